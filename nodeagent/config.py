"""Configuration: a TOML file and environment → frozen dataclasses, or one clear error.

One rule for the environment: the key `listen` is overridden by
`COCOON_NODE_LISTEN`, `engine.kind` by `COCOON_NODE_ENGINE__KIND`. Pools are set in
the file only. Secrets never stand in the file or the environment, only the path
of a file that holds them.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeagent.model import Net, Size

ENV_PREFIX = "COCOON_NODE_"
NO_ISOLATION_WORDS = "no isolation, for tests only"
TEMPLATE_PATTERN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,79}")
_NODE_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class ConfigError(Exception):
    """The configuration cannot be used; the text says which key and what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What makes machines."""

    kind: str = "qemu"
    """`qemu` or `local`."""
    accel: str = "auto"
    """`auto` (what a functional probe finds), `kvm` or `tcg`."""
    local_engine: str = ""
    """The engine `local` has no security boundary and is refused unless this
    says so, word for word: "no isolation, for tests only"."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One warm pool."""

    template: str
    """Image name or digest."""
    net: Net = Net.NONE
    """Network lane: `none`."""
    size: Size = Size.SMALL
    """`small`, `medium`, `large`, `xlarge` or `2xlarge`."""
    warm: int = 0
    """Machines to keep warm, 0 to 1000; 0 keeps a golden only."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set."""

    version: int
    """Version of this format: 1."""
    node_id: str = "node-1"
    """This node's name, [a-z0-9-]; the first part of sandbox ids derives from it."""
    listen: str = "127.0.0.1:7777"
    """`host:port` of the API; port 0 takes a free one. Without a root token the
    host must be a loopback address."""
    advertise: str = ""
    """`host:port` that clients reach the API by; default: `listen` as bound."""
    metrics_listen: str = "127.0.0.1:9464"
    """`host:port` of Prometheus metrics (loopback unless you shield it); empty = off."""
    data_dir: Path = Path("/var/lib/cocoon")
    """The node's own state: journal, goldens, machines."""
    image_dir: Path = Path("build/images")
    """Image store, as `make images` lays it out."""
    boot_dir: Path = Path("build/boot")
    """Kernel and initramfs, as `make images` lays them out."""
    root_token_file: Path | None = None
    """File with the root token, at least 16 characters; must not be readable by
    others. None: no token is asked for, and only loopback is served."""
    max_claims: int = 0
    """Most live claims; 0 = no limit."""
    refill_concurrency: int = 0
    """Machines made at a time; 0 = two thirds of the cpus, at least 4, with
    hardware virtualisation; one per cpu with software emulation."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What makes machines."""
    pools: tuple[PoolConfig, ...] = ()
    """Warm pools."""


def load(path: Path, environ: Mapping[str, str]) -> Config:
    """Reads and checks the configuration.

    Raises:
        ConfigError: unreadable, not TOML, unknown key, wrong type or value.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return parse(raw, environ, base=path.parent)


def parse(raw: Mapping[str, Any], environ: Mapping[str, str], *, base: Path = Path()) -> Config:
    """Returns the checked configuration of a parsed file. Relative paths start at `base`."""
    merged = {**raw, **_from_environment(environ)}
    if "engine" in raw and "engine" in merged:
        merged["engine"] = {**_table(raw["engine"], "engine"), **_table(merged["engine"], "engine")}
    config: Config = _build(Config, merged, "")
    absolute = {
        name: base / getattr(config, name)
        for name in ("data_dir", "image_dir", "boot_dir", "root_token_file")
        if getattr(config, name) is not None
    }
    config = dataclasses.replace(config, **absolute)
    _check(config)
    return config


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX):
            *parents, leaf = name.removeprefix(ENV_PREFIX).lower().split("__")
            table = result
            for parent in parents:
                table = table.setdefault(parent, {})
                if not isinstance(table, dict):
                    raise ConfigError(f"{name} contradicts {ENV_PREFIX}{parent.upper()}: set one of them")
            table[leaf] = value
    return result


def _build(kind: type[Any], raw: Any, prefix: str) -> Any:
    table = _table(raw, prefix.rstrip(".") or "the file")
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            advice = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"unknown key {prefix}{key}: {advice}")
    required = [f.name for f in dataclasses.fields(kind) if _is_required(f)]
    for name in required:
        if name not in table:
            raise ConfigError(f"{prefix}{name} is required")
    return kind(**{key: _convert(hints[key], value, prefix + key) for key, value in table.items()})


def _is_required(entry: dataclasses.Field[Any]) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _table(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a table")
    return raw


def _convert(hint: Any, value: Any, key: str) -> Any:
    if hint == tuple[PoolConfig, ...]:
        if not isinstance(value, list):
            raise ConfigError(f"{key} must be a list of tables: [[{key}]]")
        return tuple(_build(PoolConfig, item, f"{key}[{i}].") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, key + ".")
    if hint is int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key} must be a whole number, not {value!r}")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, not {value!r}")
    if hint is Net:
        return _choice({n.value: n for n in Net}, value, key)
    if hint is Size:
        return _choice({s.label: s for s in Size}, value, key)
    return value if hint is str else Path(value)


def _choice(choices: Mapping[str, Any], value: str, key: str) -> Any:
    if value not in choices:
        raise ConfigError(f"{key} must be one of {', '.join(choices)}, not {value!r}")
    return choices[value]


def _check(config: Config) -> None:
    if config.version != 1:
        raise ConfigError(f"version must be 1, not {config.version}")
    if not _NODE_ID.fullmatch(config.node_id):
        raise ConfigError(f"node_id must be 1 to 63 of [a-z0-9-], not {config.node_id!r}")
    host, _ = split_address(config.listen, "listen")
    if config.root_token_file is None and not is_loopback(host):
        raise ConfigError(f"listen = {config.listen!r} is not loopback: set root_token_file first")
    for key in ("advertise", "metrics_listen"):
        if getattr(config, key):
            split_address(getattr(config, key), key)
    _choice({"qemu": 1, "local": 1}, config.engine.kind, "engine.kind")
    _choice({"auto": 1, "kvm": 1, "tcg": 1}, config.engine.accel, "engine.accel")
    _choice({"debug": 1, "info": 1, "warning": 1, "error": 1}, config.log_level, "log_level")
    if config.engine.kind == "local" and config.engine.local_engine != NO_ISOLATION_WORDS:
        raise ConfigError(
            "engine.kind = 'local' has no security boundary; if that is meant, "
            f"set engine.local_engine = {NO_ISOLATION_WORDS!r}"
        )
    for key in ("max_claims", "refill_concurrency"):
        if getattr(config, key) < 0:
            raise ConfigError(f"{key} must not be negative")
    seen = set()
    for index, pool in enumerate(config.pools):
        where = f"pools[{index}]"
        if not TEMPLATE_PATTERN.fullmatch(pool.template):
            raise ConfigError(f"{where}.template {pool.template!r} is not a template name")
        if not 0 <= pool.warm <= 1000:
            raise ConfigError(f"{where}.warm must be 0 to 1000, not {pool.warm}")
        if pool.net is not Net.NONE:
            raise ConfigError(f"{where}.net: this node has no egress attachment; use 'none'")
        if (pool.template, pool.net, pool.size) in seen:
            raise ConfigError(f"{where}: there are two pools of {pool.template} {pool.size.label}")
        seen.add((pool.template, pool.net, pool.size))


def split_address(address: str, key: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[v6]:port`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{key} must be host:port, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Says whether a host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_root_token(config: Config) -> str | None:
    """Returns the root token.

    Raises:
        ConfigError: the file is missing, readable by others, or too short.
    """
    path = config.root_token_file
    if path is None:
        return None
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"root_token_file: cannot read {path}: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"root_token_file: {path} is open to others; run: chmod 600 {path}")
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"root_token_file: {path} must hold 16 or more printable ASCII characters")
    return token


def to_toml(config: Config) -> str:
    """Returns the effective values as TOML, for `--print-config`."""
    lines, tables = [], []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            tables.append(f"\n[{entry.name}]\n" + _toml_lines(value))
        elif isinstance(value, tuple):
            tables.extend(f"\n[[{entry.name}]]\n" + _toml_lines(item) for item in value)
        elif value is not None:
            lines.append(f"{entry.name} = {_toml_value(value)}")
    return "\n".join([*lines, *tables])


def _toml_lines(value: Any) -> str:
    return "\n".join(f"{f.name} = {_toml_value(getattr(value, f.name))}" for f in dataclasses.fields(value))


def _toml_value(value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    text = value.label if isinstance(value, Size) else value.value if isinstance(value, Net) else str(value)
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04X}" for c in text)
    return f'"{escaped}"'
