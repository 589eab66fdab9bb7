"""Refs, names of heads that can be moved: `/v1/logs/refs/NAME`.

GET                                          {ref, head, expires_at}, with the header ETag: "HEAD"
PUT {head}  If-Match: "HEAD", or             moves it, or makes it; 412 with the present head if that is another one
            If-None-Match: *
DELETE      [If-Match: "HEAD"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from gateway.errors import GatewayError
from gateway.features.histories.histories import full
from gateway.features.histories.records import (
    RefMovedError,
    StoredRef,
    StoreFullError,
    TooManyRefsError,
    UnknownObjectError,
)
from gateway.features.prompt_log.bases import log_error
from gateway.features.prompt_log.header import invalid, is_ref
from gateway.features.prompt_log.naming.chain import chain_named
from gateway.request.exchange import Exchange
from gateway.request.owner import owner

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

MAX_BODY: Final = 1024  # bytes
_MATCH, _NONE_MATCH = "If-Match", "If-None-Match"


class LogAnswer(NamedTuple):
    """body: JSON. lines: further lines of the head."""

    body: bytes
    lines: bytes = b""


async def ref_answer(exchange: Exchange, store: TurnStore, name: str) -> LogAnswer:
    """Answers a request for a ref. Raises GatewayError and StoreFailed."""
    if not is_ref(name):
        raise log_error(404, "not_found", "The name of a ref has 1 to 64 letters, digits, dots, _ or -.", "ref")
    owner_id, method = owner(exchange.request, exchange.caller), exchange.request.method
    try:
        if method == "GET":
            return _shown(await store.ref(owner_id, name))
        if method == "PUT":
            return _shown(await store.set_ref(owner_id, name, _head_in(exchange.api.body), _expected(exchange, required=True)))
        if method == "DELETE":
            await store.delete_ref(owner_id, name, _expected(exchange, required=False))
            return LogAnswer(b'{"deleted":1}')
    except UnknownObjectError as unknown:
        text = "The ref does not exist." if unknown.id else "No turn that is kept has this head."
        raise log_error(404, "prompt_log_not_found", text, "ref" if unknown.id else "head") from None
    except RefMovedError as moved:
        text = "The ref is at another head. Read it, merge, and try again."
        raise log_error(412, "ref_moved", text, "head", head=moved.head or None) from None
    except TooManyRefsError as error:
        raise log_error(413, "too_many_refs", f"An owner has {error.most:,} refs at most. Delete some.", "ref") from None
    except StoreFullError as failure:
        raise full(failure) from None
    raise GatewayError(405, "method_not_allowed", "A ref takes GET, PUT and DELETE.")


def _shown(ref: StoredRef) -> LogAnswer:
    body = orjson.dumps({"ref": ref.name, "head": ref.head, "expires_at": int(ref.expires_at)})
    return LogAnswer(body, f'ETag: "{ref.head}"\r\n'.encode("ascii"))


def _head_in(raw: bytes) -> str:
    """The head in the body of a PUT. Raises GatewayError 400."""
    try:
        found = orjson.loads(raw) if len(raw) <= MAX_BODY else None
    except orjson.JSONDecodeError:
        found = None
    head = found.get("head") if isinstance(found, dict) else None
    if not isinstance(head, str) or chain_named(head) is None:
        raise invalid('The body must be {"head": HEAD}, with a head such as pl1_9fIC...', "head")
    return head


def _expected(exchange: Exchange, *, required: bool) -> str:
    """The present head that the client expects; "": none. Raises GatewayError 400 or 428."""
    headers = exchange.request.headers
    match, none_match = headers.get(_MATCH), headers.get(_NONE_MATCH)
    if match is None and none_match is None:
        if required:
            text = f'A ref is moved with {_MATCH}: "HEAD", its present head, or made with {_NONE_MATCH}: *.'
            raise log_error(428, "precondition_required", text, _MATCH)
        return ""
    if match is None and none_match is not None and none_match.strip() == "*" and required:
        return ""
    head = match.strip() if match is not None and none_match is None else ""
    if not (head.startswith('"') and head.endswith('"') and chain_named(head[1:-1]) is not None):
        raise invalid(f"{_MATCH} must be one head in quotes, {_NONE_MATCH} *, and only one of them is possible.", _MATCH)
    return head[1:-1]
