"""The journal remembers what it was told, over a restart."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from nodeagent.journal.store import ClaimRecord, EndReason, Journal
from nodeagent.model import Isolation, Net, Size, Tier

CLAIM = ClaimRecord(
    "sb_a", b"t" * 32, "m-1", "rt", "sha256:0", Net.NONE, Size.XXLARGE, Tier.CLONE, Isolation.NONE,
    1, 2, 3, "ref", {"a": "ü"},
)  # fmt: skip


async def test_claims_survive_a_reopen(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add_claim(CLAIM, "request", b"c" * 32)
    journal.add_claim(replace(CLAIM, id="sb_b", claim_ns=1), "", b"")
    await journal.checkpoint()
    # Not closed: a crash.
    again = Journal(tmp_path / "j")
    assert [c.id for c in again.live_claims()] == ["sb_b", "sb_a"]
    assert again.live_claims()[1] == CLAIM
    record = again.request("request")
    assert record is not None
    assert (record.content_sha256, record.sandbox_id) == (b"c" * 32, "sb_a")
    assert again.request("other") is None
    again.close()
    journal.close()


def test_a_claim_ends_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add_claim(CLAIM, "", b"")
    assert journal.end_of("sb_a") is None
    journal.end_claim("sb_a", EndReason.RELEASED, 10)
    journal.end_claim("sb_a", EndReason.LOST, 20)
    assert journal.end_of("sb_a") is EndReason.RELEASED
    assert journal.live_claims() == []
    assert list(journal.ended_tokens()) == [("sb_a", b"t" * 32)]
    assert journal.forget_before(10) == []
    assert journal.forget_before(11) == ["sb_a"]
    assert journal.end_of("sb_a") is None
    journal.close()


def test_a_request_id_stands_for_one_claim(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add_claim(CLAIM, "request", b"c")
    with pytest.raises(sqlite3.IntegrityError):
        journal.add_claim(replace(CLAIM, id="sb_b"), "request", b"c")
    journal.close()


def test_another_version_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "j")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        Journal(tmp_path / "j")


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0
