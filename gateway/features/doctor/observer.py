"""Requests that the prefix doctor looks at, while an operator is interested."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.dialects.prompt.segments import Outline
from gateway.features.doctor.watch import Seen, Watch
from gateway.fleet.directory import Fleet
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot

_PROMPT: Final = Slot[tuple[Outline, str]]("doctor")  # its outline, its salt
_NONE: Final[tuple[Outline, str]] = ((), "")


class DoctorWatch:
    """Remembers requests for the prefix doctor, while an operator is interested."""

    def __init__(self, fleet: Fleet, watch: Watch) -> None:
        self._fleet = fleet
        self._watch = watch

    def chosen(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """Keep of the request what its record lacks."""
        api = exchange.api
        if api.outline or api.salt:
            _PROMPT.set(exchange.record, (api.outline, api.salt))

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if not self._watch.on or booking is None or not request.subject.metered or request.answer.answered != 200:
            return
        prompt, decision, usage = booking.prompt, booking.decision, request.spent.usage
        counted = usage if request.subject.countable else None
        outline, salt = _PROMPT.get(request) or _NONE
        self._watch.saw(
            Seen(
                time=request.begun,
                model=request.subject.model,
                salt=salt,
                tenant=request.sender.tenant,
                session=prompt.session,
                keys=prompt.keys,
                units=prompt.units,
                block=prompt.block_units,
                exact=not prompt.scale,
                outline=outline,
                replica=request.placement.replica,
                prompt_tokens=counted.prompt if counted else None,
                cached_tokens=counted.cached if counted else None,
                available_tokens=decision.available_tokens,
                reason=decision.reason,
                ups=tuple([state.name for state in self._fleet.replicas if state.live]),
                first_byte=request.answer.first_byte,
            )
        )
