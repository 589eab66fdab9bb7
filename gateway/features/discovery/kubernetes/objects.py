"""Converts Kubernetes objects to members. Pure.

An invalid part of an object (a hand-made EndpointSlice may contain anything that its schema allows) drops only the affected
endpoint, with a note.

An endpoint that is not ready or terminates is a draining member: it gets no new request, and its learned values are kept until
it is ready again or disappears. A pod with IPv4 and IPv6 addresses is one member with the IPv4 address, in the worse state of
the two. Of two pods with the same address or name, the non-terminating one is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.config.addresses import AddressError, address_of, base_url, parse_base_url
from gateway.config.kinds import MAX_WEIGHT, ROLES
from gateway.features.discovery.connecting import connected_as
from gateway.features.discovery.kubernetes.api import Object
from gateway.features.discovery.section import DiscoveryConfig
from gateway.fleet.membership import DECODE, REPLICA, Member, fitting

ANNOTATION: Final = "warmroute.io/"
_ANNOTATIONS: Final = ("pool", "model", "port", "weight", "capacity-tokens", "drain", "role", "bootstrap-port")
POOL, MODEL, PORT, WEIGHT, CAPACITY, DRAIN, ROLE, BOOTSTRAP_PORT = (ANNOTATION + name for name in _ANNOTATIONS)
LABEL: Final = "llm-d.ai/role"  # where no annotation names the role; of its values, ROLES
DEFAULT_PORT: Final = "http"
MAX_ENDPOINTS: Final = 1000  # per slice: Kubernetes' limit
MAX_NOTES: Final = 100
_MAX_NAME: Final = 253  # Kubernetes' limit
_ENDED: Final = ("Succeeded", "Failed")
_MAX_NUMBER: Final = 1 << 40
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class PodEndpoint:
    """The data of one replica in an object. pod, uid: of its pod, "" without one. pool, model, weight, role,
    bootstrap_port: see Member.

    problem: why it cannot be a member, or which annotation is invalid.
    """

    address: str
    port: int
    pod: str
    uid: str
    ready: bool
    terminating: bool
    pool: str = ""
    capacity_tokens: int | None = None
    drain: bool = False
    model: str = ""
    weight: int = MAX_WEIGHT
    role: str = REPLICA
    bootstrap_port: int = 0
    problem: str = ""

    @property
    def key(self) -> str:
        """Equal for all addresses of a pod."""
        return self.uid or self.pod or self.address

    @property
    def name(self) -> str:
        """The name for notes."""
        return self.pod or self.address


@dataclass(frozen=True, slots=True)
class ObjectEndpoints:
    """The endpoints in an object. version: of the object."""

    version: int
    endpoints: Sequence[PodEndpoint]


def read_slice(slice_: Object, port: int | str | None) -> Sequence[PodEndpoint]:
    """The endpoints of a discovery.k8s.io EndpointSlice, whose addresses are all IPv4 or all IPv6."""
    number = _port_of(_mappings(slice_.get("ports")), "port", port)
    found = list[PodEndpoint]()
    for each in _mappings(slice_.get("endpoints"))[:MAX_ENDPOINTS]:
        addresses = each.get("addresses")
        conditions, target = _mapping(each.get("conditions")), _mapping(each.get("targetRef"))
        pod = target if target.get("kind") == "Pod" else {}
        if isinstance(addresses, list) and addresses:
            found.append(
                PodEndpoint(
                    str(addresses[0]),
                    number,
                    _text(pod.get("name")),
                    _text(pod.get("uid")),
                    ready=conditions.get("ready") is not False,  # unknown counts as ready
                    terminating=conditions.get("terminating") is True,
                    problem="" if number else _no_port(port),
                )
            )
    return found


def read_pod(pod: Object, port: int | str | None) -> Sequence[PodEndpoint]:
    """The endpoint of a pod. None while the pod has no address, or after its end."""
    about, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    address, notes = status.get("podIP"), _mapping(about.get("annotations"))
    if not isinstance(address, str) or not address or status.get("phase") in _ENDED:
        return ()
    containers = _mappings(_mapping(pod.get("spec")).get("containers"))
    ports = [each for container in containers for each in _mappings(container.get("ports"))]
    number = _annotation_number(notes, PORT, _MAX_PORT) or _port_of(ports, "containerPort", port)
    role = _role(notes.get(ROLE)) or _role(_mapping(about.get("labels")).get(LABEL))
    capacity, wrong = _annotation_number(notes, CAPACITY, _MAX_NUMBER), _annotation_problem(notes, role)
    conditions = _mappings(status.get("conditions"))
    return (
        PodEndpoint(
            address,
            number,
            _text(about.get("name")),
            _text(about.get("uid")),
            ready=any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
            terminating=bool(about.get("deletionTimestamp")),
            pool=_text(notes.get(POOL)),
            model=_text(notes.get(MODEL)),
            weight=_annotation_number(notes, WEIGHT, MAX_WEIGHT) or MAX_WEIGHT,
            capacity_tokens=capacity or None,
            drain=notes.get(DRAIN) == "true",
            role=role,
            bootstrap_port=_annotation_number(notes, BOOTSTRAP_PORT, _MAX_PORT),
            problem=wrong if number else _no_port(port),
        ),
    )


def members_of(objects: Iterable[ObjectEndpoints], config: DiscoveryConfig, prefix: str = "") -> tuple[list[Member], list[str]]:
    """The members, sorted by name, and the first MAX_NOTES notes on problems. config: with `kubernetes`. prefix: for pods'
    names.
    """
    pods, notes = _pods(objects), list[str]()
    members, urls = dict[str, Member](), set[str]()
    for each in sorted(pods, key=lambda pod: (pod.terminating, not pod.ready, pod.uid, pod.address)):
        if each.problem and len(notes) < MAX_NOTES:
            notes.append(f"{each.name[:_MAX_NAME]}: {each.problem}")
        member = _member(each, config, prefix) if each.port else None
        if member and member.name not in members and member.url not in urls:
            members[member.name] = member
            urls.add(member.url)
    return [members[name] for name in sorted(members)], notes


def _pods(objects: Iterable[ObjectEndpoints]) -> Iterable[PodEndpoint]:
    """One endpoint per pod."""
    newest: dict[
        str, dict[str, tuple[int, PodEndpoint]]
    ] = {}  # by pod and address: an endpoint may be in two slices for a while
    for read in objects:
        for each in read.endpoints:
            addresses = newest.setdefault(each.key, {})
            known = addresses.get(each.address)
            if known is None or known[0] <= read.version:
                addresses[each.address] = read.version, each
    for addresses in newest.values():
        each, *others = [addresses[address][1] for address in sorted(addresses, key=_preference)]
        ready = each.ready and all(other.ready for other in others)
        terminating = each.terminating or any(other.terminating for other in others)
        yield replace(each, ready=ready, terminating=terminating) if others else each


def _preference(address: str) -> tuple[bool, str]:
    return ":" in address, address


def _member(endpoint: PodEndpoint, config: DiscoveryConfig, prefix: str) -> Member | None:
    """None: the address is invalid."""
    if address_of(endpoint.address) is None:
        return None
    try:
        url, place = parse_base_url(base_url(endpoint.address, endpoint.port, tls=bool(config.tls)))
    except AddressError:
        return None
    member = Member(
        fitting(prefix + endpoint.pod if endpoint.pod else place),
        url,
        endpoint.pool,
        endpoint.capacity_tokens,
        draining=endpoint.terminating or not endpoint.ready or endpoint.drain,
        instance=endpoint.uid,
        model=endpoint.model,
        weight=endpoint.weight,
        role=endpoint.role,
        bootstrap_port=endpoint.bootstrap_port,
    )
    return connected_as(member, config)


def _port_of(ports: Iterable[Mapping[str, Any]], key: str, wanted: int | str | None) -> int:
    """The number of the wanted port. None wanted: the port named http, or else the first one. 0: there is none."""
    if isinstance(wanted, int):
        return wanted
    named = list(_numbers(ports, key))
    preferred = [number for name, number in named if name == (wanted or DEFAULT_PORT)]
    return next(iter(preferred or ([number for _, number in named] if wanted is None else [])), 0)


def _numbers(ports: Iterable[Mapping[str, Any]], key: str) -> Iterator[tuple[str, int]]:
    """(name, number) of the TCP ports, in order."""
    for each in ports:
        number = _number(each.get(key), _MAX_PORT)
        if number and each.get("protocol") in (None, "TCP"):
            yield _text(each.get("name")), number


def _no_port(wanted: int | str | None) -> str:
    return "it has no port" if wanted is None else f"it has no port named {wanted}"


def _annotation_number(notes: Mapping[str, Any], name: str, max_value: int) -> int:
    """The number in an annotation. 0: none, or an invalid one."""
    return _number(notes.get(name), max_value)


def _annotation_problem(notes: Mapping[str, Any], role: str) -> str:
    """The first invalid annotation, which is ignored; "" if all are valid. role: of the pod."""
    for name, max_value in ((PORT, _MAX_PORT), (WEIGHT, MAX_WEIGHT), (CAPACITY, _MAX_NUMBER), (BOOTSTRAP_PORT, _MAX_PORT)):
        if name in notes and not _annotation_number(notes, name, max_value):
            return f"the annotation {name} is not a number from 1 to {max_value}"
    if notes.get(DRAIN) not in (None, "true", "false"):
        return f"the annotation {DRAIN} is neither true nor false"
    if ROLE in notes and not _role(notes[ROLE]):
        return f"the annotation {ROLE} is neither {' nor '.join(ROLES)}"
    if BOOTSTRAP_PORT in notes and role == DECODE:
        return f"the annotation {BOOTSTRAP_PORT} is for prefillers only, and its role is decode"
    return ""


def _role(value: object) -> str:
    return value if isinstance(value, str) and value in ROLES else REPLICA


def _number(value: object, max_value: int) -> int:
    """A number from 1 to max_value; 0 for everything else."""
    text = str(value) if isinstance(value, str | int) else ""
    number = int(text) if text.isdecimal() and len(text) < 20 else 0
    return number if number <= max_value else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> Sequence[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
