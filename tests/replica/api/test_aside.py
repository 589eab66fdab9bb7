"""Slow preparation does not hold up other requests. Events decide, not times: a gate holds what is prepared aside."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from replica.api.bodies import LONG_BODY
from replica.api.server import ServerConfig
from replica.engine import Detokenizer, EngineRequest, Grammar, Message, PromptEnd, Sequence, TemplateOverride
from replica.sim.cost import SimConfig
from tests.replica.api.test_server import chat
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import FakeClock, WatchedEngine

CHAT = "/v1/chat/completions"
LONG = "x" * LONG_BODY


class GatedEngine(WatchedEngine):
    """Long conversations and grammars wait at the gate, in whatever thread they are looked at."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate, self.entered = threading.Event(), asyncio.Event()
        self.only_first = False  # the gate is open for those that come later
        self.requests: list[EngineRequest] = []
        self._loop = asyncio.get_running_loop()

    def _wait(self) -> None:
        if self.only_first and self.entered.is_set():
            return
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.gate.wait(60), "the event loop waits for this thread"

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd = "answer",
        template: TemplateOverride | None = None,
    ) -> list[int]:
        if len(messages[-1]["content"]) >= LONG_BODY:
            self._wait()
        return super().encode_chat(messages, tools, end, template)

    def detokenizer(self, special: bool = False) -> Detokenizer:
        if special:  # not for an answer
            self._wait()
        return super().detokenizer(special)

    def grammar_error(self, grammar: Grammar) -> str | None:
        self._wait()
        return super().grammar_error(grammar)

    def submit(self, request: EngineRequest) -> Sequence:
        self.requests.append(request)
        return super().submit(request)


@dataclass(frozen=True, slots=True)
class Gated:
    replica: Replica
    engine: GatedEngine
    clock: FakeClock

    def ask(self, body: dict[str, Any]) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.replica.post(CHAT, body))

    async def finish(self, *asking: "asyncio.Task[Any]") -> list[int]:
        """Let time pass until all are answered; their statuses."""
        with self.clock.running():
            return [status for status, *_ in await asyncio.gather(*asking)]


@pytest.fixture
async def gated() -> AsyncIterator[Gated]:
    clock = FakeClock()
    engine = GatedEngine(SimConfig(kv_tokens=80_000, prefill_rate=1e5, decode_rate=100.0), clock)
    async for replica in serve(engine, clock, ServerConfig(max_queue=2)):
        yield Gated(replica, engine, clock)
        engine.gate.set()


@pytest.mark.parametrize(
    ("slow", "status"),
    [(chat(LONG), 200), (chat(LONG, truncation="auto"), 200), (chat("Hi", guided_regex="a"), 400)],
)
async def test_streams_and_small_requests_go_on_meanwhile(gated: Gated, slow: dict[str, Any], status: int) -> None:
    stream = asyncio.create_task(
        gated.replica.http.post(gated.replica.url + CHAT, json=chat("Hi", stream=True, ignore_eos=True, max_tokens=3))
    )
    await gated.engine.submitted.wait()
    gated.clock.advance(0.01)
    async with await stream as response:
        slowly = gated.ask(slow)
        await gated.engine.entered.wait()
        texts = [b""]
        while b"[DONE]" not in texts[-1]:
            gated.clock.advance(0.01)
            texts.append(await response.content.readuntil(b"\n\n"))
        frames = [orjson.loads(text[6:]) for text in texts[1:-1]]
        assert frames[-1]["choices"][0]["finish_reason"] == "length"
    assert await gated.finish(gated.ask(chat("Hi"))) == [200]
    assert not slowly.done()
    gated.engine.gate.set()
    assert await gated.finish(slowly) == [status]


async def test_small_requests_go_on_while_a_long_list_of_tokens_is_spelled(gated: Gated) -> None:
    slowly = asyncio.create_task(gated.replica.post("/detokenize", {"tokens": [7] * LONG_BODY}))
    await gated.engine.entered.wait()
    assert await gated.finish(gated.ask(chat("Hi"))) == [200]
    assert not slowly.done()
    gated.engine.gate.set()
    assert (await slowly)[0] == 200


async def test_one_that_takes_long_holds_up_no_other_long_one(gated: Gated) -> None:
    gated.engine.only_first = True
    first = gated.ask(chat(LONG, max_tokens=1))
    await gated.engine.entered.wait()
    assert await gated.finish(gated.ask(chat(LONG, max_tokens=2))) == [200]
    assert not first.done()
    gated.engine.gate.set()
    assert await gated.finish(first) == [200]
    assert [request.max_tokens for request in gated.engine.requests] == [2, 1]


async def test_a_request_in_preparation_has_a_slot_until_the_client_leaves(gated: Gated) -> None:
    slow = [gated.ask(chat(LONG)) for _ in range(2)]
    while (await (await gated.replica.http.get(gated.replica.url + "/load")).json())["server_load"] < 2:
        pass
    assert await gated.finish(gated.ask(chat("Hi"))) == [503]
    for task in slow:
        task.cancel()
    while (await (await gated.replica.http.get(gated.replica.url + "/load")).json())["server_load"]:
        pass
    assert await gated.finish(gated.ask(chat("Hi"))) == [200]


async def test_several_answers_have_several_places(gated: Gated) -> None:
    many = gated.ask(chat("Hi", n=2, temperature=1.0))
    await gated.engine.submitted.wait()
    # One of the two is in prefill; the other begins with its first token.
    assert gated.engine.load().waiting == 0
    assert (await gated.ask(chat("Hi", n=2, temperature=1.0)))[0] == 503
    assert (await gated.ask(chat("Hi", n=3, temperature=1.0)))[0] == 400
    assert await gated.finish(many) == [200]
    assert await gated.finish(gated.ask(chat("Hi", n=2, temperature=1.0))) == [200]
