"""The configuration: frozen dataclasses that are the only source of keys, types and defaults, and one `load()`.

The YAML file mirrors the dataclasses key by key. An unknown key, a key given twice, a wrong type or a value out of range
is a `ConfigError` that names the place (`pools[0].replicas[1].url`) and says what would be right: whatever passes here can
be connected to, computed with and written into a header.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from router import POLICIES

MATCH_ALL = "*"
DEFAULT_LISTEN = "127.0.0.1:8000"

_NAME = re.compile(r"[!#-&(-~]{1,100}")  # printable ASCII but for the space and the two quotes
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")  # an IPv6 address, maybe with its zone
_BASE_URL = re.compile(
    r"(?i:https?)://(?P<host>\[[^\]]+\]|[^\[\]:/?#]+)(?P<port>:[^/?#]*)?(?P<path>(/([\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*)",
    re.ASCII,
)
_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says where and what to do."""


def _positive(obj: Any, *names: str) -> None:
    for name in names:
        if getattr(obj, name) <= 0:
            raise ConfigError(f"{name}: must be greater than 0, got {getattr(obj, name)}")


def _base_url(url: str) -> tuple[str, str]:
    """(the URL without the /v1 at its end, its host:port)."""
    netloc = url.partition("://")[2].partition("/")[0]
    if "@" in netloc:
        raise ConfigError("url: credentials do not belong in a URL; clients' Authorization headers are passed on")
    match = _BASE_URL.fullmatch(url)
    if not match or not _is_host(match["host"]):
        raise ConfigError(f"url: {_shown(url)} is not a base URL such as http://127.0.0.1:9001")
    if match["port"] and not _port(match["port"][1:]):
        raise ConfigError(f"url: {_shown(url)} has no valid port")
    # Engines say that their base URL ends in /v1; the gateway adds /v1 itself.
    return url.rstrip("/").removesuffix("/v1"), netloc


def _is_host(host: str) -> bool:
    """Whether it is a name that a resolver takes, an IPv4 address, or an IPv6 address in brackets."""
    try:
        if _BRACKETED.fullmatch(host):
            ipaddress.IPv6Address(host[1:-1])
        elif not host.strip("0123456789."):
            ipaddress.IPv4Address(host)
        else:
            return _HOST.fullmatch(host) is not None
    except ValueError:
        return False
    return True


def _port(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and int(text) <= 65535 else None


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One model server. name: what metrics and headers call it (default: host:port). capacity_tokens: its KV cache."""

    url: str
    name: str = ""
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        url, netloc = _base_url(self.url)
        if self.name and not _NAME.fullmatch(self.name):
            wanted = "1 to 100 printable ASCII characters, no spaces and no quotes, are expected"
            raise ConfigError(f"name: {wanted}, got {_shown(self.name)}")
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "name", self.name or netloc)
        if self.capacity_tokens is not None:
            _positive(self, "capacity_tokens")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Replicas that serve the same models. models: name prefixes, "*" for any; empty: whatever the replicas list."""

    replicas: tuple[ReplicaConfig, ...]
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ConfigError("replicas: at least one replica URL is needed")
        if "" in self.models:
            raise ConfigError(f'models: a prefix is not empty; write "{MATCH_ALL}" for any model')


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a replica is chosen, and how long and how much the prefix index remembers."""

    policy: str = "cost"
    block_bytes: int = 256
    block_tokens: int = 64
    ttl_s: float = 900.0
    memory_mb: int = 256

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        _positive(self, "block_bytes", "block_tokens", "ttl_s", "memory_mb")


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """USD per million tokens. cached_input: default a tenth of input."""

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            if (getattr(self, name) or 0.0) < 0:
                raise ConfigError(f"{name}: a price is not negative")
        if self.cached_input is None:
            object.__setattr__(self, "cached_input", self.input / 10)


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Active probes. failures: failed probes in a row until a replica counts as down (one that refuses is down at once)."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    failures: int = 2

    def __post_init__(self) -> None:
        _positive(self, "interval_s", "timeout_s", "failures")


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """connect_s: to open a connection to a replica. first_byte_s: from the request to the first byte of the answer's body, so
    queue and prefill. idle_s: the longest silence after it; also how long a client may leave an answer unread. total_s: from
    the request to the last byte (default: no limit).
    """

    connect_s: float = 2.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "connect_s", "first_byte_s", "idle_s")
        if self.total_s is not None:
            _positive(self, "total_s")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """body_mb: the largest request body, in MiB. connections: of clients, at once. shutdown_s: how long running requests may go
    on after SIGTERM.
    """

    body_mb: int = 64
    connections: int = 10_000
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        _positive(self, "body_mb", "connections", "shutdown_s")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. `admin_key` is a secret: it comes from WARMROUTE_ADMIN_KEY, never from the file."""

    pools: tuple[PoolConfig, ...]
    listen: str = DEFAULT_LISTEN
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    prices: Mapping[str, PriceConfig] = field(default_factory=dict)
    health: HealthConfig = field(default_factory=HealthConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    log_level: str = "info"
    admin_key: str = field(default="", repr=False, metadata={"env": "WARMROUTE_ADMIN_KEY"})

    def __post_init__(self) -> None:
        if not self.pools:
            raise ConfigError("pools: at least one pool with a replica is needed (or pass --replica URL)")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        _ = self.address
        if "" in self.prices:
            raise ConfigError(f'prices: a model prefix is not empty; write "{MATCH_ALL}" for any model')
        names = [replica.name for pool in self.pools for replica in pool.replicas]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"pools: the replica {twice!r} is listed twice")
        prefixes = [prefix for pool in self.pools for prefix in pool.models]
        if doubled := next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None):
            raise ConfigError(f"pools: the model prefix {doubled!r} is claimed twice")

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of `listen`; an IPv6 host is written in brackets."""
        host, _, text = self.listen.rpartition(":")
        port = _port(text)
        if port is None or not _is_host(host):
            raise ConfigError(f"listen: {_shown(self.listen)} is not host:port, for example 0.0.0.0:8000")
        return host.strip("[]"), port


LOG_LEVELS = ("debug", "info", "warning", "error")


def load(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Config:
    """The configuration from a YAML file (None: no file), then the environment, then `overrides` (raw values by key)."""
    raw: dict[str, Any] = {} if path is None else _read(path)
    if "admin_key" in raw:
        raise ConfigError("admin_key: a secret does not belong in the file; set WARMROUTE_ADMIN_KEY")
    if env.get("WARMROUTE_LISTEN"):
        raw["listen"] = env["WARMROUTE_LISTEN"]
    if env.get("WARMROUTE_ADMIN_KEY"):
        raw["admin_key"] = env["WARMROUTE_ADMIN_KEY"]
    raw.update(overrides)
    raw.setdefault("pools", [])
    config = _convert(Config, raw, "")
    assert isinstance(config, Config)
    return config


class _Loader(yaml.SafeLoader):
    """YAML in which a key is given once; PyYAML lets the last one win. It looks before merge keys (`<<`) are put in."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise ConfigError(f"line {line}: the key {_shown(key.value)} is given twice, first in line {lines[name]}")
            lines[name] = line
        return node


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text("utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date such as 2026-99-99
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file holds a {type(raw).__name__}, a mapping of keys is expected")
    return raw


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value` (parsed YAML) as `kind` (a type hint of the dataclasses above), or a ConfigError that names `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: a list is expected, got {_shown(value)}")
        return tuple(_convert(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: a mapping is expected, got {_shown(value)}")
        return {_convert(str, key, f"{where}.{key}"): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is types.UnionType:
        return None if value is None else _convert(args[0], value, where)
    return _convert_scalar(kind, value, where)


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    # YAML 1.1 takes 1e-05, which is how Helm writes small numbers, for a text.
    scientific = isinstance(value, str) and _SCIENTIFIC.fullmatch(value)
    if kind is float and not isinstance(value, bool) and (isinstance(value, int) or scientific):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is float and not math.isfinite(value)):
        raise ConfigError(f"{where}: {_NAMES[kind]} is expected, got {_shown(value)}")
    return value


_NAMES: Mapping[Any, str] = types.MappingProxyType({int: "a whole number", float: "a finite number", str: "a text"})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _convert_dataclass(kind: Any, value: Any, where: str) -> Any:
    if kind is ReplicaConfig and isinstance(value, str):
        value = {"url": value}  # the short form of a replica
    if not isinstance(value, dict):
        raise ConfigError(f"{where or 'configuration'}: a mapping is expected, got {_shown(value)}")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            known = [item.name for item in dataclasses.fields(kind) if "env" not in item.metadata]
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{_join(where, key)}: unknown key{hint}")
    for item in dataclasses.fields(kind):
        if item.name not in value and _required(item):
            raise ConfigError(f"{_join(where, item.name)}: missing")
    parts = {key: _convert(hints[key], item, _join(where, key)) for key, item in value.items()}
    return _build(kind, parts, where)


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _build(kind: Callable[..., Any], parts: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**parts)
    except ConfigError as error:
        raise ConfigError(_join(where, str(error))) from error


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
