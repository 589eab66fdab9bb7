"""Late binding under a flood: whatever one client sends, requests of others wait no longer than twice the work before them."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from hypothesis import example, given
from hypothesis import strategies as st

from router import Booking, Lead, Outcome, Prompt, Replica, Router, text_keys
from router.late import LEAST_S
from router.leading import MARGIN
from router.load import TOGETHER_S

RATE = 10_000.0  # tokens per second
BLOCK = 1000  # tokens
LONGEST = 40  # blocks
NAMES = ["r1"]


class SerialEngine:
    """A router with one replica that is proven to compute one prompt at a time, and such an engine, on a clock of its own."""

    def __init__(self, *, shares: bool) -> None:
        self.router = Router(policy="cost", ttl_s=3600.0, memory_bytes=1 << 24, chance=random.Random(3))
        self.router.add(Replica("r1", shares_inflight=shares))
        self.router.ledger.restore("r1", (1e6, 1e6 / RATE), 0.0, 0.0)
        self.router.ledger.rates.refresh()
        serial = self.router.ledger.loads["r1"].serial
        while not serial.proven:
            serial.learn(10_000, 1.0, RATE)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: deque[tuple[Booking, Callable[[], None]]] = deque()
        self._prefills: dict[Booking, float] = {}  # seconds
        self._cached = set[bytes]()  # prompts
        self._running: tuple[Booking, float] | None = None

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def work_s(self) -> float:
        """Seconds of prefill of all requests, sent or not."""
        done = self.now - self._running[1] if self._running is not None else 0.0
        return sum(self._prefills.values()) - done

    def send(self, name: int, blocks: int, first: Callable[[], None], *, silent: bool, leaves_s: float | None) -> None:
        """A prompt of so many blocks, which begins like another one of the same name."""
        keys = text_keys(name.to_bytes(4, "big") * blocks, 4, seed=7)
        booking = self.router.choose(Prompt(keys, blocks * BLOCK, BLOCK, ""), NAMES, self.now, silent=silent)
        self._prefills[booking] = blocks * BLOCK / RATE
        if leaves_s is not None:
            self.at(self.now + leaves_s, lambda: self._leave(booking))
        self._wait(booking, first)

    def _wait(self, booking: Booking, first: Callable[[], None]) -> None:
        lead = booking.lead
        if lead is None:
            self._queue.append((booking, first))
            self._start()
            return
        lead.watch(lambda: self.at(self.now, lambda: self._release(booking, lead, first)))
        self.at(self.now + lead.most_s, lambda: self._release(booking, lead, first))

    def _release(self, booking: Booking, lead: Lead, first: Callable[[], None]) -> None:
        if booking.lead is not lead or booking.lease.closed:
            return
        if booking.release(self.now):
            booking.move(NAMES, self.now)
        self._wait(booking, first)

    def _leave(self, booking: Booking) -> None:
        """Its client disconnects before it is computed."""
        if booking in self._prefills and (self._running is None or self._running[0] is not booking):
            booking.close(Outcome(False), self.now)
            del self._prefills[booking]
            self._queue = deque(each for each in self._queue if each[0] is not booking)

    def _start(self) -> None:
        if self._running is None and self._queue:
            booking, first = self._queue.popleft()
            if booking.prompt.keys in self._cached:
                self._prefills[booking] = 0.0
            self._cached.add(booking.prompt.keys)
            self._running = booking, self.now
            self.at(self.now + self._prefills[booking], lambda: self._computed(booking, first))

    def _computed(self, booking: Booking, first: Callable[[], None]) -> None:
        del self._prefills[booking]
        self._running = None
        if not booking.lease.silent:
            booking.first_token(self.now)
        first()
        self.at(self.now + 0.5, lambda: self._end(booking))
        self._start()

    def _end(self, booking: Booking) -> None:
        booking.close(Outcome(True, booking.prompt.units, 0), self.now)


# Requests of one kind: time of the first, seconds between two, number, blocks, silent, seconds until they leave, alike.
series = st.tuples(
    st.floats(0.0, 20.0),
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    st.sampled_from([1, 5, 40, 100]),
    st.sampled_from([1, 2, 5, 20, LONGEST]),
    st.booleans(),
    st.sampled_from([None, None, 0.5, 3.0]),
    st.booleans(),
)


@example([(14.0, 0.0, 3, 20, False, None, False), (15.1, 0.1, 100, 20, True, None, False)], 10, True)  # plain ones past a line
@example([(0.0, 0.0, 40, 5, False, None, False), (16.0, 0.0, 40, 5, True, None, False)], 2, False)  # plain ones, all at once
@example([(14.0, 0.0, 300, 1, False, None, False), (15.1, 0.1, 200, 20, False, None, False)], LONGEST, True)  # a full line
@given(st.lists(series, min_size=1, max_size=6), st.sampled_from([2, 10, LONGEST]), st.booleans())
def test_a_flood_delays_nobody_for_longer_than_twice_the_work_that_was_there(
    flood: list[tuple[float, float, int, int, bool, float | None, bool]], length: int, shares: bool
) -> None:
    engine = SerialEngine(shares=shares)
    names = itertools.count(2)
    waits = list[tuple[float, float]]()

    for begin, pause_s, count, blocks, silent, leaves_s, alike in flood:
        for number in range(count):
            name = 1 if alike else next(names)
            send = partial(engine.send, name, blocks, lambda: None, silent=silent, leaves_s=leaves_s)
            engine.at(begin + number * pause_s, send)

    def other() -> None:
        begun, ahead_s = engine.now, engine.work_s()
        most_s = MARGIN * ahead_s + LEAST_S + TOGETHER_S + (2 * LONGEST + length) * BLOCK / RATE
        engine.send(0, length, lambda: waits.append((engine.now - begun, most_s)), silent=False, leaves_s=None)

    engine.at(15.0, other)
    engine.run()
    engine.router.check()
    assert not engine.router.ledger.open_leases
    [(waited_s, most_s)] = waits
    assert waited_s <= most_s + 1e-6
