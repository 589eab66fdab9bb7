"""What prompts are made of: messages, texts or token ids, checked."""

from dataclasses import dataclass, field
from typing import Any, Literal

from replica.engine import Message, Tail, Template
from replica.fields import ApiError, flag, kind_of, list_or_none

Truncation = Literal["auto", "disabled"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt is made of. Exactly one of messages, text, tokens is set."""

    messages: list[Message] | None = None
    tools: list[Any] | None = None
    tail: Tail = "answer"
    template: Template = field(default_factory=Template)
    truncation: Truncation = "disabled"
    text: str | None = None
    tokens: list[int] | None = None
    special: bool = True  # may a text get the tokenizer's own tokens around it


def chat_prompt(body: dict[str, Any]) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message.", "messages")
    return Prompt(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(messages)],
        tools=_tools(body),
        tail=_tail(body),
        template=_template(body),
        truncation=_truncation(body),
    )


def _tools(body: dict[str, Any]) -> list[Any] | None:
    """They are told to the model; what it makes of them is its text, so it cannot be forced to call one, and "none" keeps
    them in the prompt, as in vLLM: the cached prefix stays the same."""
    tools, choice = list_or_none(body, "tools"), body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        message = (
            "tool_choice must be 'auto' or 'none': a call cannot be forced here. For an answer of a shape send response_format."
        )
        raise ApiError(400, message, "tool_choice")
    if choice == "auto" and not tools:
        raise ApiError(400, "tool_choice is only allowed together with tools.", "tool_choice")
    return tools


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role (a string) and content.", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is None:
        content = ""  # an assistant's message that only calls tools
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a string or a list of parts, not {kind_of(content)}.", where)
    return {**message, "content": content}


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ApiError(
            400, f"{where} must be a text part ({{'type': 'text', 'text': ...}}): this model reads text only.", where
        )
    return text


def _tail(body: dict[str, Any]) -> Tail:
    goes_on, headed = flag(body, "continue_final_message"), body.get("add_generation_prompt")
    if goes_on and headed:
        message = (
            "continue_final_message goes on with the last message, add_generation_prompt begins another: send one of them."
        )
        raise ApiError(400, message, "continue_final_message")
    return "open" if goes_on else "none" if headed is not None and not flag(body, "add_generation_prompt") else "answer"


def text_prompts(body: dict[str, Any]) -> list[Prompt]:
    """The prompts of a completion: one, or a list of them."""
    given = body.get("prompt")
    if isinstance(given, list) and any(isinstance(one, str | list) for one in given):
        return [_one(prompt) for prompt in given]
    return [_one(given)]


def _one(prompt: object) -> Prompt:
    if isinstance(prompt, str) and prompt:
        return Prompt(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Prompt(tokens=prompt)
    message = "prompt must be a text or a list of token ids (integers), or a list of such prompts, and none of them empty."
    raise ApiError(400, message, "prompt")


def _template(body: dict[str, Any]) -> Template:
    text, variables = body.get("chat_template"), body.get("chat_template_kwargs")
    if text is not None and not isinstance(text, str):
        raise ApiError(400, f"chat_template must be a string, not {kind_of(text)}.", "chat_template")
    if variables is not None and not isinstance(variables, dict):
        raise ApiError(400, f"chat_template_kwargs must be an object, not {kind_of(variables)}.", "chat_template_kwargs")
    return Template(text, variables or {})


def _truncation(body: dict[str, Any]) -> Truncation:
    value = body.get("truncation")
    if value in (None, "disabled"):
        return "disabled"
    if value == "auto":
        return "auto"
    raise ApiError(400, "truncation must be 'auto' (drop the oldest turns if need be) or 'disabled'.", "truncation")
