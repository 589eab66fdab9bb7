"""Makes ledger entries (`ledger.url`) from finished requests."""

from __future__ import annotations

from gateway.features.ledger.batches import MAX_CHARS
from gateway.features.ledger.buffer import size_of
from gateway.features.ledger.ledger import Ledger
from gateway.request.record import SettledRequest


class LedgerEntries:
    """Observer that adds an entry for each request. Texts from clients are cut, because long ones would fill the buffer."""

    def __init__(self, ledger: Ledger) -> None:
        self._buffer = ledger.buffer
        self._now = ledger.wall_clock

    def __call__(self, request: SettledRequest) -> None:
        sender, subject, placement = request.sender, request.subject, request.placement
        answer, spent = request.answer, request.spent
        begun, first = request.begun, answer.first_token
        fields = request.fields
        run: str = fields.get("run", "") if fields is not None else ""
        workflow: str = fields.get("workflow", "") if fields is not None else ""
        model, alias, error = subject.model[:MAX_CHARS], subject.alias[:MAX_CHARS], request.error[:MAX_CHARS]
        self._buffer.add(
            (
                self._now(),
                request.id,
                sender.tenant,
                sender.key,
                subject.label,
                model,
                alias,
                placement.pool,
                placement.replica,
                subject.endpoint,
                request.status,
                subject.stream,
                request.cancelled,
                answer.resumed,
                len(placement.failed_attempts),
                error,
                request.ended - begun,
                None if first is None else first - begun,
                placement.predicted_cached_tokens,
                placement.available_cached_tokens,
                spent.consumed,
                spent.bill,
                run,
                workflow,
                sender.session,
                sender.agent,
                sender.parent,
                sender.client,
                sender.user_agent,
                request.told_code,
                size_of(model, alias, error, sender.session, sender.agent, sender.parent, sender.user_agent),
            )
        )
