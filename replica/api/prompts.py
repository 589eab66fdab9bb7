"""Prompts as clients send them: messages, texts or token ids, checked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from replica.api.tools import Function, ToolUse, tool_use
from replica.api.validation import ApiError, Flag, check_texts, json_text, kind_of
from replica.engine import Message, PromptEnd, TemplateOverride

MAX_PROMPTS = 4096  # of a completion
Truncation = Literal["auto", "disabled"]


class FunctionName(Struct):
    name: Annotated[str, Meta(description="a string")]


class NamedTool(Struct, kw_only=True):
    type: Literal["function"] | None = None
    function: Annotated[FunctionName, Meta(description="an object with a name")]


class ChatPromptFields(Struct, kw_only=True):
    """The fields of a chat's prompt."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list with at least one message")]
    tools: Annotated[list[Any], Meta(description="a list")] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool,
            Meta(description="'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"),
        ]
        | None
    ) = None
    truncation: Annotated[Truncation, Meta(description="'auto' (drop the oldest turns if needed) or 'disabled'")] | None = None
    chat_template: Annotated[str, Meta(description="a string")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """A prompt before it is tokenized. Exactly one of messages, text, tokens is set. `marks`: beginnings of the conversation to
    be measured in tokens, None for the whole. `param`: its field, for errors.
    """

    messages: list[Message] | None = None
    tools: list[Any] | None = None
    end: PromptEnd = "answer"
    template: TemplateOverride = field(default_factory=TemplateOverride)
    truncation: Truncation = "disabled"
    text: str | None = None
    tokens: list[int] | None = None
    marks: tuple[list[Message] | None, ...] = ()
    param: str = "messages"
    special: bool = True  # add the tokenizer's own special tokens around a text


def chat_prompt(fields: ChatPromptFields) -> RequestPrompt:
    """Raises ApiError."""
    return RequestPrompt(
        messages=chat_messages(fields.messages, lambda at: f"messages[{at}]"),
        tools=_tools(fields),
        end=_end(fields),
        template=TemplateOverride(fields.chat_template, fields.chat_template_kwargs or {}),
        truncation=fields.truncation or "disabled",
    )


def text_prompts(prompt: object) -> list[RequestPrompt]:
    """The prompts of a completion: one, or a list of them. Raises ApiError."""
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt has {len(prompt):,} prompts; one request may have {MAX_PROMPTS:,}.", "prompt")
        return [_text_prompt(one) for one in prompt]
    return [_text_prompt(prompt)]


def chat_tool_use(fields: ChatPromptFields) -> ToolUse:
    """Raises ApiError."""
    choice = fields.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return tool_use(_functions(fields.tools or []), "required" if isinstance(choice, NamedTool) else choice or "auto", named)


def _functions(tools: list[Any]) -> list[Function]:
    """The tools of a chat that can be called."""
    described = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [
        Function(one["name"], one["parameters"] if isinstance(one.get("parameters"), dict) else None)
        for one in described
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    ]


def _tools(fields: ChatPromptFields) -> list[Any] | None:
    """The tools, which are part of the prompt with any choice."""
    if fields.tool_choice == "auto" and not fields.tools:
        raise ApiError(400, "tool_choice is only allowed together with tools.", "tool_choice")
    return fields.tools or None


def chat_messages(messages: list[Any], name: Callable[[int], str]) -> list[Message]:
    """`chat_message` for a whole conversation. `name`: gives a message's name. Raises ApiError."""
    check_texts(_arguments(messages), name(0).partition("[")[0])
    return [chat_message(message, name(at)) for at, message in enumerate(messages)]


def _arguments(messages: list[Any]) -> Iterator[str]:
    """The arguments of all calls that are texts."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def chat_message(message: object, name: str) -> Message:
    """A message for templates: its content is a text, the arguments of its calls are objects; other fields stay. Raises
    ApiError, which calls the message `name`.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{name} must be an object with a role (a string) and content.", name)
    if "tool_calls" in message:
        message = {**message, "tool_calls": _with_objects(message["tool_calls"])}
    content = message.get("content")
    if isinstance(content, str):
        return message
    if isinstance(content, list):
        return {**message, "content": "".join(_part(part, f"{name}.content[{at}]") for at, part in enumerate(content))}
    if content is None:
        return {**message, "content": ""}  # an assistant's message with calls only
    raise ApiError(400, f"{name}.content must be a string or a list of parts, not {kind_of(content)}.", name)


def _with_objects(calls: object) -> object:
    """Calls whose arguments are objects, as vLLM passes them to templates; arguments that are no JSON object stay a text."""
    return [_with_object(call) for call in calls] if isinstance(calls, list) else calls


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call
    if not isinstance(arguments, dict):
        return call
    json_text(arguments, "arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _part(part: object, name: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        message = f"{name} must be a text part ({{'type': 'text', 'text': ...}}): this model reads text only."
        raise ApiError(400, message, name)
    return text


def _end(fields: ChatPromptFields) -> PromptEnd:
    if not fields.continue_final_message:
        return "none" if fields.add_generation_prompt is False else "answer"
    if fields.add_generation_prompt:
        message = "continue_final_message continues the last message, add_generation_prompt begins another: send one of them."
        raise ApiError(400, message, "continue_final_message")
    return "open"


def _text_prompt(prompt: object) -> RequestPrompt:
    if isinstance(prompt, str) and prompt:
        return RequestPrompt(text=prompt, param="prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return RequestPrompt(tokens=prompt, param="prompt")
    message = "prompt must be a text or a list of token ids (integers), or a list of such prompts, and none of them empty."
    raise ApiError(400, message, "prompt")
