"""Prompts as clients send them: messages, texts or token ids, checked."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from replica.api.validation import ApiError, Flag, kind_of
from replica.engine import Message, PromptEnd, TemplateOverride

Truncation = Literal["auto", "disabled"]


class ChatPromptFields(Struct, kw_only=True):
    """The fields of a body that a chat's prompt is made from."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list with at least one message")]
    tools: Annotated[list[Any], Meta(description="a list")] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto"],
            Meta(description="'auto' or 'none': a call cannot be forced here; to constrain the answer send response_format"),
        ]
        | None
    ) = None
    truncation: Annotated[Truncation, Meta(description="'auto' (drop the oldest turns if needed) or 'disabled'")] | None = None
    chat_template: Annotated[str, Meta(description="a string")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before it is tokenized. Exactly one of messages, text, tokens is set."""

    messages: list[Message] | None = None
    tools: list[Any] | None = None
    end: PromptEnd = "answer"
    template: TemplateOverride = field(default_factory=TemplateOverride)
    truncation: Truncation = "disabled"
    text: str | None = None
    tokens: list[int] | None = None
    special: bool = True  # whether a text gets the tokenizer's own special tokens around it


def chat_prompt(fields: ChatPromptFields) -> Prompt:
    """Raises ApiError."""
    return Prompt(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(fields.messages)],
        tools=_tools(fields),
        end=_end(fields),
        template=TemplateOverride(fields.chat_template, fields.chat_template_kwargs or {}),
        truncation=fields.truncation or "disabled",
    )


def text_prompts(prompt: object) -> list[Prompt]:
    """The prompts of a completion: one, or a list of them. Raises ApiError."""
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        return [_text_prompt(one) for one in prompt]
    return [_text_prompt(prompt)]


def _tools(fields: ChatPromptFields) -> list[Any] | None:
    """They are part of the prompt; calls are part of the answer's text, so none can be forced. "none" keeps the tools in the
    prompt, as in vLLM: the cached prefix stays the same."""
    if fields.tool_choice == "auto" and not fields.tools:
        raise ApiError(400, "tool_choice is only allowed together with tools.", "tool_choice")
    return fields.tools or None


def _message(message: object, name: str) -> Message:
    """A message whose content is a text; its other fields stay."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{name} must be an object with a role (a string) and content.", name)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if isinstance(content, list):
        return {**message, "content": "".join(_part(part, f"{name}.content[{at}]") for at, part in enumerate(content))}
    if content is None:
        return {**message, "content": ""}  # an assistant's message that only calls tools
    raise ApiError(400, f"{name}.content must be a string or a list of parts, not {kind_of(content)}.", name)


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


def _text_prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str) and prompt:
        return Prompt(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Prompt(tokens=prompt)
    message = "prompt must be a text or a list of token ids (integers), or a list of such prompts, and none of them empty."
    raise ApiError(400, message, "prompt")
