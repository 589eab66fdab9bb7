"""Reasoning, images, documents, files and structured output by the official clients: requests to engines, answers."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from pydantic import BaseModel, TypeAdapter

from tests.clients.sdk import told
from tests.clients.sdk.engines import engine
from tests.clients.sdk.tap import Tapped
from tests.gateway.conftest import running
from tests.support.fakes import Behaviour, FakeReplica

CHAT: TypeAdapter[Any] = TypeAdapter(ChatParams)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PDF = base64.b64encode(b"%PDF-1.4 a small one").decode()
URL = "https://example.org/ant.jpg"
TOOL: Any = {"name": "get_weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CLOCK: Any = {**TOOL, "name": "get_time"}
FUNCTIONS: Any = [
    {"type": "function", "name": one["name"], "description": "d", "parameters": one["input_schema"], "strict": False}
    for one in (TOOL, CLOCK)
]


class Person(BaseModel):
    name: str
    age: int


Answers = dict[str, bytes | Behaviour]
ANNA = '{"name": "Anna", "age": 7}'


def asked_of(replica: FakeReplica) -> Any:
    """The chat request that the engine got last; it is one by OpenAI's own types."""
    body = replica.requests[-1].json
    CHAT.validate_python(body)
    return body


async def test_thoughts_and_signatures_of_an_engine_that_has_them() -> None:
    async with engine({"messages_stream": told.thinking_message()}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        async with tapped.anthropic() as client:
            asked: Any = {"model": "m", "max_tokens": 2000, "thinking": thinking, "tools": [TOOL, CLOCK]}
            async with client.messages.stream(**asked, messages=[{"role": "user", "content": "27 * 453?"}]) as stream:
                kinds = [event.type async for event in stream]
                said = await stream.get_final_message()
        assert kinds.count("thinking") == len(told.pieces(told.THOUGHT))
        assert kinds.count("signature") == 1
        thought, redacted, text, *calls = said.content
        assert thought.type == "thinking"
        assert (thought.thinking, thought.signature) == (told.THOUGHT, told.SIGNATURE)
        assert redacted.type == "redacted_thinking"
        assert text.type == "text"
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == told.CALLS
        assert bytes(tapped.exchanges[0].body) == told.thinking_message(), "byte for byte"
        tapped.check()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_thoughts_and_parallel_calls_in_pieces_translated(field: str) -> None:
    async with engine({"chat_stream": told.thinking_chat(field)}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        async with tapped.anthropic() as client:
            asked: Any = {"model": "m", "max_tokens": 2000, "tools": [TOOL, CLOCK]}
            async with client.messages.stream(**asked, messages=[{"role": "user", "content": "27 * 453?"}]) as stream:
                message = await stream.get_final_message()
        async with tapped.openai() as other, other.responses.stream(model="m", input="27 * 453?", tools=FUNCTIONS) as parts:
            response: Any = await parts.get_final_response()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].type == "thinking"
        assert message.content[0].thinking == told.THOUGHT
        assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == told.CALLS
        assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("tool_use", 60)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == told.THOUGHT
        assert response.output_text == told.TEXT
        assert [(one.name, json.loads(one.arguments)) for one in response.output[2:]] == told.CALLS
        assert response.usage.output_tokens_details.reasoning_tokens == 7
        tapped.check()


async def test_summaries_and_a_refusal_of_an_engine_that_has_them() -> None:
    async with engine({"responses_stream": told.reasoning_response()}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        async with tapped.openai() as client:
            reasoning: Any = {"effort": "high", "summary": "detailed"}
            async with client.responses.stream(model="m", input="x", reasoning=reasoning) as parts:
                said: Any = await parts.get_final_response()
        assert [one.text for one in said.output[0].summary] == ["First I think.", "Then I doubt."]
        assert said.output[1].content[0].refusal == "I cannot help with that."
        assert bytes(tapped.exchanges[0].body) == told.reasoning_response(), "byte for byte"
        tapped.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_translated(stream: bool) -> None:
    words = "I cannot help with that."
    answers: Answers = {
        "chat": told.chat_whole({"content": None, "refusal": words}),
        "chat_stream": told.chat_stream({"refusal": words}),
    }
    async with engine(answers) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        async with tapped.openai() as client:
            if stream:
                async with client.responses.stream(model="m", input="x") as parts:
                    said: Any = await parts.get_final_response()
            else:
                said = await client.responses.create(model="m", input="x")
        assert said.output[0].content[0].refusal == words
        tapped.check()


IMAGES: Any = [
    ({"type": "base64", "media_type": "image/png", "data": PNG}, f"data:image/png;base64,{PNG}"),
    ({"type": "url", "url": URL}, URL),
]


@pytest.mark.parametrize(("source", "url"), IMAGES, ids=["base64", "url"])
async def test_images_translated(source: Any, url: str) -> None:
    wanted = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    async with engine({"chat": told.chat_whole({"content": "An ant."})}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        async with tapped.anthropic() as client:
            content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
        assert asked_of(replica)["messages"][0]["content"] == wanted
        async with tapped.openai() as other:
            items: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
            await other.responses.create(model="m", input=[{"role": "user", "content": items}])
        assert asked_of(replica)["messages"][0]["content"] == wanted
        tapped.check()


async def test_documents_and_files_translated() -> None:
    async with engine({"chat": told.chat_whole({"content": "Read."})}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        async with tapped.anthropic() as client:
            source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
            content: Any = [{"type": "document", "source": source, "title": "a.pdf"}, {"type": "text", "text": "Sum it up."}]
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
        data = f"data:application/pdf;base64,{PDF}"
        assert {"type": "file", "file": {"filename": "a.pdf", "file_data": data}} in asked_of(replica)["messages"][0]["content"]
        async with tapped.openai() as other:
            file: Any = {"type": "input_file", "filename": "a.pdf", "file_data": data}
            await other.responses.create(model="m", input=[{"role": "user", "content": [file]}])
            parts = asked_of(replica)["messages"][0]["content"]
            assert parts == [{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}]
            for reference in ({"file_id": "file-1"}, {"file_url": URL}):
                named: Any = {"type": "input_file", **reference}
                with pytest.raises(openai.BadRequestError, match=next(iter(reference))):
                    await other.responses.create(model="m", input=[{"role": "user", "content": [named]}])
        by_id: Any = [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}]
        async with tapped.anthropic() as client:
            with pytest.raises(anthropic.BadRequestError, match="source"):
                await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": by_id}])
        tapped.check()


async def test_what_a_native_engine_gets_is_what_the_client_has_sent() -> None:
    """Images, documents by reference, betas: the engine's business."""
    native = engine({"messages_stream": told.thinking_message(), "responses_stream": told.reasoning_response()})
    async with native as replica, running(replica) as run:
        tapped = Tapped(run.url)
        content: Any = [
            {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
            {"type": "document", "source": {"type": "url", "url": URL}, "citations": {"enabled": True}},
        ]
        async with tapped.anthropic() as client:
            asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
            async for _ in await client.beta.messages.create(**asked, betas=["files-api-2025-04-14"], stream=True):
                """To its end."""
        assert replica.requests[-1].body == tapped.exchanges[-1].request
        assert replica.requests[-1].headers["anthropic-beta"] == "files-api-2025-04-14"
        assert replica.requests[-1].headers["anthropic-version"] == client.default_headers["anthropic-version"]
        async with tapped.openai() as other:
            items: Any = [{"type": "input_file", "file_id": "file-1"}, {"type": "input_image", "file_id": "file-2"}]
            async for _ in await other.responses.create(model="m", input=[{"role": "user", "content": items}], stream=True):
                """To its end."""
        assert replica.requests[-1].body == tapped.exchanges[-1].request
        tapped.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output_translated(stream: bool) -> None:
    answers: Answers = {
        "chat": told.chat_whole({"content": ANNA}),
        "chat_stream": told.chat_stream(*({"content": one} for one in told.pieces(ANNA))),
    }
    anna = Person(name="Anna", age=7)
    async with engine(answers) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        turns: Any = [{"role": "user", "content": "Who?"}]
        async with tapped.openai() as client:
            if stream:
                async with client.responses.stream(model="m", input="Who?", text_format=Person) as parts:
                    response = await parts.get_final_response()
                assert response.output_parsed == anna
            else:
                assert (await client.responses.parse(model="m", input="Who?", text_format=Person)).output_parsed == anna
        schema = asked_of(replica)["response_format"]["json_schema"]
        assert set(schema["schema"]["properties"]) == {"name", "age"}
        assert schema["name"] == "Person"
        async with tapped.anthropic() as other:
            if stream:
                async with other.messages.stream(model="m", max_tokens=99, messages=turns, output_format=Person) as events:
                    message = await events.get_final_message()
            else:
                message = await other.messages.parse(model="m", max_tokens=99, messages=turns, output_format=Person)
        assert message.parsed_output == anna
        assert set(asked_of(replica)["response_format"]["json_schema"]["schema"]["properties"]) == {"name", "age"}
        tapped.check()


async def test_structured_output_by_the_synchronous_clients() -> None:
    async with engine({"chat": told.chat_whole({"content": ANNA})}) as replica, running(replica) as run:
        tapped = Tapped(run.url)

        def talk() -> list[Person | None]:
            with tapped.openai_sync() as one, tapped.anthropic_sync() as other:
                turns: Any = [{"role": "user", "content": "Who?"}]
                chat = one.chat.completions.parse(model="m", messages=turns, response_format=Person)
                response = one.responses.parse(model="m", input="Who?", text_format=Person)
                message = other.messages.parse(model="m", max_tokens=99, messages=turns, output_format=Person)
                return [chat.choices[0].message.parsed, response.output_parsed, message.parsed_output]

        assert await asyncio.to_thread(talk) == [Person(name="Anna", age=7)] * 3
        tapped.check()
