"""Data-parallel ranks: several private caches behind one URL.

An engine with data parallelism has a scheduler and a cache for each rank, and spreads requests over them unless a request names
its rank. So a member with R ranks becomes R members of the same URL, `NAME#0` to `NAME#R-1`: each has its own entries in the
prefix index, its own bookings and its own load. They share connections, probes and health.

R comes from the configuration, else from the labels of the engine's metrics. Where no request can choose its rank (the engine
does not take the header, its ranks are not numbered from 0, or it has refused a rank that its metrics name), the member stays
one, with R caches: the router believes in a share of its blocks there (`router/learning/shares.py`).

Ranks come and go while a server runs. More ranks count at once, and fewer ones after FEWER_PAGES pages in a row, because a page
may miss some just after a start. Pure, but for the memory of findings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from gateway.config.schema import MAX_REPLICAS
from gateway.fleet.engines import EngineProfile, Facts
from gateway.fleet.membership import Member, Members, fitting

log = logging.getLogger("warmroute.replicas")

FEWER_PAGES: Final = 3

Server = tuple[str, str, str]
"""The identity of a member: name, URL, instance."""


def server_of(member: Member) -> Server:
    """The server of a member, or of one of its ranks."""
    return member.listed_as, member.url, member.instance


@dataclass(slots=True)
class _Found:
    """caches: number of ranks. addressed: requests can choose their rank. fewer: pages in a row with fewer ranks. refused: the
    number of ranks of which the server has refused one; 0: none.
    """

    caches: int = 1
    addressed: bool = False
    fewer: int = 0
    refused: int = 0


class KnownRanks:
    """The ranks of all servers, as found."""

    def __init__(self) -> None:
        self._found: dict[Server, _Found] = {}

    def found(self, member: Member, engine: EngineProfile, facts: Facts) -> bool:
        """Note the facts of a page of metrics. True if the members change. O(1)."""
        if member.ranks is not None:
            return False
        known = self._found.get(server_of(member)) or _Found()
        if facts.caches < known.caches:
            known.fewer += 1
            if known.fewer < FEWER_PAGES:
                return False
        known.fewer = 0
        addressed = bool(facts.ranks) and engine.takes_rank and known.refused != facts.caches
        if (facts.caches, addressed) == (known.caches, known.addressed):
            return False
        known.caches, known.addressed = facts.caches, addressed
        self._found[server_of(member)] = known
        about = {"replica": member.listed_as, "ranks": facts.caches, "addressed": addressed}
        log.info("replica has data-parallel ranks", extra=about)
        return True

    def refused(self, member: Member) -> bool:
        """The server has refused a request because of its rank. True if its members change."""
        known = self._known(member)
        if not known.addressed:
            return False
        known.addressed, known.refused = False, known.caches
        self._found[server_of(member)] = known
        about = {"replica": member.name, "ranks": known.caches}
        log.warning("replica refuses one of its data-parallel ranks: requests name none", extra=about)
        return True

    def _known(self, member: Member) -> _Found:
        """The number of a server's ranks: configured, or found in its metrics."""
        known = self._found.get(server_of(member))
        if known is None or member.ranks not in (None, known.caches):
            return _Found(member.ranks or 1, addressed=member.ranks is not None)
        return known

    def keep(self, members: Members) -> None:
        """Forget the servers that are no members. O(servers with ranks)."""
        if self._found:
            present = {server_of(member) for member in members.values()}
            self._found = {server: known for server, known in self._found.items() if server in present}

    def expand(self, members: Members) -> Members:
        """The members, each server with ranks replaced by its ranks. O(result)."""
        if not self._found and not any(member.ranks for member in members.values()):
            return members
        expanded, room = dict[str, Member](), MAX_REPLICAS - len(members)
        for name, member in members.items():
            known = self._known(member)
            count = known.caches
            if count == 1:
                expanded[name] = member
            elif not known.addressed or not _fits(member, count, room, members):
                expanded[name] = replace(member, caches=count)
            else:
                room -= count - 1
                expanded.update((each.name, each) for each in _ranks_of(member, count))
        return expanded


def _fits(member: Member, count: int, room: int, members: Mapping[str, Member]) -> bool:
    """True if the ranks may be members beside the others."""
    return count - 1 <= room and not any(each.name in members for each in _ranks_of(member, count))


def _ranks_of(member: Member, count: int) -> list[Member]:
    capacity = member.capacity_tokens and max(1, member.capacity_tokens // count)
    return [
        replace(member, name=fitting(f"{member.name}#{rank}"), capacity_tokens=capacity, server=member.name, rank=rank)
        for rank in range(count)
    ]


def of_rank(facts: Facts, member: Member) -> Facts:
    """A rank's part of the facts of its server. The KV size is an equal part if the rank's own is unknown."""
    rank = member.rank
    if rank is None:
        return facts
    if rank < len(facts.ranks):
        own = facts.ranks[rank]
    else:
        own = replace(facts, kv_tokens=None, running=None, waiting=None, progress=())
    if own.kv_tokens is None and facts.kv_tokens is not None:
        own = replace(own, kv_tokens=max(1, facts.kv_tokens // facts.caches))
    asleep = own.asleep or facts.asleep
    return replace(
        own,
        asleep=asleep,
        version=facts.version,
        priority=facts.priority,
        adapters=facts.adapters,
        role=facts.role,
        bootstrap_port=facts.bootstrap_port,
    )
