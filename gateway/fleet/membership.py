"""Who the replicas of the fleet are: what several sources name, merged, and what changes from one set to the next.

    configuration ──┐
    operators ──────┼──► merge ──► members ──► reconcile(now, wanted) ──► changes: joined, left, changed
    other sources ──┘      └──► rejected, with the reason

Pure: values in, values out. A name belongs to the first source that names it, and so does a URL; that the member drains, any of
them may say. A member is the same as before if its name, its URL and its instance are: all that was learned of it stays true.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.config.addresses import AddressError, parse_base_url
from gateway.config.schema import (
    AUTO_ENGINE,
    MAX_REPLICAS,
    AddedReplica,
    Config,
    DiscoveryConfig,
    KeyConfig,
    PoolConfig,
    ReplicaConfig,
    TlsConfig,
    is_name,
)
from gateway.fleet import engines
from gateway.upstream.access.options import ConnectionOptions

CONFIGURATION: Final = "configuration"
OPERATORS: Final = "operators"
KEPT: Final = "before the last reload"  # stands for the source of replicas that a reload could not replace yet
COMMANDED: Final = (CONFIGURATION, OPERATORS)  # what these name, all processes know
SHOWN_S: Final = 900.0  # the counters of a replica that has left
MAX_DEPARTED: Final = 4 * MAX_REPLICAS
MAX_WEIGHT: Final = 100
_MAX_NAME: Final = 100  # characters of a replica's name


@dataclass(frozen=True, slots=True)
class Member:
    """A replica, as a source names it.

    url: its base URL, without the /v1 at the end. pool: the name of its pool; empty: that which takes its model, else that of
    its source. model: what it serves; empty: unknown. weight: percent of its share of requests that it gets. capacity_tokens:
    size of its KV cache; None: what its engine says. draining: its source wants no new requests there. instance: differs from
    that of another one which had the same name and URL before (a pod's uid); empty: its source has no such thing. key: where
    the key is that the gateway sends to it; None: it sends the client's. tls: for an https URL; None: as the system trusts.
    engine: as the table of engines names it, or AUTO_ENGINE. addresses: of its URL's host, if its source knows them; (): it is
    looked up.
    """

    name: str
    url: str
    pool: str
    capacity_tokens: int | None = None
    draining: bool = False
    instance: str = ""
    key: KeyConfig | None = None
    tls: TlsConfig | None = None
    engine: str = AUTO_ENGINE
    model: str = ""
    weight: int = MAX_WEIGHT
    addresses: tuple[str, ...] = ()

    @property
    def connection_options(self) -> ConnectionOptions:
        """How it is connected to."""
        engine = engines.named(self.engine)
        return ConnectionOptions(self.key, self.tls, engine.fragile if engine else None, self.addresses)

    @property
    def connection(self) -> tuple[object, ...]:
        """What connections to its URL depend on: all members of one URL have the same."""
        return self.key, self.tls, self.engine

    def is_same(self, other: Member) -> bool:
        """Whether it is the same replica: what was learned of it stays true."""
        return (self.name, self.url, self.instance) == (other.name, other.url, other.instance)


def fitting(name: str) -> str:
    """A name that a source has found, or so much of it as a replica's name may have, and a hash of it."""
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: _MAX_NAME - len(digest) - 1]}~{digest}"


def member_of(replica: AddedReplica, pool: str) -> Member:
    """Of a replica that an operator adds."""
    return Member(replica.name, replica.url, pool, replica.capacity_tokens, engine=replica.engine)


def _listed(replica: ReplicaConfig, pool: PoolConfig) -> Member:
    tls = replica.tls if replica.url.startswith("https:") else None
    key, capacity = replica.key, replica.capacity_tokens
    return Member(replica.name, replica.url, pool.name, capacity, key=key, tls=tls, engine=replica.engine)


def connected_as(member: Member, source: DiscoveryConfig) -> Member:
    """A member that a source has found, with what the source says of all of its members."""
    tls = source.tls if isinstance(source.tls, TlsConfig) and member.url.startswith("https:") else None
    engine = source.engine if member.engine == AUTO_ENGINE else member.engine
    return member if (source.key, tls, engine) == member.connection else replace(member, key=source.key, tls=tls, engine=engine)


def configured(config: Config) -> tuple[Member, ...]:
    """The members that the configuration lists, in its order."""
    return tuple([_listed(replica, pool) for pool in config.pools for replica in pool.replicas])


Members = Mapping[str, Member]
"""By name, in the order of their sources."""


@dataclass(frozen=True, slots=True)
class RejectedMember:
    """A member that a source names, but that cannot be one. why: for logs."""

    member: Member
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class MergedMembers:
    """sources: the name of each member's source, by the member's name."""

    members: Members
    sources: Mapping[str, str]
    rejected: Sequence[RejectedMember]


def merge(sources: Mapping[str, Iterable[Member]], pools: Collection[str]) -> MergedMembers:
    """All sources together, by their names; an earlier one goes first. pools: the names that there are. O(members).

    A watched source brings no second member at a URL: it would be the same replica, counted twice. Only that it drains counts
    (unless it is known to be another instance, which had the address before).
    """
    members: dict[str, Member] = {}
    owners: dict[str, str] = {}
    urls: dict[str, str] = {}  # -> name
    rejected: list[RejectedMember] = []
    for source, named in sources.items():
        for member in named:
            why = "" if source == CONFIGURATION else problem_of(member, pools)  # which is checked when it is read
            known = members.get(urls.get(member.url, ""))
            if known and source not in COMMANDED and member.draining and _may_be(known, member):
                members[known.name] = replace(known, draining=True)
            if not why and member.name in members:
                why = f"its name is that of a replica from {owners[member.name]} already"
            if not why and known and source not in COMMANDED:
                why = f"its URL is that of {known.name} already"
            if not why and known and known.connection != member.connection:
                why = f"its URL is that of {known.name}, which has another key, other TLS options or another engine"
            if why:
                rejected.append(RejectedMember(member, source, why))
            else:
                members[member.name] = member
                owners[member.name] = source
                urls[member.url] = member.name
    return _bounded(MergedMembers(members, owners, rejected))


def _may_be(known: Member, other: Member) -> bool:
    """Whether two members at one URL may be the same replica."""
    return known.instance == other.instance or not (known.instance and other.instance)


def _bounded(merged: MergedMembers) -> MergedMembers:
    """At most MAX_REPLICAS: those that drain are left out first, then the last ones."""
    surplus = len(merged.members) - MAX_REPLICAS
    if surplus <= 0:
        return merged
    sources = merged.sources
    found = [member for member in merged.members.values() if sources[member.name] not in COMMANDED]
    excess = sorted(found, key=lambda member: member.draining)[-surplus:]
    names = {member.name for member in excess}
    why = f"at most {MAX_REPLICAS} replicas are possible"
    return MergedMembers(
        {name: member for name, member in merged.members.items() if name not in names},
        {name: source for name, source in sources.items() if name not in names},
        [*merged.rejected, *[RejectedMember(member, sources[member.name], why) for member in excess]],
    )


def problem_of(member: Member, pools: Collection[str]) -> str:
    """What keeps it from being a member, whatever the others are; empty: nothing."""
    if not is_name(member.name):
        return "its name is not 1 to 100 printable ASCII characters without spaces and quotes"
    if member.pool not in pools:
        return f"there is no pool {member.pool[:100]!r}"
    if member.capacity_tokens is not None and member.capacity_tokens <= 0:
        return "its capacity is not positive"
    if not 0 < member.weight <= MAX_WEIGHT:
        return f"its weight is not from 1 to {MAX_WEIGHT}"
    try:
        base = parse_base_url(member.url)[0]
    except AddressError as error:
        return str(error)
    return "" if base == member.url else f"its URL is not a base URL such as {base}"


class DepartedNames:
    """Names of replicas, or of pools, that have left: their counters are shown for SHOWN_S, and forgotten after keep_s.

    Several processes forget at slightly different times, and a sum that only some of them still count in looks like a reset. So
    they keep the counters for longer, and the process that makes the page of all hides them.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._since: dict[str, float] = {}  # in the order in which they left

    def leave(self, name: str, now: float) -> None:
        self._since.pop(name, None)
        self._since[name] = now

    def back(self, name: str) -> None:
        self._since.pop(name, None)

    def hidden(self, now: float) -> set[str]:
        """Names whose counters are not shown any more. O(names)."""
        return {name for name, since in self._since.items() if now - since >= SHOWN_S}

    def pop_expired(self, now: float) -> set[str]:
        """Names that are to be forgotten now, the oldest also if there are more than MAX_DEPARTED. O(1) if there are none."""
        expired = set[str]()
        while self._since:
            name, since = next(iter(self._since.items()))
            if now - since < self._keep_s and len(self._since) <= MAX_DEPARTED:
                break
            del self._since[name]
            expired.add(name)
        return expired


@dataclass(frozen=True, slots=True)
class MembershipChanges:
    """joined, left: also a member that is not the same one now, as both. changed: others of which anything is another now."""

    joined: Sequence[Member]
    left: Sequence[Member]
    changed: Sequence[Member]


def reconcile(now: Members, wanted: Members) -> MembershipChanges:
    """What has to happen so that the wanted members are those of the fleet. O(members)."""
    joined, changed = list[Member](), list[Member]()
    for name, member in wanted.items():
        known = now.get(name)
        if known is None or not known.is_same(member):
            joined.append(member)
        elif known != member:
            changed.append(member)
    left = [member for name, member in now.items() if name not in wanted or not wanted[name].is_same(member)]
    return MembershipChanges(joined, left, changed)
