"""The stand-in replicas on the wire: each API's forms, read by the official clients' types, and what they count."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.agents.dialogues import Dialogue, Shape, head
from bench.agents.engine import Engine, LoopClock, Model, Row
from bench.agents.kinds import KINDS
from bench.agents.reading import Failed, Reply, read
from bench.agents.report import report
from bench.agents.run import Load, Plan, Score, metered, tally
from bench.agents.standin import Manner, StandIn
from gateway.fleet.engines import read as read_facts
from gateway.fleet.engines import recognise
from tests.support.pages import parse_page

SHAPE = Shape(tools=2000, system=500, turn=300)
PLAN = Plan(conversations=2, turns=3, concurrent=1, think_s=1e-6, answer_tokens=12, shape=SHAPE)
FAST = Model(kv_tokens=100_000, prefill_rate=1e9, decode_rate=1e9)
BY_NAME = {kind.name: kind for kind in KINDS}


class Fleet:
    """Some stand-ins, and a client of the first."""

    def __init__(self, engines: list[Engine], urls: list[str], http: aiohttp.ClientSession) -> None:
        self.engines = engines
        self.urls = urls
        self.http = http

    async def ask(self, name: str, dialogue: Dialogue, chance: int = 0) -> Reply:
        kind = BY_NAME[name]
        body, headers = kind.write(dialogue, head(SHAPE, 0), 12, random.Random(chance))
        async with self.http.post(self.urls[0] + kind.path, json=body, headers=headers) as response:
            return await read(response, LoopClock().time)

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.http.post(self.urls[0] + path, json={**body, "stream": True}) as response:
            lines = (await response.text()).splitlines()
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        named = [line[7:] for line in lines if line.startswith("event: ")]
        assert named in ([], [event.get("type") for event in found])
        return found

    async def whole(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        async with self.http.post(self.urls[0] + path, json=body) as response:
            assert response.status == status
            return await response.json()


@contextlib.asynccontextmanager
async def fleet(count: int = 1, manner: Manner | None = None) -> AsyncIterator[Fleet]:
    manner = manner or Manner(answer_tokens=12)
    engines = [Engine(number, FAST, LoopClock()) for number in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for engine in engines:
            runner = web.AppRunner(StandIn(engine, manner, engines).application(), access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield Fleet(engines, urls, await stack.enter_async_context(aiohttp.ClientSession()))


TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi " * 100}],
        "tools": [{"type": "function", "function": TOOL}],
        "stream_options": {"include_usage": True},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi " * 100}],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}],
        "max_tokens": 12,
    },
    "/v1/responses": {"input": "hi " * 100, "tools": [{"type": "function", "strict": None, **TOOL}]},
}


async def test_the_official_clients_types_read_chat_and_responses() -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    chat, responses = "/v1/chat/completions", "/v1/responses"
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with fleet() as standins:
        completion = ChatCompletion.model_validate(await standins.whole(chat, {"model": "m", **BODIES[chat]}))
        chunks = [
            ChatCompletionChunk.model_validate(one) for one in await standins.events(chat, {"model": "m", **BODIES[chat]})
        ]
        response = Response.model_validate(await standins.whole(responses, {"model": "m", **BODIES[responses]}))
        raw = await standins.events(responses, {"model": "m", **BODIES[responses]})
        events = [event_type.validate_python(one) for one in raw]
    counts = [completion.usage, chunks[-1].usage]
    assert [(one.prompt_tokens, one.prompt_tokens_details.cached_tokens) for one in counts if one] == [(100, 0), (100, 96)]  # type: ignore[union-attr]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == completion.choices[0].message.content
    assert completion.choices[0].message.tool_calls[0].function.name == "f"  # type: ignore[index, union-attr]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (100, 96)
    assert response.output_text == said == events[-1].response.output_text
    assert [one.type for one in response.output] == ["message", "function_call"]
    assert [one["sequence_number"] for one in raw] == list(range(len(raw)))
    assert [one.type for one in events if "delta" not in one.type and "item" not in one.type] == [
        "response.created",
        "response.in_progress",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.done",
        "response.completed",
    ]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
async def test_the_official_client_s_types_read_messages(engine: str) -> None:
    """The two engines tell usage in different events of a stream; merged it is the same."""
    pytest.importorskip("anthropic")
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    body = {"model": "m", **BODIES["/v1/messages"]}
    async with fleet(manner=Manner(engine, 12)) as standins:
        message = Message.model_validate(await standins.whole("/v1/messages", body))
        raw = await standins.events("/v1/messages", body)
        counted = await standins.whole("/v1/messages/count_tokens", body)
    assert counted == {"input_tokens": 100}
    created = 0 if engine == "llamacpp" else 96
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0) == (
        100 - created,
        created,
        0,
    )
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "tool_use"
    events = [event_type.validate_python(one) for one in raw]
    assert [one.type for one in events if one.type != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    start, delta = raw[0]["message"]["usage"], raw[-2]["usage"]
    assert start["input_tokens"] == (4 if engine == "llamacpp" else 100)
    assert delta.get("cache_read_input_tokens") == (None if engine == "llamacpp" else 96)
    reply = Reply()
    for event in raw:
        reply.feed(event)
    assert (reply.usage, reply.done) == ((100, 96), True)
    assert reply.text == message.content[0].text  # type: ignore[union-attr]
    assert reply.entry.call is not None
    assert json.loads(reply.entry.call.arguments) == message.content[1].input  # type: ignore[union-attr]


@pytest.mark.parametrize("name", list(BY_NAME))
async def test_a_conversation_has_the_same_tokens_and_finds_its_prefix_by_every_api(name: str) -> None:
    async with fleet(manner=Manner(answer_tokens=12, keep=True)) as standins:
        counts = []
        for number, kind in enumerate(("chat", name)):
            dialogue = Dialogue(7, SHAPE, 0)
            for _ in range(3):
                dialogue.ask()
                reply = await standins.ask(kind, dialogue, number)
                dialogue.answered(reply.entry, reply.identity)
                counts.append(reply.usage)
    assert [row.tag for row in standins.engines[0].rows] == ["7.1", "7.2", "7.3"] * 2
    (first, _), (second, cached), (third, more) = counts[:3]
    assert first < cached < second, "the turn before, and its answer"
    assert second - 16 < more < third
    assert [total for total, _ in counts[3:]] == [first, second, third]
    assert all(total - cached < 20 for total, cached in counts[3:]), "the same prompts, by another API"


async def test_the_billing_header_costs_a_verbatim_engine_its_cache() -> None:
    async with fleet(manner=Manner("llamacpp", 12)) as standins:
        dialogue = Dialogue(0, SHAPE, 0)
        dialogue.ask()
        usages = [(await standins.ask("messages-claude-code", dialogue, chance)).usage for chance in range(2)]
        plain = [(await standins.ask("messages", dialogue)).usage for _ in range(2)]
    assert usages[1] is not None
    assert plain[1] is not None
    assert usages[1][1] < 0.9 * usages[1][0]
    assert plain[1][1] > plain[1][0] - 20


async def test_responses_are_kept_by_the_one_that_gave_them_or_not_at_all() -> None:
    asked = {"model": "m", "input": "and?", "previous_response_id": "resp_0000000000000000"}
    expected = {
        "message": "Response with id 'resp_0000000000000000' not found.",
        "type": "invalid_request_error",
        "param": None,
        "code": 404,
    }
    async with fleet(2, Manner(answer_tokens=12, keep=True)) as standins:
        assert (await standins.whole("/v1/responses", asked, 404))["error"] == expected
        first = await standins.whole("/v1/responses", {"model": "m", "input": "hi"})
        after = {**asked, "previous_response_id": first["id"]}
        assert (await standins.whole("/v1/responses", after))["previous_response_id"] == first["id"]
        standins.urls.reverse()
        await standins.whole("/v1/responses", after, 404)
    async with fleet() as standins:
        first = await standins.whole("/v1/responses", {"model": "m", "input": "hi"})
        await standins.whole("/v1/responses", {**asked, "previous_response_id": first["id"]}, 404)
    async with fleet(manner=Manner("llamacpp")) as standins:
        await standins.whole("/v1/responses", asked, 400)


async def test_errors_have_each_api_s_shape() -> None:
    async with fleet() as standins:
        assert (await standins.whole("/v1/messages", {"messages": []}, 400))["type"] == "error"
        assert (await standins.whole("/v1/chat/completions", {"messages": []}, 400))["error"]["code"] == 400
        assert (await standins.whole("/v1/messages/count_tokens", {}, 400))["error"]["type"] == "BadRequestError"
        async with standins.http.post(standins.urls[0] + "/v1/responses", data=b"{") as response:
            assert response.status == 400
            with pytest.raises(Failed, match=r"^400 Expecting"):
                await read(response, LoopClock().time)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
async def test_it_is_recognised_by_its_page(engine: str) -> None:
    async with fleet(manner=Manner(engine)) as standins:
        await standins.whole("/v1/chat/completions", BODIES["/v1/chat/completions"])
        async with standins.http.get(standins.urls[0] + "/metrics") as response:
            page = parse_page(await response.read())
        async with standins.http.get(standins.urls[0] + "/v1/models") as response:
            owners = [model["owned_by"] for model in (await response.json())["data"]]
        async with standins.http.get(standins.urls[0] + "/health") as response:
            assert response.status == 200
    facts = read_facts(recognise(owners, page), page)
    assert (facts.engine.name, facts.running, facts.waiting) == (engine, 0, 0)
    assert facts.kv_tokens == (100_000 if engine == "vllm" else None)


# -- the load and its score


async def test_the_load_s_turns_are_counted_where_they_went() -> None:
    async with fleet() as standins:
        score = Score("none", "messages-claude-code")
        await Load(standins.urls[0], BY_NAME[score.kind], PLAN, score).run()
        rows = standins.engines[0].rows
    tally(score, rows)
    assert (score.sent, score.later, score.stayed, len(score.ttft), score.errors.total()) == (6, 4, 4, 6, 0)
    assert sorted(row.tag for row in rows) == ["0.1", "0.2", "0.3", "1.1", "1.2", "1.3"]
    assert score.told == (score.prompt, score.cached)
    assert score.cached_share > 0.5
    assert score.refused == ""


def test_a_turn_that_failed_has_not_stayed() -> None:
    rows = [
        Row(place, tag, "", 10, 5, 0.1)
        for tag, place in (("0.1", 0), ("0.2", 0), ("1.1", 1), ("1.2", 0), ("1.2", 1), ("2.1", 0))
    ]
    score = Score("none", "chat", lost=["2.2"])
    tally(score, rows)
    assert (score.later, score.stayed, score.prompt, score.cached, score.refused) == (3, 2, 60, 30, "")


async def test_a_kind_that_is_refused_is_shown_with_the_reason() -> None:
    async with fleet() as standins:
        score = Score("none", "responses-previous")
        await Load(standins.urls[0], BY_NAME[score.kind], PLAN, score).run()
        tally(score, standins.engines[0].rows)
    assert score.sent == 4
    assert score.errors == {"404 Response with id ID not found.": 2}
    assert (score.later, score.stayed, score.lost) == (2, 0, ["0.2", "1.2"])
    good = Score("other", "responses-previous", 4, 2, 1, prompt=1000, cached=905, ttft=[0.1, 0.2])
    text = "\n".join(report("Made here.", PLAN, [score, good]))
    assert "| responses-previous | - | 50% / 90.5% |" in text
    assert "| none | - | - | - | - | - | 2 of 4 |  |  |" in text
    assert "| other | 50.0% | 90.5% | 150 | 150 | 200 | 0 |  |  |" in text
    assert "- none: 2 × 404 Response with id ID not found." in text
    assert metered("http://127.0.0.1:9") is None
