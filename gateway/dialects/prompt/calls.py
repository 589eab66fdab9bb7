"""Tool calls, in one form for every dialect: the tool's name and its arguments as JSON, without the call's id.

OpenAI's dialects send the arguments as a text of JSON, Anthropic's as an object. Templates print them as an object, so the text
is read here. It is JSON within a text, which the limits on a body's structure do not see: its brackets and commas are counted
before it is read. Ids stand for nothing in most templates; where one prints them, a conversation keeps its own.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.json_structure import MAX_STRUCTURE, signs
from gateway.dialects.prompt.canonical import CanonicalPrompt, to_json, without

MAX_INLINE_SIGNS: Final = 1 << 15  # of the arguments of a prompt that is built in the event loop

_IDS: Final = ("id", "call_id", "index", "status")  # no template prints them, or only to match calls with results
_CALL: Final = b"call"


def add_call(prompt: CanonicalPrompt, name: str, arguments: bytes) -> None:
    """One call of a turn. arguments: JSON."""
    prompt.field(_CALL, orjson.dumps(name) + arguments)


def add_chat_calls(prompt: CanonicalPrompt, calls: Any) -> None:
    """The `tool_calls` of a message of OpenAI's chat, in whatever form they are."""
    if not isinstance(calls, list):
        prompt.field(b"tool_calls", to_json(calls))
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
    """A call's arguments as JSON, as an engine's template would print the object; a text that is none stays a text.

    Raises NeedsHelper if that is too much for the event loop.
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
    """Whether it has nothing but a function, ids and the usual type."""
    return call.get("type", "function") == "function" and len(call) == 1 + ("type" in call) + ("id" in call) + ("index" in call)


def _add_unknown(prompt: CanonicalPrompt, call: Any) -> None:
    prompt.field(_CALL, to_json(without(call, *_IDS) if isinstance(call, dict) else call))
