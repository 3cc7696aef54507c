"""The nonce rule of a lane's guest end, without I/O (decision 5).

Every connection from the host opens with one line `COCOON-LANE 1 <32 hex>` that is
echoed. Until it has the echo of its last line, the host sends nothing but further
lines. On a serial port connections have no borders of their own: the line is the
border, and bytes outside a connection belong to one from before a snapshot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_LENGTH = 47
_LINE = re.compile(rb"COCOON-LANE 1 [0-9a-f]{32}\n")
_LINES = re.compile(rb"(?:%b)+" % _LINE.pattern)


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection begins: echo the line, drop the connection before it."""

    line: bytes


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of the open connection."""

    data: bytes


class Framer:
    """Finds connections in a stream of bytes; keeps less than one line.

    While none is open, everything up to a line is dropped. While one is open, a
    chunk that is lines and nothing else begins the next one: the host sends them
    alone, and a snapshot may have hidden that it went away. A line with other bytes
    around it is data: a file that holds such lines must not end its own upload. A
    line that this misses (cut by a full queue) only costs the host its next try.

    Of several lines in a row only the last is a connection: the host has given up
    those before it.
    """

    def __init__(self) -> None:
        """Starts with no connection."""
        self._open = False
        self._tail = b""

    def feed(self, chunk: bytes) -> list[Opened | Data]:
        """Takes what one read gave; returns what it means, in order: at most one of each."""
        if not chunk:
            return []
        if self._open:
            if _LINES.fullmatch(chunk) is None:
                return [Data(chunk)]
            return [Opened(chunk[-LINE_LENGTH:])]
        chunk = self._tail + chunk
        found = _LINES.search(chunk)
        if found is None:
            self._tail = chunk[-(LINE_LENGTH - 1) :]
            return []
        self._open, self._tail = True, b""
        line, rest = found.group()[-LINE_LENGTH:], chunk[found.end() :]
        return [Opened(line), Data(rest)] if rest else [Opened(line)]

    def closed(self) -> None:
        """Says that the connection ended on either side."""
        self._open, self._tail = False, b""
