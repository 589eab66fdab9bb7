"""A coding agent on unmodified official clients: a long frame, and a conversation that grows with each call."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anthropic
import openai

FRAME_BYTES: Final = 60 << 10
TURN_BYTES: Final = 8 << 10
Ask = Callable[[str, list[str], Any], Awaitable[str]]
"""(base URL, the turns so far, memory of the client) -> the answer's text."""


def text_of(size: int, chance: random.Random) -> str:
    """Lines like those of a source file."""
    words = ["def", "return", "self", "value", "for", "in", "range", "(", ")", ":", "None", "import", "index", "0", "=", "+"]
    out, length = [], 0
    while length < size:
        line = " " * 4 * chance.randrange(4) + " ".join(chance.choice(words) for _ in range(8))
        out.append(line)
        length += len(line) + 1
    return "\n".join(out)[:size]


SYSTEM: Final = text_of(FRAME_BYTES // 2, random.Random(1))
TOOL: Final = {"description": text_of(FRAME_BYTES // 2, random.Random(2))}
_SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}}}


async def _chat(url: str, turns: list[str], client: openai.AsyncOpenAI) -> str:
    messages: Any = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    tools: Any = [{"type": "function", "function": {"name": "read", **TOOL, "parameters": _SCHEMA}}]
    said = ""
    async for chunk in await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True):
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
    return said


async def _messages(url: str, turns: list[str], client: anthropic.AsyncAnthropic) -> str:
    messages: Any = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    tools: Any = [{"name": "read", **TOOL, "input_schema": _SCHEMA}]
    async with client.messages.stream(model="m", max_tokens=99, system=SYSTEM, messages=messages, tools=tools) as stream:
        return await stream.get_final_text()


async def _responses(url: str, turns: list[str], client: openai.AsyncOpenAI) -> str:
    items: Any = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    tools: Any = [{"type": "function", "name": "read", **TOOL, "parameters": _SCHEMA, "strict": False}]
    async with client.responses.stream(model="m", instructions=SYSTEM, input=items, tools=tools, store=False) as stream:
        return (await stream.get_final_response()).output_text


def _openai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def _anthropic(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0)


CLIENTS: Final[Mapping[str, tuple[Callable[[str], Any], Ask]]] = {
    "openai, chat": (_openai, _chat),
    "anthropic, Messages": (_anthropic, _messages),
    "openai, Responses": (_openai, _responses),
}


async def converse(name: str, url: str, calls: int) -> list[str]:
    """The answers of a conversation with so many calls."""
    make, ask = CLIENTS[name]
    chance, turns, answers = random.Random(calls), list[str](), list[str]()
    async with make(url) as client:
        for _ in range(calls):
            turns.append(text_of(TURN_BYTES, chance))
            answers.append(await ask(url, turns, client))
            turns.append(answers[-1])
    return answers
