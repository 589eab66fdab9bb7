"""The configuration: frozen dataclasses that are the only source of keys, types and defaults, and one `load()`.

The YAML file mirrors the dataclasses key by key. An unknown key, a key given twice, a wrong type or a value out of range
is a `ConfigError` that names the place (`file:line: pools[0].replicas[1].url`) and says what would be right; all of them are
told at once. Whatever passes here can be connected to, computed with and written into a header. What passes, but cannot be
meant, is told by `config_warnings.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from gateway.addresses import AddressError, host_and_port, is_link_local, parse_base_url, shown
from gateway.endpoints import AUTO, OFF, WORDS, Endpoint, parse_listen, problems_of
from gateway.typed import (
    EXPECTED,
    FALSE,
    MAX_PROBLEMS,
    ConfigError,
    Key,
    Problem,
    convert,
    key_name,
    not_among,
    not_positive,
    refuse,
    repeated,
)
from gateway.yaml_file import YamlFile
from router import POLICIES

MATCH_ALL = "*"
DEFAULT_LISTEN = "127.0.0.1:8000"
DEFAULT_WORKERS = 1
ADMIN_PORT_OFFSET = 10_000  # not 1: the next port is often the next gateway's, or a replica's that starts later
MAX_POOLS = 1024
MAX_REPLICAS = 2048  # of all pools: a reload that adds all of them holds requests for 0.1 s
MAX_WORKERS = 64  # each hears of all that the others do
NONE, TENANT = "none", "tenant"  # of `routing.isolation`
OPERATORS, ALL = "operators", "all"  # of `routing.expose_headers`

_HOST_PORT = "host:port (such as 0.0.0.0:8000)"
_NAME = re.compile(r"[!#-&(-~]{1,100}")  # printable ASCII but for the space and the two quotes


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One model server. name: what metrics and headers call it (default: host:port). capacity_tokens: its KV cache."""

    SHORT: ClassVar = "url"  # a plain string stands for this key

    url: str
    name: str = ""
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        refuse(self.problems())
        url, netloc = parse_base_url(self.url)
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "name", self.name or netloc)

    @property
    def link_local(self) -> bool:
        """Whether its URL names a link-local address or a cloud's metadata service."""
        return is_link_local(host_and_port(self.url)[0])

    def problems(self) -> Iterator[str]:
        try:
            parse_base_url(getattr(self, "url", "http://missing"))
        except AddressError as error:
            yield f"url: {error}"
        if self.name and not _NAME.fullmatch(self.name):
            wanted = "1 to 100 printable ASCII characters, no spaces and no quotes, are expected"
            yield f"name: {wanted}, got {shown(self.name)}"
        if self.capacity_tokens is not None:
            yield from not_positive(self, "capacity_tokens")


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
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        yield from not_positive(self, "max_inflight", "queue_s")
        if self.max_queue < 0:
            yield "max_queue: must not be negative; 0: nobody waits"
        if not getattr(self, "replicas", True):
            yield "replicas: at least one replica URL is needed"
        if "" in self.models:
            yield f'models: a prefix is not empty; write "{MATCH_ALL}" for any model'


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a replica is chosen, how long and how much the prefix index remembers, and what clients learn of both.

    isolation: "tenant": no prefix is shared between tenants (header X-Tenant-Id), neither in the index nor in engines that know
    `cache_salt`. expose_headers: who gets X-Warmroute-Replica and X-Warmroute-Cached-Tokens, which tell what others have sent.
    """

    policy: str = "cost"
    block_bytes: int = 256
    block_tokens: int = 64
    ttl_s: float = 900.0
    memory_mb: int = 256
    isolation: str = field(default=NONE, metadata={EXPECTED: f"{NONE} or {TENANT}"})
    expose_headers: str = OPERATORS

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        yield from not_among(self, "policy", POLICIES)
        yield from not_positive(self, "block_bytes", "block_tokens", "ttl_s", "memory_mb")
        yield from not_among(self, "isolation", (NONE, TENANT))
        yield from not_among(self, "expose_headers", (OPERATORS, ALL))


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """USD per million tokens. cached_input: default a tenth of input."""

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        refuse(self.problems())
        if self.cached_input is None:
            object.__setattr__(self, "cached_input", self.input / 10)

    def problems(self) -> Iterator[str]:
        for name in ("input", "output", "cached_input"):
            if (getattr(self, name, 0.0) or 0.0) < 0:
                yield f"{name}: a price is not negative"


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Active probes. failures: failed probes in a row until a replica counts as down (one that refuses is down at once)."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    failures: int = 2

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        yield from not_positive(self, "interval_s", "timeout_s", "failures")


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """connect_s: to open a connection to a replica. first_byte_s: from when the request is sent there to the first byte of the
    answer's body, so queue and prefill, and all of the generation if it is not streamed. idle_s: the longest silence after it;
    also how long a client may leave an answer unread. total_s: likewise to the last byte (0: no limit), each replica anew.
    """

    connect_s: float = 2.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 0.0

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        yield from not_positive(self, "connect_s", "first_byte_s", "idle_s")
        if self.total_s < 0:
            yield "total_s: must not be negative; 0: no limit"


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """body_mb: the largest request body, in MiB. body_s: how long it may take to arrive. inflight_mb: what all requests
    together may hold in memory, in MiB (default: a quarter of the memory of the machine, or of its cgroup). connections: of
    clients, at once. client_idle_s: how long one of them may be idle, or be sending one request's head. drain_timeout_s: how
    long running requests may go on after SIGTERM.
    """

    body_mb: int = 64
    body_s: float = 300.0
    inflight_mb: int = 0
    connections: int = 10_000
    client_idle_s: float = 75.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        yield from not_positive(self, "body_mb", "body_s", "connections", "client_idle_s", "drain_timeout_s")
        if self.inflight_mb < 0:
            yield "inflight_mb: must not be negative; 0: a quarter of the memory"


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. workers: processes that serve together, as one gateway. admin_listen: where the operator endpoints are:
    host:port, "unix:/path", "off", or "auto" (127.0.0.1, at 10,000 + the port of `listen`). metrics_listen: host:port of a
    listener for Prometheus, or "off". allow_link_local: operators may add replicas at link-local and metadata addresses.
    `admin_key` is a secret: it comes from WARMROUTE_ADMIN_KEY, never from the file.
    """

    pools: tuple[PoolConfig, ...]
    listen: str = field(default=DEFAULT_LISTEN, metadata={EXPECTED: _HOST_PORT})
    admin_listen: str = field(default=AUTO, metadata={EXPECTED: f"{_HOST_PORT}, unix:/path, auto or off", FALSE: OFF})
    metrics_listen: str = field(default=OFF, metadata={EXPECTED: f"{_HOST_PORT}, or off", FALSE: OFF})
    allow_link_local: bool = False
    workers: int = DEFAULT_WORKERS
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    prices: Mapping[str, PriceConfig] = field(default_factory=dict)
    health: HealthConfig = field(default_factory=HealthConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    log_level: str = "info"
    admin_key: str = field(default="", repr=False, metadata={"env": "WARMROUTE_ADMIN_KEY"})

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[Problem | str]:
        replicas = dict(_replicas(getattr(self, "pools", ())))
        urls: dict[Key, str] = {(*key, "url"): replica.url for key, replica in replicas.items()}
        listeners = {name: getattr(self, name) for name in WORDS}
        yield from problems_of(listeners, guarded=bool(self.admin_key), replicas=urls)
        yield from not_among(self, "log_level", LOG_LEVELS)
        if not 1 <= self.workers <= MAX_WORKERS:
            yield f"workers: 1 to {MAX_WORKERS} are possible, got {self.workers}"
        if "" in self.prices:
            yield f'prices: a model prefix is not empty; write "{MATCH_ALL}" for any model'
        if not getattr(self, "pools", True):
            yield "pools: at least one pool with a replica is needed (or pass --replica URL)"
        if len(getattr(self, "pools", ())) > MAX_POOLS:
            yield f"pools: at most {MAX_POOLS} are possible, got {len(self.pools)}"
        if len(replicas) > MAX_REPLICAS:
            yield f"pools: at most {MAX_REPLICAS} replicas are possible, got {len(replicas)}"
        for key, name, first in repeated((key, replica.name) for key, replica in replicas.items()):
            if replicas[key].url == replicas[first].url:
                yield Problem(key, f"the replica {name!r} is listed twice, first as {key_name(first)}")
            else:
                yield Problem(key, f"the name {name!r} is that of {key_name(first)} already; give each replica its own `name`")
        for key, prefix, first in repeated(_prefixes(getattr(self, "pools", ()))):
            yield Problem(key, f"the model prefix {prefix!r} is claimed twice, first by {key_name(first)}")

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of `listen`."""
        endpoint = parse_listen("listen", self.listen)
        assert endpoint
        return endpoint.host, endpoint.port

    @property
    def admin(self) -> Endpoint | None:
        """Where to serve the operator endpoints, None: nowhere. With `auto`: at port 0, which is any free one, if `listen` has
        port 0, or the default port is out of range or a replica's.
        """
        if self.admin_listen != AUTO:
            return parse_listen("admin_listen", self.admin_listen)
        port = self.address[1]
        endpoint = Endpoint("127.0.0.1", port + ADMIN_PORT_OFFSET if 0 < port <= 65535 - ADMIN_PORT_OFFSET else 0)
        taken = any(endpoint.is_at(replica.url) for pool in self.pools for replica in pool.replicas)
        return replace(endpoint, port=0) if taken else endpoint

    @property
    def metrics(self) -> Endpoint | None:
        """Where to serve metrics to others than operators, None: nowhere."""
        return parse_listen("metrics_listen", self.metrics_listen)


LOG_LEVELS = ("debug", "info", "warning", "error")


def _replicas(pools: Iterable[PoolConfig | None]) -> Iterator[tuple[Key, ReplicaConfig]]:
    """(key, replica) of each that has no problem of its own; a bad one is None, or was not built (it has no name)."""
    for number, pool in enumerate(pools):
        for place, replica in enumerate(getattr(pool, "replicas", ())):
            if replica and replica.name and getattr(replica, "url", "") and not any(replica.problems()):
                yield ("pools", number, "replicas", place), replica


def _prefixes(pools: Iterable[PoolConfig | None]) -> Iterator[tuple[Key, str]]:
    """(key, prefix) of each model prefix that has no problem of its own."""
    for number, pool in enumerate(pools):
        for place, prefix in enumerate(pool.models if pool else ()):
            if prefix:
                yield ("pools", number, "models", place), prefix


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and the file that it comes from. replaced: keys whose values come from the environment or from flags."""

    config: Config
    file: YamlFile | None = None
    replaced: Collection[str] = ()

    def at(self, problem: Problem) -> Problem:
        """The problem with its file and line."""
        return _located(problem, self.file, self.replaced)


def load(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Config:
    """The configuration from a YAML file (None: no file), then the environment, then `overrides` (raw values by key)."""
    return read(path, overrides, env).config


def read(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Loaded:
    """`load`, with the file's lines. Raises ConfigError with all that is wrong."""
    file = YamlFile(path) if path else None
    raw: dict[str, Any] = dict(file.values) if file else {}
    problems = list(file.problems[:MAX_PROBLEMS]) if file else []
    untold: list[str] = []
    if file and (more := len(file.problems) - MAX_PROBLEMS) > 0:
        untold.append(f"and {more} more problems in the YAML")
    if "admin_key" in raw:
        del raw["admin_key"]
        secret = Problem(("admin_key",), "a secret does not belong in the file; set WARMROUTE_ADMIN_KEY")
        problems.append(_located(secret, file, ()))
    environment = {key: value for key, name in _VARIABLES.items() if (value := env.get(name))}
    replacing = {**environment, **overrides}
    try:
        config = convert(Config, {"pools": [], **raw, **replacing})
    except ConfigError as error:
        found = [_attributed(problem, environment.keys() - overrides.keys()) for problem in error.problems]
        problems += [_located(problem, file, replacing) for problem in found[:MAX_PROBLEMS]]
        if (more := len(found) - MAX_PROBLEMS) > 0:
            untold.append(f"and {more} more problems")
    if problems:
        raise ConfigError(*sorted(problems, key=lambda problem: problem.line), *untold)
    assert isinstance(config, Config)
    return Loaded(config, file, replacing.keys())


_VARIABLES: Mapping[str, str] = {"listen": "WARMROUTE_LISTEN", "admin_key": "WARMROUTE_ADMIN_KEY"}


def _attributed(problem: Problem, environment: Collection[str]) -> Problem:
    """The problem; if its value comes from the environment, with the name of the variable. environment: the keys set there."""
    if problem.key and problem.key[0] in environment:
        return replace(problem, text=f"{problem.text} (from the environment variable {_VARIABLES[str(problem.key[0])]})")
    return problem


def _located(problem: Problem, file: YamlFile | None, replaced: Collection[str]) -> Problem:
    if file is None or (problem.key and problem.key[0] in replaced):
        return problem
    return file.located(problem)
