"""QEMU's monitor: the qemu.qmp package behind three calls and one error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from qemu.qmp import QMPClient, QMPError

LIMIT_S = 30.0
_TEXT_LIMIT = 300


class MonitorError(Exception):
    """The monitor refused a command, broke off or did not answer in time."""


class Monitor:
    """One open monitor. Owns the socket."""

    def __init__(self, name: str) -> None:
        """Makes a closed monitor; `name` is for messages."""
        self._client = QMPClient(name)
        self._client.logger.disabled = True

    async def open(self, sock: socket.socket) -> None:
        """Waits for the greeting. Raises: MonitorError; then the socket is closed."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._client.connect(sock)
        except (QMPError, OSError, EOFError) as error:
            sock.close()
            raise MonitorError(f"no monitor: {_text(error)}") from error
        except BaseException:
            sock.close()
            raise

    async def execute(self, command: str, **arguments: Any) -> Any:
        """Runs a command and returns its answer. Raises: MonitorError."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._client.execute(command, arguments or None)
        except (QMPError, OSError) as error:
            raise MonitorError(f"{command}: {_text(error)}") from error

    async def close(self) -> None:
        """Closes the monitor; a broken one, too."""
        with contextlib.suppress(QMPError, OSError, EOFError):
            async with asyncio.timeout(LIMIT_S):
                await self._client.disconnect()


def _text(error: BaseException) -> str:
    """Returns what went wrong in one line; the package's messages may have several, with raw bytes."""
    return " ".join(str(error).split())[:_TEXT_LIMIT] or type(error).__name__
