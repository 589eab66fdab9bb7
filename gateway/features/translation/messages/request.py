"""Translates a Messages request to a chat request.

Content and order stay the same, so that an engine makes the same prompt as from the original. `turns.py` translates the
conversation, this module everything else. Omitted are fields that do not concern the answer, or that chat engines do not
reliably accept: `metadata`, `service_tier`, `cache_control` (used by the gateway), `thinking` and `output_config.effort`
(thinking depends on the model's template; engines differ in names and values), `context_management`, `container`, other betas.
Parts of the request that chat has no form for follow `rules.py`, and tools `tools.py`.

`max_tokens: 0` computes only the prompt. Chat has no such request, so one token is requested and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.body import json_object, model_of, wants_stream
from gateway.dialects.prompt.canonical import to_json
from gateway.errors import bad_request
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.messages.tools import MessageTools
from gateway.features.translation.messages.turns import chat_messages, system_text
from gateway.features.translation.rules import Omissions
from gateway.features.translation.translation import TranslatedRequest

# Equal in both. The last ones are extensions of engines that change the prompt or select its cache.
_COPIED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
    "cache_prompt",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(raw: bytes) -> TranslatedRequest:
    """Raises GatewayError 400 that names the field that chat cannot express. O(length)."""
    body = json_object(raw)
    left_out = Omissions()
    chat: dict[str, Any] = {"model": model_of(body), "messages": _conversation(body, left_out)}
    for name in _COPIED:
        if body.get(name) is not None:
            chat[name] = body[name]
    _add_tools(chat, body, left_out)
    _add_format(chat, body)
    stops = _stops(body.get("stop_sequences"))
    if stops:
        chat["stop"] = stops
    max_tokens = body.get("max_tokens")
    empty = type(max_tokens) is int and max_tokens == 0
    if max_tokens is not None:
        chat["max_tokens"] = 1 if empty else max_tokens
    if wants_stream(body):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return TranslatedRequest(to_json(chat), Echo(stops, empty=empty).written(), left_out.found)


def _conversation(body: Mapping[str, Any], left_out: Omissions) -> list[Any]:
    system = system_text(body.get("system"), left_out)
    turns = chat_messages(body.get("messages"), left_out)
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def _add_tools(chat: dict[str, Any], body: Mapping[str, Any], left_out: Omissions) -> None:
    tools = MessageTools(body, left_out)
    if tools.functions:
        chat["tools"] = tools.functions
    choice = body.get("tool_choice")
    if choice is not None:
        _add_choice(chat, choice, tools)


def _add_choice(chat: dict[str, Any], choice: Any, tools: MessageTools) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str):
            raise bad_request("tool_choice.name is required and must be a string.", "tool_choice.name")
        tools.require(name)
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        if "tools" in chat or kind == "any":  # without tools, engines refuse other choices
            chat["tool_choice"] = _CHOICES[kind]
    else:
        raise bad_request("tool_choice.type must be 'auto', 'any', 'tool' or 'none'.", "tool_choice")
    if choice.get("disable_parallel_tool_use") is True and "tools" in chat:
        chat["parallel_tool_calls"] = False


def _add_format(chat: dict[str, Any], body: Mapping[str, Any]) -> None:
    """The required form of the answer: a field of `output_config`, or of the body in older clients."""
    where, wanted, config = "output_format", body.get("output_format"), body.get("output_config")
    if isinstance(config, dict) and config.get("format") is not None:
        where, wanted = "output_config.format", config["format"]
    if wanted is None:
        return
    schema = wanted.get("schema") if isinstance(wanted, dict) and wanted.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise bad_request(f"""{where} must be an object with "type": "json_schema" and a 'schema'.""", where)
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _stops(stops: Any) -> list[str]:
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request("'stop_sequences' must be a list of strings.", "stop_sequences")
    return stops
