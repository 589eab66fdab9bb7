"""The same conversation in chat, Messages and Responses is the same prompt: each finds what another has put into the cache."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from tests.replica.api.clients import anthropics, openais, url_of
from tests.replica.conftest import Replica
from tests.support.tiers import gate

SYSTEM = "You are terse. Never invent facts, and answer in few words. " * 8
SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}}
CALL = {"what": "the café"}
NONCE = "x-anthropic-billing-header: cc_version=2.1.177.{0:02x}; cc_entrypoint=cli; cch={0:05x};"
Asking = Callable[[], Awaitable[tuple[int, int]]]  # prompt tokens, and those of them that were cached


class Conversation:
    """Its three forms. Each method asks for one more token, and is different only in what is not part of the prompt."""

    def __init__(
        self, openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic, model: str, block: int
    ) -> None:
        self.openai, self.anthropic, self.model, self.block = openai_client, anthropic_client, model, block
        self._nonce = 0

    async def chat(self) -> tuple[int, int]:
        function = {"name": "find", "description": "Finds it.", "parameters": SCHEMA}
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": orjson.dumps(CALL).decode()}}
        messages: Any = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Here.\nThere."},
            {"role": "user", "content": [{"type": "text", "text": "So "}, {"type": "text", "text": "where?"}]},
        ]
        tools: Any = [{"type": "function", "function": function}]
        answer = await self.openai.chat.completions.create(model=self.model, messages=messages, tools=tools, max_tokens=1)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0

    async def messages(self, *, blocks: bool = True) -> tuple[int, int]:
        self._nonce += 1
        nonce = NONCE.format(self._nonce)
        marked = {"cache_control": {"type": "ephemeral"}}
        system: Any = [
            {"type": "text", "text": nonce},
            {"type": "text", "text": SYSTEM[:40]},
            {"type": "text", "text": SYSTEM[40:]},
        ]
        result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Here.\nThere."}]}
        messages: Any = [
            {"role": "user", "content": "Where is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "c1", "name": "find", "input": CALL} | (marked if self._nonce % 2 else {}),
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "So "}, {"type": "text", "text": "where?"} | marked]},
        ]
        tools: Any = [{"name": "find", "description": "Finds it.", "input_schema": SCHEMA, "cache_control": None}]
        body: Any = {
            "model": self.model,
            "system": system if blocks else f"{nonce}\n{SYSTEM}",
            "messages": messages,
            "tools": tools,
        }
        answer = await self.anthropic.messages.create(max_tokens=1, metadata={"user_id": "u"}, **body)
        usage = answer.usage
        read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert (await self.anthropic.messages.count_tokens(**body)).input_tokens == usage.input_tokens + read + written
        return usage.input_tokens + read + written, read

    async def responses(self, *, developer: bool = False) -> tuple[int, int]:
        items: Any = [
            {"role": "user", "content": "Where is it?"},
            {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "find", "arguments": orjson.dumps(CALL).decode()},
            {"type": "function_call_output", "call_id": "c1", "output": "Here.\nThere."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So where?"}]},
        ]
        tools: Any = [
            {"type": "function", "name": "find", "description": "Finds it.", "parameters": SCHEMA, "strict": False},
            {"type": "web_search"},
        ]
        body: Any = {"model": self.model, "input": items, "tools": tools}
        body |= {"input": [{"role": "developer", "content": SYSTEM}, *items]} if developer else {"instructions": SYSTEM}
        answer = await self.openai.responses.create(max_output_tokens=1, store=False, **body)
        assert answer.usage
        counted = await self.openai.responses.input_tokens.count(**body)
        assert counted.input_tokens == answer.usage.input_tokens
        return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens

    @property
    def forms(self) -> list[Asking]:
        return [
            self.chat,
            self.messages,
            self.responses,
            lambda: self.messages(blocks=False),
            lambda: self.responses(developer=True),
        ]


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(params=["sim", pytest.param("transformers", marks=pytest.mark.model)])
async def conversation(request: pytest.FixtureRequest, replica: Replica, tmp_path: Path) -> AsyncIterator[Conversation]:
    if request.param == "sim":
        async with openais(replica.url) as one, anthropics(replica.url) as other:
            yield Conversation(one, other, "sim", block=16)
        return
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.replica.tiny import serving, spoken_model

    options: Any = {"chat_template": TEMPLATE, "kv_tokens": 4096, "batch_tokens": 1024}
    async with serving(spoken_model(tmp_path), **options) as one, anthropics(url_of(one)) as other:
        yield Conversation(one, other, "tiny", block=4)


@pytest.mark.parametrize("first", range(5))
@gate("sim-*", "transformers-0", reason="other seeds: the simulated engine")
async def test_each_finds_what_another_has_cached(conversation: Conversation, first: int) -> None:
    size, cached = await conversation.forms[first]()
    assert cached == 0
    for form in conversation.forms:
        assert await form() == (size, (size - 1) // conversation.block * conversation.block)
