"""JSON lines on stderr: a constant event name, facts as keys.

The standard library's loggers (grpc, cocoon_rpc, qemu.qmp) go through the same
renderer. Messages are logged through `loggable`, which leaves out every field
that the contract marks `secret`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from google.protobuf.message import Message

from cocoon.types.v1 import options_pb2

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure(level: str) -> None:
    """Sets up logging for the process, once."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("qemu").setLevel("ERROR")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def loggable(message: Message) -> dict[str, Any]:
    """Returns a message's set fields for the log, without secrets."""
    facts: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.GetOptions().Extensions[options_pb2.secret]:
            continue
        if isinstance(value, Message):
            facts[field.name] = loggable(value)
        elif isinstance(value, (str, int, float, bool)):
            facts[field.name] = value
        elif isinstance(value, bytes):
            facts[field.name] = f"<{len(value)} bytes>"
        else:
            items = list(value.items()) if hasattr(value, "items") else list(value)
            facts[field.name] = [loggable(i) if isinstance(i, Message) else i for i in items]
    return facts
