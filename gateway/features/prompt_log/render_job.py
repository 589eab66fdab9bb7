"""The body by which an engine is asked for the prompt of a conversation, and its answers, as operations of the parser process.
Pure.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.json_edits import read_list, read_object
from gateway.features.prompt_log.naming.forms import CHAT
from gateway.features.translation.table import TRANSLATIONS

_SHAPING: Final = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")


def rendering_body(body: bytes, form: str) -> tuple[bytes]:
    """Members of a chat request that shape its prompt. If its last turn is an answer, no further answer is begun. Raises
    GatewayError 400 for what chat cannot express. O(length).
    """
    chat = body if form == CHAT else TRANSLATIONS[form].request(body).body
    members = read_object(chat)
    parts = [
        b'"%b":%b' % (name.encode(), chat[members.spans[name][0] : members.spans[name][1]])
        for name in _SHAPING
        if name in members.spans
    ]
    elements, _ = read_list(chat, members.spans["messages"][0])
    first, last = elements[-1]
    begins = orjson.loads(chat[first:last]).get("role") != "assistant"
    return (b"{%b}" % b",".join([*parts, b'"add_generation_prompt":%b' % (b"true" if begins else b"false")]),)


def token_ids(answer: bytes) -> tuple[bytes, int]:
    """The list `tokens` of an engine's answer as JSON, and its length; b"": there is no list of integers. O(length)."""
    tokens = _member(answer, "tokens")
    if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
        return b"", 0
    return orjson.dumps(tokens), len(tokens)


def text_member(answer: bytes) -> tuple[bytes]:
    """The text `prompt` of an engine's answer as JSON; b"": there is none. O(length)."""
    text = _member(answer, "prompt")
    return (orjson.dumps(text) if isinstance(text, str) else b"",)


def _member(answer: bytes, name: str) -> Any:
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    return found.get(name) if isinstance(found, dict) else None
