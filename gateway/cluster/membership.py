"""The members of this process's fleet: every source's, merged, and brought into force one change at a time.

    reload: configuration ──┐
    command: add, remove ───┼──► merge ──► probe the replicas that join ──► all changes in one step
    watched sources ────────┘

Probing takes a while and changes nothing; the change itself has no await in it, so that every request sees the members either
before it or after it. Each process of a gateway does this for itself: reloads and commands reach all of them, and each watches
the sources.

A change waits for probes for `first_probes_s` at most, and the next change waits for it. An operator's own change does not
probe, for other operators' commands would wait with it, in all processes: a replica that is added is down at first and probed
at once (one that is still leaving goes on as it was), and `probed` waits for that.

A replica that an operator adds stays until it is removed or the gateway ends. A reload leaves it alone, unless the new
configuration names that replica itself, has its pool no more, or has so many replicas that there is no room for it: then the
addition is forgotten.

Only URLs of the configuration may lead to link-local addresses and metadata services: all others are guarded before they are
probed, and again when the change takes effect, for the guard ends with a former replica at the same URL that is forgotten
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from gateway.config.checks import address_problem
from gateway.config.live import Live
from gateway.config.parse import ConfigError
from gateway.config.schema import MAX_REPLICAS, Config
from gateway.fleet.directory import FIRST_PROBES_S, LOGGED, Fleet
from gateway.fleet.membership import CONFIGURATION, OPERATORS, Member, Merged, configured, merge, problem_of
from gateway.fleet.prober import ProbeResult
from gateway.fleet.sources.source import MemberSource
from gateway.upstream.client import UpstreamClient

log = logging.getLogger("warmroute.membership")

RETRY_S: Final = 5.0  # until a source that has ended or failed is watched again
NO_PROBES: Final[Mapping[str, ProbeResult]] = {}

Named = Mapping[str, tuple[Member, ...]]
"""Members by source."""


class Membership:
    """See the top of this file. `run` watches the sources until it is cancelled."""

    def __init__(
        self,
        *,
        live: Live,
        fleet: Fleet,
        upstream: UpstreamClient,
        sources: Sequence[MemberSource] = (),
        first_probes_s: float = FIRST_PROBES_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """fleet: has the members of the configuration. sources: to be watched.

        first_probes_s: how long a change waits for the replicas that join, all together, at most.
        """
        self._live = live
        self._fleet = fleet
        self._upstream = upstream
        self._watched = tuple(sources)
        self._first_probes_s = first_probes_s
        self._retry_s = retry_s
        self._named: Named = {CONFIGURATION: configured(live.config), OPERATORS: ()}
        self._merged = merge(self._named, _pools(live.config))
        self._one_at_a_time = asyncio.Lock()

    def source_of(self, name: str) -> str | None:
        """Which source names the member; None: there is no such member."""
        return self._merged.sources.get(name)

    async def reconfigure(self, config: Config, before_apply: Callable[[], None]) -> None:
        """This is the configuration from now on. before_apply: called in the step that changes the members, before they do."""
        async with self._one_at_a_time:
            members = configured(config)
            added = remaining(self._named[OPERATORS], {member.name for member in members}, _pools(config))
            await self._change(config, {**self._named, CONFIGURATION: members, OPERATORS: added}, before_apply)

    async def add(self, member: Member) -> None:
        """An operator adds a member. Raises ConfigError if its name is taken, or it cannot be a member."""
        async with self._one_at_a_time:
            config = self._live.config
            if problem := addition_problem(config, member, self.source_of(member.name), len(self._merged.members)):
                raise ConfigError(f"the replica {member.name!r} cannot be added: {problem}")
            self._change_now(config, {**self._named, OPERATORS: (*self._named[OPERATORS], member)})

    async def probed(self, name: str) -> None:
        """Wait for the first probe of a member that was added, for `first_probes_s` at most."""
        if state := self._fleet.named(name):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._first_probes_s):
                    await state.probed.wait()

    async def remove(self, name: str) -> None:
        """An operator removes a member that one has added. Raises ConfigError if none has."""
        async with self._one_at_a_time:
            added = tuple([member for member in self._named[OPERATORS] if member.name != name])
            if len(added) == len(self._named[OPERATORS]):
                raise ConfigError(f"no operator has added a replica {name!r}")
            self._change_now(self._live.config, {**self._named, OPERATORS: added})

    async def run(self) -> None:
        """Returns at once if no source is to be watched."""
        async with asyncio.TaskGroup() as group:
            for source in self._watched:
                group.create_task(self._keep_watching(source))

    async def _keep_watching(self, source: MemberSource) -> None:
        while True:
            try:
                async for members in source.watch():
                    await self._found(source.name, members)
                log.warning("member source ended", extra={"source": source.name, "retry_s": self._retry_s})
            except Exception:  # whatever it raises: its members stay, and the other sources go on
                log.exception("member source failed", extra={"source": source.name, "retry_s": self._retry_s})
            await asyncio.sleep(self._retry_s)

    async def _found(self, source: str, members: Iterable[Member]) -> None:
        """A watched source has named these members: all that it has."""
        async with self._one_at_a_time:
            ordered = tuple(sorted(members, key=lambda member: member.name))
            if ordered != self._named.get(source):
                await self._change(self._live.config, {**self._named, source: ordered})

    async def _change(self, config: Config, named: Named, before_apply: Callable[[], None] | None = None) -> None:
        merged = merge(named, _pools(config))
        others = self._guard(config, named, merged)
        try:
            probed = await self._fleet.probe_joining(merged.members, self._upstream, self._first_probes_s)
        except BaseException:  # the gateway ends, or a probe has a bug
            for url in others:
                if not self._fleet.uses(url):
                    self._upstream.forget(url)
            raise
        self._change_now(config, named, merged, before_apply, probed)

    def _change_now(
        self,
        config: Config,
        named: Named,
        merged: Merged | None = None,
        before_apply: Callable[[], None] | None = None,
        probed: Mapping[str, ProbeResult] = NO_PROBES,
    ) -> None:
        """No await in here: no request sees half of it. merged: `named`, if known. probed: see `Fleet.probe_joining`."""
        merged = merged or merge(named, _pools(config))
        self._guard(config, named, merged)
        self._log_rejected(merged)
        self._named, self._merged = named, merged
        if before_apply:
            before_apply()
        self._fleet.apply(config, merged.members, probed)

    def _guard(self, config: Config, named: Named, merged: Merged) -> Collection[str]:
        """Guard the URLs that the configuration does not have itself, unless it allows all. Returns these URLs."""
        trusted = {member.url for member in named[CONFIGURATION]}
        others = {member.url for member in merged.members.values()} - trusted
        self._upstream.trust(trusted | others if config.allow_link_local else trusted)
        for url in () if config.allow_link_local else others:
            self._upstream.guard(url)
        return others

    def _log_rejected(self, merged: Merged) -> None:
        """The first LOGGED members that were not rejected before."""
        known = set(self._merged.rejected)
        new = [each for each in merged.rejected if each not in known]
        for each in new[:LOGGED]:
            about = {"replica": each.member.name[:100], "source": each.source, "error": each.why}
            log.warning("replica is not a member", extra=about)

    def __repr__(self) -> str:
        return f"<Membership {', '.join(f'{len(members)} from {source}' for source, members in self._named.items())}>"


def addition_problem(config: Config, member: Member, source: str | None, members: int) -> str:
    """Why an operator may not add the member; empty: it may be added.

    source: that of a member with its name, if there is one. members: how many there are.
    """
    if source:
        return f"its name is that of a replica from {source} already"
    if members >= MAX_REPLICAS:
        return f"at most {MAX_REPLICAS} replicas are possible"
    return problem_of(member, _pools(config)) or address_problem(config, member.url)


def remaining(added: Iterable[Member], names: Collection[str], pools: Collection[str]) -> tuple[Member, ...]:
    """The additions that outlive a reload, the oldest first. names, pools: of the new configuration's replicas and pools."""
    outlive = [member for member in added if member.name not in names and member.pool in pools]
    return tuple(outlive[: max(0, MAX_REPLICAS - len(names))])


def _pools(config: Config) -> frozenset[str]:
    """The names of its pools."""
    return frozenset([pool.name for pool in config.pools])
