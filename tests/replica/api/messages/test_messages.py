"""Anthropic's own client against a replica: it puts streams together with its own types, and raises for errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from replica.api.server import ServerConfig
from replica.sim import text as sim_text
from replica.sim.cost import SimConfig
from tests.replica.api.clients import anthropics
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import FakeClock, WatchedEngine

LONG = "Tell me about the prefix cache of a replica, at some length and with patience. " * 20
TOOLS: Any = [{"name": "find", "description": "Finds it.", "input_schema": {"type": "object"}}]
CALLS = '<|call|>find {"what": "it"} <|call|>find {}'
EPHEMERAL: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}


def asked(content: Any, **fields: Any) -> Any:
    return {"model": "sim", "max_tokens": 20, "messages": [{"role": "user", "content": content}]} | fields


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropics(replica.url) as asking:
        yield asking


async def events(replica: Replica, body: Any) -> list[Any]:
    """Every event of a stream, each valid by the official types."""
    async with replica.http.post(replica.url + "/v1/messages", json=body | {"stream": True}) as response:
        assert response.status == 200
        raw = (await response.text()).split("\n\n")
    assert raw.pop() == ""
    kinds: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    found = []
    for frame in raw:
        head, data = frame.split("\n")
        event = kinds.validate_json(data.removeprefix("data: "), extra="forbid" if "message_start" in head else "ignore")
        assert head == f"event: {event.type}"
        found.append(event)
    return found


async def test_whole_and_streamed_answers_are_the_same(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**asked("Hi"))
    Message.model_validate_json(whole.to_json(), strict=True)
    assert (whole.role, whole.type, whole.model, whole.stop_reason) == ("assistant", "message", "sim", "max_tokens")
    assert whole.id.startswith("msg_")
    assert whole._request_id
    async with client.messages.stream(**asked("Hi")) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert final.content[0].type == whole.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens == 20
    assert final.usage.input_tokens == whole.usage.input_tokens


async def test_the_events_of_a_text(replica: Replica) -> None:
    found = await events(replica, asked("Hi", max_tokens=3, ignore_eos=True))
    kinds = [event.type for event in found]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-4:] == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    start, end = found[0].message, found[-2]
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert start.usage.input_tokens == end.usage.input_tokens > 0
    assert (end.usage.output_tokens, end.delta.stop_reason, end.delta.stop_sequence) == (3, "max_tokens", None)


@pytest.mark.parametrize("ending", ["end_turn", "stop_sequence", "max_tokens"])
async def test_why_an_answer_ended(client: anthropic.AsyncAnthropic, ending: str) -> None:
    whole = await client.messages.create(**asked("Hi", max_tokens=3000))
    assert whole.stop_reason == "end_turn"
    assert whole.content[0].type == "text"
    word = whole.content[0].text.split(" ")[2]
    fields: Any = {"end_turn": {"max_tokens": 3000}, "stop_sequence": {"stop_sequences": ["no such", word]}, "max_tokens": {}}
    again = await client.messages.create(**asked("Hi", **({"max_tokens": 4} | fields[ending])))
    async with client.messages.stream(**asked("Hi", **({"max_tokens": 4} | fields[ending]))) as stream:
        final = await stream.get_final_message()
    for one in (again, final):
        assert (one.stop_reason, one.stop_sequence) == (ending, word if ending == "stop_sequence" else None)


async def test_calls_and_the_agents_loop(client: anthropic.AsyncAnthropic) -> None:
    body = asked(f"Look for it.\n{CALLS}", tools=TOOLS, max_tokens=200)
    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        Message.model_validate_json(answer.to_json(exclude_unset=False), strict=True)
        assert answer.stop_reason == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("find", {"what": "it"}), ("find", {})]
        assert len({call.id for call in calls}) == 2
        assert all(call.id.startswith("toolu_") for call in calls)
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "here"} for call in whole.content if call.type == "tool_use"
    ]
    turns = [{"role": "assistant", "content": whole.to_dict()["content"]}, {"role": "user", "content": results}]
    more = await client.messages.create(**body | {"messages": body["messages"] + turns})
    assert (more.stop_reason, more.content[0].type) == ("end_turn", "text")
    # All of the first prompt, and the call that was generated from it, are cached.
    assert more.usage.cache_read_input_tokens is not None
    assert more.usage.cache_read_input_tokens > whole.usage.input_tokens + whole.usage.output_tokens - 32


async def test_without_a_choice_of_tools_a_call_is_text(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**asked(CALLS, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=200))
    assert whole.content[0].type == "text"
    assert whole.content[0].text.startswith("<tool_call>")
    assert whole.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
async def test_a_call_can_be_forced(client: anthropic.AsyncAnthropic, choice: Any) -> None:
    whole = await client.messages.create(**asked("Hi", tools=TOOLS, tool_choice=choice, max_tokens=200))
    assert [block.type for block in whole.content] == ["tool_use"]


async def test_usage_has_what_was_read_and_written(client: anthropic.AsyncAnthropic) -> None:
    async def usage(**fields: Any) -> Any:
        return (await client.messages.create(**asked("And?", max_tokens=1, **fields))).usage

    system: Any = [{"type": "text", "text": LONG, "cache_control": HOUR}, {"type": "text", "text": LONG[:160]}]
    plain = await usage(system="Other. " + LONG)
    assert (plain.cache_creation_input_tokens, plain.cache_read_input_tokens, plain.cache_creation) == (0, 0, None)
    first = await usage(system=system, cache_control=EPHEMERAL)
    total = first.input_tokens + first.cache_creation_input_tokens
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation.ephemeral_1h_input_tokens == len(sim_text.encode(f"<|system|>\n{LONG}")) // 16 * 16
    assert first.cache_creation_input_tokens == total // 16 * 16
    written = first.cache_creation
    assert written.ephemeral_1h_input_tokens + written.ephemeral_5m_input_tokens == first.cache_creation_input_tokens
    second = await usage(system=system, cache_control=EPHEMERAL)
    assert second.cache_read_input_tokens == (total - 1) // 16 * 16
    assert second.cache_creation.ephemeral_1h_input_tokens == 0
    assert second.cache_read_input_tokens + second.cache_creation_input_tokens + second.input_tokens == total


async def test_a_breakpoint_on_the_last_tool_is_one_at_the_end_of_the_head(client: anthropic.AsyncAnthropic) -> None:
    tools: Any = [TOOLS[0], TOOLS[0] | {"name": "other", "cache_control": EPHEMERAL}]
    for system in ("", LONG):
        body = asked("And? " * 40, max_tokens=1, tools=tools, **({"system": system} if system else {}))
        head = asked("x", max_tokens=1, tools=tools, **({"system": system} if system else {}))
        usage = (await client.messages.create(**body)).usage
        count = (await client.messages.count_tokens(**{name: head[name] for name in head if name != "max_tokens"})).input_tokens
        until = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        assert count - 32 < until <= count


async def test_marked_prompts_are_retained(replica: Replica, client: anthropic.AsyncAnthropic) -> None:
    async def read(text: str, **control: Any) -> int:
        body = asked("Hi", max_tokens=1, system=[{"type": "text", "text": text, **control}])
        return (await client.messages.create(**body)).usage.cache_read_input_tokens or 0

    assert await read("a" + LONG, cache_control=EPHEMERAL) == await read("b" + LONG) == 0
    for number in range(30):  # twice what fits
        await replica.post("/v1/completions", {"prompt": [number] * 600, "max_tokens": 1})
    assert await read("b" + LONG) == 0
    assert await read("a" + LONG) > 300


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all_warm_the_cache(replica: Replica, client: anthropic.AsyncAnthropic, stream: bool) -> None:
    body = asked(LONG, max_tokens=0, cache_control=EPHEMERAL)
    if stream:
        found = await events(replica, body)
        assert [event.type for event in found] == ["message_start", "message_delta", "message_stop"]
        usage, reason = found[1].usage, found[1].delta.stop_reason
    else:
        whole = await client.messages.create(**body)
        assert whole.content == []
        usage, reason = whole.usage, whole.stop_reason
    assert (usage.output_tokens, usage.cache_read_input_tokens, reason) == (0, 0, "max_tokens")
    after = (await client.messages.create(**asked(LONG))).usage
    assert (after.cache_read_input_tokens or 0) >= usage.cache_creation_input_tokens - 16 > 300


async def test_the_last_turn_may_be_the_beginning_of_the_answer(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**asked("Hi"))
    assert whole.content[0].type == "text"
    head = " ".join(whole.content[0].text.split(" ")[:3])
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": head}]
    rest = await client.messages.create(model="sim", max_tokens=17, messages=messages)
    assert rest.content[0].type == "text"
    assert head + rest.content[0].text == whole.content[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_simulated_engine_follows_a_schema(client: anthropic.AsyncAnthropic, stream: bool) -> None:
    """Claude Code asks for the titles of its sessions so."""
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["title"],
    }
    body = asked("Hi", output_config={"format": {"type": "json_schema", "schema": schema}})
    if stream:
        async with client.messages.stream(**body) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**body)
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text) == {"title": "warm", "tags": ["a"]}
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "nope"}, anthropic.NotFoundError, "'nope' does not exist"),
        ({"max_tokens": None}, anthropic.BadRequestError, "max_tokens: Field required"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens must be an integer of at least 0, got -1"),
        ({"max_tokens": 9000}, anthropic.BadRequestError, r"exceed context limit: \d+ \+ 9000 > 8000, decrease input length"),
        ({"system": "x y " * 6000}, anthropic.BadRequestError, r"prompt is too long: \d+ tokens > 7999 maximum"),
        ({"system": "x" * 200_000}, anthropic.ContentTooLargeError, "A body may have 100,000 bytes at most"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "pattern": "x"}}}},
            anthropic.BadRequestError,
            "does not follow 'pattern'",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_mistakes(client: anthropic.AsyncAnthropic, fields: Any, error: Any, message: str, stream: bool) -> None:
    body = {name: value for name, value in asked("Hi", **fields).items() if value is not None}
    with pytest.raises(error, match=message) as caught:
        await client.post("/v1/messages", body=body | {"stream": stream}, cast_to=Message)
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
    assert caught.value.body["error"]["type"] == kinds[caught.value.status_code]
    assert caught.value.body["request_id"] == caught.value.request_id


async def test_a_full_queue() -> None:
    clock = FakeClock()
    engine = WatchedEngine(SimConfig(max_batch=1), clock)
    async for replica in serve(engine, clock, ServerConfig(max_queue=1)):
        asking = []
        for _ in range(2):  # one runs, one waits
            asking.append(asyncio.create_task(replica.post("/v1/messages", asked("Hi"))))
            await engine.submissions.acquire()
        status, body, headers = await replica.post("/v1/messages", asked("Hi"))
        error: Any = body["error"]
        assert (status, body["type"], error["type"]) == (503, "error", "overloaded_error")
        assert error["message"] == "1 requests wait already, and 1 may. Try again in 1 s, or at another replica."
        assert headers["Retry-After"] == "1"
        assert headers["request-id"] == body["request_id"]
        with clock.running():
            assert [status for status, *_ in await asyncio.gather(*asking)] == [200, 200]


async def test_a_dead_engine_and_an_unknown_path(replica: Replica) -> None:
    replica.engine.broken = "out of memory"
    status, body, headers = await replica.post("/v1/messages", asked("Hi"))
    error: Any = body["error"]
    assert (status, body["type"], error["type"]) == (503, "error", "overloaded_error")
    assert headers["request-id"] == body["request_id"]
    status, body, _ = await replica.post("/v1/messages/batches", {})
    assert (status, body["type"]) == (404, "error")
    async with replica.http.get(replica.url + "/v1/messages", headers={"X-Request-Id": "gw-1"}) as response:
        assert (response.status, response.headers["request-id"]) == (405, "gw-1")


async def test_an_engine_that_gives_up_raises_in_the_client(frozen: Replica) -> None:
    assert frozen.clock is not None

    async def read() -> None:
        async with anthropics(frozen.url) as client, client.messages.stream(**asked("Hi")) as stream:
            await stream.get_final_message()

    asking = asyncio.create_task(read())
    await frozen.engine.submitted.wait()
    frozen.clock.advance(0.1)
    await frozen.engine.close()
    with pytest.raises(anthropic.APIStatusError, match="shutting down") as caught:
        await asking
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "api_error"


async def test_what_is_not_honoured_is_named(replica: Replica) -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    extra = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "top_k": 5}
    status, _, headers = await replica.post("/v1/messages", asked("Hi", tools=tools, metadata={"user_id": "x"}, **extra))
    assert status == 200
    assert headers["x-warmroute-ignored"] == "thinking,output_config,tools.web_search_20250305,top_k"
    for output in ({}, {"output_config": {}}, {"output_config": {"effort": None}}):
        _, _, headers = await replica.post("/v1/messages", asked("Hi", **output))
        assert "x-warmroute-ignored" not in headers
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    _, _, headers = await replica.post("/v1/messages", asked("Hi", tools=TOOLS, tool_choice=choice, stream_tokens=False))
    assert headers["x-warmroute-ignored"] == "stream_tokens,tool_choice.disable_parallel_tool_use"
    choice["disable_parallel_tool_use"] = False
    thinking = {"type": "disabled"}
    _, _, headers = await replica.post("/v1/messages", asked("Hi", tools=TOOLS, tool_choice=choice, thinking=thinking))
    assert "x-warmroute-ignored" not in headers
