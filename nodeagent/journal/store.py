"""Claims and request ids in SQLite.

Writes happen on the caller's thread: in WAL mode with `synchronous=NORMAL` a
commit is one `write` into the log and no disk sync (about 40 microseconds), so a
claim that was answered survives a crash of the agent, and one that the power cut
took along is a machine that died with it. Moving the log into the database does
sync; `checkpoint` does that from another thread, never on a claim.
"""

from __future__ import annotations

import asyncio
import enum
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodeagent.model import Isolation, Net, Size, Tier

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE claims (
    id TEXT PRIMARY KEY,
    token_sha256 BLOB NOT NULL,
    machine_id TEXT NOT NULL,
    template TEXT NOT NULL,
    digest TEXT NOT NULL,
    net TEXT NOT NULL,
    size TEXT NOT NULL,
    tier TEXT NOT NULL,
    isolation TEXT NOT NULL,
    provision_ns INTEGER NOT NULL,
    claim_ns INTEGER NOT NULL,
    expire_ns INTEGER NOT NULL,
    claim_ref TEXT NOT NULL,
    metadata TEXT NOT NULL,
    request_id TEXT UNIQUE,
    content_sha256 BLOB,
    end_ns INTEGER,
    end_reason TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX claims_by_end ON claims (end_ns);
"""
_COLUMNS = (
    "id, token_sha256, machine_id, template, digest, net, size, tier, isolation, "
    "provision_ns, claim_ns, expire_ns, claim_ref, metadata"
)
_INSERT = (
    f"INSERT INTO claims ({_COLUMNS}, request_id, content_sha256) "  # noqa: S608 - constants
    "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)


class EndReason(enum.Enum):
    """How a claim ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    STOPPED = "stopped"
    """The node was stopped in order."""
    LOST = "lost"
    """The node died and the claim with it."""


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """One claim as it is stored. Times in nanoseconds since the epoch."""

    id: str
    token_sha256: bytes
    machine_id: str
    template: str
    digest: str
    net: Net
    size: Size
    tier: Tier
    isolation: Isolation
    provision_ns: int
    claim_ns: int
    expire_ns: int
    claim_ref: str
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a request_id stood for."""

    content_sha256: bytes
    sandbox_id: str


class Journal:
    """The open journal. One thread, except `checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file.

        Raises:
            sqlite3.DatabaseError: not a journal of this version.
        """
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"{path} is a journal of version {version}, not {SCHEMA_VERSION}")

    def close(self) -> None:
        """Moves the log into the database and closes it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def add_claim(self, claim: ClaimRecord, request_id: str, content_sha256: bytes) -> None:
        """Stores a granted claim; with a request_id also what it stood for."""
        self._db.execute(
            _INSERT,
            (
                claim.id,
                claim.token_sha256,
                claim.machine_id,
                claim.template,
                claim.digest,
                claim.net.value,
                claim.size.label,
                claim.tier.value,
                claim.isolation.value,
                claim.provision_ns,
                claim.claim_ns,
                claim.expire_ns,
                claim.claim_ref,
                json.dumps(claim.metadata),
                request_id or None,
                content_sha256 or None,
            ),
        )

    def end_claim(self, sandbox_id: str, reason: EndReason, end_ns: int) -> None:
        """Marks a claim ended; a claim ends once, the first reason stands."""
        self._db.execute(
            "UPDATE claims SET end_ns=?, end_reason=? WHERE id=? AND end_ns IS NULL",
            (end_ns, reason.value, sandbox_id),
        )

    def live_claims(self) -> list[ClaimRecord]:
        """Returns the claims that have not ended, oldest first."""
        query = f"SELECT {_COLUMNS} FROM claims WHERE end_ns IS NULL ORDER BY claim_ns, id"  # noqa: S608
        return [_claim(row) for row in self._db.execute(query)]

    def ended_tokens(self) -> Iterator[tuple[str, bytes]]:
        """Yields (sandbox id, token hash) of ended claims still remembered."""
        yield from self._db.execute("SELECT id, token_sha256 FROM claims WHERE end_ns IS NOT NULL")

    def end_of(self, sandbox_id: str) -> EndReason | None:
        """Returns how a claim ended; None while it lives or if there is none."""
        row = self._db.execute("SELECT end_reason FROM claims WHERE id=?", (sandbox_id,)).fetchone()
        return EndReason(row[0]) if row and row[0] else None

    def request(self, request_id: str) -> RequestRecord | None:
        """Returns what a request id stood for."""
        row = self._db.execute(
            "SELECT content_sha256, id FROM claims WHERE request_id=?", (request_id,)
        ).fetchone()
        return RequestRecord(*row) if row else None

    def forget_before(self, limit_ns: int) -> list[str]:
        """Drops claims that ended before `limit_ns`; returns their ids."""
        gone = self._db.execute("DELETE FROM claims WHERE end_ns < ? RETURNING id", (limit_ns,)).fetchall()
        return [row[0] for row in gone]

    async def checkpoint(self) -> None:
        """Moves the log into the database, in a thread and on a connection of its own."""

        def work() -> None:
            db = sqlite3.connect(self._path)
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                db.close()

        await asyncio.to_thread(work)


def _claim(row: tuple[object, ...]) -> ClaimRecord:
    sizes = {size.label: size for size in Size}
    values = list(row)
    values[5], values[6] = Net(values[5]), sizes[str(values[6])]
    values[7], values[8] = Tier(values[7]), Isolation(values[8])
    values[13] = json.loads(str(values[13]))
    return ClaimRecord(*values)  # type: ignore[arg-type]
