"""A replica that is killed (SIGKILL, a real process): before its first byte nobody notices; in the middle of a stream every
official client raises, or the stream continues on another replica. An answer that is cut off never looks complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.sdk.processes import Process, process
from tests.clients.sdk.tap import Tapped
from tests.gateway.conftest import Running, running
from tests.support.tiers import gate

LENGTH = 12_000  # tokens: a minute, for a slow hour; it is killed long before
ENDLESS: Any = {"ignore_eos": True}
USER: Any = [{"role": "user", "content": "Tell me a long story, please."}]


@contextlib.asynccontextmanager
async def fleet(folder: Path, count: int, *, chat_only: bool, slow: bool = False, **pool: Any) -> AsyncIterator[Any]:
    """count replicas behind a gateway: (gateway, replicas)."""
    async with contextlib.AsyncExitStack() as stack:
        rate = 25.0 if slow else 1e6
        starting = (process(folder / f"{at}.log", chat_only=chat_only, prefill_rate=rate) for at in range(count))
        replicas = [await stack.enter_async_context(one) for one in starting]
        pools = [{"replicas": [one.url for one in replicas], **pool}]
        yield await stack.enter_async_context(running(pools=pools)), replicas


async def busy(run: Running, replicas: list[Process]) -> Process:
    """The replica that has the request."""
    async with asyncio.timeout(40):
        while True:
            for one in replicas:
                async with run.session.get(one.url + "/load") as answer:
                    if (await answer.json())["server_load"]:
                        return one


Killing = Callable[[], Any]


async def chat(tapped: Tapped, kill: Killing, length: int = LENGTH) -> str:
    body: Any = {"model": "m", "messages": USER, "max_tokens": length, "extra_body": ENDLESS}
    text, reason = "", None
    async with tapped.openai() as client:
        async for part in await client.chat.completions.create(**body, stream=True):
            for choice in part.choices:
                text, reason = text + (choice.delta.content or ""), choice.finish_reason
            if text:
                await kill()
    assert reason == "length"
    return text


async def messages(tapped: Tapped, kill: Killing, length: int = LENGTH) -> str:
    body: Any = {"model": "m", "messages": USER, "max_tokens": length, "extra_body": ENDLESS}
    async with tapped.anthropic() as client, client.messages.stream(**body) as stream:
        async for _ in stream.text_stream:
            await kill()
        final = await stream.get_final_message()
    return "".join(block.text for block in final.content if block.type == "text")


async def responses(tapped: Tapped, kill: Killing, length: int = LENGTH) -> str:
    body: Any = {"model": "m", "input": USER, "max_output_tokens": length, "extra_body": ENDLESS}
    text = ""
    async with tapped.openai() as client:
        async for event in await client.responses.create(**body, stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
                await kill()
            if event.type in ("response.completed", "response.incomplete"):
                return text
    raise AssertionError("the stream ended without its last event, and nothing was raised")


TALKS = {"chat": chat, "messages": messages, "responses": responses}
RAISED = {"chat": openai.APIError, "messages": anthropic.APIStatusError, "responses": openai.APIError}
WAYS = [("chat", False), ("messages", False), ("messages", True), ("responses", False), ("responses", True)]
IDS = [f"{name}, {'translated' if chat_only else 'native'}" for name, chat_only in WAYS]


async def nothing() -> None:
    """Nobody is killed."""


@pytest.mark.parametrize(("name", "chat_only"), WAYS, ids=IDS)
@gate("chat, native", "responses, translated", reason="what is translated and what is not")
async def test_a_replica_that_is_killed_in_mid_stream_raises(name: str, chat_only: bool, tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, chat_only=chat_only) as (run, (replica,)):
        tapped = Tapped(run.url)
        with pytest.raises(RAISED[name], match="failed while it answered"):
            await TALKS[name](tapped, replica.kill)
        assert tapped.check() == [None], "its last event is an error"


@pytest.mark.parametrize(("name", "chat_only"), WAYS, ids=IDS)
@gate("chat, native", "messages, translated", reason="what is translated and what is not")
async def test_before_the_first_byte_nobody_notices(name: str, chat_only: bool, tmp_path: Path) -> None:
    """The prompt takes about a second to compute."""
    async with fleet(tmp_path, 2, chat_only=chat_only, slow=True) as (run, replicas):
        tapped = Tapped(run.url)
        asking = asyncio.create_task(TALKS[name](tapped, nothing, 5))
        await (await busy(run, replicas)).kill()
        assert await asking
        tapped.check()
        assert len(tapped.exchanges) == 1, "the client has not tried again"


async def test_a_chat_goes_on_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, chat_only=False, resume_streams=True) as (run, replicas):
        tapped = Tapped(run.url)
        undisturbed = await chat(tapped, nothing, 100)
        killed = list[Process]()

        async def kill() -> None:
            if not killed:
                killed.append(await busy(run, replicas))
                await killed[0].kill()

        told = await chat(tapped, kill, 100)
        assert told.startswith(undisturbed), (
            "an engine that sends two tokens at once is asked for one too many (docs/operations.md)"
        )
        assert len(told.split()) <= len(undisturbed.split()) + 5
        assert len(killed) == 1
        tapped.check()
