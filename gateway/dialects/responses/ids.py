"""Ids of responses and conversations: in a request, in a path, in an answer.

An answer is searched and not parsed: engines write the id of a response among its first members, before any text of a model or
a client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeGuard
from urllib.parse import unquote

MAX_ID_CHARS: Final = 256

_SEARCHED: Final = 512  # bytes at the start of an answer
# Members before the id: numbers and plain words, as llama.cpp writes `created_at` and others.
_MEMBER: Final = rb'"\w{1,40}+"\s{0,8}+:\s{0,8}+(?:[\d.]{1,30}+|null|true|false|"[\w.:-]{0,100}+")\s{0,8}+,\s{0,64}+'
_ID: Final = rb'\{\s{0,64}+(?:(?!"id")%b){0,20}+"id"\s{0,8}+:\s{0,8}+"([\w.:-]{1,256}+)"' % _MEMBER
_PLAIN: Final = re.compile(rb"\s{0,64}+" + _ID)
_EVENT: Final = re.compile(rb'"response"\s{0,8}+:\s{0,8}+' + _ID)
_UNUSUAL: Final = re.compile(r"[%\\]|//|/\Z")
_EMPTY: Final = re.compile(r"[/\\]+")
_KEPT: Final = re.compile(r"/v1/(?:responses|conversations)(?:/|\Z)")
_BELOW: Final = re.compile(r"/v1/(?:responses|conversations)/([^/]{1,256})(?:/|$)")


def is_id(value: object) -> TypeGuard[str]:
    """True for an id without control characters and half surrogate pairs, which databases refuse."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable()


def is_reference(item: Mapping[str, Any]) -> bool:
    """True for an input item that refers to a stored one."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def refers(body: Mapping[str, Any]) -> str:
    """The id of the response, or of the conversation, that a request continues; "" without one."""
    conversation = body.get("conversation")
    found = body.get("previous_response_id") or (conversation.get("id") if isinstance(conversation, dict) else conversation)
    return found if isinstance(found, str) and len(found) <= MAX_ID_CHARS else ""


def path_id(path: str) -> str:
    """The id in a path below /v1/responses or /v1/conversations, "" if there is none."""
    found = _BELOW.match(path)
    return found[1] if found else ""


def is_disguised(target: str) -> bool:
    """True if a less strict server may read another path of responses or conversations in this target than the gateway does:
    a server that ignores empty segments, or decodes slashes, even twice. target: path and query, not decoded.
    """
    path = target.partition("?")[0]
    if not _UNUSUAL.search(path):
        return False
    plain = _EMPTY.sub("/", unquote(unquote(path)))
    ours = _KEPT.match(path) and plain.count("/") == path.count("/") and not path.endswith("/")
    return _KEPT.match(plain) is not None and not ours


def id_in(begin: bytes) -> str:
    """The id of the response at the beginning of an answer or a stream; "" if there is none."""
    found = _PLAIN.match(begin, 0, _SEARCHED) or _EVENT.search(begin, 0, _SEARCHED)
    return found[1].decode("ascii", "replace") if found else ""
