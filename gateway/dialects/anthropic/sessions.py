"""The session id that Claude Code sends in `metadata.user_id`."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.api_request import MAX_SESSION_CHARS

_MAX_ID: Final = 4096  # characters of a user_id; a longer one is ignored
_OLDER: Final = re.compile(r"_session_([\w-]{1,64})\Z", re.ASCII)


def user_session(metadata: Any) -> str:
    """The session in `metadata.user_id`: JSON with `session_id`, or the older text that ends in `_session_` and a UUID.

    "" for a user_id of another form. metadata: the body's value, of any type. O(1).
    """
    id_ = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(id_, str) or len(id_) > _MAX_ID:
        return ""
    if id_.startswith("{"):
        try:
            fields = orjson.loads(id_)
        except orjson.JSONDecodeError:
            return ""
        session = fields.get("session_id")
        return session[:MAX_SESSION_CHARS] if isinstance(session, str) else ""
    found = _OLDER.search(id_)
    return found[1] if found else ""
