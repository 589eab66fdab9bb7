"""The canonical prompt of Anthropic's Messages: equal to that of OpenAI's chat for the same conversation.

The conversion is that of vLLM and llama.cpp: the blocks of `system` are one text; results of tools are turns of their own,
before the rest of their turn; tool uses are calls; thinking is the reasoning of its turn. The `thinking` option is omitted:
engines that know the field read it at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final

from gateway.dialects.anthropic.billing import strip_line
from gateway.dialects.prompt.calls import add_call
from gateway.dialects.prompt.canonical import HEAD, PART, CanonicalPrompt, to_json, without
from gateway.dialects.prompt.chat import REASONING
from gateway.dialects.prompt.content import add_content, part_bytes
from gateway.dialects.prompt.head import head_parts, short_digest
from gateway.dialects.prompt.marks import MARKER
from gateway.errors import bad_request

_TOOLS: Final = HEAD + b"tools["
_CLIENT_TOOLS: Final = (None, "custom")  # types of tools run by the client; all others are run by the server
# Fields of a tool that are written first, in this order, or that no template prints.
_FUNCTION: Final = frozenset(
    ["type", "name", "description", "input_schema", MARKER, "eager_input_streaming", "defer_loading", "allowed_callers"]
)


def messages_prompt(body: Mapping[str, Any], most: int = 0) -> CanonicalPrompt:
    """The canonical prompt. Raises GatewayError 400 where the messages are not messages.

    most: maximum number of parts; beyond it NeedsHelper is raised. 0: no maximum.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    prompt = CanonicalPrompt(most)
    prompt.parts += head_parts(body, _head(prompt, body))
    _mark_tools(prompt, body.get("tools"))
    _add_system(prompt, body.get("system"))
    for index, message in enumerate(messages):
        _add_message(prompt, message, index)
        prompt.require(0)
    prompt.marks.add(body, len(prompt.parts))
    return prompt


def head_digests(prompt: CanonicalPrompt, body: Mapping[str, Any], salt: str) -> tuple[str, str, str]:
    """Digests of a finished prompt's head: tools, system prompt, all other fields. salt: the cache salt. O(length of
    the head).
    """
    heads = list(takewhile(_is_head, prompt.parts))
    tools = [part for part in heads if part.startswith(_TOOLS)]
    system = CanonicalPrompt()
    _add_system(system, body.get("system"))
    others = [part for part in heads if not part.startswith(_TOOLS)]
    return (
        short_digest(b"".join(tools)),
        short_digest(system.joined()),
        short_digest(b"".join([*others, HEAD, salt.encode("utf-8", "surrogatepass")])),
    )


def _is_head(part: bytes) -> bool:
    return part.startswith(HEAD)


def runs_tools(body: Mapping[str, Any]) -> bool:
    """True if the server is to run tools itself, and so to compute several prompts."""
    if body.get("mcp_servers"):  # of the first form of that beta, in which no tool names them
        return True
    tools = body.get("tools")
    return isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" not in tool for tool in tools)


def _head(prompt: CanonicalPrompt, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the head that OpenAI's chat writes in another form."""
    head: dict[str, Any] = {"system": None, "thinking": None, "tools": None, "tool_choice": None}
    tools = body.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise bad_request("'tools' must be a list.", "tools")
        prompt.require(len(tools))
        head["tools"] = [chat_tool(tool, index) for index, tool in enumerate(tools)]
    return head


def _mark_tools(prompt: CanonicalPrompt, tools: Any) -> None:
    """Adds the breakpoints of tools. All tools are one part of the prompt, so a breakpoint on any of them is one at its end."""
    if isinstance(tools, list):
        for tool in tools:
            if isinstance(tool, dict) and MARKER in tool:
                prompt.marks.add(tool, len(prompt.parts))


def chat_tool(tool: Any, index: int) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat."""
    if not isinstance(tool, dict):
        where = f"tools[{index}]"
        raise bad_request(f"{where} must be an object with 'name' and 'input_schema'.", where)
    if "input_schema" not in tool or tool.get("type") not in _CLIENT_TOOLS:
        return without(tool, MARKER)
    function = {"name": tool.get("name")}
    if "description" in tool:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if len(tool) > len(function):
        function |= {key: value for key, value in tool.items() if key not in _FUNCTION and value is not None}
    return {"type": "function", "function": function}


def _add_system(prompt: CanonicalPrompt, system: Any) -> None:
    """Adds the system prompt as one turn: engines join its blocks."""
    if system is None:
        return
    if isinstance(system, str):
        if text := strip_line(system):
            prompt.begin("system")
            prompt.parts.append(text.encode())
        return
    if not isinstance(system, list):
        raise bad_request("'system' must be a string or a list of text blocks.", "system")
    prompt.require(len(system))
    blocks = [block for block in system if not _is_billing(block)]
    if blocks:
        prompt.begin("system")
        for block in blocks:
            prompt.parts.append(part_bytes(prompt, _stripped(block), "system"))


def _is_billing(block: Any) -> bool:
    """True if a block has a billing line and nothing else."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text != "" and not strip_line(text)


def _stripped(block: Any) -> Any:
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str):
        return block
    rest = strip_line(text)
    return block if len(rest) == len(text) else {**block, "text": rest}


def _add_message(prompt: CanonicalPrompt, message: Any, index: int) -> None:
    if not isinstance(message, dict):
        where = f"messages[{index}]"
        raise bad_request(f"{where} must be an object with 'role' and 'content'.", where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        where = f"messages[{index}].role"
        raise bad_request(f"{where} must be 'user' or 'assistant'.", where)
    if isinstance(content, str):
        prompt.begin(role)
        prompt.parts.append((strip_line(content) if role == "system" else content).encode())
        return
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content blocks.", where)
    prompt.require(2 * len(content) - 1)
    _add_blocks(prompt, role, content, where)


def _add_blocks(prompt: CanonicalPrompt, role: str, content: list[Any], where: str) -> None:
    """Adds a turn of blocks: first the results of tools, then its text, its reasoning and its calls."""
    said, calls, thoughts, results = list[Any](), list[dict[str, Any]](), list[str](), 0
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results += 1
            prompt.begin("tool")
            add_content(prompt, block.get("content"), where)
            prompt.marks.add(block, len(prompt.parts))
        elif kind == "tool_use":
            calls.append(block)
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking" and not (role == "system" and _is_billing(block)):
            said.append(_stripped(block) if role == "system" else block)
    if results and not (said or calls or thoughts):
        return
    prompt.begin(role)
    for number, block in enumerate(said):
        if number:
            prompt.parts.append(PART)
        prompt.parts.append(part_bytes(prompt, block, where))
    if thoughts:
        prompt.unprinted(REASONING, to_json("".join(thoughts)))
    for call in calls:
        add_call(prompt, str(call.get("name")), to_json(call.get("input")))
        prompt.marks.add(call, len(prompt.parts))
