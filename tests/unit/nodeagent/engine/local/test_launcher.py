"""The launcher's parts, each in a process of its own: they change what a process is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.engine.local import launcher
from tests.framework.leaks import mounts_naming, processes_naming

_IMPORT = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(launcher.__file__).parent)!r})
import launcher
"""


def _python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", _IMPORT + script], capture_output=True, text=True, timeout=20
    )


def test_pid_1_whose_holder_is_gone_ends_before_it_changes_anything() -> None:
    done = _python("""
theirs, ours = os.pipe()
os.close(ours)
before = os.readlink("/proc/self/ns/mnt")
print(launcher.init("/nowhere", [], theirs), os.readlink("/proc/self/ns/mnt") == before)
""")
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_reaper_reaps_strangers_and_ends_with_its_child() -> None:
    done = _python("""
import ctypes
ctypes.CDLL(None).prctl(36, 1)  # orphans come to us, as they do to pid 1
read, write = os.pipe()
child = os.fork()
if child == 0:
    if os.fork() == 0:
        os._exit(3)  # nobody waits for this one
    os.read(read, 1)
    os._exit(7)
if os.fork() == 0:
    os._exit(5)
os.write(write, b"x")
print(launcher.reap_until(child))
""")
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize(
    ("child", "code"),
    [("os._exit(0)", 0), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 247)],
)
def test_holder_ends_with_pid_1(child: str, code: int) -> None:
    done = _python(f"""
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGCHLD}})
child = os.fork()
if child == 0:
    {child}
print(launcher.hold(child))
""")
    assert done.stdout == f"{code}\n", done.stderr


def test_holder_ends_a_pid_1_that_was_stopped() -> None:
    """The stop itself wakes the holder too, and must not be taken for an end."""
    done = _python("""
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
child = os.fork()
if child == 0:
    holder = os.getppid()
    if os.fork() == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(holder, signal.SIGTERM)
        os._exit(0)
    signal.pause()
print(launcher.hold(child), os.path.exists(f"/proc/{child}"))
""")
    assert done.stdout == f"{-signal.SIGKILL & 0xFF} False\n", done.stderr


@pytest.mark.root
def test_layer_that_is_no_file_system_ends_it_with_a_word_and_leaves_nothing(tmp_path: Path) -> None:
    layer = tmp_path / "layer-0.erofs"
    layer.write_bytes(b"no file system " * 1000)
    done = subprocess.run(
        [sys.executable, "-I", "-S", launcher.__file__, str(tmp_path), str(layer)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert "mount" in done.stderr
    assert processes_naming(str(tmp_path)) == []
    assert mounts_naming(str(tmp_path)) == []
