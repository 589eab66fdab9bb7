"""A check of an engine: a generation of one token, sent by the gateway itself.

It tells an engine that hangs from a request that takes long by its own nature: no client has a part in it.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import GatewayError, ReplicaFailure
from gateway.request.ranks import to_rank
from gateway.upstream.client import ReplicaCall, UpstreamClient

LONGEST_S: Final = 60.0  # then it is sent again
_MOST_BYTES: Final = 64 << 10  # of an answer with one token
_HEADERS: Final = b"Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
_CHAT: Final = {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
_DATA: Final = re.compile(rb"^data: ?(\{.*)$", re.MULTILINE)  # events of a stream
_TEXT: Final = {"prompt": "ping", "max_tokens": 1}


class CheckForm(NamedTuple):
    """The model of a check, and whether it is a stream: as of a waiting request, because an engine may hang for one of several
    models, or for streams only.
    """

    model: str
    stream: bool


ANSWERED, UNANSWERED, REFUSED = "answered", "unanswered", "refused"
ENDS: Final = (ANSWERED, UNANSWERED, REFUSED)


async def check(upstream: UpstreamClient, url: str, form: CheckForm, rank: int | None = None) -> str:
    """ANSWERED: the engine has generated a token; UNANSWERED: it has not within LONGEST_S, or its connection broke; REFUSED:
    it takes no such request, which shows nothing. rank: the data-parallel rank that is to answer.
    """
    fields = {**({"model": form.model} if form.model else {}), **({"stream": True} if form.stream else {})}
    try:
        for path, body in (("/v1/chat/completions", _CHAT), ("/v1/completions", _TEXT)):
            status, answer = await _ask(upstream, url, path, {**fields, **body}, rank)
            if status == 200:
                texts = _DATA.findall(answer) if form.stream else ()
                return ANSWERED if any(map(_has_choice, texts or (answer,))) else REFUSED
            if status >= 500 or status in (401, 403, 429):
                break
    except ReplicaFailure:
        return UNANSWERED
    except GatewayError:  # the gateway lacks a resource
        return REFUSED
    return REFUSED


async def _ask(upstream: UpstreamClient, url: str, path: str, body: dict[str, Any], rank: int | None) -> tuple[int, bytes]:
    call = ReplicaCall("POST", path, _HEADERS, orjson.dumps(body), probe=True)
    answer = await upstream.open(url, call if rank is None else to_rank(call, rank, b""), LONGEST_S)
    try:
        return answer.status, await answer.read(_MOST_BYTES)
    finally:
        answer.close()


def _has_choice(answer: bytes) -> bool:
    try:
        return bool(orjson.loads(answer)["choices"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
