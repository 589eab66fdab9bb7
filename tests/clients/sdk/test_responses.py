"""What OpenAI's documentation shows of Responses and chat, with its own client, over our replica: as it is, and translated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam

from tests.clients.sdk.grammar.answers import frames_of
from tests.clients.sdk.grammar.responses import response_of
from tests.clients.sdk.tap import Tapped

PARIS = {"location": "Paris, France"}
BOGOTA = {"location": "Bogotá, Colombia"}
SCHEMA: Any = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City and country"}},
    "required": ["location"],
    "additionalProperties": False,
}
WEATHER = FunctionToolParam(type="function", name="get_weather", description="Gets it.", parameters=SCHEMA, strict=True)
CALLS = f"Weather?\n<|call|>get_weather {json.dumps(PARIS)} <|call|>get_weather {json.dumps(BOGOTA)}"
HI: Any = {"model": "m", "input": "Write a one-sentence bedtime story about a unicorn.", "max_output_tokens": 3000}


def calls_of(response: openai.types.responses.Response) -> list[Any]:
    return [json.loads(item.arguments) for item in response.output if item.type == "function_call"]


async def test_a_response(clients: Tapped) -> None:
    async with clients.openai() as client:
        said = await client.responses.create(**HI, instructions="Talk like a pirate.", metadata={"a": "b"}, store=False)
        assert (said.object, said.status, said.error) == ("response", "completed", None)
        assert (said.instructions, said.metadata, said.model) == ("Talk like a pirate.", {"a": "b"}, "m")
        assert said.id.startswith("resp_")
        assert said.output_text
        turns: Any = [{"role": "user", "content": HI["input"]}, *said.to_dict()["output"], {"role": "user", "content": "And?"}]
        more = await client.responses.create(model="m", input=turns, instructions="Talk like a pirate.")
    assert said.usage is not None
    assert more.usage is not None
    assert more.usage.input_tokens > said.usage.total_tokens
    assert more.usage.input_tokens_details.cached_tokens > said.usage.total_tokens - 32


async def test_a_stream_by_its_helper(clients: Tapped) -> None:
    async with clients.openai() as client:
        whole = await client.responses.create(**HI)
        async with client.responses.stream(**HI) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
    assert text == final.output_text == whole.output_text != ""
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    summed = response_of(frames_of(bytes(clients.exchanges[-1].body)))
    assert summed is not None
    assert summed["id"] == final.id


async def test_a_stream_of_raw_events(clients: Tapped) -> None:
    async with clients.openai() as client:
        stream = await client.responses.create(**HI, stream=True)
        kinds = [event.type.removeprefix("response.") async for event in stream]
    assert kinds[:5] == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_and_their_results(clients: Tapped, stream: bool) -> None:
    body: Any = {"model": "m", "input": [{"role": "user", "content": CALLS}], "tools": [WEATHER], "parallel_tool_calls": True}
    async with clients.openai() as client:
        if stream:
            async with client.responses.stream(**body) as events:
                deltas = [one.delta async for one in events if one.type == "response.function_call_arguments.delta"]
                first: openai.types.responses.Response = await events.get_final_response()
            assert [json.loads(one) for one in "".join(deltas).replace("}{", "}\n{").split("\n")] == [PARIS, BOGOTA]
        else:
            first = await client.responses.create(**body)
        assert calls_of(first) == [PARIS, BOGOTA]
        called = [item for item in first.output if item.type == "function_call"]
        assert len({item.call_id for item in called} | {item.id for item in called}) == 4
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "25"} for item in called]
        turns = [*body["input"], *first.to_dict()["output"], *results]  # type: ignore[misc]
        final = await client.responses.create(**body | {"input": turns})
    assert [item.type for item in final.output] == ["message"]


@pytest.mark.parametrize(
    ("choice", "called"), [("auto", 0), ("required", 1), ({"type": "function", "name": "get_weather"}, 1), ("none", 0)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_of_tools(clients: Tapped, choice: Any, called: int, stream: bool) -> None:
    body: Any = {"model": "m", "input": "Hi", "tools": [WEATHER | {"strict": False}], "tool_choice": choice}
    async with clients.openai() as client:
        if stream:
            async with client.responses.stream(**body) as events:
                said: Any = await events.get_final_response()
        else:
            said = await client.responses.create(**body)
    assert len(calls_of(said)) == called


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_makes_it_incomplete(clients: Tapped, stream: bool) -> None:
    body = HI | {"max_output_tokens": 3, "extra_body": {"ignore_eos": True}}
    async with clients.openai() as client:
        if stream:
            events = [event async for event in await client.responses.create(**body, stream=True)]
            assert events[-1].type == "response.incomplete"
            said = events[-1].response
        else:
            said = await client.responses.create(**body)
    assert said.status == "incomplete"
    assert said.incomplete_details is not None
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.usage is not None
    assert said.usage.output_tokens == 3


async def test_reasoning_is_asked_for(clients: Tapped) -> None:
    """The simulated model does not reason; what is asked is repeated, and nothing fails."""
    async with clients.openai() as client:
        said = await client.responses.create(**HI, reasoning={"effort": "low", "summary": "auto"})
    assert said.output_text
    assert said.usage is not None
    assert said.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_and_its_helper(clients: Tapped, stream: bool) -> None:
    messages: Any = [
        {"role": "developer", "content": "Talk like a pirate."},
        {"role": "user", "content": "Are semicolons optional?"},
    ]
    body: Any = {"model": "m", "messages": messages, "max_completion_tokens": 3000}
    async with clients.openai() as client:
        whole = await client.chat.completions.create(**body)
        if stream:
            async with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
                text = "".join([event.delta async for event in events if event.type == "content.delta"])
                final: Any = await events.get_final_completion()
            assert text == final.choices[0].message.content == whole.choices[0].message.content
            assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_of_chat(clients: Tapped, stream: bool) -> None:
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools: Any = [{"type": "function", "function": function}]
    body: Any = {"model": "m", "messages": [{"role": "user", "content": CALLS}], "tools": tools}
    async with clients.openai() as client:
        if stream:
            async with client.chat.completions.stream(**body) as events:
                done = [event.name async for event in events if event.type == "tool_calls.function.arguments.done"]
                first: Any = await events.get_final_completion()
            assert done == ["get_weather"] * 2
        else:
            first = await client.chat.completions.create(**body)
        assert first.choices[0].finish_reason == "tool_calls"
        calls = first.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [PARIS, BOGOTA]
        said = {"role": "assistant", "tool_calls": [call.to_dict(exclude_none=True) for call in calls]}
        results = [{"role": "tool", "tool_call_id": call.id, "content": "25"} for call in calls]
        final = await client.chat.completions.create(**body | {"messages": [*body["messages"], said, *results]})
    assert final.choices[0].message.content


async def test_the_synchronous_client(clients: Tapped) -> None:
    def talk() -> tuple[str, str, list[Any]]:
        with clients.openai_sync() as client:
            whole = client.responses.create(**HI).output_text
            with client.responses.stream(**HI) as stream:
                text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            with client.responses.stream(model="m", input=CALLS, tools=[WEATHER]) as stream:
                called = calls_of(stream.get_final_response())
            with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "Hi"}]) as chat:
                assert chat.get_final_completion().choices[0].message.content
        return whole, text, called

    whole, text, called = await asyncio.to_thread(talk)
    assert text == whole
    assert called == [PARIS, BOGOTA]
