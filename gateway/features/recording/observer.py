"""Records traffic for recorders (`warmroute record`)."""

from __future__ import annotations

from gateway.features.recording.recording import Recording
from gateway.request.record import SettledRequest
from gateway.request.settle import Observer


class RecordTraffic:
    """Records a row for every request that reached a replica. It observes only during a recording."""

    def __init__(self, recording: Recording, observers: list[Observer]) -> None:
        """observers: of the gateway; this object is in the list during a recording."""
        self._recording = recording
        self._observers = observers
        recording.begin, recording.end = self._begin, self._end

    def _begin(self) -> None:
        self._observers.append(self)

    def _end(self) -> None:
        self._observers.remove(self)

    def __call__(self, request: SettledRequest) -> None:
        subject, placement, answer = request.subject, request.placement, request.answer
        booking, recording, usage = request.booking, self._recording, request.spent.usage
        if booking is None or not subject.generates or not subject.countable:
            recording.skipped += 1
            return
        prompt = booking.prompt
        if not recording.wants(prompt.family_key):
            return
        first = answer.first_token if subject.stream else None
        row = (
            request.begun,
            None if first is None else first - request.begun,
            request.ended - request.begun,
            usage.prompt if usage else None,
            placement.estimated_prompt_tokens,
            usage.completion if usage else None,
            usage.cached if usage else None,
            placement.predicted_cached_tokens,
            prompt.units,
            prompt.block_units,
            not prompt.scale,
            prompt.keys,
            prompt.family_key,  # agents of one session share blocks: they are in a sample together
            prompt.client,
            request.status,
            subject.label,
            placement.pool,
            placement.replica,
            request.sender.tenant,
        )
        recording.add(prompt.family_key, prompt.keys, row)
