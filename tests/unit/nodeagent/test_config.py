"""Configuration is right, or one clear error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from nodeagent.config import Config, ConfigError, load, parse, read_root_token, to_toml
from nodeagent.model import Size

POOL = {"template": "rt", "size": "medium", "warm": 3}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({}, "version is required"),
        ({"version": 2}, "version must be 1"),
        ({"version": 1, "lisen": "x"}, "unknown key lisen: did you mean listen?"),
        ({"version": 1, "zzz": 1}, "unknown key zzz: known keys: version"),
        ({"version": 1, "engine": {"kin": "qemu"}}, "unknown key engine.kin: did you mean engine.kind?"),
        (
            {"version": 1, "pools": [{"template": "rt", "wram": 1}]},
            r"unknown key pools\[0\].wram: did you mean",
        ),
        ({"version": 1, "pools": [{}]}, r"pools\[0\].template is required"),
        ({"version": 1, "pools": {}}, "must be a list of tables"),
        ({"version": 1, "max_claims": "many"}, "max_claims must be a whole number"),
        ({"version": 1, "max_claims": True}, "max_claims must be a whole number"),
        ({"version": 1, "max_claims": -1}, "must not be negative"),
        ({"version": 1, "listen": 7}, "listen must be a string"),
        ({"version": 1, "listen": "localhost"}, "listen must be host:port"),
        ({"version": 1, "listen": "localhost:70000"}, "listen must be host:port"),
        ({"version": 1, "listen": "0.0.0.0:7777"}, "set root_token_file first"),
        ({"version": 1, "node_id": "Not ok"}, "node_id"),
        ({"version": 1, "engine": "qemu"}, "must be a table"),
        ({"version": 1, "engine": {"kind": "xen"}}, "engine.kind must be one of qemu, local"),
        ({"version": 1, "engine": {"kind": "local"}}, "no security boundary"),
        ({"version": 1, "log_level": "loud"}, "log_level must be one of"),
        ({"version": 1, "pools": [{"template": "rt", "size": "huge"}]}, "must be one of small, medium"),
        ({"version": 1, "pools": [{"template": "r t"}]}, "is not a template name"),
        ({"version": 1, "pools": [{"template": "rt", "warm": 1001}]}, "warm must be 0 to 1000"),
        ({"version": 1, "pools": [{"template": "rt", "net": "egress"}]}, "no egress attachment"),
        ({"version": 1, "pools": [{"template": "rt"}, {"template": "rt"}]}, "there are two pools of rt"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(raw, {})


def test_environment_overrides_by_one_rule() -> None:
    environ = {"COCOON_NODE_MAX_CLAIMS": "7", "COCOON_NODE_ENGINE__ACCEL": "tcg", "OTHER": "x"}
    config = parse({"version": 1, "max_claims": 1, "engine": {"kind": "qemu"}}, environ)
    assert (config.max_claims, config.engine.accel, config.engine.kind) == (7, "tcg", "qemu")
    with pytest.raises(ConfigError, match="unknown key max_clams"):
        parse({"version": 1}, {"COCOON_NODE_MAX_CLAMS": "7"})


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('version = 1\ndata_dir = "d"\nimage_dir = "/images"\n')
    config = load(path, {})
    assert (config.data_dir, config.image_dir) == (tmp_path / "d", Path("/images"))


def test_printed_configuration_reads_back_the_same() -> None:
    config = parse({"version": 1, "node_id": "a", "data_dir": '/a "b"', "pools": [POOL]}, {})
    assert config.pools[0].size is Size.MEDIUM
    assert parse(tomllib.loads(to_toml(config)), {}) == config


@pytest.mark.parametrize("text", [None, "version = ", b"\xff"])
def test_unreadable_files_are_said(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / "node.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"node\.toml"):
        load(path, {})


@pytest.mark.parametrize(
    ("token", "mode", "says"),
    [
        ("a-token-of-16-chars", 0o600, None),
        ("short", 0o600, "16 or more"),
        ("a-token-of-16-chars", 0o644, "chmod 600"),
        ("a-token-of-16-ch\u00e4rs", 0o600, "16 or more"),
        (None, 0o600, "cannot read"),
    ],
)
def test_root_token_file_is_held_to_its_rules(
    tmp_path: Path, token: str | None, mode: int, says: str | None
) -> None:
    path = tmp_path / "token"
    if token is not None:
        path.write_text(token + "\n")
        path.chmod(mode)
    config = Config(version=1, root_token_file=path)
    if says is None:
        assert read_root_token(config) == token
    else:
        with pytest.raises(ConfigError, match=says):
            read_root_token(config)
