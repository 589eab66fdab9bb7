"""The canonical prompt of OpenAI's Responses: equal to that of OpenAI's chat for the same conversation.

The conversion is that of the engines: `instructions`, and turns of the role `developer`, are the system prompt; the items of
one answer (its reasoning, its text, its calls) are one turn; the output of a call is a turn of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.prompt.calls import add_call, arguments_json
from gateway.dialects.prompt.canonical import CanonicalPrompt, to_json, without
from gateway.dialects.prompt.chat import REASONING
from gateway.dialects.prompt.content import add_content, part_bytes
from gateway.dialects.prompt.head import head_parts
from gateway.dialects.responses.ids import is_reference
from gateway.errors import bad_request

_ASSISTANT: Final = "assistant"
_ROLES: Final = {"developer": "system"}
OUTPUTS: Final = frozenset(["function_call_output", "custom_tool_call_output"])
CALLS: Final = frozenset(["function_call", "custom_tool_call"])
_FUNCTION: Final = frozenset(["type", "name", "description", "parameters", "strict"])
_NOT_PRINTED: Final = ("id", "call_id", "status")  # fields of an item
# Types of tools run by the client; all others are run by the server.
_CLIENT_TOOLS: Final = frozenset(["function", "custom", "local_shell", "shell", "apply_patch", "computer", "namespace"])


def responses_prompt(body: Mapping[str, Any], most: int = 0) -> CanonicalPrompt:
    """The canonical prompt. Raises GatewayError 400 if the body has no valid input.

    most: maximum number of parts; beyond it NeedsHelper is raised. 0: no maximum.
    """
    instructions, items = body.get("instructions"), body.get("input")
    prompt = CanonicalPrompt(most)
    prompt.parts += head_parts(body, _head(prompt, body))
    if instructions is not None:
        if not isinstance(instructions, str):
            raise bad_request("'instructions' must be a string.", "instructions")
        if instructions:
            prompt.begin("system")
            prompt.parts.append(instructions.encode())
    if isinstance(items, str):
        prompt.begin("user")
        prompt.parts.append(items.encode())
    elif isinstance(items, list):
        _add_items(prompt, items)
    elif items is not None or not has_context(body):
        raise bad_request("'input' is required: a string, or a list of items.", "input")
    return prompt


def has_context(body: Mapping[str, Any]) -> bool:
    """True if a part of the prompt is stored at the server, and not in the body."""
    return any(body.get(name) is not None for name in ("previous_response_id", "conversation", "prompt"))


def runs_tools(body: Mapping[str, Any]) -> bool:
    """True if the server is to run tools itself, and so to compute several prompts."""
    tools = body.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and str(tool.get("type", "function")) not in _CLIENT_TOOLS for tool in tools
    )


def _head(prompt: CanonicalPrompt, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the head that OpenAI's chat writes in another form."""
    head: dict[str, Any] = {"instructions": None, "tools": None}
    tools, reasoning = body.get("tools"), body.get("reasoning")
    if tools is not None:
        if not isinstance(tools, list):
            raise bad_request("'tools' must be a list.", "tools")
        prompt.require(len(tools))
        head["tools"] = [chat_tool(tool, index) for index, tool in enumerate(tools)]
    if isinstance(reasoning, dict):
        head["reasoning_effort"] = reasoning.get("effort")
    return head


def chat_tool(tool: Any, index: int) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat."""
    if not isinstance(tool, dict):
        where = f"tools[{index}]"
        raise bad_request(f"{where} must be an object with a 'type'.", where)
    if tool.get("type", "function") != "function" or "name" not in tool:
        return tool
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    if tool.get("strict"):
        function["strict"] = True
    if len(tool) > len(function) + 1:
        function |= {key: value for key, value in tool.items() if key not in _FUNCTION and value is not None}
    return {"type": "function", "function": function}


class _Answer:
    """The items of one answer, collected for one turn of the prompt."""

    __slots__ = ("calls", "content", "reasoning")

    def __init__(self) -> None:
        self.content: tuple[Any, str] | None = None  # and its name in errors
        self.reasoning = list[str]()
        self.calls = list[tuple[str, bytes]]()

    @property
    def has_output(self) -> bool:
        """True if it has more than reasoning."""
        return self.content is not None or bool(self.calls)

    def write(self, prompt: CanonicalPrompt) -> None:
        prompt.begin(_ASSISTANT)
        if self.content is not None:
            add_content(prompt, *self.content)
        if self.reasoning:
            prompt.unprinted(REASONING, to_json("".join(self.reasoning)))
        for name, arguments in self.calls:
            add_call(prompt, name, arguments)


def _add_items(prompt: CanonicalPrompt, items: list[Any]) -> None:
    prompt.require(len(items))
    answer: _Answer | None = None
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            where = f"input[{index}]"
            raise bad_request(f"{where} must be an object: a message or another item.", where)
        kind = item.get("type", "message")
        if is_of_answer(kind, item):
            if answer is not None and answer.has_output and kind not in CALLS:
                answer.write(prompt)
                answer = None
            answer = answer or _Answer()
            _add_to_answer(prompt, answer, kind, item, index)
        else:
            if answer is not None:
                answer.write(prompt)
                answer = None
            _add_turn(prompt, kind, item, index)
        prompt.require(0)
    if answer is not None:
        answer.write(prompt)


def is_of_answer(kind: Any, item: Mapping[str, Any]) -> bool:
    """True if an item of this type belongs to the turn of an answer."""
    return kind in ("reasoning", "function_call", "custom_tool_call") or (kind == "message" and item.get("role") == _ASSISTANT)


def _add_to_answer(prompt: CanonicalPrompt, answer: _Answer, kind: Any, item: dict[str, Any], index: int) -> None:
    if kind == "message":
        answer.content = item.get("content"), f"input[{index}].content"
    elif kind == "reasoning":
        if text := reasoning_of(item):
            answer.reasoning.append(text)
    else:
        name = item.get("name")
        arguments = item.get("arguments") if kind == "function_call" else None
        value = arguments_json(prompt, arguments) if isinstance(arguments, str) else to_json(item.get("input"))
        answer.calls.append((name if isinstance(name, str) else "", value))


def reasoning_of(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, or else of its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list):
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if texts:
                return "".join(texts)
    return ""


def _add_turn(prompt: CanonicalPrompt, kind: Any, item: dict[str, Any], index: int) -> None:
    """Adds an item that is a turn of its own."""
    role = item.get("role")
    if kind in ("message", None) and (isinstance(role, str) or not is_reference(item)):
        if not isinstance(role, str):
            where = f"input[{index}].role"
            raise bad_request(f"{where} must be a string such as 'user'.", where)
        prompt.begin(_ROLES.get(role, role))
        add_content(prompt, item.get("content"), f"input[{index}].content")
    elif isinstance(kind, str) and kind in OUTPUTS:
        prompt.begin("tool")
        output = item.get("output")
        known = output is None or isinstance(output, str | list)
        add_content(prompt, output if known else orjson.dumps(output).decode(), f"input[{index}].output")
    else:
        prompt.refers = prompt.refers or is_reference(item)
        prompt.begin(str(kind))
        prompt.parts.append(part_bytes(prompt, without(item, *_NOT_PRINTED[1:]), f"input[{index}]"))
