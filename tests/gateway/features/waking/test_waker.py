"""Sleeping engines are woken when they are needed, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.features.waking.waker import PAUSE_S, Waker
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, hangs, http, models, status, writes


def page(*, level: int = 0, waiting: int = 0) -> Behaviour:
    """vLLM's metrics. level: of its sleep; 0: awake."""
    states = {"awake": level == 0, "weights_offloaded": level == 1, "discard_all": level == 2}
    lines = [f'vllm:num_requests_running{{engine="0"}} 0.0\nvllm:num_requests_waiting{{engine="0"}} {waiting}.0']
    lines += [f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {float(on)}' for name, on in states.items()]
    return writes(http(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4"))


class Sleeper(FakeReplica):
    """An engine that wakes up when it is asked to. woken: how often it was asked."""

    @classmethod
    def made(cls, level: int = 1, refuses: bool = False) -> Sleeper:
        async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            if request.path != "/wake_up":
                await answers()(request, writer)
            elif refuses:
                await status(404)(request, writer)
            else:
                engine.pages["/metrics"] = page()
                await writes(http(200, b'{"status":"awake","tags":null}'))(request, writer)

        engine = cls([behave], listing=models("m", owner="vllm"), pages={"/metrics": page(level=level)})
        return engine

    @property
    def woken(self) -> int:
        return sum(request.path == "/wake_up" for request in self.requests)


async def look(run: Running) -> None:
    await run.gateway.fleet.probe_all(run.gateway.upstream)


def awake(*waiting: int) -> list[FakeReplica]:
    return [
        FakeReplica([answers()], listing=models("m", owner="vllm"), pages={"/metrics": page(waiting=count)})
        for count in waiting
    ]


WAKES: Any = {"health": {"interval_s": 60, "wake": True}}


async def test_a_request_without_a_replica_wakes_one_and_is_answered_when_it_is_repeated() -> None:
    async with Sleeper.made() as first, Sleeper.made() as second, running(first, second, **WAKES) as run:
        await look(run)
        waker = run.gateway[Waker]
        waker.sweep(1000.0)
        assert not waker._waking, "nobody wants it"
        assert (await run.get("/ready"))[0] == 200, "else no request would come, and wake it"
        assert b'"id":"m"' in (await run.get("/v1/models"))[2]
        assert (await run.post(BODY))[0] == 503
        waker.sweep(1001.0)
        await eventually(lambda: any(state.live for state in run.gateway.fleet.replicas))  # it is probed at once
        assert (await run.post(BODY))[0] == 200
        assert first.woken + second.woken == 1


async def test_full_replicas_wake_one_after_the_other() -> None:
    full, free = awake(3, 0)
    async with full, free, Sleeper.made() as one, Sleeper.made() as two, running(full, free, one, two, **WAKES) as run:
        await look(run)
        waker = run.gateway[Waker]
        waker.sweep(1000.0)
        assert not waker._waking, "one of them is not full"
        free.pages["/metrics"] = page(waiting=1)
        await look(run)
        waker.sweep(1001.0)
        await eventually(lambda: one.woken + two.woken == 1 and not waker._waking)
        waker.sweep(1001.0 + PAUSE_S / 2)
        assert not waker._waking, "the first one takes load off the others meanwhile"
        woken = one if one.woken else two
        woken.pages["/metrics"] = page(waiting=9)
        await look(run)
        waker.sweep(1001.0 + PAUSE_S)
        await eventually(lambda: one.woken + two.woken == 2)


async def test_a_queue_wakes_one() -> None:
    busy = FakeReplica([hangs(asyncio.Event())], listing=models("m", owner="vllm"), pages={"/metrics": page()})
    async with busy, Sleeper.made() as one:
        pool = {"replicas": [busy.url, one.url], "max_inflight": 1}
        async with running(pools=[pool], **WAKES) as run:
            await look(run)
            sending = [asyncio.ensure_future(run.post(BODY)) for _ in range(2)]
            await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
            run.gateway[Waker].sweep(1000.0)
            await eventually(lambda: one.woken)
            for each in sending:
                each.cancel()


async def test_an_engine_that_has_discarded_its_weights_or_drains_is_left_alone() -> None:
    async with Sleeper.made(level=2) as lost, Sleeper.made() as drained, running(lost, drained, **WAKES) as run:
        await look(run)
        await run.post({"name": drained.name}, "/warmroute/drain")
        await run.post(BODY)
        run.gateway[Waker].sweep(1000.0)
        assert not run.gateway[Waker]._waking


async def test_an_engine_that_cannot_be_woken_is_asked_again_later() -> None:
    async with Sleeper.made(refuses=True) as one, running(one, **WAKES) as run:
        await look(run)
        waker = run.gateway[Waker]
        for now in (1000.0, 1001.0, 1000.0 + PAUSE_S):
            assert (await run.post(BODY))[0] == 503
            waker.sweep(now)
            await eventually(lambda: not waker._waking)
        assert one.woken == 2


async def test_by_default_nobody_is_woken() -> None:
    async with Sleeper.made() as one, running(one) as run:
        await look(run)
        assert (await run.post(BODY))[0] == 503
        assert run.gateway.part(Waker) is None
