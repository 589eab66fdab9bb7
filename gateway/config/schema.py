"""The configuration: frozen Structs that are the only source of keys, types, bounds, defaults and descriptions.

The YAML file mirrors them key by key. A key that is added here is read, checked (`parse.py`) and in the JSON Schema
(`json_schema.py`) at once; tests name the places in docs/configuration.md and in the chart that have to follow. What the type
of one value cannot say, how values clash, is in `checks.py`; where values come from is in `source.py`.

Whatever passes can be connected to, computed with and written into a header. A Struct that is made in Python is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from gateway.config.addresses import (
    ISSUER_URL,
    STORE_URL,
    STORE_URL_PATTERN,
    dns_name,
    host_and_port,
    host_name,
    is_link_local,
    issuer_url,
    jwks_url,
    name_server,
    parse_base_url,
    shown,
    store_url,
)
from gateway.config.aliases import MAX_ALIASES, MAX_NAME_CHARS, alias_name, model_name
from gateway.config.hints import ALONE, EXPECTED, FALSE, MAX_NUMBER, NAME, READ, SECRET, UNSHOWN
from gateway.config.listen import AUTO, OFF, ListenAddress, parse_listen
from router import POLICIES

MATCH_ALL = "*"
DEFAULT_LISTEN = "127.0.0.1:8000"
DEFAULT_WORKERS = 1
ADMIN_PORT_OFFSET = 10_000  # not 1: the next port is often the next gateway's, or a replica's that starts later
MAX_POOLS = 1024
MAX_REPLICAS = 2048  # of all pools: a reload that adds all of them holds requests for 0.1 s
MAX_FALLBACKS = 8  # pools that one request may be handed on to
MAX_SOURCES = 64  # of replicas: each is watched, by each worker
MAX_NAME_SERVERS = 8
SOURCE_KINDS = ("dns", "kubernetes", "file")
AUTO_ENGINE = "auto"
MAX_POOL_NAME = 90  # characters of a name that is made of models
MAX_PRICE = 1e6  # USD for a million tokens, or for an image
MAX_TIERS, MAX_PEAKS, MAX_CHANGES = 8, 24, 64  # of a model's prices
MAX_DAYS = 36_500  # of retention
MAX_GRANTED = 100  # models, or pools, that a key names
MAX_ISSUERS = 16  # of tokens: each has its keys read by each worker
MAX_AUDIENCES = 16
LEDGER = "ledger"  # of `keys.url`
MAX_WORKERS = 64  # every message of one goes to all others
NONE, TENANT = "none", "tenant"  # of `routing.isolation`
OPERATORS, ALL = "operators", "all"  # of `routing.expose_headers`

if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]
Isolation = Literal["none", "tenant"]
# As `fleet/engines.py` names them; a test compares.
EngineName = Literal["auto", "vllm", "warmroute", "sglang", "llamacpp", "tgi", "ollama", "distributed-llama"]
Audience = Literal["operators", "all"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_DATABASE_URL_PATTERN = r"off|sqlite|sqlite:///[^\s?#]+|postgres(ql)?://[^\s]+"
_PASSWORD = re.compile(r"postgres(ql)?://([^\s/?#]*:[^\s/?#]*@|.*[?&]password=)")
_DATABASE_URL = "sqlite, sqlite:///PATH, postgresql://USER@HOST/NAME or off"
_KEYS_URL_PATTERN = rf"ledger|/[^\0]+|{_DATABASE_URL_PATTERN}"
_KEYS_URL = "ledger, sqlite, sqlite:///PATH, postgresql://USER@HOST/NAME, the absolute path of a YAML file or off"
_DATE = "a date such as 2026-10-07, or 2026-10-07T16:00:00Z,"
_HOURS = "hours such as 01:00-04:00, of UTC,"
_HOURS_PATTERN = r"([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)"
_HOST_PORT = "host:port (such as 0.0.0.0:8000)"
_HOST_PORT_PATTERN = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}"
_URL_PATTERN = r"^https?://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(:[1-9][0-9]{0,4})?(/[^?#\s]*)?$"
_TRACES_PATH = "/v1/traces"  # that collectors' documents write, and the gateway adds itself
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_NAME = re.compile(r"[!#-&(-~]{0,100}")  # printable ASCII but for the space and the two quotes


def _base_url(url: str) -> str:
    """Raises AddressError."""
    return parse_base_url(url)[0]


def _collector(url: str) -> str:
    """Raises AddressError."""
    return url if url == OFF else parse_base_url(url.rstrip("/").removesuffix(_TRACES_PATH))[0]


def database_url(url: str) -> str:
    """Raises ValueError, without credentials."""
    if _PASSWORD.match(url):
        raise ValueError("a password does not belong in a URL; set PGPASSWORD, or PGPASSFILE to a file in the form of .pgpass")
    if re.fullmatch(_DATABASE_URL_PATTERN, url):
        return url
    written = url.partition(":")[0] if "@" in url or "password" in url.lower() else url
    raise ValueError(f"{_DATABASE_URL} is expected, got {shown(written)}")


def _keys_url(url: str) -> str:
    """Raises ValueError, without credentials."""
    if url == LEDGER or (url.startswith("/") and "\0" not in url and len(url) > 1):
        return url
    try:
        return database_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace(_DATABASE_URL, _KEYS_URL)) from None


def _price_date(text: str) -> str:
    """Raises ValueError."""
    try:
        if text:
            unix_time(text)
    except ValueError:
        raise ValueError(f"{_DATE} is expected, got {shown(text)}") from None
    return text


def unix_time(text: str) -> float:
    """Of a date, or a date and time; without a time zone it is in UTC. Raises ValueError."""
    begins = datetime.fromisoformat(text)
    return (begins if begins.tzinfo else begins.replace(tzinfo=UTC)).timestamp()


def _hours(text: str) -> str:
    """Raises ValueError."""
    begin, _, end = text.partition("-")
    if not re.fullmatch(_HOURS_PATTERN, text) or begin == end:
        raise ValueError(f"{_HOURS} are expected, got {shown(text)}")
    return text


def _variable(name: str) -> str:
    """Raises ValueError, without the text: it may be the secret itself."""
    if name and not _VARIABLE.fullmatch(name):
        raise ValueError("the name of an environment variable is expected, such as VLLM_API_KEY, not the key itself")
    return name


def _key_file(path: str) -> str:
    """Raises ValueError, without the text: likewise."""
    if not _is_absolute(path):
        raise ValueError("the absolute path of a file is expected, not the key itself")
    return path


def _file(path: str) -> str:
    """Raises ValueError."""
    if not _is_absolute(path):
        raise ValueError(f"the absolute path of a file is expected, got {shown(path)}")
    return path


def _is_absolute(path: str) -> bool:
    """Or none. A relative path would depend on where the gateway was started."""
    return not path or (path.startswith("/") and "\0" not in path)


def _server_name(name: str) -> str:
    """Raises AddressError."""
    return dns_name(name) if name else ""


def is_name(name: str) -> bool:
    """Whether a replica or a pool may have this name."""
    return bool(name and _NAME.fullmatch(name))


def _name(name: str) -> str:
    """Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"1 to 100 printable ASCII characters, no spaces and no quotes, are expected, got {shown(name)}")
    return name


def _about(text: str, **extra: Any) -> Meta:
    """A description for editors. extra: see `parse.py`."""
    return Meta(description=text, extra=extra)


Positive = Annotated[int, Meta(gt=0, le=MAX_NUMBER)]
Days = Annotated[int, Meta(gt=0, le=MAX_DAYS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Dollars = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Price = Annotated[float, Meta(ge=0, le=MAX_PRICE)]
PriceDate = Annotated[str, Meta(extra={READ: _price_date, EXPECTED: _DATE})]
PeakHours = Annotated[str, Meta(extra={READ: _hours, EXPECTED: _HOURS}, extra_json_schema={"pattern": f"^{_HOURS_PATTERN}$"})]
# Patterns are for editors and the chart, which have no better check.
DatabaseUrl = Annotated[
    str,
    Meta(
        extra={READ: database_url, FALSE: OFF, EXPECTED: _DATABASE_URL},
        extra_json_schema={"pattern": f"^({_DATABASE_URL_PATTERN})$"},
    ),
]
BaseUrl = Annotated[str, Meta(extra={READ: _base_url}, extra_json_schema={"pattern": _URL_PATTERN})]
Name = Annotated[str, Meta(extra={READ: _name}, extra_json_schema={"pattern": f"^{_NAME.pattern}$"})]
ModelPrefix = Annotated[str, Meta(min_length=1, extra={EXPECTED: f'a model name or its beginning ("{MATCH_ALL}": any model)'})]

MAX_ORIGINS = 100
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]{0,30}://[A-Za-z0-9._\[\]:-]{1,250})$"
Origin = Annotated[
    str,
    Meta(pattern=_ORIGIN, extra={EXPECTED: 'an origin such as "https://chat.example.org" or "http://localhost:3000", or "*"'}),
]
ModelAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        extra={
            READ: alias_name,
            EXPECTED: f"a name of 1 to {MAX_NAME_CHARS} characters, with a star at its end or none",
            NAME: True,
        },
    ),
]
ModelName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        extra={READ: model_name, EXPECTED: f"the name of one model, of 1 to {MAX_NAME_CHARS} characters,", NAME: True},
    ),
]


Port = Annotated[int, Meta(ge=1, le=65535)]
DnsName = Annotated[
    str,
    Meta(
        max_length=253,
        extra={READ: dns_name, EXPECTED: "a DNS name such as vllm.models.svc.cluster.local"},
        extra_json_schema={"pattern": "^[A-Za-z0-9_.-]+$"},
    ),
]
NameServer = Annotated[
    str,
    Meta(extra={READ: name_server}, extra_json_schema={"pattern": r"^(\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:.]+)(:[0-9]{1,5})?$"}),
]
ObjectName = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$",
        extra={EXPECTED: "a name of Kubernetes (small letters, digits, - and .)"},
    ),
]
LabelSelector = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_./=!, ()-]*$",
        max_length=1024,
        extra={EXPECTED: "a label selector such as app=vllm,tier in (gpu,cpu)"},
    ),
]
PortName = Annotated[str, Meta(pattern="^[a-z0-9-]*[a-z][a-z0-9-]*$", max_length=15)]  # of Kubernetes
_ABSOLUTE = {"pattern": "^(/.*)?$"}
FilePath = Annotated[
    str, Meta(max_length=1024, extra={READ: _file, EXPECTED: "the absolute path of a file"}, extra_json_schema=_ABSOLUTE)
]


def _granted(text: str) -> str:
    """Raises ValueError."""
    if "*" in text[:-1]:
        raise ValueError(f"a name, or the beginning of names with a star at its end, is expected, got {shown(text)}")
    return text


Granted = Annotated[str, Meta(min_length=1, max_length=256, extra={READ: _granted})]
GrantedPool = Annotated[str, Meta(min_length=1, max_length=256)]  # a pool of all models is called * itself
ClaimText = Annotated[str, Meta(min_length=1, max_length=256, extra={NAME: True})]
IssuerName = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$", extra={NAME: True})]
IssuerUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        extra={READ: issuer_url, EXPECTED: ISSUER_URL},
        extra_json_schema={"pattern": _URL_PATTERN},
    ),
]
JwksUrl = Annotated[
    str,
    Meta(
        max_length=2048, extra={READ: jwks_url, EXPECTED: ISSUER_URL}, extra_json_schema={"pattern": r"^$|^https?://[^\s#]+$"}
    ),
]
ListPath = Annotated[str, Meta(max_length=1024, extra={EXPECTED: "the path of a file"})]
Variable = Annotated[
    str, Meta(extra={READ: _variable, UNSHOWN: True}, extra_json_schema={"pattern": f"^({_VARIABLE.pattern})?$"})
]


KeyFile = Annotated[str, Meta(max_length=1024, extra={READ: _key_file, UNSHOWN: True}, extra_json_schema=_ABSOLUTE)]
ServerName = Annotated[
    str,
    Meta(
        max_length=253, extra={READ: _server_name, EXPECTED: "a DNS name"}, extra_json_schema={"pattern": "^[A-Za-z0-9_.-]*$"}
    ),
]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class KeyConfig(_Section, frozen=True):
    """Where the key of a replica is: exactly one of both. The configuration never has the key itself."""

    env: Annotated[Variable, _about("Name of an environment variable of the gateway.")] = ""
    file: Annotated[KeyFile, _about("Absolute path of a file with the key; it is read again when it changes.")] = ""

    @property
    def place(self) -> str:
        """For messages."""
        return f"the environment variable {self.env}" if self.env else f"the file {self.file}"


class TlsConfig(_Section, frozen=True):
    """How a replica at an https URL is connected to. Files are PEM, at absolute paths, and read again on a change."""

    ca_file: Annotated[FilePath, _about("Certificates of the authorities to trust; empty: the system's.")] = ""
    cert_file: Annotated[FilePath, _about("The gateway's own certificate, for replicas that ask for one.")] = ""
    key_file: Annotated[FilePath, _about("Its private key, without a password; empty: it is in cert_file.")] = ""
    server_name: Annotated[
        ServerName, _about("The name that the replica's certificate has to have; empty: the URL's host.")
    ] = ""


Key = Annotated[
    KeyConfig | None,
    Meta(extra={EXPECTED: "a mapping such as {env: VLLM_API_KEY} or {file: /run/secrets/key}", UNSHOWN: True}),
]


class AddedReplica(_Section, frozen=True):
    """A model server as operators add it, who may not have the gateway read its environment, or files, and send them somewhere.

    A plain string is short for its url.
    """

    SHORT: ClassVar = "url"

    url: Annotated[BaseUrl, _about("Base URL; /v1 at its end may be left out.")]
    name: Annotated[Name, _about("Its name in metrics, headers and logs; empty: host:port.")] = ""
    capacity_tokens: Annotated[Positive | None, _about("Size of its KV cache; null: as its engine advertises.")] = None
    engine: Annotated[EngineName, _about("What it is; auto: found out. Distributed-Llama has to be named.")] = "auto"

    def __post_init__(self) -> None:
        if not self.name:
            force_setattr(self, "name", parse_base_url(self.url)[1])

    @property
    def link_local(self) -> bool:
        """Whether its URL names a link-local address or a cloud's metadata service."""
        return is_link_local(host_and_port(self.url)[0])


class ReplicaConfig(AddedReplica, frozen=True):
    """One model server; a plain string is short for its url."""

    key: Annotated[
        Key, _about("Sent to it as a bearer token, in place of the client's key; null: the client's is passed on.")
    ] = None
    tls: Annotated[TlsConfig | None, _about("For an https URL; null: the system's authorities.")] = None


class ListedReplica(AddedReplica, frozen=True):
    """A replica of a file that is watched; key and TLS options are its source's. pool: empty: that of the source."""

    pool: Name = ""
    draining: bool = False


class ReplicaList(_Section, frozen=True):
    """A file that is watched."""

    replicas: Annotated[tuple[ListedReplica, ...], Meta(max_length=MAX_REPLICAS)]


class FallbackConfig(_Section, frozen=True):
    """Where requests go that a pool cannot serve; a plain string is short for its pool."""

    SHORT: ClassVar = "pool"

    pool: Annotated[Name, _about("The name of another pool.")]
    model: Annotated[ModelName, _about("The model to ask that pool for; empty: the one that the request names.")] = ""


class DnsConfig(_Section, frozen=True):
    """Replicas are the addresses of a name, or the targets of its SRV records; a plain string is short for its name."""

    SHORT: ClassVar = "name"

    name: Annotated[DnsName, _about("Such as vllm.models.svc.cluster.local, or _http._tcp.vllm.models.svc.cluster.local.")]
    port: Annotated[Port | None, _about("The replicas' port; null: targets and ports of SRV records.")] = None
    servers: Annotated[
        tuple[NameServer, ...], Meta(max_length=MAX_NAME_SERVERS), _about("Name servers; empty: the system's.")
    ] = ()

    @property
    def source(self) -> str:
        """What it watches."""
        return f"dns {self.name}" + (f":{self.port}" if self.port else "") + "".join(f" by {each}" for each in self.servers[:1])


class KubernetesConfig(_Section, frozen=True):
    """Replicas are the endpoints of a Service, or pods with certain labels; a plain string is short for `service`."""

    SHORT: ClassVar = "service"

    service: Annotated[ObjectName, _about("Its name. Needs the right to list and watch endpointslices.")] = ""
    pods: Annotated[LabelSelector, _about("Their labels, such as app=vllm. Needs the right to list and watch pods.")] = ""
    namespace: Annotated[ObjectName, _about("Empty: the gateway's own.")] = ""
    port: Annotated[
        Port | PortName | None, _about("Number or name of the replicas' port; null: the one named http, else the first one.")
    ] = None
    server: Annotated[BaseUrl, _about("URL of the API server; empty: that of the cluster which the gateway runs in.")] = ""
    token_file: Annotated[
        FilePath, _about("Bearer token, read again for each request; empty: the service account's, or none with `server`.")
    ] = ""
    ca_file: Annotated[
        FilePath, _about("Certificates to trust; empty: the service account's, or the system's with `server`.")
    ] = ""

    @property
    def source(self) -> str:
        """What it watches."""
        what = f"pods {self.pods}" if self.pods else f"service {self.service}"
        port = f":{self.port}" if self.port else ""
        return f"kubernetes {what}{port}" + "".join(
            f" {word} {value}" for word, value in (("in", self.namespace), ("at", self.server)) if value
        )


class DiscoveryConfig(_Section, frozen=True):
    """Where replicas are found, beside those that the pools list: one of `dns`, `kubernetes` and `file`."""

    dns: DnsConfig | None = None
    kubernetes: KubernetesConfig | None = None
    file: Annotated[
        ListPath,
        _about("A YAML file with a list of replicas, as a pool has one; each may have pool and draining, too. It is watched."),
    ] = ""
    pool: Annotated[Name, _about("The replicas' pool; empty: the only one.")] = ""
    tls: Annotated[
        bool | TlsConfig,
        Meta(extra={EXPECTED: "true, false or a mapping such as {ca_file: /etc/ca.pem}"}),
        _about("Replicas found by DNS or Kubernetes are connected to over https, with these options; true: the system's CAs."),
    ] = False
    key: Annotated[Key, _about("Sent to the replicas as a bearer token, in place of the client's key.")] = None
    engine: Annotated[EngineName, _about("What the replicas are, where they do not say so themselves; auto: found out.")] = (
        "auto"
    )

    @property
    def source(self) -> str:
        """What it watches, as logs, metrics and operators name it."""
        if self.dns:
            return self.dns.source
        return self.kubernetes.source if self.kubernetes else f"file {self.file}"

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of source that it names."""
        return [kind for kind in SOURCE_KINDS if getattr(self, kind)]


class PoolConfig(_Section, frozen=True):
    """Replicas that serve the same models. Within a Config each pool has a name of its own."""

    replicas: Annotated[tuple[ReplicaConfig, ...], _about("Those that are known beforehand; see also `discovery`.")] = ()
    models: Annotated[tuple[ModelPrefix, ...], _about("Model name prefixes; empty: the models that the replicas list.")] = ()
    name: Annotated[Name, _about("Its name in metrics and for operators; empty: its models, or `default`.")] = ""
    max_inflight: Annotated[Positive, _about("Requests at all replicas of the pool together; more are queued.")] = 4096
    max_queue: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (no queue) or more"}),
        _about("Requests in the queue; beyond it, 429."),
    ] = 1024
    queue_s: Annotated[Seconds, _about("Seconds that a request may be queued.")] = 30.0
    strip_billing_header: Annotated[
        bool, _about("The billing line of Claude Code, which changes with every request, is cut out of what goes to replicas.")
    ] = True
    resume_streams: Annotated[bool, _about("Text streams that their replica breaks off are continued by another one.")] = False
    fallback: Annotated[
        FallbackConfig | None, _about("Another pool, for requests that this one cannot serve; null: they are errors.")
    ] = None


class RoutingConfig(_Section, frozen=True):
    """How a replica is chosen, what the prefix index remembers, and what clients learn of both."""

    policy: Policy = "cost"
    block_bytes: Annotated[Positive, _about("Length of a block of text, in bytes.")] = 256
    block_tokens: Annotated[Positive, _about("Length of a block of token ids.")] = 64
    ttl_s: Annotated[Seconds, _about("Seconds after its last use that a prefix is believed to be cached.")] = 900.0
    memory_mb: Annotated[Positive, _about("Bound of the prefix index of each worker, in MiB.")] = 256
    isolation: Annotated[
        Isolation,
        _about("tenant: tenants (X-Tenant-Id) share no prefixes, neither in the index nor in engines that know cache_salt."),
    ] = "none"
    compare: Annotated[bool, _about("Follow what other policies would have found cached, to show what routing saves.")] = False
    expose_headers: Annotated[
        Audience,
        _about("Who gets X-Warmroute-Replica and X-Warmroute-Cached-Tokens, which show what others have sent."),
    ] = "operators"


class TierConfig(_Section, frozen=True):
    """Prices of requests with long prompts, all of their tokens: USD per million."""

    above: Annotated[Positive, _about("Prompts with more tokens than this.")]
    input: Price
    output: Price
    cached_input: Annotated[Price | None, _about("Null: in proportion to input, as below the tier.")] = None
    cache_write: Annotated[Price | None, _about("Likewise.")] = None
    cache_write_1h: Annotated[Price | None, _about("Likewise.")] = None


class PeakConfig(_Section, frozen=True):
    """Hours at which all prices of a model are multiplied."""

    hours: Annotated[
        PeakHours, _about("From and to, UTC; they may pass midnight, and are then those of the day on which they begin.")
    ]
    factor: Annotated[float, Meta(gt=0, le=100), _about("On all prices.")]
    days: Annotated[tuple[Day, ...], Meta(min_length=1, max_length=len(DAYS)), _about("Days of the week, UTC.")] = DAYS


class PriceConfig(_Section, frozen=True):
    """USD per million tokens."""

    input: Price
    output: Price
    cached_input: Annotated[Price | None, _about("Null: a tenth of input.")] = None
    cache_write: Annotated[
        Price | None, _about("Of tokens that the engine reports as newly written to its cache. Null: as input.")
    ] = None
    cache_write_1h: Annotated[Price | None, _about("The same, of what is to stay for an hour. Null: as cache_write.")] = None
    image: Annotated[Price, _about("USD for each image in a prompt, beside its tokens.")] = 0.0
    tiers: Annotated[tuple[TierConfig, ...], Meta(max_length=MAX_TIERS), _about("Other prices for longer prompts.")] = ()
    peak: Annotated[
        tuple[PeakConfig, ...],
        Meta(max_length=MAX_PEAKS),
        _about("Hours with other prices; where two overlap, the first holds."),
    ] = ()
    since: Annotated[PriceDate, _about("From when on these prices hold: a date, or a date and time, UTC. Empty: always.")] = ""

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


class HealthConfig(_Section, frozen=True):
    """Active probes of the replicas."""

    interval_s: Annotated[Seconds, _about("Seconds between probes of a replica.")] = 2.0
    timeout_s: Annotated[Seconds, _about("Seconds that a probe may take.")] = 5.0
    failures: Annotated[
        Positive, _about("Failed probes in a row until a replica is down; one that refuses connections is down at once.")
    ] = 2


class TimeoutConfig(_Section, frozen=True):
    """Time limits of an attempt at a replica. Each replica that is tried has all of the time."""

    first_byte_s: Annotated[
        Seconds,
        _about(
            "Seconds from the end of the request to the first byte of the answer's body: queue and prefill, and all of the"
            " generation if it is not streamed."
        ),
    ] = 300.0
    idle_s: Annotated[
        Seconds, _about("Longest silence after the first byte; also how long a client may leave an answer unread.")
    ] = 120.0
    total_s: Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (no limit) or more"}),
        _about("Seconds from the end of the request to the last byte of the answer; 0: no limit."),
    ] = 0.0


class LimitConfig(_Section, frozen=True):
    """What clients may send and hold."""

    body_mb: Annotated[Positive, _about("Largest request body, in MiB.")] = 64
    body_s: Annotated[Seconds, _about("Seconds that a request body may take to arrive.")] = 300.0
    inflight_mb: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (a quarter of the memory) or more"}),
        _about("Memory of all requests together, in MiB; 0: a quarter of the memory of the machine, or of its cgroup."),
    ] = 0
    connections: Annotated[Positive, _about("Connections of clients at once.")] = 10_000
    client_idle_s: Annotated[
        Seconds, _about("Seconds that a client's connection may be idle, or be sending one request's head.")
    ] = 75.0
    drain_accept_s: Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (none) or more"}),
        _about("Seconds after SIGTERM in which new connections are still accepted, for balancers that do not know of it yet."),
    ] = 2.0
    drain_timeout_s: Annotated[Seconds, _about("Seconds that running requests may go on afterwards.")] = 30.0


class StateConfig(_Section, frozen=True):
    """What the gateway keeps for its clients: responses and conversations (OpenAI's Responses API with `store`)."""

    url: Annotated[
        DatabaseUrl,
        _about(
            "sqlite (a file in the user's state folder), sqlite:///PATH, postgresql://USER@HOST/NAME (the password is in"
            " PGPASSWORD), or off: nothing is kept, and requests that name a response go to the replica that has it."
        ),
    ] = "sqlite"
    ttl_s: Annotated[Seconds, _about("Seconds after its last use that a response or a conversation is kept.")] = 2_592_000.0


class LedgerConfig(_Section, frozen=True):
    """The usage of every request, in a database: row by row, and summed up by day."""

    url: Annotated[
        DatabaseUrl,
        _about(
            "sqlite (a file in the user's state folder), sqlite:///PATH, postgresql://USER@HOST/NAME (the password is in"
            " PGPASSWORD), or off: there is none."
        ),
    ] = OFF
    retention_d: Annotated[Days, _about("Days that the row of a request is kept.")] = 30


class OidcConfig(_Section, frozen=True):
    """Callers with a JWT of an issuer (OpenID Connect), in place of a key. The limits are those of each of its tenants."""

    issuer: Annotated[IssuerUrl, _about("Its URL, as in the claim `iss` of its tokens: https, or http on this machine.")]
    audience: Annotated[
        tuple[ClaimText, ...],
        Meta(min_length=1, max_length=MAX_AUDIENCES, extra={ALONE: True}),
        _about("What the claim `aud` has to be, or to contain; of several, one of them."),
    ]
    tenant_claim: Annotated[
        ClaimText, _about("The claim that names the tenant; a path such as /kubernetes.io/namespace goes into objects.")
    ]
    name: Annotated[
        IssuerName, _about("Its name in logs and lists, where a caller is NAME:TENANT; empty: the host of its URL.")
    ] = ""
    jwks_url: Annotated[JwksUrl, _about("Where its public keys are; empty: as its discovery document says.")] = ""
    ca_file: Annotated[FilePath, _about("Certificates of the authorities to trust; empty: the system's.")] = ""
    tenants: Annotated[
        tuple[Granted, ...],
        Meta(max_length=MAX_GRANTED),
        _about("Tenants that it may name, or beginnings of them that end with a star; none: all."),
    ] = ()
    models: Annotated[
        tuple[Granted, ...], Meta(max_length=MAX_GRANTED), _about("Models that its callers may use, likewise; none: all.")
    ] = ()
    pools: Annotated[
        tuple[GrantedPool, ...], Meta(max_length=MAX_GRANTED), _about("Pools that its callers may use; none: all.")
    ] = ()
    budget_usd_day: Annotated[Dollars | None, _about("USD for each tenant and day (UTC); null: no limit.")] = None
    budget_usd_month: Annotated[Dollars | None, _about("USD for each tenant and month (UTC); null: no limit.")] = None
    requests_per_minute: Annotated[Positive | None, _about("Of each tenant; null: no limit.")] = None
    uncached_tokens_per_minute: Annotated[
        Positive | None, _about("Prompt tokens that replicas have to compute, of each tenant; null: no limit.")
    ] = None
    priority: Annotated[
        int, Meta(ge=-100, le=100), _about("Of its callers in the queue, and the most that they may ask for.")
    ] = 0

    def __post_init__(self) -> None:
        if not self.name:
            force_setattr(self, "name", host_name(self.issuer))


class KeysConfig(_Section, frozen=True):
    """Who may use the API: keys, each of a tenant."""

    url: Annotated[
        str,
        Meta(
            extra={READ: _keys_url, FALSE: OFF, EXPECTED: _KEYS_URL},
            extra_json_schema={"pattern": f"^({_KEYS_URL_PATTERN})$"},
        ),
        _about(
            "ledger (the database of `ledger.url`), sqlite (a file in the user's state folder), sqlite:///PATH,"
            " postgresql://USER@HOST/NAME, the absolute path of a YAML file with digests of keys, or off: there are no keys."
        ),
    ] = OFF
    required: Annotated[
        bool, _about("Requests without a valid key are refused; false: those without one are served, as of no tenant.")
    ] = True
    oidc: Annotated[
        tuple[OidcConfig, ...],
        Meta(max_length=MAX_ISSUERS),
        _about("Issuers whose tokens are taken as well; with or without keys."),
    ] = ()

    @property
    def on(self) -> bool:
        return self.url != OFF or bool(self.oidc)


class SharingConfig(_Section, frozen=True):
    """A Valkey or Redis server through which several gateways share what they know."""

    url: Annotated[
        str,
        Meta(
            max_length=2048,
            extra={READ: store_url, FALSE: OFF, EXPECTED: STORE_URL},
            extra_json_schema={"pattern": f"^({STORE_URL_PATTERN})$"},
        ),
        _about(
            "redis://[USER@]HOST[:PORT][/DB], rediss:// over TLS, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST,"
            " or off. The password is in WARMROUTE_SHARING_PASSWORD."
        ),
    ] = OFF
    cluster: Annotated[
        Name, _about("Gateways with the same name here share; others may use the same server, and are apart.")
    ] = "default"
    ca_file: Annotated[FilePath, _about("Certificates to trust; empty: the system's.")] = ""
    cert_file: Annotated[FilePath, _about("Certificate of this gateway, where the server wants one.")] = ""
    key_file: Annotated[FilePath, _about("Its key; empty: it is in cert_file.")] = ""


class SnapshotConfig(_Section, frozen=True):
    """A file of what the gateway knows of the replicas' caches, so that a restart does not begin cold."""

    file: Annotated[
        str,
        Meta(min_length=1, max_length=1024, extra={FALSE: OFF, EXPECTED: "auto, off, or the path of a file"}),
        _about("auto (in the user's state folder, named by the address of `listen`; off with port 0), off, or a path."),
    ] = AUTO


class TracingConfig(_Section, frozen=True):
    """OpenTelemetry traces. What the collector asks for, such as a key, is in the variables OTEL_EXPORTER_OTLP_*."""

    endpoint: Annotated[
        str,
        Meta(
            max_length=2048,
            extra={READ: _collector, FALSE: OFF, EXPECTED: "the base URL of a collector (OTLP over HTTP), or off"},
            extra_json_schema={"pattern": f"^off$|{_URL_PATTERN}"},
        ),
        _about("Base URL of a collector for OTLP over HTTP, such as http://otel-collector:4318, or off."),
    ] = OFF
    sample: Annotated[
        float, Meta(ge=0, le=1), _about("Share of the requests to trace, of those that belong to no trace yet.")
    ] = 0.01
    follow_parents: Annotated[
        bool,
        _about(
            "Requests of a trace (traceparent) are traced if their sender traces them; false: `sample` holds for them, too."
        ),
    ] = True


class Config(_Section, frozen=True):
    """The whole file."""

    pools: Annotated[
        tuple[PoolConfig, ...],
        Meta(
            min_length=1,
            max_length=MAX_POOLS,
            extra={EXPECTED: "at least one pool with a replica (or the flag --replica URL), or a source in `discovery`,"},
        ),
    ]
    discovery: Annotated[
        tuple[DiscoveryConfig, ...],
        Meta(max_length=MAX_SOURCES),
        _about("Where replicas are found while the gateway runs."),
    ] = ()
    listen: Annotated[
        str,
        Meta(extra={EXPECTED: _HOST_PORT}, extra_json_schema={"pattern": f"^{_HOST_PORT_PATTERN}$"}),
        _about("host:port of the gateway; port 0 takes any free one."),
    ] = DEFAULT_LISTEN
    admin_listen: Annotated[
        str,
        Meta(
            extra={EXPECTED: f"{_HOST_PORT}, unix:/path, auto or off", FALSE: OFF},
            extra_json_schema={"pattern": f"^(auto|off|unix:/.+|{_HOST_PORT_PATTERN})$"},
        ),
        _about(
            "Listener for operators: host:port, unix:/path, off, or auto (127.0.0.1, at 10,000 + the port of listen). Beyond"
            " loopback addresses only with the admin key."
        ),
    ] = AUTO
    metrics_listen: Annotated[
        str,
        Meta(
            extra={EXPECTED: f"{_HOST_PORT}, or off", FALSE: OFF},
            extra_json_schema={"pattern": f"^(off|{_HOST_PORT_PATTERN})$"},
        ),
        _about("Listener for Prometheus: host:port, or off."),
    ] = OFF
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(max_length=MAX_ORIGINS),
        _about('Origins of web pages that may use the API from a browser; "*": all.'),
    ] = ()
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS, description="Processes that serve together, as one gateway.")] = (
        DEFAULT_WORKERS
    )
    routing: RoutingConfig = RoutingConfig()
    prices: Annotated[
        Mapping[ModelPrefix, PriceList],
        _about(
            'By model name or its beginning; "*" for any model. Where they change: a list, each but the first with `since`.'
        ),
    ] = {}
    model_aliases: Annotated[
        Mapping[ModelAlias, ModelName],
        Meta(
            max_length=MAX_ALIASES,
            extra={EXPECTED: "a mapping of names to models such as {claude-*: qwen3-coder} ({}: none)"},
        ),
        _about("Other names of models: ALIAS: MODEL; an alias that ends with a star stands for all names that begin so."),
    ] = {}
    health: HealthConfig = HealthConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    limits: LimitConfig = LimitConfig()
    state: Annotated[
        StateConfig, Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: sqlite}, or off to keep nothing,"})
    ] = StateConfig()
    ledger: Annotated[
        LedgerConfig, Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: sqlite}, or off for none,"})
    ] = LedgerConfig()
    keys: Annotated[
        KeysConfig, Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: sqlite}, or off for none,"})
    ] = KeysConfig()
    sharing: Annotated[
        SharingConfig, Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: redis://valkey:6379}, or off"})
    ] = SharingConfig()
    snapshot: Annotated[
        SnapshotConfig, Meta(extra={FALSE: {"file": OFF}, EXPECTED: "a mapping such as {file: auto}, or off"})
    ] = SnapshotConfig()
    tracing: Annotated[
        TracingConfig,
        Meta(extra={FALSE: {"endpoint": OFF}, EXPECTED: "a mapping such as {endpoint: http://otel-collector:4318}, or off"}),
    ] = TracingConfig()
    log_level: LogLevel = "info"
    log_format: Annotated[
        LogFormat, _about("json: one object a line; console: text for people; auto: console on a terminal, else json.")
    ] = "auto"
    admin_key: Annotated[str, Meta(extra={SECRET: True})] = ""

    def __post_init__(self) -> None:
        """Give each pool a name that the configuration has not named: by its models, for these say what it is."""
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
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "admin_key"]

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
        0, or if the default port is out of range or a replica's.
        """
        if self.admin_listen != AUTO:
            return parse_listen("admin_listen", self.admin_listen)
        port = self.address[1]
        endpoint = ListenAddress("127.0.0.1", port + ADMIN_PORT_OFFSET if 0 < port <= 65535 - ADMIN_PORT_OFFSET else 0)
        taken = any(endpoint.is_at(replica.url) for pool in self.pools for replica in pool.replicas)
        return ListenAddress(endpoint.host, 0) if taken else endpoint

    @property
    def metrics(self) -> ListenAddress | None:
        """The listener for Prometheus; None: there is none."""
        return parse_listen("metrics_listen", self.metrics_listen)


def _free_name(models: Sequence[str], taken: Collection[str]) -> str:
    """A name for a pool of these models that no other has."""
    name = ",".join("".join(char for char in model if _NAME.fullmatch(char)) for model in models)[:MAX_POOL_NAME] or "default"
    number = 1
    while (free := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return free
