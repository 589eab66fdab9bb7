"""The configuration: frozen dataclasses that are the only source of keys, types and defaults, and one `load()`.

The YAML file mirrors the dataclasses key by key. An unknown key, a key given twice, a wrong type or a value out of range
is a `ConfigError` that names the place (`pools[0].replicas[1].url`) and says what would be right: whatever passes here can
be connected to, computed with and written into a header.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gateway.typed import ConfigError, convert, read_yaml, shown
from router import POLICIES

MATCH_ALL = "*"
DEFAULT_LISTEN = "127.0.0.1:8000"
DEFAULT_WORKERS = 1
MAX_WORKERS = 64  # each hears of all that the others do

_NAME = re.compile(r"[!#-&(-~]{1,100}")  # printable ASCII but for the space and the two quotes
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")  # an IPv6 address, maybe with its zone
_BASE_URL = re.compile(
    r"(?i:https?)://(?P<host>\[[^\]]+\]|[^\[\]:/?#]+)(?P<port>:[^/?#]*)?(?P<path>(/([\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*)",
    re.ASCII,
)


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
        raise ConfigError(f"url: {shown(url)} is not a base URL such as http://127.0.0.1:9001")
    if match["port"] and not _port(match["port"][1:]):
        raise ConfigError(f"url: {shown(url)} has no valid port")
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

    SHORT: ClassVar = "url"  # a plain string stands for this key

    url: str
    name: str = ""
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        url, netloc = _base_url(self.url)
        if self.name and not _NAME.fullmatch(self.name):
            wanted = "1 to 100 printable ASCII characters, no spaces and no quotes, are expected"
            raise ConfigError(f"name: {wanted}, got {shown(self.name)}")
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "name", self.name or netloc)
        if self.capacity_tokens is not None:
            _positive(self, "capacity_tokens")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Replicas that serve the same models. models: name prefixes, "*" for any; empty: whatever the replicas list.

    max_inflight: requests at all its replicas together; more wait in line, max_queue of them at most, queue_s at most.
    resume_streams: a text stream that its replica breaks off is finished by another one.
    """

    replicas: tuple[ReplicaConfig, ...]
    models: tuple[str, ...] = ()
    max_inflight: int = 4096
    max_queue: int = 1024
    queue_s: float = 30.0
    resume_streams: bool = False

    def __post_init__(self) -> None:
        _positive(self, "max_inflight", "queue_s")
        if self.max_queue < 0:
            raise ConfigError("max_queue: must not be negative; 0: nobody waits")
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
    the request to the last byte (0: no limit).
    """

    connect_s: float = 2.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "connect_s", "first_byte_s", "idle_s")
        if self.total_s < 0:
            raise ConfigError("total_s: must not be negative; 0: no limit")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """body_mb: the largest request body, in MiB. body_s: how long it may take to arrive. inflight_mb: what all requests
    together may hold in memory, in MiB (default: a quarter of the memory of the machine, or of its cgroup). connections: of
    clients, at once. client_idle_s: how long one of them may be idle, or be sending one request's head. drain_timeout_s: how
    long running requests may go on after SIGTERM.
    """

    body_mb: int = 64
    body_s: float = 300.0
    inflight_mb: int | None = None
    connections: int = 10_000
    client_idle_s: float = 75.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _positive(self, "body_mb", "body_s", "connections", "client_idle_s", "drain_timeout_s")
        if self.inflight_mb is not None:
            _positive(self, "inflight_mb")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. workers: processes that serve together, as one gateway. `admin_key` is a secret: it comes from
    WARMROUTE_ADMIN_KEY, never from the file.
    """

    pools: tuple[PoolConfig, ...]
    listen: str = DEFAULT_LISTEN
    workers: int = DEFAULT_WORKERS
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
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers: 1 to {MAX_WORKERS} are possible, got {self.workers}")
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
            raise ConfigError(f"listen: {shown(self.listen)} is not host:port, for example 0.0.0.0:8000")
        return host.strip("[]"), port


LOG_LEVELS = ("debug", "info", "warning", "error")


def load(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Config:
    """The configuration from a YAML file (None: no file), then the environment, then `overrides` (raw values by key)."""
    raw: dict[str, Any] = {} if path is None else read_yaml(path)
    if "admin_key" in raw:
        raise ConfigError("admin_key: a secret does not belong in the file; set WARMROUTE_ADMIN_KEY")
    if env.get("WARMROUTE_LISTEN"):
        raw["listen"] = env["WARMROUTE_LISTEN"]
    if env.get("WARMROUTE_ADMIN_KEY"):
        raw["admin_key"] = env["WARMROUTE_ADMIN_KEY"]
    raw.update(overrides)
    raw.setdefault("pools", [])
    config = convert(Config, raw, "")
    assert isinstance(config, Config)
    return config
