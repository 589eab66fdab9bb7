"""The session that Claude Code names in `metadata.user_id`."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.api_request import MAX_SESSION_CHARS

_MAX_ID: Final = 4096  # characters of an id that is read
_OLDER: Final = re.compile(r"_session_([\w-]{1,64})\Z", re.ASCII)


def user_session(metadata: Any) -> str:
    """JSON with `session_id`, or the older text that ends in `_session_` and a UUID. "": it is neither, but names a user.

    metadata: of a body, whatever it is. O(1).
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
