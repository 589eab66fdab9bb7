"""The members of a running gateway: reloads, operators and sources that change them at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from gateway.app import compose
from gateway.cluster.commands import LocalControl, SingleProcess
from gateway.cluster.member_source import MemberSource
from gateway.cluster.membership import KEPT, MAX_DRAINS, Membership
from gateway.cluster.messages import Command, Drain, Join, Leave
from gateway.config.parse import ConfigError
from gateway.config.schema import AddedReplica, Config
from gateway.core import Surroundings
from gateway.features.discovery.metrics import DiscoveryMetrics
from gateway.fleet.membership import Member
from gateway.server.endpoints import clients_runner
from gateway.telemetry.counters import Instruments
from gateway.telemetry.metrics import MetricFamily
from tests.gateway.conftest import BODY, LOGGED, Running, eventually, running, serving_runner
from tests.support.configs import load
from tests.support.fakes import FakeReplica, FakeRequest, models, streams


class Gate:
    """A model list that answers while `open` is set, and sets `asked` at each request."""

    def __init__(self) -> None:
        self.asked, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def __call__(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await self.open.wait()
        await models("m")(request, writer)


def guarded(run: Running, url: str) -> bool:
    return url in run.gateway.upstream._guarded


LATER: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}}


def with_pool(*pools: dict[str, Any]) -> Config:
    """A configuration with these pools, of which some may be empty."""
    discovery = [{"file": "none.yaml", "pool": pools[0]["name"]}]
    return load(None, {**LATER, "pools": list(pools), "discovery": discovery}, env={})


async def test_what_a_reload_brings_of_a_source_while_its_forerunner_is_forgotten_is_guarded() -> None:
    gate = Gate()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, **LATER) as run:
        membership = with_source(run, Source(Member("y", two.url, "later")))
        await membership.add(Member("x", two.url, "default"))
        await membership.probed("x")
        await membership.remove("x")
        async with watched(membership):
            await eventually(lambda: "y" in repr(membership.rejected))
            gate.asked.clear()
            gate.open.clear()
            config = with_pool({"replicas": [one.url], "name": "default"}, {"models": ["l"], "name": "later"})
            reloading = asyncio.create_task(membership.reconfigure(config, lambda: run.gateway.live.take(config)))
            await gate.asked.wait()
            for url in run.gateway.fleet.forget_departed():
                run.gateway.upstream.forget(url)
            assert not run.gateway.fleet.named("x")
            gate.open.set()
            await reloading
            assert run.gateway.fleet.named("y")
            assert guarded(run, two.url)


async def test_a_url_that_a_source_names_is_guarded_before_its_first_probe() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one) as run:
        async with watched(with_source(run, Source(Member("y", two.url, "default")))):
            await gate.asked.wait()
            assert (state := run.gateway.fleet.named("y"))
            assert not state.up
            assert guarded(run, two.url)
        gate.open.set()


async def test_what_a_source_finds_does_not_wait_for_a_reload_that_probes() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, FakeReplica() as three, running(one, **LATER) as run:
        source = QueueSource()
        membership = with_source(run, source)
        async with watched(membership):
            await source.queue.put([Member("y", three.url, "default")])
            await eventually(lambda: (state := run.gateway.fleet.named("y")) and state.up)
            config = with_pool({"replicas": [one.url, two.url], "name": "default"})
            reloading = asyncio.create_task(membership.reconfigure(config, lambda: run.gateway.live.take(config)))
            await gate.asked.wait()
            await source.queue.put([Member("y", three.url, "default", draining=True)])
            await eventually(lambda: (state := run.gateway.fleet.named("y")) and state.draining)
            assert not reloading.done()
            gate.open.set()
            await reloading
            assert (state := run.gateway.fleet.named("y"))
            assert state.draining, "what the source said while the reload probed stays"


async def test_a_source_whose_settings_stay_goes_on_after_a_reload_and_others_begin_and_end() -> None:
    stays, ends, begins = QueueSource("stays"), QueueSource("ends"), QueueSource("begins")
    sources = [stays, ends]
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three, running(one, **LATER) as run:
        gateway = run.gateway
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            await stays.queue.put([Member("a", two.url, "")])
            await ends.queue.put([Member("b", three.url, "")])
            await eventually(lambda: there(run) >= {"a", "b"})
            sources[:] = [QueueSource("stays"), begins]
            await membership.reconfigure(gateway.config, lambda: None)
            assert there(run) >= {"a", "b"}, "until the new source has answered"
            await begins.queue.put([])
            await eventually(lambda: there(run) >= {"a"} and "b" not in there(run))
            await stays.queue.put([])  # the old one is still watched
            await eventually(lambda: "a" not in there(run))
            await begins.queue.put([Member("c", two.url, "")])
            await eventually(lambda: "c" in there(run))
            await ends.queue.put([Member("b", three.url, "")])
            sources[1] = QueueSource("begins", settings="others")
            await membership.reconfigure(gateway.config, lambda: None)
            assert "c" in there(run), "until the new one finds something else"
            await sources[1].queue.put([])
            await eventually(lambda: "c" not in there(run))
            assert ends.queue.qsize() == 1, "nobody watches it"


async def test_a_reload_from_a_list_to_a_source_that_answers_changes_no_replica() -> None:
    """The pods of the list are found under the same names."""
    async with FakeReplica() as one, running(one, **LATER) as run:
        gateway, found = run.gateway, QueueSource("found")
        sources: list[QueueSource] = []
        membership = with_source(run, sources=sources)
        async with watched(membership):
            state = gateway.fleet.named(one.name)
            sources.append(found)
            await found.queue.put([Member(one.name, one.url, "")])
            config = with_pool({"name": "default"})
            await membership.reconfigure(config, lambda: gateway.live.take(config))
            assert gateway.fleet.named(one.name) is state
            assert state
            assert state.live
            assert membership.source_of(one.name) == "found"


async def test_a_reload_to_a_source_that_does_not_answer_keeps_what_there_is_until_it_does() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        gateway, found = run.gateway, QueueSource("found")
        sources: list[QueueSource] = []
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            sources.append(found)
            config = with_pool({"name": "default"}, {"name": "other", "models": ["o"], "replicas": [two.url]})
            await membership.reconfigure(config, lambda: gateway.live.take(config))
            assert there(run) == {one.name, two.name}
            assert membership.source_of(one.name) == KEPT
            assert (await run.post())[0] == 200
            config = with_pool({"name": "default"}, {"name": "other", "models": ["o"]})
            await membership.reconfigure(config, lambda: gateway.live.take(config))
            assert there(run) == {one.name}, "only in the pool whose source is silent"
            await found.queue.put([Member("pod", two.url, "")])
            await eventually(lambda: there(run) == {"pod"})


async def test_a_pool_that_gets_another_name_takes_its_replicas_along() -> None:
    source = QueueSource()
    sources = [source]
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            await source.queue.put([Member("a", two.url, ""), Member("b", one.url, "default")])
            await eventually(lambda: (state := run.gateway.fleet.named("a")) and state.up)
            state = run.gateway.fleet.named("a")
            sources[:] = [QueueSource(pool="other")]
            config = with_pool({"name": "other", "models": ["m"]})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert run.gateway.fleet.named("a") is state
            assert state
            assert (state.member.pool, state.live) == ("other", True)
            assert "there is no pool 'default'" in [each.why for each in membership.rejected]


async def test_what_is_kept_serves_until_what_a_late_source_has_found_is_probed() -> None:
    gate = Gate()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, **LATER) as run:
        gateway, found = run.gateway, QueueSource("found")
        sources: list[QueueSource] = []
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            sources.append(found)
            config = with_pool({"name": "default"})
            await membership.reconfigure(config, lambda: gateway.live.take(config))
            gate.open.clear()
            long = with_source(run, found, first_wait_s=40)  # which waits for the probe
            long.seed(KEPT, [Member(one.name, one.url, "default")])
            async with watched(long):
                await found.queue.put([Member("pod", two.url, "")])
                await gate.asked.wait()
                assert there(run) == {one.name}
                assert (await run.post())[0] == 200
                gate.open.set()
                await eventually(lambda: there(run) == {"pod"})
                assert (state := gateway.fleet.named("pod"))
                assert state.up
                assert (await run.post())[0] == 200


async def test_replicas_that_a_former_source_has_brought_to_other_pools_are_kept_too() -> None:
    former = QueueSource("former")
    sources: list[QueueSource] = [former]
    pools = {"name": "default"}, {"name": "two", "models": ["t"]}
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            config = with_pool(*pools)
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            await former.queue.put([Member("a", one.url, ""), Member("b", two.url, "two")])
            await eventually(lambda: there(run) == {"a", "b"})
            sources[:] = [QueueSource("new")]
            await membership.reconfigure(config, lambda: None)
            assert there(run) == {"a", "b"}
            await sources[0].queue.put([Member("a", one.url, "")])
            await eventually(lambda: there(run) == {"a"})


async def test_what_was_kept_does_not_come_back_when_its_successor_leaves() -> None:
    well, silent = QueueSource("well"), QueueSource("silent")
    sources: list[QueueSource] = []
    async with FakeReplica() as one, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            sources[:] = [well, silent]
            await well.queue.put([Member("pod", one.url, "")])
            config = with_pool({"name": "default"})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert there(run) == {"pod"}
            await well.queue.put([])
            await eventually(lambda: not there(run))


async def test_a_reload_takes_replicas_out_although_a_source_was_silent_all_the_time() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, **LATER) as run:
        membership = with_source(run, QueueSource("silent"), first_wait_s=40)
        async with watched(membership), asyncio.timeout(30):
            config = with_pool({"name": "default", "replicas": [one.url]})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert there(run) == {one.name}


async def test_what_is_kept_follows_the_only_pool_to_its_new_name() -> None:
    sources: list[QueueSource] = []
    async with FakeReplica() as one, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=0.05)
        async with watched(membership):
            sources.append(QueueSource(pool="m"))
            config = with_pool({"name": "m", "models": ["m"]})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert there(run) == {one.name}
            assert (await run.post())[0] == 200


async def test_a_drain_of_what_the_configuration_has_named_ends_when_a_source_names_it() -> None:
    """As for workers that are started later, which do not know of it."""
    sources: list[QueueSource] = []
    async with FakeReplica() as one, running(one, **LATER) as run:
        membership = with_source(run, sources=sources)
        async with watched(membership):
            membership.drain(one.name, on=True)
            sources.append(QueueSource("found"))
            await sources[0].queue.put([Member(one.name, one.url, "")])
            config = with_pool({"name": "default"})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert membership.source_of(one.name) == "found"
            assert (state := run.gateway.fleet.named(one.name))
            assert not state.drained


async def test_a_source_that_a_reload_replaces_is_watched_until_then() -> None:
    former, new = QueueSource("former"), QueueSource("new")
    sources = [former]
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=40)
        async with watched(membership):
            await former.queue.put([Member("pod", two.url, "")])
            await eventually(lambda: "pod" in there(run))
            sources[:] = [new]
            reloading = asyncio.create_task(membership.reconfigure(run.gateway.config, lambda: None))
            await asyncio.sleep(0)
            await former.queue.put([Member("pod", two.url, "", draining=True)])
            await eventually(lambda: (state := run.gateway.fleet.named("pod")) and state.draining)
            assert not reloading.done()
            await new.queue.put([Member("pod", two.url, "", draining=True)])
            await reloading


async def test_a_source_with_other_settings_comes_into_force_with_the_reload() -> None:
    gate = Gate()
    sources = [QueueSource()]
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, FakeReplica() as three, running(one, **LATER) as run:
        membership = with_source(run, sources=sources, first_wait_s=40)
        async with watched(membership):
            await sources[0].queue.put([Member("pod", three.url, "")])
            await eventually(lambda: "pod" in there(run))
            gate.open.clear()
            sources[:] = [QueueSource(settings="others")]
            await sources[0].queue.put([Member("other", two.url, "")])
            reloading = asyncio.create_task(membership.reconfigure(run.gateway.config, lambda: None))
            await gate.asked.wait()
            assert there(run) == {one.name, "pod"}
            gate.open.set()
            await reloading
            assert there(run) == {one.name, "other"}


async def test_a_drain_waits_for_a_replica_that_a_source_will_find_and_outlives_its_absence() -> None:
    source = QueueSource()
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, source)
        async with watched(membership):
            membership.drain("pod", on=True)
            for _ in range(2):
                await source.queue.put([Member("pod", two.url, "")])
                await eventually(lambda: "pod" in there(run))
                assert (state := run.gateway.fleet.named("pod"))
                assert state.drained
                await source.queue.put([])
                await eventually(lambda: "pod" not in there(run))
            membership.drain("pod", on=False)
            await source.queue.put([Member("pod", two.url, "")])
            await eventually(lambda: "pod" in there(run))
            assert (state := run.gateway.fleet.named("pod"))
            assert not state.drained


async def test_drains_of_names_that_nobody_finds_are_bounded() -> None:
    async with FakeReplica() as one, running(one, **LATER) as run:
        membership = with_source(run, QueueSource())
        for number in range(3 * MAX_DRAINS):
            membership.drain(f"pod-{number}", on=True)
        assert len(membership._drains) == MAX_DRAINS
        assert f"pod-{3 * MAX_DRAINS - 1}" in membership._drains


async def test_one_url_under_two_names_of_sources_is_one_replica() -> None:
    first, second = QueueSource("a"), QueueSource("b")
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, first, second)
        async with watched(membership):
            await second.queue.put([Member("x", two.url, ""), Member("y", one.url, "")])
            await eventually(lambda: "x" in there(run))
            await first.queue.put([Member("z", two.url, "")])
            await eventually(lambda: "z" in there(run))
            assert there(run) == {one.name, "z"}, "the sources by their names, whoever has answered first"
            assert sorted(each.why for each in membership.rejected) == [
                f"{one.name} has its URL already",
                "z has its URL already",
            ]


async def test_what_another_process_has_found_counts_until_the_own_source_answers() -> None:
    source = QueueSource()
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three, running(one, **LATER) as run:
        membership = with_source(run, source)
        async with watched(membership):
            membership.seed("none", [Member("n", three.url, "")])
            membership.seed("toy", [Member("a", two.url, "")])
            assert there(run) == {one.name, "a"}
            await source.queue.put([Member("b", three.url, "")])
            await eventually(lambda: there(run) == {one.name, "b"})
            membership.seed("toy", [Member("a", two.url, "")])
            assert there(run) == {one.name, "b"}


async def test_what_a_source_finds_during_its_reload_goes_to_workers_that_start_later_too() -> None:
    sources: list[QueueSource] = []
    published = list[tuple[str, int]]()
    async with FakeReplica() as one, running(one, **LATER) as run:
        membership = with_source(run, sources=sources)
        membership.published = lambda name, members: published.append((name, len(members)))
        async with watched(membership):
            sources.append(QueueSource("new"))
            await sources[0].queue.put([Member("pod", one.url, "")])
            config = with_pool({"name": "default"})
            await membership.reconfigure(config, lambda: run.gateway.live.take(config))
            assert published == [("new", 1)]


async def test_a_storm_of_changes_takes_a_part_of_the_time_and_ends_with_the_last() -> None:
    """A change seems to take 1 s here: the next one comes 9 s later."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    source, changes, seen = QueueSource(), list[int](), set[int]()
    async with FakeReplica() as one, running(one, **LATER) as run:
        gateway = run.gateway
        membership = Membership(
            live=gateway.live, fleet=gateway.fleet, upstream=gateway.upstream, sources_of=lambda _config: [source], clock=clock
        )

        def published(_name: str, members: Sequence[Member]) -> None:
            changes.append(len(members))
            seen.add(len(there(run)))

        membership.published = published
        async with watched(membership):
            for number in range(1, 60):
                await source.queue.put([Member(f"pod-{at}", f"http://127.0.0.1:{at + 1}", "") for at in range(number)])
            await eventually(lambda: len(changes) == 59)
            assert len(seen) < 20, "several come into force together"
            membership.apply_found()
            assert len(there(run)) == 60


async def test_what_is_still_to_come_into_force_does_not_when_nothing_is_watched_any_more() -> None:
    """A change seems to take 5 ms here: the next one comes 45 ms later."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.005
        return now[0]

    source = QueueSource()
    published = asyncio.Queue[int]()
    async with FakeReplica() as one, running(one, **LATER) as run:
        gateway = run.gateway
        membership = Membership(
            live=gateway.live, fleet=gateway.fleet, upstream=gateway.upstream, sources_of=lambda _config: [source], clock=clock
        )
        membership.published = lambda _name, members: published.put_nowait(len(members))
        async with watched(membership):
            for number in range(2):
                await source.queue.put([Member("pod", "http://127.0.0.1:1", "")] * number)
                await published.get()
        before = there(run)
        await asyncio.sleep(0.1)  # longer than any timer
        assert there(run) == before


async def test_another_instance_at_the_same_address_is_another_replica() -> None:
    source = QueueSource()
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run, watched(with_source(run, source)):
        await source.queue.put([Member("pod-0", two.url, "default", instance="uid-1")])
        await eventually(lambda: (state := run.gateway.fleet.named("pod-0")) and state.up)
        first = run.gateway.fleet.named("pod-0")
        await source.queue.put([Member("pod-0", two.url, "default", instance="uid-1", draining=True)])
        await eventually(lambda: (state := run.gateway.fleet.named("pod-0")) and state.draining)
        assert run.gateway.fleet.named("pod-0") is first
        await source.queue.put([Member("pod-0", two.url, "default", instance="uid-2")])
        await eventually(lambda: (state := run.gateway.fleet.named("pod-0")) and not state.draining)
        assert run.gateway.fleet.named("pod-0") is not first


async def test_metrics_show_what_sources_have_found_and_which_of_them_fail() -> None:
    good, bad = QueueSource("good"), QueueSource("bad")
    async with FakeReplica() as one, FakeReplica() as two, running(one, **LATER) as run:
        membership = with_source(run, good, bad)
        async with watched(membership):
            await good.queue.put([Member("a", two.url, "default")])
            await bad.queue.put(OSError("the server is away"))
            await eventually(lambda: run.gateway.fleet.named("a") and "the server is away" in repr(membership.watches))
            metrics = DiscoveryMetrics(MetricFamily(Instruments()))
            metrics.show(membership.state_of_sources())
            assert metrics.up.values == {("good",): 1, ("bad",): 0}
            assert metrics.replicas.values == {("good",): 1, ("bad",): 0}
            await bad.queue.put([])
            await eventually(lambda: "away" not in repr(membership.watches))
            good.problem = "no answer"
            metrics.show(membership.state_of_sources())
            assert metrics.up.values == {("good",): 0, ("bad",): 1}


async def test_a_reload_waits_for_replicas_that_do_not_answer_no_longer_than_it_may_and_operators_no_longer_than_it() -> None:
    gate = Gate()
    gate.open.clear()
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60, "timeout_s": 60}}
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=0.3, **raw) as run:
        config = load(None, {**raw, "pools": [{"replicas": [one.url, two.url]}]}, env={})
        reloading = asyncio.create_task(run.gateway.local.reload.take(config))
        await gate.asked.wait()
        async with asyncio.timeout(30):  # not the timeout of a probe
            await run.gateway.control.execute(Join("default", AddedReplica(one.url, "x")))
            await reloading
        assert {state.name: state.up for state in run.gateway.fleet.replicas} == {one.name: True, two.name: False, "x": True}
        gate.open.set()
        await eventually(lambda: all(state.up for state in run.gateway.fleet.replicas))


async def test_a_reload_that_is_given_up_keeps_the_way_to_a_replica_that_is_leaving() -> None:
    """It would bring a replica of a source at the URL of one that is leaving."""
    gate, go_on = Gate(), asyncio.Event()
    old = FakeReplica([streams("a", "b", hold=go_on)], listing=gate)
    async with old, FakeReplica() as new, running(old, **LATER) as run:
        parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        await run.gateway.local.reload.take(with_pool({"replicas": [new.url], "name": "default"}))
        membership = with_source(run, Source(Member("again", old.url, "later")))
        async with watched(membership):
            await eventually(lambda: "again" in repr(membership.rejected))
            gate.asked.clear()
            gate.open.clear()
            config = with_pool({"replicas": [new.url], "name": "default"}, {"models": ["l"], "name": "later"})
            reloading = asyncio.create_task(membership.reconfigure(config, lambda: None))
            await gate.asked.wait()
            reloading.cancel()
            await asyncio.wait([reloading])
            assert reloading.cancelled()
            assert old.name in repr(run.gateway.upstream)
            go_on.set()
            assert [part.choices[0].delta.content async for part in parts] == ["b"]
            await eventually(lambda: old.name not in repr(run.gateway.upstream))
        gate.open.set()


async def test_link_local_addresses_are_for_the_configuration_alone() -> None:
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}}
    async with FakeReplica() as one, FakeReplica() as two, running(one, **raw) as run:
        await run.gateway.local.membership.add(Member("x", two.url, "default"))
        assert guarded(run, two.url)
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [one.url, two.url]}]}, env={}))
        assert not guarded(run, two.url), "it is in the configuration, under another name"


async def test_an_addition_that_is_removed_before_it_is_probed_ends_at_once() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=60) as run:
        adding = asyncio.create_task(run.post({"url": two.url, "name": "x"}, path="/warmroute/replicas"))
        await gate.asked.wait()
        async with asyncio.timeout(30), run.session.delete(f"{run.admin_url}/warmroute/replicas/x") as removed:
            assert removed.status == 200
            status, _, error = await adding
        assert (status, error["error"]["code"], error["error"]["param"]) == (409, "replica_removed", "name")
        assert run.gateway.local.membership.source_of("x") is None
        gate.open.set()


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_an_addition_that_a_reload_has_replaced_before_its_first_probe_is_not_the_operators(*, elsewhere: bool) -> None:
    gate = Gate()
    gate.open.clear()
    async with (
        FakeReplica() as one,
        FakeReplica(listing=gate) as two,
        FakeReplica() as three,
        running(one, first_probes_s=0.5) as run,
    ):
        adding = asyncio.create_task(run.post({"url": two.url, "name": "x"}, path="/warmroute/replicas"))
        await gate.asked.wait()
        await run.gateway.local.reload.take(with_x(one, three if elsewhere else two))
        status, _, answer = await adding
        if elsewhere:
            assert (status, answer["error"]["code"]) == (409, "replica_removed")
        else:
            assert (status, answer["replica"]["url"], answer["replica"]["pool"]) == (201, two.url, "other")
            assert answer["until"] == "it is removed from the configuration"
        gate.open.set()


def with_x(one: FakeReplica, two: FakeReplica) -> Config:
    x = {"name": "other", "models": ["m2"], "replicas": [{"url": two.url, "name": "x"}]}
    return load(
        None, {"listen": "127.0.0.1:0", "pools": [{"name": "default", "models": ["m"], "replicas": [one.url]}, x]}, env={}
    )


class Overtaken:
    """A control plane where another process's command comes before the next one."""

    def __init__(self, local: LocalControl) -> None:
        self.first: Callable[[], Awaitable[None]] | None = None
        self._one = SingleProcess(local)

    async def execute(self, command: Command) -> None:
        if self.first:
            first, self.first = self.first, None
            await first()
        await self._one.execute(command)

    async def page(self) -> bytes:
        return await self._one.page()

    async def run(self) -> None:
        await self._one.run()

    async def ready(self) -> None:
        await self._one.ready()


@contextlib.asynccontextmanager
async def overtaken(*replicas: FakeReplica) -> AsyncIterator[tuple[Running, Overtaken]]:
    config = load(None, {"listen": "127.0.0.1:0", "pools": [{"replicas": [each.url for each in replicas]}]}, env={})
    gateway = compose(config, LOGGED, Surroundings(control_plane=Overtaken))
    assert isinstance(gateway.control, Overtaken)
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        yield run, gateway.control


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_a_replica_that_a_reload_has_named_before_it_is_removed_is_the_configurations(*, elsewhere: bool) -> None:
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three, overtaken(one) as (run, control):
        assert (await run.post({"url": two.url, "name": "x"}, path="/warmroute/replicas"))[0] == 201
        config = with_x(one, three if elsewhere else two)
        control.first = lambda: run.gateway.local.reload.take(config)
        async with run.session.delete(f"{run.admin_url}/warmroute/replicas/x") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (409, "replica_not_added")


@pytest.mark.parametrize("back", [True, False])
async def test_a_drain_of_a_replica_that_has_been_removed_says_what_drains_now(*, back: bool) -> None:
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three, overtaken(one) as (run, control):
        added = {"url": two.url, "name": "x"}
        assert (await run.post(added, path="/warmroute/replicas"))[0] == 201

        async def leave() -> None:
            await control.execute(Leave("x"))
            run.gateway.fleet.forget_departed()
            if back:
                await control.execute(Join("default", AddedReplica(three.url, "x")))

        control.first = leave
        status, _, answer = await run.post({"name": "x"}, path="/warmroute/drain")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (409, "replica_removed", "name")
        assert (f"Another replica has its name now, {three.url}, and is draining." in answer["error"]["message"]) is back


async def test_no_command_waits_for_the_first_probe_of_an_addition() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=60) as run:
        fleet, control = run.gateway.fleet, run.gateway.control
        adding = asyncio.create_task(control.execute(Join("default", AddedReplica(two.url, "x"))))
        await gate.asked.wait()
        async with asyncio.timeout(30):
            await control.execute(Join("default", AddedReplica(one.url, "y")))
            await control.execute(Drain("x", on=True))
            await control.execute(Leave("y"))
        assert (x := fleet.named("x"))
        assert (x.up, x.draining, adding.done()) == (False, True, False)
        gate.open.set()
        await adding
        assert x.up


async def test_an_addition_that_does_not_answer_is_down_at_first_and_is_waited_for_no_longer_than_it_may() -> None:
    gate = Gate()
    gate.open.clear()
    health = {"interval_s": 60, "timeout_s": 60}
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=0.2, health=health) as run:
        async with asyncio.timeout(30):  # not the timeout of a probe
            await run.gateway.control.execute(Join("default", AddedReplica(two.url, "x")))
        state = run.gateway.fleet.named("x")
        assert state
        assert not state.up
        gate.open.set()
        await eventually(lambda: state.up)


async def test_a_replica_that_comes_back_is_not_drained() -> None:
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}}
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, **raw) as run:
        both = run.gateway.config
        await run.gateway.control.execute(Drain(two.name, on=True))
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [one.url]}]}, env={}))
        await run.gateway.local.reload.take(both)
        state = run.gateway.fleet.named(two.name)
        assert state
        assert not state.draining, "whether it was forgotten in between or not"


async def test_neither_the_gateway_itself_nor_a_name_that_is_taken_is_added() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, listen="127.0.0.1:8999") as run:
        membership = run.gateway.local.membership
        itself, taken = Member("self", "http://localhost:8999", "default"), Member(one.name, two.url, "default")
        for refused, why in ((itself, "is this gateway itself"), (taken, "a replica from configuration has its name")):
            with pytest.raises(ConfigError, match=why):
                await membership.add(refused)
        assert [state.name for state in run.gateway.fleet.replicas] == [one.name]


class Source:
    """Names the same members whenever it is watched; then it ends."""

    name, pool, settings, problem = "toy", "default", None, ""

    def __init__(self, *members: Member) -> None:
        self._members = members
        self.watched = 0

    async def watch(self, *, expects: bool) -> AsyncIterator[Sequence[Member]]:
        self.watched += 1
        yield self._members


class QueueSource:
    """Yields what a test puts into its queue; an exception is raised."""

    def __init__(self, name: str = "toy", settings: str = "", pool: str = "default") -> None:
        self.name, self.pool, self.settings, self.problem = name, pool, settings, ""
        self.queue: asyncio.Queue[Sequence[Member] | Exception] = asyncio.Queue()

    async def watch(self, *, expects: bool) -> AsyncIterator[Sequence[Member]]:
        while True:
            found = await self.queue.get()
            if isinstance(found, Exception):
                raise found
            yield found


def there(run: Running) -> set[str]:
    """The names of the replicas that are no longer leaving."""
    return {state.name for state in run.gateway.fleet.replicas}


def with_source(
    run: Running, *fixed: MemberSource, sources: Sequence[MemberSource] = (), first_wait_s: float = 2.0
) -> Membership:
    """sources: may change until the next reload."""
    gateway = run.gateway
    return Membership(
        live=gateway.live,
        fleet=gateway.fleet,
        upstream=gateway.upstream,
        sources_of=lambda _config: tuple(fixed or sources),
        first_wait_s=first_wait_s,
        retry_s=0.01,
    )


@contextlib.asynccontextmanager
async def watched(membership: Membership) -> AsyncIterator[None]:
    watching = asyncio.create_task(membership.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def test_an_operator_does_not_take_the_name_of_a_source_s_replica(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        membership = with_source(run, Source(Member("pod", two.url, "default")))
        async with watched(membership):
            await eventually(lambda: run.gateway.fleet.named("pod"))
            status, _, error = await run.post({"url": one.url, "name": "pod"}, path="/warmroute/replicas")
            assert (status, error["error"]["code"]) == (409, "replica_exists")
            with pytest.raises(ConfigError, match="no operator has added"):
                await membership.remove("pod")
            # In other processes the source may not have found it yet: a command is decided without sources, alike in all.
            await membership.add(Member("pod", one.url, "default"))
            assert (state := run.gateway.fleet.named("pod"))
            assert state.url == one.url
            assert membership.source_of("pod") == "operators"
            assert "a replica from operators has its name already" in [
                getattr(record, "error", "") for record in caplog.records
            ]


async def test_a_source_that_ends_is_watched_again_and_its_members_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        source = Source(Member("pod", two.url, "default"))
        watching = asyncio.create_task(with_source(run, source).run())
        await eventually(lambda: source.watched > 3)
        assert run.gateway.fleet.named("pod")
        assert "source of replicas does not work: it is tried again" in caplog.text
        watching.cancel()
