"""OpenAI's own client against a replica's Responses: it puts streams together with its own types."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.replica.api.clients import openais
from tests.replica.conftest import Replica

TOOLS: Any = [
    {"type": "function", "name": "find", "description": "Finds it.", "parameters": {"type": "object"}, "strict": None}
]
CALLS = '<|call|>find {"what": "it"} <|call|>find {}'


def asked(content: Any, **fields: Any) -> Any:
    return {"model": "sim", "max_output_tokens": 20, "input": content} | fields


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openais(replica.url) as asking:
        yield asking


async def events(replica: Replica, body: Any) -> list[Any]:
    """Every event of a stream, each valid by the official types, numbered in order."""
    async with replica.http.post(replica.url + "/v1/responses", json=body | {"stream": True}) as response:
        assert response.status == 200
        raw = (await response.text()).split("\n\n")
    assert raw.pop() == ""
    kinds: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    found = []
    for frame in raw:
        head, data = frame.split("\n")
        event = kinds.validate_json(data.removeprefix("data: "))
        assert head == f"event: {event.type}"
        assert event.sequence_number == len(found)
        found.append(event)
    return found


async def test_whole_and_streamed_answers_are_the_same(client: openai.AsyncOpenAI) -> None:
    body = asked("Hi", instructions="Be brief.", max_output_tokens=3000, metadata={"a": "b"})
    whole = await client.responses.create(**body)
    Response.model_validate(whole.to_dict())
    assert (whole.status, whole.incomplete_details, whole.error) == ("completed", None, None)
    assert (whole.instructions, whole.metadata, whole.store) == ("Be brief.", {"a": "b"}, False)
    assert whole.id.startswith("resp_")
    assert whole.output[0].id.startswith("msg_")  # type: ignore[union-attr]
    async with client.responses.stream(**body) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text == text != ""
    assert whole.usage
    assert final.usage
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details.reasoning_tokens == 0
    assert final.usage.input_tokens_details.cached_tokens == (whole.usage.input_tokens - 1) // 16 * 16


async def test_the_events_of_a_text_in_openais_order(replica: Replica) -> None:
    found = await events(replica, asked("Hi", max_output_tokens=3, ignore_eos=True))
    kinds = [event.type.removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert found[0].response.status == found[1].response.status == "in_progress"
    last = found[-1].response
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last.output[0].status == "incomplete"
    assert last.usage.output_tokens == 3
    texts = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(texts) == found[-4].text == last.output[0].content[0].text
    assert {event.item_id for event in found[3:-2]} == {last.output[0].id}


async def test_a_whole_answer_at_the_token_limit_is_incomplete(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**asked("Hi", max_output_tokens=3, extra_body={"ignore_eos": True}))
    assert whole.status == "incomplete"
    assert whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_a_response_repeats_of_its_request_what_holds(replica: Replica) -> None:
    form = {"type": "text"}
    body = asked("Hi", parallel_tool_calls=False, text={"format": form, "verbosity": "low"}, metadata={"a": "b"})
    _, answer, headers = await replica.post("/v1/responses", body)
    assert (answer["parallel_tool_calls"], answer["text"], answer["metadata"]) == (True, {"format": form}, {"a": "b"})
    assert headers["x-warmroute-ignored"] == "parallel_tool_calls,text.verbosity"


async def test_calls_and_the_agents_loop(client: openai.AsyncOpenAI, replica: Replica) -> None:
    body = asked([{"role": "user", "content": f"Look for it.\n{CALLS}"}], tools=TOOLS, max_output_tokens=200)
    whole = await client.responses.create(**body)
    async with client.responses.stream(**body) as stream:
        streamed = await stream.get_final_response()
    for answer in (whole, streamed):
        Response.model_validate(answer.to_dict())
        assert answer.status == "completed"
        calls: Any = answer.output
        assert [call.type for call in calls] == ["function_call"] * 2
        assert [(call.name, orjson.loads(call.arguments)) for call in calls] == [("find", {"what": "it"}), ("find", {})]
        assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
    kinds = [event.type.removeprefix("response.") for event in await events(replica, body)]
    one = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *one, *one, "completed"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "here"} for call in whole.output]  # type: ignore[union-attr]
    more = await client.responses.create(**body | {"input": [*body["input"], *whole.to_dict()["output"], *results]})  # type: ignore[misc]
    assert more.output[0].type == "message"
    assert more.usage
    assert whole.usage
    # All of the first prompt, and the calls that were generated from it, are cached.
    assert more.usage.input_tokens_details.cached_tokens > whole.usage.total_tokens - 32


async def test_a_call_can_be_forced(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**asked("Hi", tools=TOOLS, tool_choice="required", max_output_tokens=200))
    assert [item.type for item in whole.output] == ["function_call"]
    none = await client.responses.create(**asked(CALLS, tools=TOOLS, tool_choice="none", max_output_tokens=200))
    assert none.output_text.startswith("<tool_call>")


async def test_stored_responses_are_not_here(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**asked("Hi", store=True))
    for asking in (
        client.responses.retrieve(whole.id),
        client.responses.delete(whole.id),
        client.responses.cancel(whole.id),
        client.responses.input_items.list(whole.id)._get_page(),  # type: ignore[attr-defined]
        client.responses.create(**asked("And?", previous_response_id=whole.id)),
    ):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{whole.id}' not found") as caught:
            await asking
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_output_tokens": 9000}, "ask for at most"),
        ({"input": "x y " * 6000}, "Shorten it"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "reads text only"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"format": "date"}}}}, "does not follow 'format'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_mistakes_are_answered_in_openais_shape(replica: Replica, fields: Any, message: str, stream: bool) -> None:
    status, body, _ = await replica.post("/v1/responses", asked("Hi", stream=stream) | fields)
    error: Any = body["error"]
    assert status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]


async def test_a_long_conversation_may_be_cut(client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": role, "content": f"{at} " + "x y " * 1500} for at in range(4) for role in ("user", "assistant")]
    body = asked([*turns, {"role": "user", "content": "And?"}], truncation="auto")
    raw = await client.responses.with_raw_response.create(**body)
    assert raw.headers["x-warmroute-dropped-messages"] == "6"


async def test_an_engine_that_gives_up_is_a_failed_response(frozen: Replica) -> None:
    assert frozen.clock is not None
    asking = asyncio.create_task(events(frozen, asked("Hi")))
    await frozen.engine.submitted.wait()
    frozen.clock.advance(0.1)
    await frozen.engine.close()
    found = await asking
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds[-5:] == ["output_text.done", "content_part.done", "output_item.done", "error", "failed"]
    last = found[-1].response
    assert (last.status, last.error.code) == ("failed", "server_error")
    assert "shutting down" in last.error.message == found[-2].message


@pytest.mark.model
async def test_the_real_engine_keeps_to_a_format_and_a_forced_call(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("llguidance")
    from tests.replica.tiny import serving, spoken_model

    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools: Any = [{"type": "function", "name": "find", "parameters": schema}]
    extra: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 300, "temperature": 1.0, "extra_body": {"seed": 5}}
    async with serving(spoken_model(tmp_path), chat_template=template) as client:
        called = await client.responses.create(tools=tools, tool_choice="required", **extra)
        one = {"type": "json_schema", "name": "x", "schema": schema | {"properties": {"n": {"const": 3}}}}
        shaped = await client.responses.create(text={"format": one}, **extra)  # type: ignore[call-overload]
    assert [(item.type, item.name, orjson.loads(item.arguments)["n"] in (1, 2)) for item in called.output] == [
        ("function_call", "find", True)
    ]
    assert called.status == "completed"
    assert orjson.loads(shaped.output_text) == {"n": 3}
