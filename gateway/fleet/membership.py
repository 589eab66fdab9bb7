"""Members of the fleet: the replicas named by several sources, merged, and the changes from one set to the next.

    configuration ──┐
    operators ──────┼──► merge ──► members ──► reconcile(now, wanted) ──► changes: joined, left, changed
    other sources ──┘      └──► rejected, with the reason

Pure: values in, values out. A name belongs to the first source that names it, and so does a URL; any source may say that the
member drains. A member is the same as before if its name, its URL and its instance are: then its learned state stays valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.config.addresses import AddressError, parse_base_url
from gateway.config.kinds import MAX_WEIGHT, is_name
from gateway.config.schema import (
    AUTO_ENGINE,
    MAX_REPLICAS,
    AddedReplica,
    Config,
    KeyConfig,
    PoolConfig,
    PrefillReplica,
    ReplicaConfig,
    TlsConfig,
)
from gateway.fleet import engines
from gateway.upstream.access.options import ConnectionOptions

CONFIGURATION: Final = "configuration"
OPERATORS: Final = "operators"
KEPT: Final = "before the last reload"  # source of replicas that a reload could not replace yet
COMMANDED: Final = (CONFIGURATION, OPERATORS)  # sources that all processes share
REPLICA, DECODE, PREFILL = "", "decode", "prefill"  # roles: does both, may take prompts over, computes prompts for others
SHOWN_S: Final = 900.0  # for which the counters of a replica that has left are shown
MAX_DEPARTED: Final = 4 * MAX_REPLICAS
_MAX_NAME: Final = 100  # characters of a replica's name


@dataclass(frozen=True, slots=True)
class Member:
    """A replica, as a source names it.

    url: its base URL, without the /v1 at the end. pool: the name of its pool; "": the pool of its model, else of its source.
    model: its model; "": unknown. weight: its share of new work (`candidates.py`). capacity_tokens: size of its KV cache; None:
    reported by its engine. draining: its source wants no new requests there. instance: distinguishes it from an earlier replica
    of the same name and URL (a pod's uid); "": its source has no such id. key: the key that the gateway sends to it; None: the
    client's key. tls: for an https URL; None: the system's defaults. engine: a name of the table of engines, or AUTO_ENGINE.
    addresses: of its URL's host, if its source knows them; (): they are looked up. ranks: number of its data-parallel ranks;
    None: as its metrics say. The next three are set by `ranks.py`. server: of a rank, the name of the member that it is a part
    of; else "". rank: its number. caches: number of caches behind it of which no request can choose one. role: REPLICA, DECODE
    or PREFILL. bootstrap_port: of a replica with the role PREFILL; 0: its engine says it, or it has SGLang's default.
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
    ranks: int | None = None
    server: str = ""
    rank: int | None = None
    caches: int = 1
    role: str = REPLICA
    bootstrap_port: int = 0

    @property
    def listed_as(self) -> str:
        """The name under which its source lists it."""
        return self.server or self.name

    @property
    def connection_options(self) -> ConnectionOptions:
        """The options of connections to it."""
        engine = engines.named(self.engine)
        return ConnectionOptions(self.key, self.tls, engine.fragile if engine else None, self.addresses)

    @property
    def connection(self) -> tuple[object, ...]:
        """The values that determine connections to its URL: all members of one URL have the same."""
        return self.key, self.tls, self.engine

    def is_same(self, other: Member) -> bool:
        """True if it is the same replica, so that its learned state stays valid."""
        return (self.name, self.url, self.instance) == (other.name, other.url, other.instance)


def fitting(name: str) -> str:
    """The name, if a replica may have it; a longer one is cut, and ends with a hash of the whole."""
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: _MAX_NAME - len(digest) - 1]}~{digest}"


def member_of(replica: AddedReplica, pool: str) -> Member:
    """The member for a replica that an operator adds."""
    engine, weight, ranks = replica.engine, replica.weight, replica.ranks
    return Member(replica.name, replica.url, pool, replica.capacity_tokens, engine=engine, weight=weight, ranks=ranks)


def _listed(replica: ReplicaConfig, pool: PoolConfig, role: str) -> Member:
    tls = replica.tls if replica.url.startswith("https:") else None
    key, capacity = replica.key, replica.capacity_tokens
    engine, weight, ranks = replica.engine, replica.weight, replica.ranks
    port = (isinstance(replica, PrefillReplica) and replica.bootstrap_port) or 0
    member = Member(replica.name, replica.url, pool.name, capacity, key=key, tls=tls, engine=engine, weight=weight, ranks=ranks)
    return replace(member, role=role, bootstrap_port=port) if role else member


def configured(config: Config) -> tuple[Member, ...]:
    """The members in the configuration, in its order."""
    roles = {"replicas": REPLICA, "decode": DECODE, "prefill": PREFILL}
    listed = ((replica, pool, roles[key]) for pool in config.pools for key, each in pool.by_role.items() for replica in each)
    return tuple([_listed(*each) for each in listed])


Members = Mapping[str, Member]
"""Members by name, in the order of their sources."""


@dataclass(frozen=True, slots=True)
class RejectedMember:
    """A member named by a source that is invalid or a duplicate. why: for logs."""

    member: Member
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class MergedMembers:
    """The members of all sources. sources: the source of each member, by its name."""

    members: Members
    sources: Mapping[str, str]
    rejected: Sequence[RejectedMember]


def merge(sources: Mapping[str, Iterable[Member]], pools: Collection[str]) -> MergedMembers:
    """Merges all sources, by their names; earlier ones take precedence. pools: existing names. O(members).

    A watched source adds no second member at a URL: it would be the same replica, counted twice. Only its draining counts
    (unless it is known to be another instance, which had the address before).
    """
    members: dict[str, Member] = {}
    owners: dict[str, str] = {}
    urls: dict[str, str] = {}  # -> name
    rejected: list[RejectedMember] = []
    for source, named in sources.items():
        for member in named:
            why = "" if source == CONFIGURATION else problem_of(member, pools)  # the configuration is already checked
            known = members.get(urls.get(member.url, ""))
            if known and source not in COMMANDED and member.draining and _may_be(known, member):
                members[known.name] = replace(known, draining=True)
            if not why and member.name in members:
                why = f"a replica from {owners[member.name]} has its name already"
            if not why and known and source not in COMMANDED:
                why = f"{known.name} has its URL already"
            if not why and known and known.connection != member.connection:
                why = f"{known.name} has the same URL with another key, other TLS options or another engine"
            if why:
                rejected.append(RejectedMember(member, source, why))
            else:
                members[member.name] = member
                owners[member.name] = source
                urls[member.url] = member.name
    return _bounded(MergedMembers(members, owners, rejected))


def _may_be(known: Member, other: Member) -> bool:
    """True if two members at one URL may be the same replica."""
    return known.instance == other.instance or not (known.instance and other.instance)


def _bounded(merged: MergedMembers) -> MergedMembers:
    """At most MAX_REPLICAS members: draining ones are left out first, then the last ones."""
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
    """The reason why this member is invalid by itself; "": it is valid."""
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
    """Names of replicas, or of pools, that have left: their counters are shown for SHOWN_S, and dropped after keep_s.

    Several processes drop them at slightly different times, and a sum over only some of the processes would look like a reset.
    So they keep the counters for longer, and the process that makes the common page hides them.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._since: dict[str, float] = {}  # in order of leaving

    def leave(self, name: str, now: float) -> None:
        self._since.pop(name, None)
        self._since[name] = now

    def back(self, name: str) -> None:
        self._since.pop(name, None)

    def hidden(self, now: float) -> set[str]:
        """Names whose counters are hidden now. O(names)."""
        return {name for name, since in self._since.items() if now - since >= SHOWN_S}

    def pop_expired(self, now: float) -> set[str]:
        """Remove and return names to be dropped now, beyond MAX_DEPARTED the oldest ones. O(1) if there are none."""
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
    """joined, left: a member that is replaced by another instance is in both. changed: members that are the same, with new
    values.
    """

    joined: Sequence[Member]
    left: Sequence[Member]
    changed: Sequence[Member]


def reconcile(now: Members, wanted: Members) -> MembershipChanges:
    """The changes that lead from the present members to the wanted ones. O(members)."""
    joined, changed = list[Member](), list[Member]()
    for name, member in wanted.items():
        known = now.get(name)
        if known is None or not known.is_same(member):
            joined.append(member)
        elif known != member:
            changed.append(member)
    left = [member for name, member in now.items() if name not in wanted or not wanted[name].is_same(member)]
    return MembershipChanges(joined, left, changed)
