"""The nonce rule of a lane's guest end, without I/O (decision 5).

Every connection from the host opens with one line `COCOON-LANE 1 <32 hex>` that is
echoed. On a serial port connections have no borders of their own: the line is the
border, and bytes outside a connection belong to one from before a snapshot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_LENGTH = 47
_LINE = re.compile(rb"COCOON-LANE 1 [0-9a-f]{32}\n")


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection begins: echo the line, drop the connection before it."""

    line: bytes


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of the open connection."""

    data: bytes


class Framer:
    """Finds connections in a stream of bytes.

    While none is open, everything up to a line is dropped. While one is open, a
    line at the start of a chunk begins the next one: the host writes it on its own
    after it has gone away, and a snapshot may have hidden its going.
    """

    def __init__(self) -> None:
        """Starts with no connection."""
        self._open = False
        self._tail = b""

    def feed(self, chunk: bytes) -> list[Opened | Data]:
        """Takes what was read; returns what it means, in order."""
        events: list[Opened | Data] = []
        while chunk:
            if self._open:
                found = _LINE.match(chunk)
                if found is None:
                    events.append(Data(chunk))
                    break
            else:
                chunk = self._tail + chunk
                found = _LINE.search(chunk)
                if found is None:
                    self._tail = chunk[-(LINE_LENGTH - 1) :]
                    break
            self._open, self._tail = True, b""
            events.append(Opened(found.group()))
            chunk = chunk[found.end() :]
        return events

    def closed(self) -> None:
        """Says that the connection ended on either side."""
        self._open, self._tail = False, b""


def is_line(line: bytes) -> bool:
    """Says whether `line` is a well-formed nonce line."""
    return _LINE.fullmatch(line) is not None
