"""Going down: what runs may finish, what does not is told so, and it takes no longer than it should."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import openai
import pytest

from gateway.app import compose, serve
from gateway.config import load
from tests.fakes import FakeReplica, hangs, streams
from tests.gateway.conftest import BODY, LOGGED, eventually


@dataclass(slots=True)
class Serving:
    url: str
    client: openai.AsyncOpenAI
    stop: asyncio.Event
    hurry: asyncio.Event
    over: asyncio.Task[None]

    async def refuses(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except ConnectionError:
            return True
        writer.close()
        return False


@contextlib.asynccontextmanager
async def serving(replica: FakeReplica, drain_timeout_s: float) -> AsyncIterator[Serving]:
    """The gateway as the command runs it."""
    raw = {"listen": "127.0.0.1:0", "pools": [{"replicas": [replica.url]}], "limits": {"drain_timeout_s": drain_timeout_s}}
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    over = asyncio.create_task(serve(compose(load(None, raw, env={}), LOGGED), stop, hurry, started.set_result))
    url = await started
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            yield Serving(url, client, stop, hurry, over)
    finally:
        stop.set()
        hurry.set()
        await over


async def test_a_running_stream_finishes_and_nothing_new_is_accepted() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as replica, serving(replica, 60) as gateway, asyncio.timeout(20):
        parts = aiter(await gateway.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        gateway.stop.set()
        while not await gateway.refuses():  # noqa: ASYNC110  (a listening socket has no event)
            await asyncio.sleep(0.002)
        assert not gateway.over.done()
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        await gateway.over


@pytest.mark.parametrize("by", ["time", "a second signal"])
async def test_what_does_not_finish_is_ended_with_a_word(by: str) -> None:
    never = asyncio.Event()
    replica = FakeReplica([streams("a", "b", hold=never), hangs(never)])
    limit = 0.2 if by == "time" else 600
    async with replica, serving(replica, limit) as gateway, aiohttp.ClientSession() as session, asyncio.timeout(20):
        parts = aiter(await gateway.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        waiting = asyncio.create_task(session.post(f"{gateway.url}/v1/chat/completions", json=BODY))
        await eventually(lambda: len(replica.requests) == 2)
        gateway.stop.set()
        if by != "time":
            gateway.hurry.set()
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(parts)
        answer = await waiting
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["Connection"] == "close"
        await gateway.over
