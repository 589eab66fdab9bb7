"""Replicas that answer probes and generate nothing, over real sockets. Time is set: no test waits for a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gateway.app import compose
from gateway.cluster.messages import MessageError
from gateway.core import Surroundings
from gateway.features.hangs.hang_watch import CHECK_S, FRESH_S, SILENCE, HangWatch
from gateway.features.hangs.progress import FIRST_FLOOR_S, FLOOR_S
from gateway.fleet.state import ReplicaState
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, serving_runner
from tests.support.fakes import FakeReplica, FakeRequest
from tests.support.hanging_engine import HangingEngine, texts_of

LONG_S = 40.0  # longer than the silence that a prompt of BODY's size explains
STREAM = {"model": "m", "messages": [{"role": "user", "content": "hello " * 200}], "stream": True}
PLAIN = {**STREAM, "stream": False}
WITH_TOOLS = {**STREAM, "tools": [{"type": "function", "function": {"name": "f"}}]}


class SetClock:
    """Monotonic seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A gateway over engines, with a set clock."""

    def __init__(self, run: Running, clock: SetClock) -> None:
        self.run, self.clock = run, clock
        self.watch = run.gateway[HangWatch]
        self.asked = list[asyncio.Task[bytes]]()

    def state(self, engine: FakeReplica) -> ReplicaState:
        state = self.run.gateway.fleet.named(engine.name)
        assert state is not None
        return state

    def hung(self, *engines: FakeReplica) -> list[bool]:
        return [self.state(engine).hung for engine in engines]

    async def pass_s(self, seconds: float) -> None:
        """Let time pass: a look at each replica in each second, and a probe in each fifth."""
        for second in range(round(seconds)):
            if second % 5 == 0:
                await self.run.gateway.fleet.probe_all(self.run.gateway.upstream)
            self.clock.now += 1.0
            self.watch.sweep(self.clock.now)

    async def warm(self, *engines: FakeReplica, body: dict[str, Any] = STREAM) -> None:
        """Each engine has computed a prompt, so that it is none of the first ones."""
        for engine in engines:
            for other in engines:
                self.state(other).drained = other is not engine
                self.run.gateway.fleet._changed(self.state(other))
            assert texts_of(await self.stream({**body, "messages": [{"role": "user", "content": engine.name}]}))
            self.state(engine).drained = False
        for engine in engines:
            self.state(engine).drained = False
            self.run.gateway.fleet._changed(self.state(engine))

    async def stream(self, body: dict[str, Any]) -> bytes:
        async with self.run.session.post(f"{self.run.url}/v1/chat/completions", json=body) as answer:
            return await answer.read()

    async def ask(self, engine: HangingEngine, body: dict[str, Any] | None = None) -> asyncio.Task[bytes]:
        """A request that reaches this engine, and is booked there or answered."""
        before = len(engine.requests)
        others = [state for state in self.run.gateway.fleet.replicas if state is not self.state(engine)]
        for state in others:
            state.drained = True
            self.run.gateway.fleet._changed(state)
        task = asyncio.ensure_future(self.stream(body or STREAM))
        self.asked.append(task)
        await eventually(lambda: len(engine.requests) > before)
        for state in others:
            state.drained = False
            self.run.gateway.fleet._changed(state)
        await eventually(lambda: task.done() or self.run.gateway.router.ledger.of(engine.name).own_inflight)
        return task

    async def hang(self, engine: HangingEngine) -> None:
        """Let it hang until the watch has noticed. It has a request."""
        engine.works.clear()
        await self.until_checked(engine)
        await self.pass_s(CHECK_S + 1)
        assert self.hung(engine) == [True]

    async def until_checked(self, engine: HangingEngine) -> None:
        before, left = engine.checks, LONG_S
        while (watched := self.watch._watched.get(self.state(engine))) is None or watched.check is None:
            assert left, "it is checked"
            left -= 1
            await self.pass_s(1)
        await eventually(lambda: engine.checks > before)


@contextlib.asynccontextmanager
async def staged(*engines: FakeReplica, warm: bool = True, **config: Any) -> AsyncIterator[Stage]:
    clock = SetClock()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        config.setdefault(
            "limits", {"adopt_s": 0, "drain_timeout_s": 1}
        )  # else requests outlive their clients, by the set clock
        pools = config.pop("pools", None)
        made = config_over(*engines, **({"pools": pools([engine.url for engine in engines])} if pools else {}), **config)
        gateway = compose(made, LOGGED, Surroundings(clock=clock, late_s=60.0))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            stage = Stage(run, clock)
            if warm:
                await stage.warm(*engines)
            try:
                yield stage
            finally:
                for task in stage.asked:
                    task.cancel()
                await asyncio.gather(*stage.asked, return_exceptions=True)


@pytest.mark.parametrize("body", [STREAM, PLAIN])
async def test_its_requests_move_and_new_ones_go_elsewhere(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        one.works.clear()
        waiting = await stage.ask(one, body)
        await stage.until_checked(one)
        assert stage.hung(one, other) == [False, False], "the check may still be answered"
        await stage.pass_s(CHECK_S + 1)
        assert stage.hung(one, other) == [True, False]
        answer = await waiting
        assert texts_of(answer) == (["a", "b", "c"] if body["stream"] else ["hello"])
        (line,) = [each for each in caplog.records if each.message.startswith("replica hangs")]
        assert (line.levelname, line.replica, line.inflight, line.others) == ("WARNING", one.name, 1, True)

        asked = len(one.requests)
        for _ in range(5):
            await stage.stream(STREAM)  # one held this prompt, as far as it is known
        assert len(one.requests) == asked
        rows = json.loads((await stage.run.get("/warmroute/replicas"))[2])["replicas"]
        assert {row["name"]: row["hung"] for row in rows} == {one.name: True, other.name: False}
        metrics = await stage.run.metrics()
        assert metrics[f'warmroute_replica_hung{{replica="{one.name}"}}'] == 1
        assert metrics[f'warmroute_hung_requests_moved_total{{replica="{one.name}"}}'] == 1
        assert metrics['warmroute_retries_total{reason="hung"}'] == 1
        assert not any(value for name, value in metrics.items() if name.startswith("warmroute_replica_circuit_open{")), (
            "blameless"
        )


async def test_it_is_noticed_when_it_generates_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        one.works.clear()
        await stage.ask(one)
        await stage.hang(one)
        one.works.set()
        await eventually(lambda: stage.hung(one) == [False])  # by the running check, without any request
        assert "replica generates again" in caplog.text
        assert (await stage.run.metrics())[f'warmroute_replica_hung{{replica="{one.name}"}}'] == 0
        asked = len(one.requests)
        for number in range(50):
            await stage.stream({**STREAM, "messages": [{"role": "user", "content": f"{number} " * 500}]})
        assert len(one.requests) > asked


@pytest.mark.parametrize("opens", [False, True])
async def test_keep_alives_of_its_server_are_no_progress(opens: bool) -> None:
    one, other = HangingEngine(opens=opens), HangingEngine(opens=opens)
    async with staged(one, other) as stage:
        one.works.clear()
        waiting = await stage.ask(one)
        await stage.hang(one)
        answer = await waiting
        assert texts_of(answer) == ["a", "b", "c"]
        assert answer.count(b'"role"') == int(opens), "one beginning"


async def test_a_stream_that_has_tokens_stays_and_shows_the_recovery() -> None:
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        one.works.clear()
        first = await stage.ask(one)
        second = await stage.ask(one, {**STREAM, "messages": [{"role": "user", "content": "again " * 200}]})
        await stage.hang(one)
        assert texts_of(await first) == texts_of(await second) == ["a", "b", "c"]
        assert len(other.requests) == 3


async def test_an_engine_that_hangs_for_streams_only_is_checked_by_a_stream() -> None:
    one, other = HangingEngine(stuck=lambda request: request.json.get("stream") is True), HangingEngine()
    async with staged(one, other, warm=False) as stage:
        await stage.warm(one, other, body=PLAIN)
        waiting = await stage.ask(one)
        await stage.until_checked(one)
        await stage.pass_s(CHECK_S + 1)
        assert stage.hung(one) == [True]
        assert texts_of(await waiting) == ["a", "b", "c"], "from the other one"


async def test_another_worker_checks_by_a_stream_too() -> None:
    one, other = HangingEngine(stuck=lambda request: request.json.get("stream") is True), HangingEngine()
    async with staged(one, other, warm=False) as stage:
        stage.watch.receive(2, msgspec.msgpack.encode((one.name, True, "m", True)))
        await stage.pass_s(3)
        await eventually(lambda: one.checks == 1)
        assert [request.json.get("stream") for request in one.requests] == [True]
        assert stage.hung(one) == [True]


async def test_a_replica_has_a_series_before_it_hangs() -> None:
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other, warm=False) as stage:
        metrics = await stage.run.metrics()
        assert [metrics[f'warmroute_replica_hung{{replica="{each.name}"}}'] for each in (one, other)] == [0, 0]


async def test_without_another_replica_its_requests_stay() -> None:
    only = HangingEngine()
    async with staged(only) as stage:
        only.works.clear()
        waiting = await stage.ask(only)
        await stage.hang(only)
        later = await stage.ask(only, PLAIN)
        await stage.pass_s(10)
        assert not waiting.done()
        assert not later.done()
        only.works.set()
        assert (texts_of(await waiting), texts_of(await later)) == (["a", "b", "c"], ["hello"])
        await eventually(lambda: stage.hung(only) == [False])


async def test_a_fallback_pool_gets_its_requests() -> None:
    one, outside = HangingEngine(), HangingEngine()

    def pools(urls: list[str]) -> list[dict[str, Any]]:
        return [
            {"name": "main", "models": ["m"], "replicas": [urls[0]], "fallback": {"pool": "outside"}},
            {"name": "outside", "models": ["unused"], "replicas": [urls[1]]},
        ]

    async with staged(one, outside, warm=False, pools=pools) as stage:
        assert texts_of(await stage.stream(STREAM))
        one.works.clear()
        waiting = asyncio.ensure_future(stage.stream(STREAM))
        await eventually(lambda: len(one.requests) == 2)
        await stage.hang(one)
        assert texts_of(await waiting) == texts_of(await stage.stream(STREAM)) == ["a", "b", "c"]
        assert len(outside.requests) == 2


async def test_a_request_that_hangs_every_engine_does_not_reach_them_all() -> None:
    engines = [HangingEngine() for _ in range(4)]
    async with staged(*engines) as stage:
        for engine in engines:
            engine.works.clear()
        await stage.ask(engines[0])

        def reached() -> list[HangingEngine]:
            return [engine for engine in engines if len(engine.requests) - 1 - engine.checks]

        for count in (1, 2, 3):
            await eventually(lambda count=count: len(reached()) == count)  # type: ignore[misc]
            (present,) = (engine for engine in reached() if stage.hung(engine) == [False])
            await stage.hang(present)
        await stage.pass_s(2 * LONG_S)
        assert len(reached()) == 3
        assert sum(stage.hung(*engines)) == 3, "one was never asked"


# -- what is no hang


def poisoned(request: FakeRequest) -> bool:
    return b"POISON" in request.body


async def test_a_request_that_never_gets_a_token_shows_nothing_about_its_replica() -> None:
    one = HangingEngine(stuck=poisoned)
    async with staged(one, HangingEngine()) as stage:
        await stage.ask(one, {**STREAM, "messages": [{"role": "user", "content": "POISON"}], "max_tokens": 10**9})
        for _ in range(20):
            await stage.pass_s(30)
            await eventually(lambda: stage.watch._watched[stage.state(one)].check is None)
        assert stage.hung(one) == [False]
        assert 2 <= one.checks <= 10, "rarer and rarer in these ten minutes"


async def test_a_long_prefill_is_explained_by_its_prompt() -> None:
    one = HangingEngine()
    async with staged(one, HangingEngine()) as stage:
        one.works.clear()
        await stage.ask(one, {**STREAM, "messages": [{"role": "user", "content": "word " * 20_000}]})
        await stage.pass_s(300)
        assert (stage.hung(one), one.checks) == ([False], 0)


async def test_the_first_prompt_of_a_slow_engine_without_counters_may_take_half_an_hour() -> None:
    """An agent's first prompt, at 7 tokens/s: a check would only wait behind it."""
    one = HangingEngine(counts=False)
    async with staged(one, warm=False) as stage:
        one.works.clear()
        await stage.ask(one, {**STREAM, "messages": [{"role": "user", "content": "word " * 8_000}]})
        await stage.pass_s(600)
        assert (stage.hung(one), one.checks) == ([False], 0)


async def test_an_engine_whose_own_counters_move_is_not_checked() -> None:
    one = HangingEngine()
    async with staged(one, HangingEngine()) as stage:
        one.works.clear()
        await stage.ask(one)
        for _ in range(50):
            one.computed += 1
            await stage.pass_s(4)
        assert (stage.hung(one), one.checks) == ([False], 0)


async def test_the_first_prompt_of_an_engine_may_take_longer() -> None:
    one = HangingEngine()
    async with staged(one, warm=False) as stage:
        one.works.clear()
        await stage.ask(one)
        await stage.pass_s(FIRST_FLOOR_S)
        assert one.checks == 0
        await stage.until_checked(one)


@pytest.mark.parametrize(("body", "judged"), [(PLAIN, False), (STREAM, True), (WITH_TOOLS, False)])
async def test_without_counters_of_the_engine_an_unseen_generation_may_explain_the_silence(
    body: dict[str, Any], judged: bool
) -> None:
    """A check would wait behind it, in an engine that computes one request at a time."""
    one = HangingEngine(counts=False)
    async with staged(one, HangingEngine(counts=False)) as stage:
        one.works.clear()
        await stage.ask(one, body)
        if judged:
            await stage.hang(one)
        else:
            await stage.pass_s(300)
            assert (stage.hung(one), one.checks) == ([False], 0)


async def test_a_replica_whose_clients_have_left_is_not_judged() -> None:
    one = HangingEngine()
    async with staged(one, HangingEngine()) as stage:
        one.works.clear()
        waiting = await stage.ask(one)
        await stage.until_checked(one)
        waiting.cancel()
        await eventually(lambda: not stage.run.gateway.router.ledger.of(one.name).inflight)
        await stage.pass_s(100)
        assert stage.hung(one) == [False]
        await eventually(lambda: one.gone == 2)  # the request and the check


async def test_a_replica_that_goes_down_is_forgotten() -> None:
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        one.works.clear()
        await stage.ask(one)
        await stage.hang(one)
        await one.stop()
        await stage.pass_s(2)
        assert (stage.state(one).up, stage.hung(one)) == (False, [False])
        assert not stage.watch._watched


# -- several workers


def test_the_floors_are_shorter_than_any_time_limit() -> None:
    assert FLOOR_S < FIRST_FLOOR_S < 600


async def test_another_worker_tells() -> None:
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        one.works.clear()
        waiting = await stage.ask(one)
        stage.watch.receive(2, msgspec.msgpack.encode((one.name, True, "m", True)))
        assert stage.hung(one) == [True]
        assert texts_of(await waiting) == ["a", "b", "c"], "its own requests move, too"
        stage.watch.receive(2, msgspec.msgpack.encode((one.name, True, "m", True)))
        stage.watch.receive(2, msgspec.msgpack.encode((one.name, False, "m", True)))
        assert stage.hung(one) == [False]
        stage.watch.receive(2, msgspec.msgpack.encode(("no such replica", True, "m", True)))
        with pytest.raises(MessageError):
            stage.watch.receive(2, b"\x93garbage")


@pytest.mark.parametrize(("told", "others", "judged"), [(1, 1, True), (0, 1, False), (1, 2, False)])
async def test_without_counters_of_the_engine_workers_tell_each_other_of_their_requests(
    told: int, others: int, judged: bool
) -> None:
    """told: requests of which another worker tells; others: of other workers and gateways."""
    one, said = HangingEngine(counts=False), list[tuple[str, int]]()

    def publish(topic: str, message: bytes) -> None:
        if topic == SILENCE:
            said.append(msgspec.msgpack.decode(message, type=tuple[str, int]))
            if told:
                stage.watch.receive_silence(2, msgspec.msgpack.encode((one.name, told)))

    async with staged(one, HangingEngine(counts=False)) as stage:
        stage.run.gateway.control.publish = publish
        one.works.clear()
        await stage.ask(one)
        ledger = stage.run.gateway.router.ledger
        leases = [ledger.open(one.name, 100, 100, stage.clock.now, remote=True) for _ in range(others)]
        if judged:
            await stage.hang(one)
        else:
            await stage.pass_s(300)
            assert (stage.hung(one), one.checks) == ([False], 0)
        assert set(said) == {(one.name, 1)}
        for lease in leases:
            lease.close(stage.clock.now)


async def test_what_a_worker_told_is_soon_old() -> None:
    one = HangingEngine(counts=False)
    async with staged(one, HangingEngine(counts=False)) as stage:
        one.works.clear()
        await stage.ask(one)
        await stage.pass_s(1)
        (watched,) = stage.watch._watched.values()
        for sender in (2, 3):
            stage.watch.receive_silence(sender, msgspec.msgpack.encode((one.name, 5)))
        assert watched.silent_elsewhere(stage.clock.now + FRESH_S) == 10
        assert watched.silent_elsewhere(stage.clock.now + FRESH_S + 1) == 0
        stage.watch.receive_silence(2, msgspec.msgpack.encode(("no such replica", 5)))
        with pytest.raises(MessageError):
            stage.watch.receive_silence(2, b"\x93garbage")


@pytest.mark.parametrize("body", [PLAIN, WITH_TOOLS])
async def test_a_worker_does_not_tell_of_requests_that_may_explain_a_silence(body: dict[str, Any]) -> None:
    one, said = HangingEngine(counts=False), list[str]()
    async with staged(one, HangingEngine(counts=False)) as stage:
        publish: Callable[[str, bytes], None] = lambda topic, _message: said.append(topic)  # noqa: E731
        stage.run.gateway.control.publish = publish
        one.works.clear()
        await stage.ask(one, body)
        lease = stage.run.gateway.router.ledger.open(one.name, 100, 100, stage.clock.now, remote=True)
        await stage.pass_s(300)
        assert SILENCE not in said
        lease.close(stage.clock.now)


async def test_the_verdict_is_told() -> None:
    told = list[tuple[str, bool, str, bool]]()
    one, other = HangingEngine(), HangingEngine()
    async with staged(one, other) as stage:
        publish: Callable[[str, bytes], None] = lambda _topic, message: told.append(msgspec.msgpack.decode(message))  # noqa: E731
        stage.run.gateway.control.publish = publish
        one.works.clear()
        await stage.ask(one)
        await stage.hang(one)
        one.works.set()
        await eventually(lambda: stage.hung(one) == [False])
    assert [tuple(each) for each in told] == [(one.name, True, "m", True), (one.name, False, "m", True)]
