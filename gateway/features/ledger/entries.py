"""Entries of the ledger (`ledger.url`)."""

from __future__ import annotations

from gateway.features.ledger.batches import MAX_CHARS
from gateway.features.ledger.buffer import size_of
from gateway.features.ledger.ledger import Ledger
from gateway.request.record import SettledRequest


class LedgerEntries:
    """What the ledger keeps of every request. Texts that clients choose are cut: the rest of them would fill its memory."""

    def __init__(self, ledger: Ledger) -> None:
        self._buffer = ledger.buffer
        self._now = ledger.wall_clock

    def __call__(self, request: SettledRequest) -> None:
        begun, first = request.begun, request.first_byte
        model, alias, error = request.model[:MAX_CHARS], request.alias[:MAX_CHARS], request.error[:MAX_CHARS]
        self._buffer.add(
            (
                self._now(),
                request.id,
                request.tenant,
                request.key,
                request.label,
                model,
                alias,
                request.pool,
                request.replica,
                request.endpoint,
                request.status,
                request.stream,
                request.cancelled,
                request.resumed,
                len(request.failed_attempts),
                error,
                request.ended - begun,
                None if first is None else first - begun,
                request.predicted_cached_tokens,
                request.available_cached_tokens,
                request.consumed,
                request.bill,
                size_of(model, alias, error),
            )
        )
