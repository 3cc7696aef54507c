"""Engines: what makes, snapshots and destroys machines. See `base`."""

from __future__ import annotations

from nodeagent.config import Config
from nodeagent.engine.base import Engine


def make_engine(config: Config) -> Engine:
    """Returns the engine that the configuration names, not yet prepared."""
    if config.engine.kind == "local":
        from nodeagent.engine.local.engine import LocalEngine

        return LocalEngine()
    from nodeagent.engine.qemu.engine import QemuEngine

    return QemuEngine(config.boot_dir, config.data_dir, accel=config.engine.accel)
