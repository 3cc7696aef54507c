"""What a guest prints on its serial console: the end of it, kept after its death."""

from __future__ import annotations

import asyncio
import socket

from nodeagent.engine.child import printable

_KEPT_BYTES = 8192
_CHUNK_BYTES = 65536
_LINE_LIMIT = 300
# A guest that prints without end costs 20 reads a second, and waits for them.
_PAUSE_S = 0.05
# More than a socket buffer holds: what a dead machine left is read whole.
_DRAIN_READS = 16


class Console:
    """Reads a machine's end of the console. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes our end; the other is QEMU's alone."""
        sock.setblocking(False)
        self._sock = sock
        self._kept = b""
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._watch()

    def last_line(self) -> str:
        """Returns the last line that is not blank, printable and bounded; "" if there is none."""
        self._drain()
        lines = map(printable, self._kept.decode(errors="replace").splitlines())
        return next((line[-_LINE_LIMIT:] for line in reversed([*lines]) if line.strip()), "")

    def close(self) -> None:
        """Closes the socket; what was printed stays. Idempotent."""
        if self._sock.fileno() != -1:
            self._drain()
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _watch(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable)

    def _on_readable(self) -> None:
        # Always: the end of a stream would be readable for ever.
        self._loop.remove_reader(self._sock)
        if self._read():
            self._pause = self._loop.call_later(_PAUSE_S, self._watch)

    def _drain(self) -> None:
        for _ in range(_DRAIN_READS):
            if not self._read():
                break

    def _read(self) -> bool:
        """Reads once; says whether there was something."""
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except OSError:
            return False
        self._kept = (self._kept + data)[-_KEPT_BYTES:]
        return bool(data)
