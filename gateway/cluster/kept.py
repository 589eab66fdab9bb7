"""Replicas that a reload would remove before their replacement is known.

    reload: a new source does not answer in time ──► keep ──► the source answers: its members replace the kept ones
                                                      └────► another member takes the name or the URL of one: that one leaves

They count as members of one more source (KEPT). Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.cluster.watches import Watch
from gateway.fleet.membership import COMMANDED, KEPT, Member, MergedMembers

MembersBySource = Mapping[str, tuple[Member, ...]]


class KeptReplicas:
    """The kept replicas (see the module)."""

    def __init__(self) -> None:
        self._members: tuple[Member, ...] = ()
        self._awaited = frozenset[str]()  # names of the sources that are to replace them

    def awaits(self, watch: Watch) -> bool:
        """True if the replicas are kept until this source answers."""
        return watch.name in self._awaited

    def keep(self, merged: MergedMembers, prepared: Mapping[str, Watch], silent: Mapping[str, str], only_pool: str) -> None:
        """Keep replicas during a reload without the answers of new sources. silent: name -> pool of these sources. Replicas
        that they may replace are kept until they answer: the replicas of their pools, and of all pools that former sources had
        members in.

        merged: the members so far. prepared: all sources from now on. only_pool: the only pool before and after the reload (""
        otherwise): then all replicas are kept, in this pool.
        """
        before = {name for name in self._awaited if name in prepared and prepared[name].members is None}
        self._awaited = frozenset(before.union(silent))
        if not silent:
            return  # earlier kept replicas stay while their sources are awaited
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
        """The kept members that no other member replaces, while a source is awaited."""
        if not any(name in watches and watches[name].members is None for name in self._awaited):
            return ()
        names = {member.name for members in others.values() for member in members}
        urls = {member.url for members in others.values() for member in members}
        return tuple([member for member in self._members if member.name not in names and member.url not in urls])

    def reduce(self, left: tuple[Member, ...], merged: MergedMembers) -> bool:
        """Drop the kept members that are not in `left`: another member has taken their name or URL. merged: the members so far.
        Returns True if other processes must be told.
        """
        news = left != self._members or bool(left and merged.sources.get(left[0].name) != KEPT)
        self._members = left
        return news

    def seed(self, members: Iterable[Member], watches: Iterable[Watch]) -> None:
        """Set the replicas that another process keeps."""
        self._members = tuple(members)
        self._awaited = frozenset([watch.name for watch in watches if watch.members is None])

    def __bool__(self) -> bool:
        return bool(self._members)

    def __repr__(self) -> str:
        return f"<KeptReplicas: {len(self._members)}, until {sorted(self._awaited)} answer>"
