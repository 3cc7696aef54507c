"""Sandbox ids and tokens."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets

ID_PATTERN = re.compile(r"sb_[a-z2-7]{26}")


def node_hint(node_id: str) -> str:
    """Returns the six characters that a node's sandbox ids start with."""
    return _base32(hashlib.sha256(node_id.encode()).digest())[:6]


def new_sandbox_id(hint: str) -> str:
    """Returns `sb_`, the birth node's hint and 20 random characters (100 bits)."""
    return f"sb_{hint}{_base32(secrets.token_bytes(13))[:20]}"


def new_token() -> str:
    """Returns a bearer token of 256 random bits."""
    return secrets.token_urlsafe(32)


def token_sha256(token: str) -> bytes:
    """Returns what is stored of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()
