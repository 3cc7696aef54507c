"""A node that cannot start says why in one line and leaves with status 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.framework.leaks import processes_naming
from tests.framework.node import ROOT, NodeProcess, node_config

pytestmark = pytest.mark.root


def node(config: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a node that is not expected to serve."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto" / "python")))
    return subprocess.run(
        [sys.executable, "-m", "nodeagent", "--config", str(config), *arguments],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def refusal(tmp_path: Path, text: str) -> str:
    """Returns the one line that a node of this configuration leaves with."""
    config = tmp_path / "node.toml"
    config.write_text(text)
    ended = node(config)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert ended.returncode == 2, ended.stderr
    assert len(lines) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert processes_naming(str(tmp_path)) == []
    return lines[0]


@pytest.mark.parametrize("key", ["listen", "metrics_listen"])
def test_a_port_in_use_is_said(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refusal(tmp_path, node_config(tmp_path / "data", "local", (("rt", 1),), **{key: address}))
    assert f"{key}: cannot listen on {address}" in line


def test_a_typo_is_said_with_a_suggestion(tmp_path: Path) -> None:
    line = refusal(tmp_path, node_config(tmp_path / "data", "local", max_claim=1))
    assert line.endswith("unknown key max_claim: did you mean max_claims?")
    assert str(tmp_path / "node.toml") in line
    assert not (tmp_path / "data").exists()


def test_a_missing_configuration_is_said(tmp_path: Path) -> None:
    ended = node(tmp_path / "none.toml")
    assert ended.returncode == 2
    assert "none.toml" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("engine", ["local", "qemu"])
def test_missing_images_name_the_command_that_builds_them(tmp_path: Path, engine: str) -> None:
    config = node_config(tmp_path / "data", engine, (("rt", 1),), image_dir=str(tmp_path / "none"))
    assert "make images" in refusal(tmp_path, config)


def test_a_missing_kernel_names_the_command_that_builds_it(tmp_path: Path) -> None:
    line = refusal(tmp_path, node_config(tmp_path / "data", "qemu", boot_dir=str(tmp_path / "none")))
    assert "make images" in line


def test_a_pool_of_an_unknown_template_is_said(tmp_path: Path) -> None:
    line = refusal(tmp_path, node_config(tmp_path / "data", "local", (("nope", 1),)))
    assert "nope" in line


def test_a_token_file_open_to_others_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sixteen-characters")
    token.chmod(0o644)
    assert "chmod 600" in refusal(tmp_path, node_config(tmp_path / "data", "local", token=token))


def test_a_data_directory_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert "data_dir" in refusal(tmp_path, node_config(tmp_path / "data", "local"))


def test_a_foreign_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    journal = tmp_path / "data" / "journal.db"
    journal.write_bytes(b"no database at all" * 100)
    refusal(tmp_path, node_config(tmp_path / "data", "local"))
    assert journal.read_bytes() == b"no database at all" * 100


def test_a_second_agent_on_one_data_directory_is_refused(tmp_path: Path) -> None:
    config = node_config(tmp_path / "data", "local")
    with NodeProcess(tmp_path, config) as first:
        second = tmp_path / "second"
        second.mkdir()
        (second / "node.toml").write_text(config)
        ended = node(second / "node.toml")
        assert ended.returncode == 2
        assert "is in use by another node agent" in ended.stderr
        assert first.process.poll() is None


def test_printed_configuration_is_effective_and_reads_back(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(node_config(tmp_path / "data", "local", (("rt", 2),)))
    first = node(config, "--print-config", COCOON_NODE_MAX_CLAIMS="9")
    assert (first.returncode, first.stderr) == (0, "")
    values = tomllib.loads(first.stdout)
    assert values["max_claims"] == 9
    assert values["pools"] == [{"template": "rt", "net": "none", "size": "small", "warm": 2}]
    config.write_text(first.stdout)
    assert node(config, "--print-config").stdout == first.stdout
    assert not (tmp_path / "data").exists()
