"""Addresses, tokens and channels."""

from __future__ import annotations

import ssl
import threading
from urllib.parse import urlsplit

import grpc

from cocoonsandbox.errors import SandboxError

_OPTIONS = (
    # A node that merely vanished is noticed within 40 s, however silent the calls are.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
# What gRPC accepts as the shortest idle time of a connection.
_SHORTEST_IDLE_S = 1.0


def parse_address(addr: str) -> tuple[str, str]:
    """Returns (`host:port`, scheme: "" | "http" | "https") of the first seed in `addr`.

    Raises:
        ValueError: not `host:port` or an http(s) origin. The text repeats an
            address only if it cannot hold a secret.
    """
    first = addr.split(",", maxsplit=1)[0].strip()
    if not first or any(not c.isprintable() or c.isspace() for c in first):
        raise ValueError(f"an address is host:port or an http(s) origin, not {first!r}")
    parts = urlsplit(first if "://" in first else f"//{first}")
    if parts.scheme not in {"", "http", "https"}:
        raise ValueError(f"an address is host:port or an http(s) origin, not {parts.scheme}://")
    if "@" in first or parts.path not in {"", "/"} or "?" in first or "#" in first:
        raise ValueError("an address has no user, path, query or fragment: give host:port")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the port is a number from 1 to 65535: {first!r}") from error
    if port is None and parts.scheme:
        port = 443 if parts.scheme == "https" else 80
    if not parts.hostname or not port:
        raise ValueError(f"an address is host:port with a port from 1 to 65535, not {first!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme


def check_token(token: str, what: str) -> None:
    """Refuses what cannot travel as metadata; gRPC's own refusal would print it.

    Raises:
        ValueError: not printable ASCII; the text does not repeat the token.
    """
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise ValueError(f"{what} is not printable ASCII: is there a newline at its end?")


def credentials(scheme: str, context: ssl.SSLContext | None) -> grpc.ChannelCredentials | None:
    """Returns the credentials for TLS, None for plain text.

    gRPC brings its own TLS and takes no ssl.SSLContext. The root certificates of
    one can be handed on, the rest of it cannot: a context that does not verify is
    refused rather than half honoured.

    Raises:
        ValueError: the context cannot be honoured.
    """
    if context is None:
        return grpc.ssl_channel_credentials() if scheme == "https" else None
    if scheme == "http":
        raise ValueError("an ssl_context goes with host:port or https://, not with http://")
    if context.verify_mode is not ssl.CERT_REQUIRED or not context.check_hostname:
        raise ValueError("gRPC always verifies the server; give an ssl_context that does, too")
    roots = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    return grpc.ssl_channel_credentials(roots.encode() or None)


class Channels:
    """One channel for each endpoint, shared by all handles of a client. Thread-safe."""

    def __init__(self, tls: grpc.ChannelCredentials | None, keep_alive: float) -> None:
        """Takes the credentials, and after how many unused seconds a connection is closed."""
        self._credentials = tls
        idle_ms = int(max(keep_alive, _SHORTEST_IDLE_S) * 1000)
        self._options = (*_OPTIONS, ("grpc.client_idle_timeout_ms", min(idle_ms, 2**31 - 1)))
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._closed = False

    def get(self, endpoint: str) -> grpc.Channel:
        """Returns the channel of an endpoint; connects lazily. Raises: SandboxError: the client is closed."""
        with self._lock:
            if self._closed:
                raise SandboxError("the client is closed; make a new one")
            channel = self._channels.get(endpoint)
            if channel is None:
                if self._credentials is None:
                    channel = grpc.insecure_channel(endpoint, options=self._options)
                else:
                    channel = grpc.secure_channel(endpoint, self._credentials, options=self._options)
                self._channels[endpoint] = channel
            return channel

    def close(self) -> None:
        """Closes every channel; calls still open end with an error. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
