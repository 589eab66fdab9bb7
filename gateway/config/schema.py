"""The configuration: frozen Structs that are the only source of keys, types, bounds, defaults and descriptions.

The YAML file has the same keys. A new key here is at once read, checked (`parse.py`) and in the JSON Schema (`json_schema.py`);
tests name the places in docs/configuration.md and in the chart to be updated. Problems between values, which a type cannot
express, are in `checks.py`; the sources of values are in `source.py`.

A value that passes can be connected to, computed with and written into a header. A Struct created in Python is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from gateway.config.addresses import host_and_port, is_link_local, is_loopback, parse_base_url, shown
from gateway.config.aliases import MAX_ALIASES
from gateway.config.hints import ALONE, EXPECTED, FALSE, FIXED, MAX_NUMBER, READ, SECRET, UNSHOWN
from gateway.config.kinds import (
    DATE,
    MAX_WEIGHT,
    NAME_PATTERN,
    BaseUrl,
    ConfigSection,
    EngineName,
    FilePath,
    KeyFile,
    KeyHeader,
    ModelAlias,
    ModelName,
    ModelPrefix,
    Name,
    Port,
    Positive,
    Price,
    Ranks,
    Seconds,
    ServerName,
    SteeringField,
    TranslatedApi,
    Variable,
    Weight,
    about,
    unix_time,
)
from gateway.config.listen import AUTO, OFF, ListenAddress, parse_listen
from router import POLICIES

DEFAULT_LISTEN = "127.0.0.1:8000"
ADMIN_PORT_OFFSET = 10_000  # not 1: the next port is often the next gateway's, or a replica's that starts later
MAX_POOLS = 1024
MAX_REPLICAS = 2048  # of all pools: a reload that adds them all delays requests by 0.1 s
MAX_FALLBACKS = 8  # pools in the chain of fallbacks of one request
AUTO_ENGINE = "auto"
MAX_POOL_NAME = 90  # characters of a name derived from models
MAX_TIERS, MAX_PEAKS, MAX_CHANGES = 8, 24, 64  # of a model's prices
NONE, TENANT = "none", "tenant"  # of `routing.isolation`
OPERATORS, ALL = "operators", "all"  # of `routing.expose_headers`

if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]
Isolation = Literal["none", "tenant"]
Audience = Literal["operators", "all"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_HOURS = "hours such as 01:00-04:00, of UTC,"
_HOURS_PATTERN = r"([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)"
_HOST_PORT = "host:port (such as 0.0.0.0:8000)"
_HOST_PORT_PATTERN = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}"


def _price_date(text: str) -> str:
    """Check a price's date. Raises ValueError."""
    try:
        if text:
            unix_time(text)
    except ValueError:
        raise ValueError(f"{DATE} is expected, got {shown(text)}") from None
    return text


def _hours(text: str) -> str:
    """Check peak hours. Raises ValueError."""
    begin, _, end = text.partition("-")
    if not re.fullmatch(_HOURS_PATTERN, text) or begin == end:
        raise ValueError(f"{_HOURS} are expected, got {shown(text)}")
    return text


PriceDate = Annotated[str, Meta(extra={READ: _price_date, EXPECTED: DATE})]
PeakHours = Annotated[str, Meta(extra={READ: _hours, EXPECTED: _HOURS}, extra_json_schema={"pattern": f"^{_HOURS_PATTERN}$"})]

MAX_ORIGINS = 100
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]{0,30}://[A-Za-z0-9._\[\]:-]{1,250})$"
Origin = Annotated[
    str,
    Meta(pattern=_ORIGIN, extra={EXPECTED: 'an origin such as "https://chat.example.org" or "http://localhost:3000", or "*"'}),
]


class KeyConfig(ConfigSection, frozen=True):
    """The source of a replica's key: exactly one of both. The configuration never has the key itself."""

    env: Annotated[Variable, about("Name of an environment variable of the gateway.")] = ""
    file: Annotated[KeyFile, about("Absolute path of a file with the key; it is read again when it changes.")] = ""
    header: Annotated[KeyHeader, about("Where the key is sent: x-api-key for Anthropic's own API.")] = "authorization"

    @property
    def place(self) -> str:
        """The source, for messages."""
        return f"the environment variable {self.env}" if self.env else f"the file {self.file}"


class TlsConfig(ConfigSection, frozen=True):
    """TLS options for a replica at an https URL. Files are PEM, at absolute paths, and read again on a change."""

    ca_file: Annotated[FilePath, about("Certificates of the authorities to trust; empty: the system's.")] = ""
    cert_file: Annotated[FilePath, about("The gateway's own certificate, for replicas that ask for one.")] = ""
    key_file: Annotated[FilePath, about("Its private key, without a password; empty: it is in cert_file.")] = ""
    server_name: Annotated[ServerName, about("The name that the replica's certificate has to have; empty: the URL's host.")] = (
        ""
    )


ReplicaKey = Annotated[
    KeyConfig | None,
    Meta(extra={EXPECTED: "a mapping such as {env: VLLM_API_KEY} or {file: /run/secrets/key}", UNSHOWN: True}),
]


class AddedReplica(ConfigSection, frozen=True):
    """A model server as operators add it. They cannot set options that make the gateway send its environment or files to a
    replica.

    A plain string is short for its url.
    """

    SHORT: ClassVar = "url"

    url: Annotated[BaseUrl, about("Base URL; /v1 at its end may be left out.")]
    name: Annotated[Name, about("Its name in metrics, headers and logs; empty: host:port.")] = ""
    capacity_tokens: Annotated[Positive | None, about("Size of its KV cache; null: as its engine advertises.")] = None
    engine: Annotated[EngineName, about("What it is; auto: found out. Distributed-Llama has to be named.")] = "auto"
    weight: Annotated[Weight, about("Its share of new work, beside the weights of the others of its pool.")] = MAX_WEIGHT
    ranks: Annotated[
        Ranks | None, about("Data-parallel ranks behind its URL, each with a cache of its own; null: as its metrics say.")
    ] = None

    def __post_init__(self) -> None:
        if not self.name:
            force_setattr(self, "name", parse_base_url(self.url)[1])

    @property
    def link_local(self) -> bool:
        """True if its URL names a link-local address or a cloud's metadata service."""
        return is_link_local(host_and_port(self.url)[0])


class ReplicaConfig(AddedReplica, frozen=True):
    """One model server; a plain string is short for its url."""

    key: Annotated[
        ReplicaKey, about("Sent to it as a bearer token, in place of the client's key; null: the client's is passed on.")
    ] = None
    tls: Annotated[TlsConfig | None, about("For an https URL; null: the system's authorities.")] = None


class PrefillReplica(ReplicaConfig, frozen=True):
    """A model server that computes prompts for others; a plain string is short for its url."""

    bootstrap_port: Annotated[
        Port | None, about("SGLang: its `--disaggregation-bootstrap-port`; null: as its engine says, else 8998.")
    ] = None


class FallbackConfig(ConfigSection, frozen=True, omit_defaults=True):  # the default of `model` is no name to a worker
    """The target of requests that a pool cannot serve; a plain string is short for its pool."""

    SHORT: ClassVar = "pool"

    pool: Annotated[Name, about("The name of another pool.")]
    model: Annotated[ModelName, about("The model to ask that pool for; empty: the one that the request names.")] = ""


class PoolConfig(ConfigSection, frozen=True):
    """Replicas that serve the same models. Within a Config each pool has a name of its own."""

    replicas: Annotated[tuple[ReplicaConfig, ...], about("Those that are known beforehand; see also `discovery`.")] = ()
    prefill: Annotated[
        tuple[PrefillReplica, ...], about("Replicas that compute long prompts for those in `decode`, and answer nothing.")
    ] = ()
    decode: Annotated[
        tuple[ReplicaConfig, ...], about("Replicas that answer, and take prompts over that one of `prefill` has computed.")
    ] = ()
    models: Annotated[tuple[ModelPrefix, ...], about("Model name prefixes; empty: the models that the replicas list.")] = ()
    name: Annotated[Name, about("Its name in metrics and for operators; empty: its models, or `default`.")] = ""
    max_inflight: Annotated[Positive, about("Requests at all replicas of the pool together; more are queued.")] = 4096
    max_queue: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (no queue) or more"}),
        about("Requests in the queue; beyond it, 429."),
    ] = 1024
    queue_s: Annotated[
        Seconds | None,
        about("Seconds that a request may be queued; null: 30, and 240 for streams with signs of life, without a fallback."),
    ] = None
    strip_billing_header: Annotated[
        bool, about("The billing line of Claude Code, which changes with every request, is cut out of what goes to replicas.")
    ] = True
    translate: Annotated[
        tuple[TranslatedApi, ...] | None,
        about("APIs that replicas get in chat completions, also if they speak them; null: Responses, for llama.cpp's server."),
    ] = None
    resume_streams: Annotated[bool, about("Text streams that their replica breaks off are continued by another one.")] = False
    delta: Annotated[
        bool,
        about("The replicas are gateways that keep logs: they get the new turns of a conversation, and a name for the rest."),
    ] = False
    fallback: Annotated[
        FallbackConfig | None, about("Another pool, for requests that this one cannot serve; null: they are errors.")
    ] = None

    @property
    def by_role(self) -> Mapping[str, tuple[ReplicaConfig, ...]]:
        """All replicas of the pool, by the key that lists them."""
        return {"replicas": self.replicas, "decode": self.decode, "prefill": self.prefill}

    @property
    def members(self) -> tuple[ReplicaConfig, ...]:
        """All replicas of the pool."""
        return (*self.replicas, *self.decode, *self.prefill)


class RoutingConfig(ConfigSection, frozen=True):
    """The choice of a replica, the prefix index, and their visibility to clients."""

    policy: Policy = "cost"
    block_bytes: Annotated[Positive, about("Bytes of a block of text; one of token ids has a quarter as many.")] = 256
    ttl_s: Annotated[Seconds, about("Seconds after its last use that a prefix is believed to be cached.")] = 900.0
    memory_mb: Annotated[Positive, about("Bound of the prefix index of each worker, in MiB.")] = 256
    isolation: Annotated[
        Isolation,
        about("tenant: tenants (X-Tenant-Id) share no prefixes, neither in the index nor in engines that know cache_salt."),
    ] = "none"
    expose_headers: Annotated[
        Audience,
        about("Who gets X-Warmroute-Replica and X-Warmroute-Cached-Tokens, which show what others have sent."),
    ] = "operators"

    client_fields: Annotated[
        tuple[SteeringField, ...],
        about("Fields of clients' bodies that steer engines and reach them all the same; the others of these are cut out."),
    ] = ()

    @property
    def block_tokens(self) -> int:
        """Length of a block of token ids: a token is about four bytes of text."""
        return max(1, self.block_bytes // 4)


class TierConfig(ConfigSection, frozen=True):
    """Prices of requests with long prompts, all of their tokens: USD per million. Cache prices stay in proportion to input."""

    above: Annotated[Positive, about("Prompts with more tokens than this.")]
    input: Price
    output: Price


class PeakConfig(ConfigSection, frozen=True):
    """Hours at which all prices of a model are multiplied."""

    hours: Annotated[
        PeakHours, about("From and to, UTC; they may pass midnight, and are then those of the day on which they begin.")
    ]
    factor: Annotated[float, Meta(gt=0, le=100), about("On all prices.")]
    days: Annotated[tuple[Day, ...], Meta(min_length=1, max_length=len(DAYS)), about("Days of the week, UTC.")] = DAYS


class PriceConfig(ConfigSection, frozen=True):
    """USD per million tokens."""

    input: Price
    output: Price
    cached_input: Annotated[Price | None, about("Null: a tenth of input.")] = None
    cache_write: Annotated[
        Price | None, about("Of tokens that the engine reports as newly written to its cache. Null: as input.")
    ] = None
    cache_write_1h: Annotated[Price | None, about("The same, of what is to stay for an hour. Null: as cache_write.")] = None
    image: Annotated[Price, about("USD for each image in a prompt, beside its tokens.")] = 0.0
    tiers: Annotated[tuple[TierConfig, ...], Meta(max_length=MAX_TIERS), about("Other prices for longer prompts.")] = ()
    peak: Annotated[
        tuple[PeakConfig, ...],
        Meta(max_length=MAX_PEAKS),
        about("Hours with other prices; where two overlap, the first holds."),
    ] = ()
    since: Annotated[PriceDate, about("From when on these prices hold: a date, or a date and time, UTC. Empty: always.")] = ""

    def __post_init__(self) -> None:
        if self.cached_input is None:
            force_setattr(self, "cached_input", self.input / 10)
        if self.cache_write is None:
            force_setattr(self, "cache_write", self.input)
        if self.cache_write_1h is None:
            force_setattr(self, "cache_write_1h", self.cache_write)


PriceList = Annotated[
    tuple[PriceConfig, ...],
    Meta(min_length=1, max_length=MAX_CHANGES, extra={ALONE: True, EXPECTED: "a price, or a list of them,"}),
]


class HealthConfig(ConfigSection, frozen=True):
    """Active probes of the replicas."""

    interval_s: Annotated[Seconds, about("Seconds between probes of a replica.")] = 2.0
    timeout_s: Annotated[Seconds, about("Seconds that a probe may take.")] = 5.0
    failures: Annotated[
        Positive, about("Failed probes in a row until a replica is down; one that refuses connections is down at once.")
    ] = 2


class ListenerTlsConfig(ConfigSection, frozen=True):
    """TLS for clients, and for operators at an `admin_listen` beyond loopback addresses and Unix sockets. Files are PEM, at
    absolute paths, and read again on a change.
    """

    cert_file: Annotated[FilePath, about("The certificate, and those between it and the authority's; empty: no TLS.")] = ""
    key_file: Annotated[FilePath, about("Its private key, without a password; empty: it is in cert_file.")] = ""

    @property
    def on(self) -> bool:
        return bool(self.cert_file)


class TimeoutConfig(ConfigSection, frozen=True):
    """Time limits of a request at replicas. Every byte of an answer is a sign of life: silence counts from the last one."""

    first_byte_s: Annotated[
        Seconds,
        about(
            "Longest silence of a replica before the first token: queue and prefill, and all of the generation if it is not"
            " streamed."
        ),
    ] = 1800.0
    idle_s: Annotated[
        Seconds,
        about(
            "Longest silence after the first token; also how long a client may leave an answer unread, at most 120 s on Linux."
        ),
    ] = 120.0
    total_s: Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (no limit) or more"}),
        about("Seconds from the first attempt to the last byte of the answer, over all attempts; 0: no limit."),
    ] = 0.0


class LimitConfig(ConfigSection, frozen=True):
    """Limits of clients."""

    body_mb: Annotated[Positive, about("Largest request body, in MiB.")] = 64
    body_s: Annotated[Seconds, about("Seconds that a request body may take to arrive.")] = 300.0
    inflight_mb: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (a quarter of the memory) or more"}),
        about("Memory of all requests together, in MiB; 0: a quarter of the memory of the machine, or of its cgroup."),
    ] = 0
    connections: Annotated[Positive, about("Connections of clients at once.")] = 10_000
    client_idle_s: Annotated[
        Seconds, about("Seconds that a client's connection may be idle, or be sending one request's head.")
    ] = 75.0
    keepalive_s: Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (off) or more"}),
        about("Seconds without a byte until a client that waits for a stream gets a sign of life (a comment, a ping); 0: off."),
    ] = 15.0
    drain_accept_s: Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (none) or more"}),
        about("Seconds after SIGTERM in which new connections are still accepted, for balancers that do not know of it yet."),
    ] = 2.0
    drain_timeout_s: Annotated[Seconds, about("Seconds that running requests may go on afterwards.")] = 30.0


class Config(ConfigSection, frozen=True):
    """The core's part of the file. The type of the whole file extends it by the sections of features (`sections.py`)."""

    pools: Annotated[
        tuple[PoolConfig, ...],
        Meta(
            min_length=1,
            max_length=MAX_POOLS,
            extra={EXPECTED: "at least one pool with a replica (or the flag --replica URL), or a source in `discovery`,"},
        ),
    ]
    listen: Annotated[
        str,
        Meta(extra={EXPECTED: _HOST_PORT, FIXED: True}, extra_json_schema={"pattern": f"^{_HOST_PORT_PATTERN}$"}),
        about("host:port of the gateway; port 0 takes any free one."),
    ] = DEFAULT_LISTEN
    admin_listen: Annotated[
        str,
        Meta(
            extra={EXPECTED: f"{_HOST_PORT}, unix:/path, auto or off", FALSE: OFF, FIXED: True},
            extra_json_schema={"pattern": f"^(auto|off|unix:/.+|{_HOST_PORT_PATTERN})$"},
        ),
        about(
            "Listener for operators: host:port, unix:/path, off, or auto (127.0.0.1, at 10,000 + the port of listen). Beyond"
            " loopback addresses only with the admin key."
        ),
    ] = AUTO
    metrics_listen: Annotated[
        str,
        Meta(
            extra={EXPECTED: f"{_HOST_PORT}, or off", FALSE: OFF, FIXED: True},
            extra_json_schema={"pattern": f"^(off|{_HOST_PORT_PATTERN})$"},
        ),
        about("Listener for Prometheus: host:port, or off."),
    ] = OFF
    tls: Annotated[ListenerTlsConfig, Meta(extra={FIXED: True})] = ListenerTlsConfig()
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(max_length=MAX_ORIGINS),
        about('Origins of web pages that may use the API from a browser; "*": all.'),
    ] = ()
    routing: Annotated[RoutingConfig, Meta(extra={FIXED: ("block_bytes",)})] = RoutingConfig()
    prices: Annotated[
        Mapping[ModelPrefix, PriceList],
        about('By model name or its beginning; "*" for any model. Where they change: a list, each but the first with `since`.'),
    ] = {}
    model_aliases: Annotated[
        Mapping[ModelAlias, ModelName],
        Meta(
            max_length=MAX_ALIASES,
            extra={EXPECTED: "a mapping of names to models such as {claude-*: qwen3-coder} ({}: none)"},
        ),
        about("Other names of models: ALIAS: MODEL; an alias that ends with a star stands for all names that begin so."),
    ] = {}
    health: HealthConfig = HealthConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    limits: LimitConfig = LimitConfig()
    log_level: Annotated[LogLevel, Meta(extra={FIXED: True})] = "info"
    log_format: Annotated[
        LogFormat,
        Meta(extra={FIXED: True}),
        about("json: one object a line; console: text for people; auto: console on a terminal, else json."),
    ] = "auto"
    log_clients: Annotated[
        bool, about("Addresses and user agents of clients are in the log, in the ledger and on the live page.")
    ] = True
    admin_key: Annotated[str, Meta(extra={SECRET: True, FIXED: True})] = ""
    read_key: Annotated[str, Meta(extra={SECRET: True, FIXED: True})] = ""

    def __post_init__(self) -> None:
        """Derive a name for each pool without one from its models."""
        taken = {pool.name for pool in self.pools if pool.name}
        if len(taken) == len(self.pools):
            return
        named = list[PoolConfig]()
        for pool in self.pools:
            free = pool if pool.name else replace(pool, name=_free_name(pool.models, taken))
            taken.add(free.name)
            named.append(free)
        force_setattr(self, "pools", tuple(named))

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in ("admin_key", "read_key")]

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of `listen`."""
        endpoint = parse_listen("listen", self.listen)
        assert endpoint
        return endpoint.host, endpoint.port

    @property
    def admin(self) -> ListenAddress | None:
        """The listener for operators; None: there is none. With `auto`: at port 0, which is any free one, if `listen` has port
        0, or if the default port is out of range or in use by a replica.
        """
        if self.admin_listen != AUTO:
            return parse_listen("admin_listen", self.admin_listen)
        port = self.address[1]
        endpoint = ListenAddress("127.0.0.1", port + ADMIN_PORT_OFFSET if 0 < port <= 65535 - ADMIN_PORT_OFFSET else 0)
        taken = any(endpoint.is_at(replica.url) for pool in self.pools for replica in pool.members)
        return ListenAddress(endpoint.host, 0) if taken else endpoint

    @property
    def admin_tls(self) -> bool:
        """True if operators' connections have TLS: not on this machine."""
        admin = self.admin if self.tls.on else None
        return admin is not None and not admin.path and not is_loopback(admin.host)

    @property
    def metrics(self) -> ListenAddress | None:
        """The listener for Prometheus; None: there is none."""
        return parse_listen("metrics_listen", self.metrics_listen)


def _free_name(models: Sequence[str], taken: Collection[str]) -> str:
    """An unused name for a pool of these models."""
    name = (
        ",".join("".join(char for char in model if NAME_PATTERN.fullmatch(char)) for model in models)[:MAX_POOL_NAME]
        or "default"
    )
    number = 1
    while (free := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return free
