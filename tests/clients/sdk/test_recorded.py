"""What vLLM and llama.cpp have answered, through the gateway to the official clients: each API as the engine has written it,
and the engine's chat as Messages and as Responses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.sdk.engines import engine, recorded
from tests.clients.sdk.tap import Tapped
from tests.clients.sdk.test_errors import ask as ask_anything
from tests.gateway.conftest import eventually, running
from tests.support.fakes import http, writes
from tests.support.paths import CAPTURES

pytestmark = pytest.mark.skipif(not CAPTURES.exists(), reason="no recorded answers beside the checkout")
MODEL = "smollm2"
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
CHATS = [
    ("vllm", "chat_1_cold.json"),
    ("vllm", "chat_2_same.json"),
    ("vllm", "chat_5_stream_usage.sse"),
    ("vllm", "chat_6_stream_plain.sse"),
    ("vllm", "chat_7_stream_continuous_usage.sse"),
    ("llamacpp", "chat_1_cold.json"),
    ("llamacpp", "chat_2_same.json"),
    ("llamacpp", "chat_8_stream_usage.sse"),
    ("llamacpp", "chat_9_stream_plain.sse"),
    ("llamacpp", "chat_10_stream_progress.sse"),
]
MESSAGES = [
    ("vllm", "messages_anthropic.json"),
    ("vllm", "messages_anthropic_stream.sse"),
    ("vllm", "messages_stream_cached.sse"),
    ("vllm", "messages_tool_result.json"),
    ("vllm", "messages_billing_header_string.json"),
    ("llamacpp", "messages_anthropic.json"),
    ("llamacpp", "messages_anthropic_stream.sse"),
]
RESPONSES = [
    ("vllm", "responses.json"),
    ("vllm", "responses_stream.sse"),
    ("vllm", "responses_instructions.json"),
    ("vllm", "responses_list_input.json"),
    ("vllm", "responses_tools_call_items.json"),
    ("llamacpp", "responses.json"),
]

# llama.cpp's responses lack fields that the SDK's types require (tools, details of the usage). They go on as they are.
UNTYPED = [("llamacpp", "responses.json")]


def answer(source: str, name: str) -> bytes:
    return recorded(Path(CAPTURES) / source, name)


def text_in(raw: bytes) -> str:
    """All that an answer says, read without any client."""
    if not raw.startswith((b"data:", b"event:")):
        return "".join(texts(json.loads(raw)))
    events = [json.loads(line.removeprefix("data: ")) for line in raw.decode().splitlines() if line.startswith("data: {")]
    numbered = "sequence_number" in events[0]  # Responses, where later events repeat the text
    said = [event for event in events if not numbered or event["type"].endswith("text.delta")]
    return "".join(event["delta"] if numbered else "".join(texts(event)) for event in said)


def texts(value: Any) -> list[str]:
    """The values of `text` and `content`, wherever they are."""
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    if not isinstance(value, dict):
        return []
    own = [one for name, one in value.items() if name in ("text", "content") and isinstance(one, str)]
    return own + [text for one in value.values() for text in texts(one)]


async def ask(tapped: Tapped, api: str, *, stream: bool) -> tuple[str, int]:
    """(text, tokens of the prompt) as the official client has them."""
    if api == "messages":
        async with tapped.anthropic() as client:
            body: Any = {"model": MODEL, "max_tokens": 16, "messages": USER}
            if stream:
                async with client.messages.stream(**body) as events:
                    said = await events.get_final_message()
            else:
                said = await client.messages.create(**body)
        read = (said.usage.cache_read_input_tokens or 0) + (said.usage.cache_creation_input_tokens or 0)
        return "".join(block.text for block in said.content if block.type == "text"), said.usage.input_tokens + read
    async with tapped.openai() as other:
        if api == "responses":
            if stream:
                async with other.responses.stream(model=MODEL, input=USER) as parts:
                    response: Any = await parts.get_final_response()
            else:
                response = await other.responses.create(model=MODEL, input=USER)
            return response.output_text, response.usage.input_tokens if response.usage else 0
        if not stream:
            whole: Any = await other.chat.completions.create(model=MODEL, messages=USER)
            return whole.choices[0].message.content, whole.usage.prompt_tokens
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await other.chat.completions.create(model=MODEL, messages=USER, **usage)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, max(chunk.usage.prompt_tokens if chunk.usage else 0 for chunk in chunks)


@pytest.mark.parametrize(
    ("api", "behind", "source", "name"),
    [
        *(("chat", "chat", *one) for one in CHATS),
        *(("messages", "chat", *one) for one in CHATS),
        *(("responses", "chat", *one) for one in CHATS),
        *(("messages", "messages", *one) for one in MESSAGES),
        *(("responses", "responses", *one) for one in RESPONSES),
    ],
)
async def test_a_recorded_answer(api: str, behind: str, source: str, name: str) -> None:
    raw, stream = answer(source, name), name.endswith(".sse")
    async with (
        engine({behind + ("_stream" if stream else ""): raw}, MODEL) as replica,
        running(replica, prices={"*": {"input": 1.0, "output": 2.0}}) as run,
    ):
        tapped = Tapped(run.url, foreign=api == behind)
        text, prompt = await ask(tapped, api, stream=stream)
        assert text == text_in(raw) != ""
        if api == behind:
            assert bytes(tapped.exchanges[0].body) == raw, "byte for byte"
        if (source, name) not in UNTYPED:
            tapped.check()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        page = await run.metrics()
        counted = sum(value for key, value in page.items() if key.startswith("warmroute_prompt_tokens_total{"))
        guessed = sum(value for key, value in page.items() if key.startswith("warmroute_estimated_answers_total{"))
        assert counted == prompt or (prompt == 0 < guessed)


@pytest.mark.parametrize(("source", "api"), [("vllm", "messages"), ("vllm", "chat"), ("llamacpp", "chat")])
async def test_the_recorded_errors(source: str, api: str) -> None:
    name = {"messages": "messages_unknown_model.json", "chat": "error_too_long.json"}[api]
    record = json.loads((Path(CAPTURES) / source / name).read_bytes())
    words = (record.get("response") or record["answer"])["error"]["message"]
    error = writes(http(record["status"], answer(source, name)))
    async with engine({api: error}, MODEL) as replica, running(replica) as run:
        tapped = Tapped(run.url, foreign=True)
        with pytest.raises(Exception, match="Error code") as caught:
            await ask_anything(tapped, api, model=MODEL)
        assert caught.value.status_code == record["status"]  # type: ignore[attr-defined]
        assert words in str(caught.value)
