"""A simulated fleet in which some replicas compute prompts, and the others take them over and generate.

    request ──► a decoder ──┬── short, or cheaper there ──────────────────────────► its queue ──► prefill ──► decoding
                            └──► the best prefiller ──► its queue ──► prefill ──► transfer ──► the decoder's queue ──► decoding

The rule is that of the gateway (`pricing/legs.py`), and so are the bookings: one at the decoder, which begins again with the
transfer, and one at the prefiller. Transfers do not slow each other. A prefill does not slow the decoding beside it, here as in
the fleet without prefillers: the gain of a split, even times between tokens, is not in the numbers, its price is.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.booking import Booking
from router.pricing.legs import LOCAL_TOKENS, local_reason
from router.router import Router
from router.simulation.fleet import FleetSpec, Held, ServedRequest, Simulation
from router.simulation.workloads import SimulatedRequest, WorkloadSource
from router.types import Outcome, Replica


class SplitPlacement:
    """The production router for both kinds of replicas: the first `spec.prefillers` compute prompts only. local_tokens: see
    `local_reason`.
    """

    def __init__(self, router: Router, spec: FleetSpec, local_tokens: int = LOCAL_TOKENS) -> None:
        self.router = router
        self._local_tokens = local_tokens
        self._prefillers, self._decoders = spec.names[: spec.prefillers], spec.names[spec.prefillers :]
        self._numbers = {name: number for number, name in enumerate(spec.names)}
        for name in spec.names:
            router.add(Replica(name, spec.kv_tokens, pool="prefill" if name in self._prefillers else ""))

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, Booking]:
        booking = self.router.choose(request.prompt, self._decoders, now)
        return self._numbers[booking.chosen.replica], booking

    def booking_of(self, handle: Booking) -> Booking | None:
        return handle

    def prefiller(self, request: SimulatedRequest, decoder: Booking, now: float) -> tuple[int, Booking] | None:
        """The number and the booking of the replica that computes the prompt. None: the decoder does."""
        best = self.router.rank(request.prompt, self._prefillers, now)[0].best
        if local_reason(decoder.chosen, best, self._local_tokens):
            return None
        booking = self.router.choose(request.prompt, self._prefillers, now)
        booking.release(now)
        return self._numbers[booking.chosen.replica], booking

    def first_token(self, handle: Booking, now: float) -> None:
        handle.first_token(now)

    def finished(self, handle: Booking, outcome: Outcome, now: float) -> None:
        handle.close(outcome, now)

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None:
        """Without others there is nothing to learn from reports."""


class SplitSimulation(Simulation):
    """One run of such a fleet. A ServedRequest has the cached tokens of the replica that computed its prompt."""

    def __init__(
        self, spec: FleetSpec, source: WorkloadSource, placement: SplitPlacement, *, held: Iterable[Held] = ()
    ) -> None:
        super().__init__(spec, source, placement, held=held)
        self._split = placement
        self._transfer_s = 1 / spec.transfer_rate
        self._of_leg: dict[int, ServedRequest] = {}  # by the identity of a prefill leg: the request
        self._taken: dict[int, int] = {}  # by the identity of a request: tokens that its prefiller had cached

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        served = ServedRequest(request, now)
        served.replica, served.handle = self._placement.place(request, now)
        served.handle.release(now)
        if (chosen := self._split.prefiller(request, served.handle, now)) is None:
            self._send(served, now)
            return
        leg = ServedRequest(request, now)
        leg.replica, leg.handle = chosen
        self._of_leg[id(leg)] = served
        self._send(leg, now)

    def _seconds(self, served: ServedRequest, rate: float) -> float:
        return 0.0 if id(served) in self._taken else super()._seconds(served, rate)

    def _prefilled(self, served: ServedRequest, now: float) -> None:
        request = self._of_leg.pop(id(served), None)
        if request is None:
            if id(served) in self._taken:
                served.cached_tokens = self._taken[id(served)]
            super()._prefilled(served, now)
            return
        replica = self._replicas[served.replica]
        replica.prefilling = False
        replica.running -= 1
        replica.cache.drop(served.request)
        served.handle.first_token(now)
        served.handle.close(Outcome(True, served.request.tokens, served.cached_tokens), now)
        self._taken[id(request)] = served.cached_tokens
        lacking = request.handle.chosen.uncached_tokens
        request.handle.move([request.handle.chosen.replica], now)
        request.handle.release(now)
        self._at(now + lacking * self._transfer_s, self._send, request)
        self._start(replica, now)

    def _outcome(self, served: ServedRequest) -> Outcome:
        """The counts of cached tokens are not about the decoder of a prompt that was taken over."""
        remote = self._taken.pop(id(served), None) is not None
        return Outcome(True, served.request.tokens, served.cached_tokens, countable=not remote)
