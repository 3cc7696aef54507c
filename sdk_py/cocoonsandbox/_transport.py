"""Addresses, channels and deadlines."""

from __future__ import annotations

import ssl
import threading
from urllib.parse import urlsplit

import grpc

_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
)


def parse_address(addr: str) -> tuple[str, bool]:
    """Returns (`host:port`, whether TLS) of the first seed in `addr`.

    Raises:
        ValueError: not `host:port` or an http(s) origin.
    """
    first = addr.split(",", maxsplit=1)[0].strip()
    if not first or any(not c.isprintable() or c.isspace() for c in first):
        raise ValueError(f"not an address: {addr!r}")
    parts = urlsplit(first if "://" in first else f"//{first}")
    if parts.scheme not in {"", "http", "https"}:
        raise ValueError(f"not an http(s) origin: {addr!r}")
    if (
        parts.path not in {"", "/"}
        or parts.query
        or parts.fragment
        or parts.username is not None
        or "@" in first
    ):
        raise ValueError(f"an address has no path, query or user: {addr!r}")
    port = parts.port  # raises ValueError beyond 65535
    if port is None and parts.scheme:
        port = 443 if parts.scheme == "https" else 80
    if not parts.hostname or not port:
        raise ValueError(f"an address is host:port with a port above 0: {addr!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "https"


class Channels:
    """One channel for each endpoint, shared by all handles of a client. Thread-safe."""

    def __init__(self, tls: bool, ssl_context: ssl.SSLContext | None) -> None:
        """Takes whether to use TLS. grpc takes no ssl.SSLContext: its roots are passed on."""
        self._credentials: grpc.ChannelCredentials | None = None
        if tls or ssl_context is not None:
            roots = None
            if ssl_context is not None:
                certificates = ssl_context.get_ca_certs(binary_form=True)
                roots = "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode() or None
            self._credentials = grpc.ssl_channel_credentials(roots)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._closed = False

    def get(self, endpoint: str) -> grpc.Channel:
        """Returns the channel of an endpoint. Raises: ValueError: the client is closed."""
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            channel = self._channels.get(endpoint)
            if channel is None:
                if self._credentials is None:
                    channel = grpc.insecure_channel(endpoint, options=_OPTIONS)
                else:
                    channel = grpc.secure_channel(endpoint, self._credentials, options=_OPTIONS)
                self._channels[endpoint] = channel
            return channel

    def close(self) -> None:
        """Closes every channel. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
