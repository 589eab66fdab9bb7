"""What watchers get: bounds, slow ones, a gateway whose workers cannot be asked."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest

from gateway.cluster.commands import SingleProcess
from gateway.errors import GatewayError, supervisor_silent
from gateway.features.live_page.broadcast import MAX_WATCHERS, QUEUED, SHOWN_MODELS, Broadcast, PageWatcher
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, models


def data(event: bytes | None) -> tuple[str, dict[str, Any]]:
    assert event is not None
    name, body = event.decode().rstrip("\n").split("\n")
    return name.removeprefix("event: "), json.loads(body.removeprefix("data: "))


def made(run: Running, control: Any = None, every_s: float = 0.01) -> Broadcast:
    return Broadcast(run.gateway.local, control or run.gateway.control, time.time, every_s)


async def test_a_watcher_that_does_not_read_is_let_go() -> None:
    async with FakeReplica() as one, running(one) as run:
        broadcast = made(run)
        slow, quick = await broadcast.watch(), await broadcast.watch()
        async with asyncio.timeout(40):
            for _ in range(QUEUED + 3):
                assert data(await quick.next())[0] in ("hello", "frame")
            assert await slow.next() is None
        assert (slow.slow, quick.slow) == (True, False)
        broadcast.leave(slow)
        broadcast.leave(quick)


async def test_there_are_only_so_many() -> None:
    async with FakeReplica() as one, running(one) as run:
        broadcast = made(run)
        watchers = [await broadcast.watch() for _ in range(MAX_WATCHERS)]
        with pytest.raises(GatewayError, match="close a page"):
            await broadcast.watch()
        broadcast.leave(watchers[0])
        watchers[0] = await broadcast.watch()
        for watcher in watchers:
            broadcast.leave(watcher)


async def test_workers_that_cannot_be_asked_are_a_problem_that_passes() -> None:
    async with FakeReplica() as one, running(one) as run:

        class Failing(SingleProcess):
            silent = False

            async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
                if self.silent:
                    raise supervisor_silent()
                return await super().ask(topic, question)

        control = Failing(run.gateway.local)
        watcher = await made(run, control).watch()
        async with asyncio.timeout(40):
            assert data(await watcher.next())[0] == "hello"
            control.silent = True
            while data(event := await watcher.next())[0] != "problem":
                pass
            assert data(event)[1]["problem"]
            control.silent = False
            while data(await watcher.next())[0] != "frame":
                pass
        watcher.end()


async def test_a_worker_that_is_late_once_is_not_counted_anew() -> None:
    async with FakeReplica() as one, running(one) as run:

        class Two(SingleProcess):
            """One more worker. late: it does not answer."""

            late = False
            ended = 1000
            asked: Any = None

            async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
                self.asked = msgspec.msgpack.decode(question)
                first = await super().ask(topic, question)
                if self.late:
                    return first
                page = msgspec.msgpack.decode(first[0])
                other = {"ring": "r2", "process": "p2", "last": self.ended, "rows": [], "ended": self.ended, "hidden": 7}
                other["replicas"] = {one.name: [self.ended, 10.0]}
                return {**first, 1: msgspec.msgpack.encode({**page, **other})}

        control = Two(run.gateway.local)
        broadcast = made(run, control)
        assert (await broadcast.snapshot())["replicas"][0]["prompt_tokens"] == 1000
        watcher = await broadcast.watch()
        async with asyncio.timeout(40):
            await watcher.next()

            async def frame(workers: int) -> tuple[Any, ...]:
                while (found := data(await watcher.next())[1])["workers"] != workers:
                    assert found["ended"] == found["hidden"] == 0
                return found["ended"], found["hidden"], found["replicas"][0]["prompt_tokens"]

            control.late = True
            assert await frame(workers=1) == (0, 0, 1000)
            assert control.asked["cursors"]["r2"] == 1000
            control.late, control.ended = False, 1003
            assert await frame(workers=2) == (3, 0, 1003)
        watcher.end()
        broadcast.leave(watcher)


async def test_a_bug_ends_the_streams_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, running(one) as run:

        class Broken(SingleProcess):
            asked = 0

            async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
                self.asked += 1
                if self.asked > 1:
                    raise KeyError("a bug")
                return await super().ask(topic, question)

        watcher = await made(run, Broken(run.gateway.local)).watch()
        async with asyncio.timeout(40):
            assert data(await watcher.next())[0] == "hello"
            assert await watcher.next() is None
        assert "watchers are disconnected" in caplog.text


async def test_when_the_gateway_goes_down_the_streams_end() -> None:
    async with FakeReplica() as one, running(one) as run:
        broadcast = made(run)
        watcher = await broadcast.watch()
        broadcast.close()
        async with asyncio.timeout(40):
            while await watcher.next() is not None:
                pass
        assert not watcher.slow
        broadcast.leave(watcher)


async def test_lists_of_models_are_cut() -> None:
    async with FakeReplica(listing=models(*(f"m-{number}" for number in range(50)))) as one, running(one) as run:
        [row] = (await made(run).snapshot())["replicas"]
        assert (len(row["models"]), row["further_models"]) == (SHOWN_MODELS, 50 - SHOWN_MODELS)


async def test_events_are_read_in_their_order_to_the_end() -> None:
    watcher = PageWatcher()
    watcher.put(b"1")
    watcher.put(b"2")
    watcher.end()
    watcher.put(b"3")
    assert [await watcher.next() for _ in range(3)] == [b"1", b"2", None]
