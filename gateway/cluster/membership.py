"""The members of this process's fleet: merged from all sources, and changed in single steps.

    reload: configuration ──► wait for new sources, probe joining ones ──┐
    command: add, remove, drain ─────────────────────────────────────────┼──► merge ──► all changes in one step
    watched sources ─────────────────────────────────────────────────────┘

The change itself has no await in it, so that every request sees the members either before or after it. Each process of a
gateway does this for itself: reloads and commands reach all of them, and each watches the sources.

A reload waits before it changes anything: for the first answers of sources that are new or have other settings, and then for
the probes of the joining replicas, for `first_wait_s` at most each. Commands wait for it, because all processes execute them in
the same order. If a source does not answer by then, its pool keeps the replicas that would leave until the source answers
(`kept.py`).

Members from sources do not wait for a reload, so that a replica that shuts down gets no further request. A replica from a
source or an operator is down at first and probed at once (a replica that is still leaving continues with its state); `probed`
and `first_found` wait for that. Changes take a tenth of the time at most: if sources change often, several changes are applied
together.

A replica added by an operator stays until it is removed or the gateway ends. A reload leaves it alone, unless the new
configuration names that replica itself, lacks its pool, or has so many replicas that there is no room for it: then the addition
is dropped.

Commands are decided by data that all processes share: the members of the configuration and of operators. Members of sources
reach each process at a different moment. So an addition takes its name from a found replica; the endpoint refuses it (409) if
its own process knows that replica. A drain of a name that neither has is stored for a replica that a source may find.

Only URLs of the configuration may lead to link-local addresses and metadata services. All others are guarded before they are
probed, and again after a reload's probes, because the guard ends when a former replica at the same URL is removed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.cluster.kept import KeptReplicas, MembersBySource
from gateway.cluster.member_source import MemberSource
from gateway.cluster.watches import RETRY_S, Watch, Watches, answered
from gateway.config.checks import address_problem
from gateway.config.kinds import MATCH_ALL
from gateway.config.live import Live
from gateway.config.parse import ConfigError
from gateway.config.schema import MAX_REPLICAS, Config
from gateway.fleet.directory import FIRST_PROBES_S, LOGGED, Fleet
from gateway.fleet.membership import (
    COMMANDED,
    CONFIGURATION,
    KEPT,
    OPERATORS,
    Member,
    MergedMembers,
    RejectedMember,
    configured,
    merge,
    problem_of,
)
from gateway.fleet.prober import ProbeResult
from gateway.upstream.client import UpstreamClient

log = logging.getLogger("warmroute.membership")

MAX_DRAINS: Final = MAX_REPLICAS
REST: Final = 9  # pause before the next change, as a multiple of the last change's duration
NO_PROBES: Final[Mapping[str, ProbeResult]] = {}

SourcesOf = Callable[[Config], Sequence[MemberSource]]


class Membership:
    """The members (see the module). `run` watches the sources until it is cancelled."""

    def __init__(
        self,
        *,
        live: Live,
        fleet: Fleet,
        upstream: UpstreamClient,
        sources_of: SourcesOf,
        first_wait_s: float = FIRST_PROBES_S,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """fleet: has the members of the configuration. sources_of: the sources that a configuration names.

        first_wait_s: limit of a reload's wait for new sources, and of its wait for joining replicas.
        """
        self._live = live
        self._fleet = fleet
        self._upstream = upstream
        self._sources_of = sources_of
        self._first_wait_s = first_wait_s
        self._clock = clock
        self._added: tuple[Member, ...] = ()
        self._drains: dict[str, None] = {}  # names that sources may find
        self._kept = KeptReplicas()
        self._pools: Mapping[str, str] = {}  # of the present sources, by their names
        self._merged = merge({CONFIGURATION: configured(live.config)}, _pools(live.config))
        self._one_at_a_time = asyncio.Lock()
        self._rests_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.published: Callable[[str, tuple[Member, ...]], None] | None = None  # called with the members of a source
        self.watches = Watches(self._source_found, self._expects, retry_s)
        self._set_connection_options(self._merged.members.values())
        sources = sources_of(live.config)
        self._use_sources(sources, self.watches.prepared(sources))

    @property
    def rejected(self) -> Sequence[RejectedMember]:
        """Members from sources that were refused."""
        return self._merged.rejected

    def source_of(self, name: str) -> str | None:
        """The source of this member; None: there is no such member."""
        return self._merged.sources.get(name)

    # -- reloads

    async def reconfigure(self, config: Config, before_apply: Callable[[], None]) -> None:
        """Set the configuration. before_apply: called just before the members change, in the same step."""
        async with self._one_at_a_time:
            sources = self._sources_of(config)
            prepared = self.watches.prepared(sources)
            new = [watch for watch in prepared.values() if watch not in self.watches.all]
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._first_wait_s):
                        await answered(new)
                members = configured(config)
                added = remaining(self._added, {member.name for member in members}, _pools(config))
                probed = await self._probed(config, self._members_by_source(config, added, prepared, _pool_of(sources)))
            except BaseException:  # the gateway ends, or a probe has a bug
                self.watches.end(new)
                raise
            silent = {watch.name: _pool_of(sources)[watch.name] for watch in new if watch.members is None}
            self._kept.keep(self._merged, prepared, silent, _only_pool(self._live.config, config))
            commanded = {member.name for member in (*configured(self._live.config), *self._added)}
            for name in commanded.union(member.name for member in members):
                self._drains.pop(name, None)  # a drain ends when the configuration or an operator takes the name
            self._added = added
            self._use_sources(sources, prepared)
            self._bring_into_force(config, before_apply, probed)
            for watch in new:
                if self.published and watch.members is not None:
                    self.published(watch.name, watch.members)
            for name in commanded:
                if self.source_of(name) not in (CONFIGURATION, OPERATORS, None):
                    self._drain(name, on=False)

    def _use_sources(self, sources: Iterable[MemberSource], prepared: Mapping[str, Watch]) -> None:
        """Set the sources."""
        self._pools = _pool_of(sources)
        self.watches.change(prepared)

    async def _probed(self, config: Config, named: MembersBySource) -> Mapping[str, ProbeResult]:
        """The answers of the replicas that would join (`Fleet.probe_joining`)."""
        merged = merge(named, _pools(config))
        others = self._guard(config, named, merged)
        self._set_connection_options([member for member in merged.members.values() if not self._fleet.uses(member.url)])
        try:
            return await self._fleet.probe_joining(merged.members, self._upstream, self._first_wait_s)
        except BaseException:  # the gateway ends, or a probe has a bug
            for url in others:
                if not self._fleet.uses(url):
                    self._upstream.forget(url)
            raise

    # -- commands

    async def add(self, member: Member) -> None:
        """An operator adds a member. Raises ConfigError if its name is taken, or the member is invalid."""
        async with self._one_at_a_time:
            config = self._live.config
            known = {each.name: CONFIGURATION for each in configured(config)} | {each.name: OPERATORS for each in self._added}
            if problem := addition_problem(config, member, known.get(member.name), len(known)):
                raise ConfigError(f"the replica {member.name!r} cannot be added: {problem}")
            self._drains.pop(member.name, None)
            self._added = (*self._added, member)
            self._bring_into_force(config)

    async def probed(self, name: str) -> None:
        """Wait for the first probe of an added member, for `first_wait_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_wait_s):
                for state in self._fleet.all_named(name):
                    await state.probed.wait()

    async def remove(self, name: str) -> None:
        """An operator removes an added member. Raises ConfigError if no operator has added it."""
        async with self._one_at_a_time:
            added = tuple([member for member in self._added if member.name != name])
            if len(added) == len(self._added):
                raise ConfigError(f"no operator has added a replica {name!r}")
            self._added = added
            self._bring_into_force(self._live.config)

    def drain(self, name: str, *, on: bool) -> None:
        """An operator stops or resumes new requests there. The name is stored for a replica that a source may find."""
        self._drain(name, on=on)
        self._drains.pop(name, None)
        if on and self.source_of(name) not in COMMANDED:
            self._drains[name] = None
            if len(self._drains) > MAX_DRAINS:
                del self._drains[next(iter(self._drains))]

    def _drain(self, name: str, *, on: bool) -> None:
        for state in self._fleet.all_named(name):
            self._fleet.drain(state, on=on)

    # -- sources

    async def run(self) -> None:
        """Watch the sources, until it is cancelled."""
        try:
            await self.watches.run()
        finally:
            self._cancel_timer()

    async def first_found(self, within_s: float) -> None:
        """Wait until each source has answered, and for the first probes of its members; within_s at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await answered(self.watches.all)
                self.apply_found()
                found = {name for name, source in self._merged.sources.items() if source not in COMMANDED}
                replicas = [state for state in self._fleet.replicas if state.member.listed_as in found]
                await asyncio.gather(*(state.probed.wait() for state in replicas))

    def seed(self, source: str, members: Iterable[Member]) -> None:
        """Members of a source that another process has found, or keeps: used until this process's own watches have answers."""
        if source == KEPT:
            self._kept.seed(members, self.watches.all)
        for watch in self.watches.all:
            if watch.name == source and watch.members is None:
                watch.members = tuple(members)
        self.apply_found()

    def _expects(self, watch: Watch) -> bool:
        """True if an answer of this source without members would be unexpected."""
        return bool(watch.members or (self._kept and self._kept.awaits(watch)))

    async def _source_found(self, watch: Watch, members: Collection[Member]) -> None:
        """Handle the members of a watched source: its complete list."""
        found = tuple(sorted(members, key=lambda member: member.name))
        if found == watch.members:
            return
        if watch.members is None and self._kept.awaits(watch) and watch in self.watches.all:
            await self._replace_kept(watch, found)
            return
        watch.members = found
        if watch not in self.watches.all:
            return  # a reload waits for this source
        if self.published:
            self.published(watch.name, found)
        wait_s = self._rests_until - self._clock()
        if wait_s <= 0:
            self.apply_found()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.apply_found)

    async def _replace_kept(self, watch: Watch, found: tuple[Member, ...]) -> None:
        """Apply the source's members once they have been probed; the kept ones leave in the same step."""
        async with self._one_at_a_time:
            config, watch.members = self._live.config, found
            named = self._members_by_source(config, self._added, {each.name: each for each in self.watches.all}, self._pools)
            watch.members = None
            probed = await self._probed(config, named)
            watch.members = found
            if watch in self.watches.all:
                self._bring_into_force(config, probed=probed)
            if self.published:
                self.published(watch.name, found)

    def apply_found(self) -> None:
        """Apply the members of the sources now."""
        self._cancel_timer()
        self._bring_into_force(self._live.config)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    # -- the change

    def _members_by_source(
        self, config: Config, added: tuple[Member, ...], watches: Mapping[str, Watch], pools: Mapping[str, str]
    ) -> MembersBySource:
        """Members by their source. Sources are ordered by name, so that all processes give precedence to the same one.

        pools: of the sources, for members that name none.
        """
        found = {
            name: tuple([_placed(member, config, pools[name]) for member in watch.members])
            for name, watch in sorted(watches.items())
            if watch.members is not None
        }
        named = {CONFIGURATION: configured(config), OPERATORS: added, **found}
        kept = self._kept.beside(named, watches)
        return {**named, KEPT: kept} if kept else named

    def _bring_into_force(
        self,
        config: Config,
        before_apply: Callable[[], None] | None = None,
        probed: Mapping[str, ProbeResult] = NO_PROBES,
    ) -> None:
        """Apply the members. No await in here: no request sees half of a change. probed: see `Fleet.probe_joining`."""
        begun = self._clock()
        named = self._members_by_source(config, self._added, {watch.name: watch for watch in self.watches.all}, self._pools)
        kept = named.get(KEPT, ())
        if self._kept.reduce(kept, self._merged) and self.published:
            self.published(KEPT, kept)
        merged = merge(named, _pools(config))
        self._guard(config, named, merged)
        self._set_connection_options(merged.members.values())
        self._log_rejected(merged)
        self._merged = merged
        if before_apply:
            before_apply()
        self._fleet.apply(config, merged.members, probed)
        for name in self._drains:
            if merged.sources.get(name, CONFIGURATION) not in COMMANDED:
                self._drain(name, on=True)
        now = self._clock()
        self._rests_until = now + REST * (now - begun)

    def _guard(self, config: Config, named: MembersBySource, merged: MergedMembers) -> Collection[str]:
        """Guard the URLs that are not in the configuration, unless it allows all. Returns these URLs."""
        trusted = {member.url for member in named[CONFIGURATION]}
        others = {member.url for member in merged.members.values()} - trusted
        self._upstream.trust(trusted)
        for url in others:
            self._upstream.guard(url)
        return others

    def _set_connection_options(self, members: Iterable[Member]) -> None:
        """Set the connection options that the members' sources want."""
        for member in members:
            self._upstream.set_options(member.url, member.connection_options)

    def _log_rejected(self, merged: MergedMembers) -> None:
        """Logs the first LOGGED newly rejected members."""
        known = set(self._merged.rejected)
        new = [each for each in merged.rejected if each not in known]
        for each in new[:LOGGED]:
            about = {"replica": each.member.name[:100], "source": each.source, "error": each.why}
            log.warning("replica is not a member", extra=about)

    def state_of_sources(self) -> Sequence[tuple[Watch, int]]:
        """Each source, and the number of its members."""
        owners = list(self._merged.sources.values())
        return [(watch, owners.count(watch.name)) for watch in self.watches.all]

    def __repr__(self) -> str:
        return f"<Membership of {len(self._merged.members)}, {len(self._added)} added, {self.watches!r}>"


def addition_problem(config: Config, member: Member, source: str | None, members: int) -> str:
    """The reason why an operator may not add the member; "": it may be added.

    source: of an existing member with the same name, or None. members: number of existing members. Both for COMMANDED sources
    only.
    """
    if source:
        return f"a replica from {source} has its name already"
    if members >= MAX_REPLICAS:
        return f"at most {MAX_REPLICAS} replicas are possible"
    for each in configured(config):
        if each.url == member.url and each.connection != member.connection:
            return f"{each.name} has the same URL with another key, other TLS options or another engine"
    return problem_of(member, _pools(config)) or address_problem(config, member.url)


def remaining(added: Iterable[Member], names: Collection[str], pools: Collection[str]) -> tuple[Member, ...]:
    """The additions that survive a reload, the oldest first. names, pools: of the new configuration's replicas and pools."""
    outlive = [member for member in added if member.name not in names and member.pool in pools]
    return tuple(outlive[: max(0, MAX_REPLICAS - len(names))])


def _pool_of(sources: Iterable[MemberSource]) -> Mapping[str, str]:
    """The pool of each source, by the source's name."""
    return {source.name: source.pool for source in sources}


def _only_pool(before: Config, config: Config) -> str:
    """The name of the only pool before and after; "" if there are several."""
    return config.pools[0].name if len(config.pools) == len(before.pools) == 1 else ""


def _placed(member: Member, config: Config, pool: str) -> Member:
    """The member with the name of its pool. pool: its source's."""
    return member if member.pool else replace(member, pool=_pool_for(config, member) or pool)


def _pool_for(config: Config, member: Member) -> str:
    """The pool with the longest prefix of the member's model; "": there is none, or no model."""
    if not member.model:
        return ""
    prefixes = {"" if prefix == MATCH_ALL else prefix: pool.name for pool in config.pools for prefix in pool.models}
    matching = [prefix for prefix in prefixes if member.model.startswith(prefix)]
    return prefixes[max(matching, key=len)] if matching else ""


def _pools(config: Config) -> frozenset[str]:
    """The names of the configuration's pools."""
    return frozenset([pool.name for pool in config.pools])
