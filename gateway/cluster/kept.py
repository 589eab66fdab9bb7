"""Replicas that a reload would take away before it is known what takes their place.

    reload: a new source does not answer in time ──► keep ──► the source answers: what it has found takes their place
                                                      └────► one of their names or URLs is taken: that one leaves

They stand beside the sources, as those of one more (KEPT). Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.cluster.watches import Watch
from gateway.fleet.membership import COMMANDED, KEPT, Member, MergedMembers

MembersBySource = Mapping[str, tuple[Member, ...]]


class KeptReplicas:
    """See the top of this file."""

    def __init__(self) -> None:
        self._members: tuple[Member, ...] = ()
        self._awaited = frozenset[str]()  # names of the sources that are to replace them

    def awaits(self, watch: Watch) -> bool:
        """True: they stay until this source answers."""
        return watch.name in self._awaited

    def keep(self, merged: MergedMembers, prepared: Mapping[str, Watch], silent: Mapping[str, str], only_pool: str) -> None:
        """A reload goes on without the answers of new sources: silent, name -> pool. What these may be meant to replace is kept
        until they answer: the replicas of their pools, and of the pools that former sources have brought replicas to.

        merged: the members so far. prepared: all sources from now on. only_pool: the only one, before and after ("" otherwise):
        all are kept then, in this pool.
        """
        before = {name for name in self._awaited if name in prepared and prepared[name].members is None}
        self._awaited = frozenset(before.union(silent))
        if not silent:
            return  # what was kept before stays while it is waited for
        members = merged.members.values()
        if only_pool:
            self._members = tuple([replace(member, pool=only_pool) for member in members])
            return
        pools = set(silent.values())
        for member in members:
            if (source := merged.sources[member.name]) not in COMMANDED and source not in prepared:
                pools.add(member.pool)
        self._members = tuple([member for member in members if member.pool in pools])

    def beside(self, others: MembersBySource, watches: Mapping[str, Watch]) -> tuple[Member, ...]:
        """The kept members that count beside these others, while a source is waited for."""
        if not any(name in watches and watches[name].members is None for name in self._awaited):
            return ()
        names = {member.name for members in others.values() for member in members}
        urls = {member.url for members in others.values() for member in members}
        return tuple([member for member in self._members if member.name not in names and member.url not in urls])

    def reduce(self, left: tuple[Member, ...], merged: MergedMembers) -> bool:
        """Only these are left: what something else has taken the name or the URL of does not come back. merged: the members so
        far. Returns whether that is news for other processes.
        """
        news = left != self._members or bool(left and merged.sources.get(left[0].name) != KEPT)
        self._members = left
        return news

    def seed(self, members: Iterable[Member], watches: Iterable[Watch]) -> None:
        """Another process keeps these."""
        self._members = tuple(members)
        self._awaited = frozenset([watch.name for watch in watches if watch.members is None])

    def __bool__(self) -> bool:
        return bool(self._members)

    def __repr__(self) -> str:
        return f"<KeptReplicas: {len(self._members)}, until {sorted(self._awaited)} answer>"
