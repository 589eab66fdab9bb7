"""The members of a running gateway: reloads, operators and sources that change them at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.app import Surroundings, compose
from gateway.cluster.commands import LocalControl, SingleProcess
from gateway.cluster.membership import Membership
from gateway.cluster.messages import Command, Drain, Join, Leave
from gateway.config.parse import ConfigError
from gateway.config.schema import Config, ReplicaConfig
from gateway.config.source import load
from gateway.fleet.membership import Member
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import BODY, LOGGED, Running, eventually, running, serving_runner
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


async def test_a_replica_that_a_source_names_while_its_forerunner_is_forgotten_is_guarded() -> None:
    gate = Gate()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one) as run:
        membership = with_source(run, Source(Member("y", two.url, "default")))
        await membership.add(Member("x", two.url, "default"))
        await membership.probed("x")
        await membership.remove("x")
        gate.asked.clear()
        gate.open.clear()
        watching = asyncio.create_task(membership.run())
        await gate.asked.wait()
        for url in run.gateway.fleet.forget_departed():
            run.gateway.upstream.forget(url)
        assert not run.gateway.fleet.named("x")
        gate.open.set()
        await eventually(lambda: run.gateway.fleet.named("y"))
        assert guarded(run, two.url)
        watching.cancel()


async def test_a_url_that_a_source_names_is_guarded_before_its_first_probe() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one) as run:
        watching = asyncio.create_task(with_source(run, Source(Member("y", two.url, "default"))).run())
        await gate.asked.wait()
        assert not run.gateway.fleet.named("y")
        assert guarded(run, two.url)
        watching.cancel()
        gate.open.set()


async def test_a_reload_waits_for_replicas_that_do_not_answer_no_longer_than_it_may_and_operators_no_longer_than_it() -> None:
    gate = Gate()
    gate.open.clear()
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60, "timeout_s": 60}}
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=0.3, **raw) as run:
        config = load(None, {**raw, "pools": [{"replicas": [one.url, two.url]}]}, env={})
        reloading = asyncio.create_task(run.gateway.local.reload.take(config))
        await gate.asked.wait()
        async with asyncio.timeout(30):  # not the timeout of a probe
            await run.gateway.control.execute(Join("default", ReplicaConfig(one.url, "x")))
            await reloading
        assert {state.name: state.up for state in run.gateway.fleet.replicas} == {one.name: True, two.name: False, "x": True}
        gate.open.set()
        await eventually(lambda: all(state.up for state in run.gateway.fleet.replicas))


async def test_a_probe_that_is_given_up_keeps_the_way_to_a_replica_that_is_leaving() -> None:
    """A source names the URL of a replica that is leaving, and is no longer watched before it has answered."""
    gate, go_on = Gate(), asyncio.Event()
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}}
    old = FakeReplica([streams("a", "b", hold=go_on)], listing=gate)
    async with old, FakeReplica() as new, running(old, **raw) as run:
        parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [new.url]}]}, env={}))
        gate.asked.clear()
        gate.open.clear()
        watching = asyncio.create_task(with_source(run, Source(Member("again", old.url, "default"))).run())
        await gate.asked.wait()
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled()
        assert old.name in repr(run.gateway.upstream)
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        await eventually(lambda: old.name not in repr(run.gateway.upstream))
        gate.open.set()


async def test_what_link_local_addresses_are_allowed_for_changes_with_a_reload() -> None:
    raw: dict[str, Any] = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}}
    async with FakeReplica() as one, FakeReplica() as two, running(one, **raw) as run:
        await run.gateway.local.membership.add(Member("x", two.url, "default"))
        assert guarded(run, two.url)
        before = run.gateway.config
        await run.gateway.local.reload.take(replace(before, allow_link_local=True))
        assert not guarded(run, two.url)
        await run.gateway.local.reload.take(before)
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
                await control.execute(Join("default", ReplicaConfig(three.url, "x")))

        control.first = leave
        status, _, answer = await run.post({"name": "x"}, path="/warmroute/drain")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (409, "replica_removed", "name")
        assert (f"What has its name now, {three.url}, is draining." in answer["error"]["message"]) is back


async def test_no_command_waits_for_the_first_probe_of_an_addition() -> None:
    gate = Gate()
    gate.open.clear()
    async with FakeReplica() as one, FakeReplica(listing=gate) as two, running(one, first_probes_s=60) as run:
        fleet, control = run.gateway.fleet, run.gateway.control
        adding = asyncio.create_task(control.execute(Join("default", ReplicaConfig(two.url, "x"))))
        await gate.asked.wait()
        async with asyncio.timeout(30):
            await control.execute(Join("default", ReplicaConfig(one.url, "y")))
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
            await run.gateway.control.execute(Join("default", ReplicaConfig(two.url, "x")))
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
        for refused, why in ((itself, "is this gateway itself"), (taken, "from configuration already")):
            with pytest.raises(ConfigError, match=why):
                await membership.add(refused)
        assert [state.name for state in run.gateway.fleet.replicas] == [one.name]


class Source:
    """Names the same members whenever it is watched; then it ends."""

    name = "toy"

    def __init__(self, *members: Member) -> None:
        self._members = members
        self.watched = 0

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        self.watched += 1
        yield self._members


def with_source(run: Running, source: Source) -> Membership:
    gateway = run.gateway
    return Membership(live=gateway.live, fleet=gateway.fleet, upstream=gateway.upstream, sources=[source], retry_s=0.01)


async def test_an_operator_does_not_take_the_name_of_a_source_s_replica() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        source = Source(Member("pod", two.url, "default"))
        membership = with_source(run, source)
        watching = asyncio.create_task(membership.run())
        await eventually(lambda: run.gateway.fleet.named("pod"))
        with pytest.raises(ConfigError, match="from toy already"):
            await membership.add(Member("pod", one.url, "default"))
        with pytest.raises(ConfigError, match="no operator has added"):
            await membership.remove("pod")
        watching.cancel()


async def test_a_source_that_ends_is_watched_again_and_its_members_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        source = Source(Member("pod", two.url, "default"))
        watching = asyncio.create_task(with_source(run, source).run())
        await eventually(lambda: source.watched > 3)
        assert run.gateway.fleet.named("pod")
        assert "member source ended" in caplog.text
        watching.cancel()
