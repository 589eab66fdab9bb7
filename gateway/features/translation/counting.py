"""Answers to requests that count tokens, where no replica has the endpoint: the gateway's estimate.

An error would cost more: Claude Code's `/context` sends a generation in place of each count. The estimate is the size of the
canonical prompt by the bytes per token that the model's engines have reported. The answer is marked by a header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from gateway.dialects.anthropic.messages import CountTokens
from gateway.dialects.responses.responses import CountResponseTokens
from gateway.errors import GatewayError
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.phases.replies import JSON_LINE, Replies
from router import Router

ESTIMATED_LINE: Final = b"X-Warmroute-Estimated: input_tokens\r\n"
_NOT_FOUND: Final = 404
_FORMS: Final[Mapping[str, bytes]] = {
    CountTokens.name: b'{"input_tokens":%d}',
    CountResponseTokens.name: b'{"object":"response.input_tokens","input_tokens":%d}',
}


class TokenEstimates:
    """Answers in place of the error that no replica has the endpoint."""

    def __init__(self, router: Router, replies: Replies) -> None:
        self._router = router
        self._replies = replies

    def answer(self, exchange: Exchange, failed: GatewayError) -> ClientReply | None:
        """None: the error is the answer."""
        form = _FORMS.get(exchange.dialect.name)
        if form is None or failed.status != _NOT_FOUND or not exchange.booked:
            return None
        record = exchange.record
        tokens = max(1, math.ceil(exchange.api.size / self._router.units_per_token(record.subject.label)))
        record.fields = {**(record.fields or {}), "counted": "estimate"}
        record.status = 200
        record.answer.ok = record.answer.complete = record.answer.own = True
        return self._replies.begin(exchange, record.status, form % tokens, JSON_LINE + ESTIMATED_LINE)
