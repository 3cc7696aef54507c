"""A real node: the agent as a process of its own, on loopback, in a directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.framework.leaks import assert_nothing_left

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "images"
BOOT = ROOT / "build" / "boot"
ROOT_TOKEN = "root-token-of-the-tests"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0


def node_config(
    data_dir: Path,
    engine: str,
    pools: tuple[tuple[str, int], ...] = (),
    token: Path | None = None,
    **extra: Any,
) -> str:
    """Returns the TOML of a test node; `pools` are (template, warm)."""
    lines = {
        "version": 1,
        "node_id": "test-node",
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "data_dir": str(data_dir),
        "image_dir": str(IMAGES),
        "boot_dir": str(BOOT),
        **({"root_token_file": str(token)} if token else {}),
        **extra,
    }
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items())
    text += f'\n[engine]\nkind = "{engine}"\naccel = "auto"\n'
    text += 'local_engine = "no isolation, for tests only"\n'
    for template, warm in pools:
        text += f'\n[[pools]]\ntemplate = "{template}"\nwarm = {warm}\n'
    return text


class NodeProcess:
    """`python -m nodeagent` as a context manager; leaving it proves that nothing is left."""

    def __init__(self, directory: Path, config: str) -> None:
        """Takes a directory (for configuration, log and data) and the configuration's text."""
        self.directory = directory
        self.log = directory / "node.log"
        self.config = directory / "node.toml"
        self.config.write_text(config)
        self.address = ""
        self.metrics_address = ""
        self.root_token = ROOT_TOKEN
        self._ready = threading.Event()

    def __enter__(self) -> NodeProcess:
        """Starts it and waits until it serves."""
        path = os.pathsep.join((str(ROOT), str(ROOT / "proto" / "python")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent", "--config", str(self.config)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(START_LIMIT_S) or not self.address:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            raise AssertionError(f"the node did not start: {self.log.read_text()[-2000:]}")
        return self

    def kill(self) -> None:
        """Ends the agent as a crash would; what it ran is left to the next one."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        """Copies the log, and finds the line that says where the node listens."""
        assert self.process.stderr is not None
        with self.log.open("wb", buffering=0) as log:
            for line in self.process.stderr:
                log.write(line)
                if b'"node_ready"' in line:
                    facts = json.loads(line)
                    self.address, self.metrics_address = facts["address"], facts["metrics"]
                    self._ready.set()
        self._ready.set()
        self.process.stderr.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops it in order and proves that nothing is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_LIMIT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join()
        if error is None:
            assert status == 0, self.log.read_text()[-2000:]
            assert_nothing_left(self.directory / "data")
