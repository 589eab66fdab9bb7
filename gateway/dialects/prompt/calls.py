"""Tool calls, in one form for every dialect: the tool's name and its arguments as JSON, without the call's id.

OpenAI's dialects send the arguments as a text of JSON, Anthropic's as an object. Templates print them as an object, so the text
is parsed here. The limits on a body's structure do not cover JSON within a text: its brackets and commas are counted before it
is parsed. Most templates do not print ids; if one does, a conversation keeps its own ids.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.json_structure import MAX_STRUCTURE, signs
from gateway.dialects.prompt.canonical import CanonicalPrompt, to_json, without

MAX_INLINE_SIGNS: Final = 1 << 15  # brackets and commas in the arguments of a prompt that is built in the event loop

_IDS: Final = ("id", "call_id", "index", "status")  # no template prints them, except to match calls with results
_CALL: Final = b"call"
_CALLS: Final = b"tool_calls"


def add_call(prompt: CanonicalPrompt, name: str, arguments: bytes) -> None:
    """Adds one call of a turn. arguments: JSON."""
    prompt.field(_CALL, orjson.dumps(name) + arguments)


def add_chat_calls(prompt: CanonicalPrompt, calls: Any) -> None:
    """Adds the `tool_calls` of a message of OpenAI's chat, in any form."""
    if not isinstance(calls, list):
        prompt.unprinted(_CALLS, to_json(calls))
        return
    prompt.require(len(calls))
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or len(function) > 2:
            _add_unknown(prompt, call)
            continue
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(name, str) and isinstance(arguments, str) and _is_plain(call):
            add_call(prompt, name, arguments_json(prompt, arguments))
        else:
            _add_unknown(prompt, call)


def arguments_json(prompt: CanonicalPrompt, arguments: str) -> bytes:
    """A call's arguments as JSON, as an engine's template prints the object; a text that is no JSON stays a text.

    Raises NeedsHelper if parsing is too much work for the event loop.
    """
    raw = arguments.encode()
    if not prompt.takes(signs(raw), MAX_INLINE_SIGNS if prompt.inline else MAX_STRUCTURE):
        if prompt.inline:
            raise NeedsHelper
        return orjson.dumps(arguments)
    try:
        return orjson.dumps(orjson.loads(raw))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return orjson.dumps(arguments)


def _is_plain(call: dict[str, Any]) -> bool:
    """True if a call has nothing but a function, ids and the usual type."""
    return call.get("type", "function") == "function" and len(call) == 1 + ("type" in call) + ("id" in call) + ("index" in call)


def _add_unknown(prompt: CanonicalPrompt, call: Any) -> None:
    prompt.unprinted(_CALL, to_json(without(call, *_IDS) if isinstance(call, dict) else call))
