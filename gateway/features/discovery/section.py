"""The section `discovery`: sources of replicas in addition to the lists of the pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from gateway.config.addresses import host_and_port, is_loopback
from gateway.config.checks import repeated
from gateway.config.hints import CLASHES, EXPECTED, READ, SOURCES
from gateway.config.kinds import BaseUrl, ConfigSection, DnsName, EngineName, FilePath, Name, Port, Role, about
from gateway.config.parse import Key, Problem, key_name
from gateway.config.schema import MAX_REPLICAS, AddedReplica, Config, ReplicaKey, TlsConfig
from gateway.config.sections import MAX_SOURCES, Section
from gateway.errors import first_names
from gateway.features.discovery.name_server import name_server

MAX_NAME_SERVERS = 8
SOURCE_KINDS = ("dns", "kubernetes", "file")

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
ListPath = Annotated[str, Meta(max_length=1024, extra={EXPECTED: "the path of a file"})]


class ListedReplica(AddedReplica, frozen=True):
    """A replica of a file that is watched; key and TLS options are its source's. pool: empty: that of the source. role: null:
    likewise.
    """

    pool: Name = ""
    draining: bool = False
    role: Role | None = None
    bootstrap_port: Port | None = None


class ReplicaList(ConfigSection, frozen=True):
    """A file that is watched."""

    replicas: Annotated[tuple[ListedReplica, ...], Meta(max_length=MAX_REPLICAS)]


class DnsConfig(ConfigSection, frozen=True):
    """Replicas are the addresses of a name, or the targets of its SRV records; a plain string is short for its name."""

    SHORT: ClassVar = "name"

    name: Annotated[DnsName, about("Such as vllm.models.svc.cluster.local, or _http._tcp.vllm.models.svc.cluster.local.")]
    port: Annotated[Port | None, about("The replicas' port; null: targets and ports of SRV records.")] = None
    servers: Annotated[
        tuple[NameServer, ...], Meta(max_length=MAX_NAME_SERVERS), about("Name servers; empty: the system's.")
    ] = ()

    @property
    def source(self) -> str:
        """The name of the source."""
        return f"dns {self.name}" + (f":{self.port}" if self.port else "") + "".join(f" by {each}" for each in self.servers[:1])


class KubernetesConfig(ConfigSection, frozen=True):
    """Replicas are the endpoints of a Service, or pods with certain labels; a plain string is short for `service`."""

    SHORT: ClassVar = "service"

    service: Annotated[ObjectName, about("Its name. Needs the right to list and watch endpointslices.")] = ""
    pods: Annotated[LabelSelector, about("Their labels, such as app=vllm. Needs the right to list and watch pods.")] = ""
    namespace: Annotated[ObjectName, about("Empty: the gateway's own.")] = ""
    port: Annotated[
        Port | PortName | None, about("Number or name of the replicas' port; null: the one named http, else the first one.")
    ] = None
    server: Annotated[BaseUrl, about("URL of the API server; empty: that of the cluster which the gateway runs in.")] = ""
    token_file: Annotated[
        FilePath, about("Bearer token, read again for each request; empty: the service account's, or none with `server`.")
    ] = ""
    ca_file: Annotated[
        FilePath, about("Certificates to trust; empty: the service account's, or the system's with `server`.")
    ] = ""

    @property
    def source(self) -> str:
        """The name of the source."""
        what = f"pods {self.pods}" if self.pods else f"service {self.service}"
        port = f":{self.port}" if self.port else ""
        return f"kubernetes {what}{port}" + "".join(
            f" {word} {value}" for word, value in (("in", self.namespace), ("at", self.server)) if value
        )


class DiscoveryConfig(ConfigSection, frozen=True):
    """A source of replicas, in addition to the lists of the pools: one of `dns`, `kubernetes` and `file`."""

    dns: DnsConfig | None = None
    kubernetes: KubernetesConfig | None = None
    file: Annotated[
        ListPath,
        about("A YAML file with a list of replicas, as a pool has one; each may have pool and draining, too. It is watched."),
    ] = ""
    pool: Annotated[Name, about("The replicas' pool; empty: the only one.")] = ""
    tls: Annotated[
        bool | TlsConfig,
        Meta(extra={EXPECTED: "true, false or a mapping such as {ca_file: /etc/ca.pem}"}),
        about("Replicas found by DNS or Kubernetes are connected to over https, with these options; true: the system's CAs."),
    ] = False
    key: Annotated[ReplicaKey, about("Sent to the replicas as a bearer token, in place of the client's key.")] = None
    engine: Annotated[EngineName, about("What the replicas are, where they do not say so themselves; auto: found out.")] = (
        "auto"
    )
    role: Annotated[
        Role | None,
        about("What of the work replicas do that name no role: prefill or decode, as in a pool; null: all, or as engines say."),
    ] = None

    @property
    def source(self) -> str:
        """The name of the source in logs, metrics and the operators' API."""
        if self.dns:
            return self.dns.source
        return self.kubernetes.source if self.kubernetes else f"file {self.file}"

    @property
    def kinds(self) -> Sequence[str]:
        """The configured kinds of source."""
        return [kind for kind in SOURCE_KINDS if getattr(self, kind)]


def _wrong(values: Mapping[Key, Any]) -> Iterator[Problem]:
    """Sources of no kind or several kinds, incomplete sources, and duplicates."""
    for key, value in values.items():
        match value:
            case DiscoveryConfig(kinds=kinds) if len(kinds) != 1:
                got = " and ".join(kinds) or "none"
                yield Problem(key, f"one of {', '.join(SOURCE_KINDS)} is expected, got {got}")
            case DiscoveryConfig(file=file, tls=True) if file:
                yield Problem((*key, "tls"), "a file has the whole URLs of its replicas: write https there")
            case KubernetesConfig(service=service, pods=pods):
                if bool(service) == bool(pods):
                    yield Problem(key, "either service or pods is expected")
                yield from _in_clear(key, value)
            case DnsConfig(name=name, port=None) if not name.startswith("_"):
                yield Problem((*key, "port"), f"it is needed, or a name of SRV records such as _http._tcp.{name}")
    sources = ((key, value) for key, value in values.items() if isinstance(value, DiscoveryConfig))
    for key, first in repeated((key, source.source) for key, source in sources if source.kinds):
        yield Problem(key, f"the same source as {key_name(first)}")
    if ("pools",) in values:  # only valid pools are compared
        found = [(key, value) for key, value in values.items() if isinstance(value, DiscoveryConfig)]
        yield from _wrong_pools(found, [pool.name for pool in Config(pools=tuple(values["pools",])).pools])


def _wrong_pools(sources: Iterable[tuple[Key, DiscoveryConfig]], names: Sequence[str]) -> Iterator[Problem]:
    """Sources without an existing pool. names: of the pools."""
    for key, source in sources:
        if source.pool and source.pool not in names:
            yield Problem((*key, "pool"), f"{source.pool!r} is no pool's name; possible are: {first_names(names)}")
        elif not source.pool and len(names) > 1:
            yield Problem((*key, "pool"), f"the name of the replicas' pool is needed: one of {first_names(names)}")


def _in_clear(key: Key, kubernetes: KubernetesConfig) -> Iterator[Problem]:
    """An API server without TLS that would get a token over the network, or has unused certificates."""
    if not kubernetes.server or kubernetes.server.lower().startswith("https:"):
        return
    if kubernetes.ca_file:
        yield Problem((*key, "ca_file"), f"TLS needs an https URL, got {kubernetes.server}")
    if kubernetes.token_file and not is_loopback(host_and_port(kubernetes.server)[0]):
        text = f"the token would go over the network unencrypted: an https URL is needed, got {kubernetes.server}"
        yield Problem((*key, "server"), text)


def _names(sources: Sequence[DiscoveryConfig]) -> list[str]:
    return [each.source for each in sources]


DISCOVERY: Final = Section[Sequence[DiscoveryConfig]](
    "discovery",
    Annotated[
        tuple[DiscoveryConfig, ...],
        Meta(
            max_length=MAX_SOURCES,
            extra={CLASHES: _wrong, SOURCES: _names},
        ),
        about("Where replicas are found while the gateway runs."),
    ],
    (),
)
