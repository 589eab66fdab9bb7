"""A plain answer from an engine that is always asked for a stream.

It notices only while it streams that nobody wants the rest: a client that leaves, or a stop string, ends its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.errors import ReplicaFailure
from gateway.features.translation.adaptation.answers import AdaptedAnswers
from gateway.upstream.client import ReplicaAnswer

PLAIN: Final = b"Content-Type: application/json\r\n"  # the head of such an answer: the engine's own is that of a stream
_EVENT_STREAM: Final = "text/event-stream"


async def collected(answer: ReplicaAnswer, adapted: AdaptedAnswers, charge: Callable[[int], None]) -> bytes:
    """The whole answer for the client. charge: called with the size of each piece; may raise. Raises ReplicaFailure."""
    if answer.content_type != _EVENT_STREAM:
        raise ReplicaFailure("garbage", f"asked for a stream, it answers with {answer.content_type or 'no content type'!r}")
    pieces = adapted.collected()
    while True:
        data = answer.take()
        charge(len(data))
        pieces.feed(data)
        if pieces.over or answer.complete:
            break
        await answer.more()
    pieces.finish()
    return adapted.answer(pieces.answer())
