"""What a failure of QEMU is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocoon_rpc.errors import CocoonError, NodeAtCapacityError, ProvisionFailedError
from nodeagent.engine.qemu.machine import LOG, failure


@pytest.mark.parametrize(
    ("cause", "printed", "kind", "resource"),
    [
        ("no monitor: EOFError", "qemu: could not open disk", ProvisionFailedError, None),
        ("no monitor: EOFError", "qemu: file: No space left on device", NodeAtCapacityError, "disk"),
        ("xen-save-devices-state: Disk quota exceeded", "", NodeAtCapacityError, "disk"),
        ("no monitor: EOFError", "cannot set up guest memory 'ram'", NodeAtCapacityError, "memory"),
        ("no monitor: EOFError", "mmap: Cannot allocate memory", NodeAtCapacityError, "memory"),
    ],
)
def test_failure_says_what_ran_out(
    tmp_path: Path, cause: str, printed: str, kind: type[CocoonError], resource: str | None
) -> None:
    (tmp_path / LOG).write_text("older line\n" + printed)
    error = failure("clone", cause, tmp_path)
    assert type(error) is kind
    assert getattr(error.detail, "resource", None) == resource


def test_failure_has_qemus_last_words_in_one_bounded_line(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"first\n\x1b[31m" + b"x" * 5000 + b"end\n")
    error = failure("boot", "no monitor", tmp_path)
    assert error.message.isprintable()
    assert "end" in error.message
    assert len(error.message) < 600


def test_failure_without_a_log_is_its_cause(tmp_path: Path) -> None:
    assert "stop: TimeoutError" in failure("pause", "stop: TimeoutError", tmp_path).message
