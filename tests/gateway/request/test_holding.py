"""Requests at once with one cold head, over sockets, at an engine that does not share prefixes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica, FakeRequest, dies_now, models, streams

Lines = Callable[[], list[dict[str, Any]]]
HEAD = "You work on source code. " * 400


def body(name: str, head: str = HEAD) -> dict[str, Any]:
    messages = [{"role": "system", "content": head}, {"role": "user", "content": name}]
    return {"model": "m", "messages": messages, "stream": True}


class SlowEngine:
    """Computes until it is told to go on. `tgi` in a configuration: it does not share prefixes in flight."""

    def __init__(self) -> None:
        self.dies = False  # then, in place of an answer
        self.computed = asyncio.Event()
        self.arrived = list[str]()
        self.replica = FakeReplica([self._answer])

    @property
    def config(self) -> dict[str, Any]:
        return {"url": self.replica.url, "engine": "tgi"}

    async def _answer(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        self.arrived.append(request.json["messages"][1]["content"])
        await self.computed.wait()
        if self.dies:
            dies_now(writer)
        else:
            await streams("good")(request, writer)


@asynccontextmanager
async def in_front_of(*engines: SlowEngine, **config: Any) -> AsyncIterator[Running]:
    async with contexts(*engines):
        pool = {"replicas": [engine.config for engine in engines]}
        async with running(pools=[pool], **config) as run:
            yield run


@asynccontextmanager
async def contexts(*engines: SlowEngine) -> AsyncIterator[None]:
    if not engines:
        yield
        return
    async with engines[0].replica, contexts(*engines[1:]):
        yield


async def send(run: Running, name: str, head: str = HEAD) -> int:
    async with run.session.post(f"{run.url}/v1/chat/completions", json=body(name, head)) as answer:
        text = await answer.text()
        assert "good" in text or answer.status != 200, text
        return answer.status


def waiting(run: Running) -> int:
    """Requests that are held."""
    loads = run.gateway.router.ledger.loads.values()
    return sum(lease.lead is not None for load in loads for lease in load.waiting)


async def ended(run: Running) -> dict[str, int]:
    """Ends of waits, by result."""
    found = await run.metrics()
    key = 'warmroute_held_seconds_count{result="'
    return {name.removeprefix(key).removesuffix('"}'): int(value) for name, value in found.items() if name.startswith(key)}


async def test_one_of_six_computes_the_head_and_the_others_wait_for_its_first_token(request_lines: Lines) -> None:
    engine = SlowEngine()
    async with in_front_of(engine) as run:
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(6)]
        await eventually(lambda: waiting(run) == 5 and len(engine.arrived) == 1)
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 6
        assert sorted(engine.arrived) == [f"task {number}" for number in range(6)]
        assert await ended(run) == {"computed": 5}
        lines = request_lines()
        assert sum("held_s" in line for line in lines) == 5
        assert all(0 < line["held_s"] <= line["ttft_s"] for line in lines if "held_s" in line)


async def test_alone_and_among_strangers_nobody_waits(request_lines: Lines) -> None:
    engine = SlowEngine()
    async with in_front_of(engine) as run:
        sent = [asyncio.create_task(send(run, f"task {number}", f"{number}" + HEAD)) for number in range(4)]
        await eventually(lambda: len(engine.arrived) == 4)
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 4
        assert await send(run, "next", "0" + HEAD) == 200
        assert await ended(run) == {}
        assert not any("held_s" in line for line in request_lines())


async def test_the_next_one_leads_when_the_client_of_the_first_leaves() -> None:
    engine = SlowEngine()
    async with in_front_of(engine) as run:
        first = asyncio.create_task(send(run, "first"))
        await eventually(lambda: engine.arrived == ["first"])
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(4)]
        await eventually(lambda: waiting(run) == 4)
        first.cancel()
        await eventually(lambda: len(engine.arrived) == 2)
        await eventually(lambda: waiting(run) == 3)
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 4
        assert await ended(run) == {"lost": 1, "computed": 3}


async def test_when_the_first_ones_replica_dies_another_one_computes_the_head_once() -> None:
    """The lead moves, and those who wait for it follow it there."""
    one, two = SlowEngine(), SlowEngine()
    async with in_front_of(one, two) as run:
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(5)]
        await eventually(lambda: waiting(run) == 4 and one.arrived + two.arrived)
        first, other = (one, two) if one.arrived else (two, one)
        assert (len(first.arrived), len(other.arrived)) == (1, 0)
        first.dies = True
        first.computed.set()
        await eventually(lambda: other.arrived == first.arrived[:1])
        await eventually(lambda: waiting(run) == 4)
        other.computed.set()
        assert await asyncio.gather(*sent) == [200] * 5


async def test_a_request_that_comes_from_a_replica_that_died_waits_for_nobody() -> None:
    one, two = SlowEngine(), SlowEngine()
    async with in_front_of(one, two) as run:
        sent = [asyncio.create_task(send(run, f"task {number}", f"{number}" + HEAD)) for number in range(2)]
        await eventually(lambda: len(one.arrived) == len(two.arrived) == 1)
        for load in run.gateway.router.ledger.loads.values():
            while not load.serial.proven:
                load.serial.learn(10_000, 1e9, 1.0)
        one.dies = True
        one.computed.set()
        await eventually(lambda: len(two.arrived) == 2)
        assert waiting(run) == 0
        two.computed.set()
        assert await asyncio.gather(*sent) == [200] * 2


async def test_a_client_that_leaves_while_it_waits_reaches_no_replica() -> None:
    engine = SlowEngine()
    async with in_front_of(engine) as run:
        first = asyncio.create_task(send(run, "first"))
        await eventually(lambda: engine.arrived == ["first"])
        second = asyncio.create_task(send(run, "second"))
        await eventually(lambda: waiting(run) == 1)
        second.cancel()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 1)
        engine.computed.set()
        assert await first == 200
        assert engine.arrived == ["first"]
        assert await ended(run) == {"left": 1}


async def test_with_slots_a_request_waits_for_the_end_of_the_one_before_it() -> None:
    """And not for its first token only: until then the prefix is in its slot."""
    end = asyncio.Event()
    async with FakeReplica([streams("good", hold=end)]) as replica:
        pool = {"replicas": [{"url": replica.url, "engine": "llamacpp"}]}
        async with running(pools=[pool]) as run:
            ledger = run.gateway.router.ledger
            ledger.restore(replica.name, (1e6, 1e5), 0.0, 0.0)  # ten tokens per second: it may wait for minutes
            ledger.rates.refresh()
            sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(2)]
            await eventually(lambda: any(load.decoding for load in ledger.loads.values()) and waiting(run) == 1)
            assert len(replica.requests) == 1
            end.set()
            assert await asyncio.gather(*sent) == [200] * 2
            assert await ended(run) == {"computed": 1}


async def test_a_lead_that_takes_much_longer_than_expected_is_not_waited_for() -> None:
    engine = SlowEngine()
    async with in_front_of(engine) as run:
        name = next(iter(run.gateway.router.replicas))
        run.gateway.router.ledger.restore(name, (1e6, 1e6 / 10_000.0), 0.0, 0.0)  # tokens per second
        run.gateway.router.ledger.rates.refresh()
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(2)]
        await eventually(lambda: len(engine.arrived) == 2)
        assert await ended(run) == {"late": 1}
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 2


@pytest.mark.parametrize("engine_name", ["vllm", "warmroute"])
async def test_engines_that_share_in_flight_get_all_at_once(engine_name: str) -> None:
    """And those of which it is to be learned."""
    engine = SlowEngine()
    async with contexts(engine), running(pools=[{"replicas": [{"url": engine.replica.url, "engine": engine_name}]}]) as run:
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(6)]
        await eventually(lambda: len(engine.arrived) == 6)
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 6


async def test_the_kind_of_a_recognised_engine_is_known_to_the_router() -> None:
    """It is recognised after it has joined, and reports no KV size."""
    async with FakeReplica(listing=models("m", owner="llamacpp")) as one, FakeReplica() as two, running(one, two) as run:
        router = run.gateway.router
        assert [router.shares_inflight(each.name) for each in (one, two)] == [False, None]


async def test_a_gateway_that_goes_down_ends_those_who_wait() -> None:
    engine = SlowEngine()
    async with in_front_of(engine, limits={"drain_timeout_s": 0.1}) as run:
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(3)]
        await eventually(lambda: waiting(run) == 2 and len(engine.arrived) == 1)
        run.gateway.running.drain()
        await run.gateway.running.wait(0.05, asyncio.Event(), lambda: None)
        assert all(status >= 500 for status in await asyncio.gather(*sent))
        assert len(engine.arrived) == 1


async def test_a_flood_with_one_head_reaches_the_engine_once() -> None:
    engine = SlowEngine()
    async with in_front_of(engine, limits={"connections": 400}) as run:
        sent = [asyncio.create_task(send(run, f"task {number}")) for number in range(100)]
        await eventually(lambda: waiting(run) == 99 and len(engine.arrived) == 1)
        engine.computed.set()
        assert await asyncio.gather(*sent) == [200] * 100
