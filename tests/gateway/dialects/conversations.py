"""One conversation in the words of three dialects, as their clients write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(max_size=30)
NAMES = st.sampled_from(["read", "shell"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAGQAAABkCAYAAABw4pVUAAAAAElFTkSuQmCC"


@dataclass(frozen=True)
class Image:
    data: str


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]
    result: Any  # a text, or a list of texts and images


@dataclass(frozen=True)
class Turn:
    """What a user says, and what comes back: reasoning, a text, calls of tools with their results."""

    said: list[Any]
    reasoning: str
    answer: str
    calls: list[Call]


IMAGES = st.builds(Image, st.sampled_from([PNG, "AAAA"]))
CALLS = st.builds(
    Call, NAMES, st.dictionaries(TEXTS, VALUES, max_size=3), TEXTS | st.lists(TEXTS | IMAGES, min_size=1, max_size=2)
)
TURNS = st.lists(
    st.builds(Turn, st.lists(TEXTS | IMAGES, min_size=1, max_size=3), TEXTS, TEXTS, st.lists(CALLS, max_size=2)), max_size=3
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={"description": TEXTS},
    ).flatmap(lambda tool: VALUES.map(lambda schema: {**tool, "schema": {"type": "object", "properties": schema}})),
    max_size=2,
)
SYSTEMS = st.lists(TEXTS.filter(bool), max_size=2)


def chat(system: list[str], tools: list[Any], turns: list[Turn], ids: str = "call") -> dict[str, Any]:
    """A body of chat completions. ids: with which those of the calls begin."""
    messages = list[Any]()
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": _parts(turn.said, _chat_image)})
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if turn.reasoning:
            answer["reasoning_content"] = turn.reasoning
        calls = [(f"{ids}_{number}_{at}", call) for at, call in enumerate(turn.calls)]
        if calls:
            functions = [(id_, {"name": call.name, "arguments": json.dumps(call.arguments, indent=1)}) for id_, call in calls]
            answer["tool_calls"] = [{"id": id_, "type": "function", "function": function} for id_, function in functions]
        messages.append(answer)
        for id_, call in calls:
            messages.append({"role": "tool", "tool_call_id": id_, "content": _parts(call.result, _chat_image)})
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if tools:
        body["tools"] = [{"type": "function", "function": _function(tool, "parameters")} for tool in tools]
    return body


def messages(system: list[str], tools: list[Any], turns: list[Turn], ids: str = "toolu") -> dict[str, Any]:
    """The same for Anthropic's Messages: results of tools come in the next turn of the user."""
    found, results = list[Any](), list[Any]()
    for number, turn in enumerate(turns):
        found.append({"role": "user", "content": [*results, *_blocks(turn.said)]})
        thinking = [{"type": "thinking", "thinking": turn.reasoning, "signature": ids}] if turn.reasoning else []
        calls = [(f"{ids}_{number}_{at}", call) for at, call in enumerate(turn.calls)]
        uses = [{"type": "tool_use", "id": id_, "name": call.name, "input": call.arguments} for id_, call in calls]
        found.append({"role": "assistant", "content": [*thinking, {"type": "text", "text": turn.answer}, *uses]})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": id_,
                "content": call.result if isinstance(call.result, str) else _blocks(call.result),
            }
            for id_, call in calls
        ]
    if results:
        found.append({"role": "user", "content": results})
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": found}
    if system:
        body["system"] = [{"type": "text", "text": text} for text in system]
    if tools:
        body["tools"] = [_function(tool, "input_schema") for tool in tools]
    return body


def responses(system: list[str], tools: list[Any], turns: list[Turn], ids: str = "fc") -> dict[str, Any]:
    """The same for OpenAI's Responses, as a list of items."""
    items = list[Any]()
    for number, turn in enumerate(turns):
        items.append({"role": "user", "content": _inputs(turn.said)})
        if turn.reasoning:
            summary = [{"type": "summary_text", "text": turn.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{ids}", "summary": summary, "encrypted_content": None})
        output = [{"type": "output_text", "text": turn.answer, "annotations": [], "logprobs": None}]
        items.append({"type": "message", "id": f"msg_{ids}", "role": "assistant", "status": "completed", "content": output})
        calls = [(f"{ids}_{number}_{at}", call) for at, call in enumerate(turn.calls)]
        for id_, call in calls:
            arguments = json.dumps(call.arguments, separators=(",", ":"))
            items.append({"type": "function_call", "id": ids, "call_id": id_, "name": call.name, "arguments": arguments})
        for id_, call in calls:
            output_of = call.result if isinstance(call.result, str) else _inputs(call.result)
            items.append({"type": "function_call_output", "call_id": id_, "output": output_of})
    body: dict[str, Any] = {"model": "m", "input": items}
    if system:
        body["instructions"] = "".join(system)
    if tools:
        body["tools"] = [{"type": "function", "strict": False, **_function(tool, "parameters")} for tool in tools]
    return body


def _function(tool: dict[str, Any], schema: str) -> dict[str, Any]:
    described = {"description": tool["description"]} if "description" in tool else {}
    return {"name": tool["name"], **described, schema: tool["schema"]}


def _parts(content: Any, image: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else image(part) for part in content]


def _chat_image(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image.data}", "detail": "auto"}}


def _blocks(content: list[Any]) -> list[Any]:
    def block(image: Image) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image.data}}

    blocks: list[Any] = _parts(content, block)
    if blocks:
        blocks[-1]["cache_control"] = {"type": "ephemeral"}  # on the newest block, so it moves
    return blocks


def _inputs(content: list[Any]) -> list[Any]:
    found: list[Any] = [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": f"data:image/png;base64,{part.data}", "detail": "auto"}
        for part in content
    ]
    return found
