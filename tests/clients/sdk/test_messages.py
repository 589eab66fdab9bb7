"""Examples of Anthropic's documentation, with its own client, over our replica: native, and translated to chat."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.clients.sdk.engines import simulated
from tests.clients.sdk.grammar.answers import frames_of
from tests.clients.sdk.grammar.messages import message_of
from tests.clients.sdk.tap import Tapped
from tests.gateway.conftest import running

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["location"],
    },
}
TIME: Any = {"name": "get_time", "description": "Get the time", "input_schema": {"type": "object", "properties": {}}}
SF = {"location": "San Francisco, CA", "unit": "celsius"}
CALLS = f"<|call|>get_weather {json.dumps(SF)} <|call|>get_time {{}}"
HI: Any = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello, Claude"}]}


def asked(content: Any, **fields: Any) -> Any:
    return {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": content}]} | fields


def calls_of(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


async def test_a_message(clients: Tapped) -> None:
    async with clients.anthropic() as client:
        said = await client.messages.create(
            **HI, system="Be brief.", metadata={"user_id": "u"}, extra_body={"temperature": 0.0}
        )
        assert (said.type, said.role, said.model) == ("message", "assistant", "m")
        assert said.id.startswith("msg_")
        assert said._request_id
        assert said.content[0].type == "text"
        assert said.content[0].text
        assert 0 < said.usage.output_tokens <= 40
        turns = [*HI["messages"], {"role": "assistant", "content": said.content[0].text}, {"role": "user", "content": "And?"}]
        more = await client.messages.create(**HI | {"messages": turns}, system="Be brief.")
        assert more.usage.cache_read_input_tokens
        assert more.usage.input_tokens + more.usage.cache_read_input_tokens > said.usage.input_tokens


async def test_a_stream_by_its_helper(clients: Tapped) -> None:
    async with clients.anthropic() as client:
        whole = await client.messages.create(**HI)
        async with client.messages.stream(**HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert final.content[0].type == whole.content[0].type == "text"
        assert text == final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    summed = message_of(frames_of(bytes(clients.exchanges[-1].body)))
    assert summed is not None
    assert {"stop_details": None, **summed} == final.to_dict() | {"content": [{"type": "text", "text": text}]}, (
        "the client has missed nothing"
    )


async def test_a_stream_of_raw_events(clients: Tapped) -> None:
    async with clients.anthropic() as client, await client.messages.create(**HI, stream=True) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_one_tool_and_its_result(clients: Tapped) -> None:
    question = f"What is the weather like in San Francisco?\n<|call|>get_weather {json.dumps(SF)}"
    async with clients.anthropic() as client:
        first = await client.messages.create(**asked(question, tools=[WEATHER]))
        assert first.stop_reason == "tool_use"
        assert calls_of(first) == [("get_weather", SF)]
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "15 degrees"}]}
        turns: Any = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        final = await client.messages.create(model="m", max_tokens=200, tools=[WEATHER], messages=turns)
    assert final.stop_reason == "end_turn"
    assert [block.type for block in final.content] == ["text"]
    assert (final.usage.cache_read_input_tokens or 0) > 16, "the first prompt was cached"


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tools_and_their_results(clients: Tapped, stream: bool) -> None:
    body = asked(f"Weather and time?\n{CALLS}", tools=[WEATHER, TIME])
    async with clients.anthropic() as client:
        if stream:
            pieces = list[str]()
            async with client.messages.stream(**body) as events:
                async for event in events:
                    if event.type == "input_json":
                        pieces.append(event.partial_json)
                first = await events.get_final_message()
            assert json.loads(pieces[0]) == SF
        else:
            first = await client.messages.create(**body)
        assert calls_of(first) == [("get_weather", SF), ("get_time", {})]
        ids = [block.id for block in first.content if block.type == "tool_use"]
        assert len(set(ids)) == 2
        results = [{"type": "tool_result", "tool_use_id": ids[0], "content": "15"}]
        results.append({"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True})  # type: ignore[dict-item]
        turns = [{"role": "assistant", "content": first.to_dict()["content"]}, {"role": "user", "content": results}]
        final = await client.messages.create(**body | {"messages": [*body["messages"], *turns]})
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "auto"}, 0),
        ({"type": "any"}, 1),
        ({"type": "tool", "name": "get_time"}, 1),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "none"}, 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_of_tools(clients: Tapped, choice: Any, called: int, stream: bool) -> None:
    body = asked("Hi", tools=[TIME], tool_choice=choice)
    async with clients.anthropic() as client:
        if stream:
            async with client.messages.stream(**body) as events:
                said = await events.get_final_message()
        else:
            said = await client.messages.create(**body)
    assert len(calls_of(said)) == called
    assert (said.stop_reason == "tool_use") == bool(called)


@pytest.mark.parametrize("stream", [False, True])
async def test_why_an_answer_ends(clients: Tapped, stream: bool) -> None:
    async with clients.anthropic() as client:
        whole = await client.messages.create(**asked("Hello", max_tokens=3000))
        assert whole.content[0].type == "text"
        word = whole.content[0].text.split(" ")[2]
        for fields, reason in (({"max_tokens": 3}, "max_tokens"), ({"stop_sequences": ["no such", word]}, "stop_sequence")):
            body = asked("Hello", **fields)
            if stream:
                async with client.messages.stream(**body) as events:
                    said = await events.get_final_message()
            else:
                said = await client.messages.create(**body)
            assert (said.stop_reason, said.stop_sequence) == (reason, word if reason == "stop_sequence" else None)


async def test_a_prewarming_request_has_no_content(clients: Tapped) -> None:
    long = [{"type": "text", "text": "You are a careful assistant. " * 60, "cache_control": {"type": "ephemeral"}}]
    async with clients.anthropic() as client:
        warm = await client.messages.create(**asked("Hi", max_tokens=0, system=long))
        assert (warm.content, warm.stop_reason) == ([], "max_tokens")
        async with client.messages.stream(**asked("Hi", max_tokens=0, system=long)) as events:
            assert (await events.get_final_message()).content == []
        said = await client.messages.create(**asked("Hi", system=long))
    assert (said.usage.cache_read_input_tokens or 0) > 300


async def test_documents_of_text_and_betas(clients: Tapped) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The grass is green. The sky is blue."}
    document = {"type": "document", "source": source, "title": "My Document", "context": "Trustworthy."}
    content: Any = [document, {"type": "text", "text": "What color is the grass?"}]
    async with clients.anthropic() as client:
        said = await client.messages.create(**asked(content))
        assert said.stop_reason in ("end_turn", "max_tokens")
        beta = await client.beta.messages.create(**asked("Hi"), betas=["context-1m-2025-08-07", "no-such-beta"])
        assert beta.content[0].type == "text"


async def test_thoughts_of_earlier_turns_are_taken(clients: Tapped) -> None:
    thought = {"type": "thinking", "thinking": "27 * 453 = 12231", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
    turns: Any = [
        {"role": "user", "content": "What is 27 * 453?"},
        {
            "role": "assistant",
            "content": [thought, {"type": "redacted_thinking", "data": "EmwK"}, {"type": "text", "text": "12,231"}],
        },
        {"role": "user", "content": "And half of it?"},
    ]
    async with clients.anthropic() as client:
        said = await client.messages.create(
            model="m", max_tokens=2000, messages=turns, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert said.content[0].type == "text"


async def test_the_synchronous_client(clients: Tapped) -> None:
    def talk() -> tuple[str, str, list[tuple[str, Any]]]:
        with clients.anthropic_sync() as client:
            whole = client.messages.create(**HI)
            with client.messages.stream(**HI) as stream:
                text = "".join(stream.text_stream)
            with client.messages.stream(**asked(f"Weather and time?\n{CALLS}", tools=[WEATHER, TIME])) as stream:
                called = calls_of(stream.get_final_message())
        assert whole.content[0].type == "text"
        return whole.content[0].text, text, called

    whole, text, called = await asyncio.to_thread(talk)
    assert text == whole
    assert called == [("get_weather", SF), ("get_time", {})]


async def test_tokens_are_counted() -> None:
    """Where the replica has the path: it is not translated."""
    async with simulated() as url, running(url) as run:
        clients = Tapped(run.url)
        async with clients.anthropic() as client:
            body = {name: value for name, value in asked("Hi", tools=[WEATHER]).items() if name != "max_tokens"}
            counted = (await client.messages.count_tokens(**body)).input_tokens
            usage = (await client.messages.create(**asked("Hi", tools=[WEATHER]))).usage
        clients.check()
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
