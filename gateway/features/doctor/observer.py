"""Passes requests to the prefix doctor during a watch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.dialects.prompt.segments import Outline
from gateway.features.doctor.entries import entry_keys
from gateway.features.doctor.watch import DoctorWatch, SeenRequest
from gateway.fleet.directory import Fleet
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.named_log import NAMED_LOG
from gateway.request.record import SettledRequest
from gateway.request.settle import Observer
from gateway.request.slots import Slot

_PROMPT: Final = Slot[tuple[Outline, str, str]]("doctor")  # outline and salt of the prompt, agent of the session


class DoctorObserver:
    """Records requests for the prefix doctor during a watch."""

    def __init__(self, fleet: Fleet, watch: DoctorWatch, extensions: Extensions, observers: list[Observer]) -> None:
        """extensions, observers: of the gateway; this object is in both during a watch."""
        self._fleet = fleet
        self._watch = watch
        self._extensions = extensions
        self._observers = observers
        watch.begins, watch.ends = self._begin, self._end

    def _begin(self) -> None:
        self._extensions.chosen.append(self._chosen)
        self._observers.append(self)

    def _end(self) -> None:
        self._extensions.chosen.remove(self._chosen)
        self._observers.remove(self)

    def _chosen(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """Stores the values that the request's record lacks."""
        _PROMPT.set(exchange.record, (exchange.api.outline, exchange.api.salt, exchange.caller.agent))

    def __call__(self, request: SettledRequest) -> None:
        booking, prompt_values = request.booking, _PROMPT.get(request)
        if booking is None or prompt_values is None or not request.subject.metered or request.answer.answered != 200:
            return
        prompt, decision, usage = booking.prompt, booking.decision, request.spent.usage
        counted = usage if request.subject.countable else None
        outline, salt, agent = prompt_values
        log = NAMED_LOG.get(request)
        self._watch.record(
            SeenRequest(
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
                live_replicas=tuple([state.name for state in self._fleet.replicas if state.live]),
                first_byte=request.answer.first_token,
                entries=entry_keys(log.digests) if log is not None else b"",
                thread=agent,
            )
        )
