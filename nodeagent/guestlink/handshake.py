"""The nonce rule of a lane's host end, without I/O (decision 5).

The host sends a line, the guest's bridge sends it back, and only what comes after
is the new connection's. A line can get lost (the guest is booting, or it fell into
an old connection's bytes), so the host asks again with another; the last one counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from nodeagent.guestlink.lanes import LaneError

PREFIX = b"COCOON-LANE 1 "
LINE_LENGTH = 47
_JUNK_LIMIT = 64 * 1024 * 1024


def _session() -> bytes:
    return secrets.token_hex(12).encode()


class Handshake:
    """One attempt to open one connection; keeps less than one line of what comes.

    The lines of an attempt share 96 random bits and are counted, so that a late echo
    of an earlier one is known without keeping them all.
    """

    def __init__(self, session: Callable[[], bytes] = _session) -> None:
        """Takes the source of the random part, 24 hexadecimal digits."""
        self._stem = PREFIX + session()
        self._count = 0
        self._line = b""
        self._tail = b""
        self._junk = 0
        self._heard = False

    @property
    def heard(self) -> bool:
        """Whether the guest answered an earlier line.

        It takes lines in order and will come to the last: asking once more would only
        make that one outdated, for ever with a guest slower than the asking.
        """
        return self._heard

    def next_line(self) -> bytes:
        """Returns the line to send now; from here only its echo opens the connection."""
        self._count += 1
        self._line = b"%b%08x\n" % (self._stem, self._count)
        self._heard = False
        return self._line

    def feed(self, data: bytes) -> bytes | None:
        """Takes received bytes; returns what follows the echo, None while there is no echo.

        Raises:
            LaneError: much came, and never the echo.
        """
        data = self._tail + data
        _, echo, rest = data.partition(self._line)
        if echo:
            return rest
        self._heard = self._heard or self._stem in data
        self._junk += len(data) - len(self._tail)
        if self._junk > _JUNK_LIMIT:
            raise LaneError("the guest sends without end and never echoes the nonce; destroy the machine")
        self._tail = data[-(LINE_LENGTH - 1) :]
        return None
