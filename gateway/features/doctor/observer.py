"""Requests that the prefix doctor looks at, while an operator is interested."""

from __future__ import annotations

from gateway.features.doctor.watch import SeenRequest, Watch
from gateway.fleet.directory import Fleet
from gateway.request.record import SettledRequest


class DoctorWatch:
    """Remembers requests for the prefix doctor, while an operator is interested."""

    def __init__(self, fleet: Fleet, watch: Watch) -> None:
        self._fleet = fleet
        self._watch = watch

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if not self._watch.on or booking is None or not request.metered or request.answered != 200:
            return
        prompt, decision, usage = booking.prompt, booking.decision, request.usage
        counted = usage if request.countable else None
        self._watch.saw(
            SeenRequest(
                time=request.begun,
                model=request.model,
                salt=request.salt,
                tenant=request.tenant,
                session=prompt.session,
                keys=prompt.keys,
                units=prompt.units,
                block=prompt.block_units,
                exact=not prompt.scale,
                outline=request.outline,
                replica=request.replica,
                prompt_tokens=counted.prompt if counted else None,
                cached_tokens=counted.cached if counted else None,
                available_tokens=decision.available_tokens,
                reason=decision.reason,
                ups=tuple([state.name for state in self._fleet.replicas if state.live]),
                first_byte=request.first_byte,
            )
        )
