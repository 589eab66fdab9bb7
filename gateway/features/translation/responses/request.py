"""Translates a Responses request to a chat request, and makes the part that its response repeats.

Unknown fields are kept, because engines have their own fields, such as `top_k` and `chat_template_kwargs`. Fields that only
label a request, or concern only the provider, are omitted. Fields that would change the answer and that chat cannot express are
an error 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.body import json_object
from gateway.dialects.prompt.canonical import to_json
from gateway.errors import bad_request
from gateway.features.translation.responses.tools import ChatTools
from gateway.features.translation.responses.turns import chat_messages
from gateway.features.translation.rules import Omissions
from gateway.features.translation.translation import TranslatedRequest

# These need a server that stores objects.
_KEPT: Final[Mapping[str, str]] = {
    "previous_response_id": "Send the whole conversation in 'input'.",
    "conversation": "Send the whole conversation in 'input'.",
    "prompt": "Send the prompt in 'instructions' and 'input'.",
}
_LEFT_OUT: Final = frozenset(
    [
        *_KEPT,
        *("instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text", "reasoning"),
        *(
            "background",
            "context_management",
            "include",
            "max_tool_calls",
            "truncation",
            "top_logprobs",
            "stream",
            "stream_options",
        ),
        *("store", "metadata", "client_metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier"),
        # Fields of chat that Responses does not have.
        *("messages", "max_tokens", "max_completion_tokens", "functions", "function_call", "n", "logprobs", "response_format"),
        *("reasoning_effort", "verbosity"),
    ]
)
_LOGPROBS: Final = "message.output_text.logprobs"
# Repeated fields, and their defaults.
_REPEATED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


def chat_request(raw: bytes) -> TranslatedRequest:
    """Raises GatewayError 400 that names the field. O(length)."""
    body = json_object(raw)
    _refuse(body)
    left_out = Omissions()
    tools = ChatTools(body.get("tools"), left_out)
    if body.get("context_management") is not None:
        left_out.add("context_management", "nothing here compacts a conversation")
    chat = {key: value for key, value in body.items() if key not in _LEFT_OUT}
    chat["messages"] = chat_messages(body.get("instructions"), body.get("input"), left_out)
    _add_tools(chat, body, tools)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    _add_text(chat, body.get("text"))
    _add_reasoning(chat, body.get("reasoning"))
    if body.get("stream") is True:
        chat["stream"], chat["stream_options"] = True, {"include_usage": True}
    return TranslatedRequest(to_json(chat), _echo(body, tools), left_out.found)


def _refuse(body: Mapping[str, Any]) -> None:
    for name, instead in _KEPT.items():
        if body.get(name) is not None:
            raise _not_in_chat(name, instead)
    if body.get("background"):
        raise _not_in_chat("background", "Leave it out.")
    include = body.get("include")
    if body.get("top_logprobs"):
        raise _not_in_chat("top_logprobs", "Leave it out.")
    if isinstance(include, list) and _LOGPROBS in include:
        raise _not_in_chat("include", f"Leave {_LOGPROBS!r} out.")


def _not_in_chat(name: str, instead: str) -> Exception:
    return bad_request(f"{name!r} cannot be used with this model, whose replicas speak only chat completions. {instead}", name)


def _add_tools(chat: dict[str, Any], body: Mapping[str, Any], tools: ChatTools) -> None:
    """Without tools a choice of "auto" is meaningless, and engines refuse it."""
    choice = tools.choose(body.get("tool_choice"))
    if tools.functions:
        chat["tools"] = tools.functions
        if body.get("parallel_tool_calls") is not None:
            chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    if choice is not None and (tools.functions or choice != "auto"):
        chat["tool_choice"] = choice


def _add_text(chat: dict[str, Any], text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, dict):
        raise bad_request("'text' must be an object.", "text")
    if text.get("verbosity") is not None:
        chat["verbosity"] = text["verbosity"]
    form = text.get("format")
    kind = form.get("type") if isinstance(form, dict) else form
    if isinstance(form, dict) and kind == "json_schema":
        chat["response_format"] = {"type": kind, kind: {key: value for key, value in form.items() if key != "type"}}
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind not in (None, "text"):
        raise bad_request("text.format.type must be 'text', 'json_schema' or 'json_object'.", "text.format.type")


def _add_reasoning(chat: dict[str, Any], reasoning: Any) -> None:
    """The summary setting is ignored: engines return the whole reasoning."""
    if reasoning is None:
        return
    if not isinstance(reasoning, dict):
        raise bad_request("'reasoning' must be an object.", "reasoning")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]


def _echo(body: Mapping[str, Any], tools: ChatTools) -> bytes:
    echo: dict[str, Any] = {"background": False, "model": body.get("model"), "previous_response_id": None}
    for key, default in _REPEATED.items():
        value = body.get(key)
        echo[key] = default if value is None else value
    echo["tools"] = tools.echo
    if isinstance(body.get("store"), bool):
        echo["store"] = body["store"]
    return to_json(echo)
