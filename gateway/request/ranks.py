"""Requests to a data-parallel rank of an engine: how they name it, and how an engine refuses an unknown one."""

from __future__ import annotations

import re
from typing import Final

from gateway.dialects.salts import with_member
from gateway.upstream.client import ReplicaCall

BAD_REQUEST: Final = 400
# vLLM: "data_parallel_rank 7 is out of range [0, 4)."; SGLang: "routed_dp_rank=7 out of range [0, 4)".
_REFUSAL: Final = re.compile(rb"(?:data_parallel_rank|dp_rank)\b[^\n]{0,64}?\b(?:out of range|range|less than|between)\b")


def to_rank(call: ReplicaCall, rank: int, field: bytes) -> ReplicaCall:
    """The call for this rank. field: the member of JSON bodies that names it beside the header; b"": none."""
    ranked = call.with_headers(b"%bX-data-parallel-rank: %d\r\n" % (call.headers, rank))
    body = with_member(call.body, b'"%b":%d' % (field, rank)) if field else None
    return ranked if body is None else ranked.with_body(body)


def is_rank_refusal(error: bytes) -> bool:
    """True if an error (status 400) may be about the rank. A client can provoke such words."""
    return _REFUSAL.search(error) is not None
