"""Late binding: at a replica that computes one prompt at a time, requests wait in the gateway, and the shortest goes first.

An engine's queue is first come, first served: a short prompt waits for all long ones before it. A gateway that sends the next
prompt only when the last one has its first token can choose: the line of a replica goes by the seconds of prefill, less AGEING
times the seconds of waiting, so that a long prompt is not overtaken for ever. The mean of the waits is the least with the
shortest first.

It is safe only where nothing is lost by it, so a request waits only if
- the policy is the default one, whose prices know of the line;
- the replica is proven to compute one prompt at a time (`learning/serial.py`): another engine would compute both meanwhile;
- the prefills before it take longer than LEAST_S: the replica is idle for a round trip between two prompts;
- a first token will show the end of the prefill before it: plain answers show none;
- no request of others is there: in the engine's queue each request has a turn to lose.
Once the proof is lost, or others come, the line ends with the next first token: all of it is sent. If the replica loses its
cache, the line ends at once; if it leaves, also, and its requests are chosen again.

A waiting request is booked like all others, and the price of the replica counts it (`ReplicaLoad.before`): a new one waits for
its predecessors in the line, and delays its successors. The wait is bounded (`Lead.most_s`).

Plain requests, and others that do not wait, are sent past the line. Once that would cost the line TOGETHER_S, it ends: all of
it is sent, and then they: else a client with many of them would hold others back. Requests that are sent for new evidence do
not count. Plain answers in the engine do not stop the line, because nothing shows the end of their prefill.

Engines keep no blocks for requests that wait, so a long line of long prompts can evict the prefixes of its own later ones, and
each of these then evicts another one. So a request is credited when it is sent, as the engine uses its blocks then, and if the
replica has lost more than LEAST_S of its match by then, it is chosen again: mostly for a replica without a line. Until
then other prompts are compared with those in line (`Quotes`), so that a burst with one new head follows its first request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.leading import MARGIN, MAX_S, Lead
from router.load import Lease

LEAST_S: Final = 0.1
MOST_WAITING: Final = 256  # in one line


class TurnInLine(Lead):
    """A request's place in the line of its replica."""

    __slots__ = ("_called", "_changed")

    def __init__(self, lease: Lease, most_s: float) -> None:
        super().__init__(lease, 0, most_s, 0.0)
        self._called = False
        self._changed: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        return False

    @property
    def computed(self) -> bool:
        return self._called

    @property
    def over(self) -> bool:
        return self._called

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called when it is its turn, until `unwatch`."""
        self._changed = changed

    def unwatch(self, changed: Callable[[], None]) -> None:
        self._changed = None

    def call(self) -> None:
        """It is its turn."""
        self._called = True
        if self._changed is not None:
            self._changed()

    def __repr__(self) -> str:
        return f"<TurnInLine of {self.lease!r}>"


def _may_wait(lease: Lease, now: float) -> bool:
    load = lease.load
    return not lease.silent and len(load.line) < MOST_WAITING and load.orders(now)


def turn_of(lease: Lease, now: float) -> TurnInLine | None:
    """A place in the line, for a lease that has just been booked behind others; None: it is sent at once, past the line if
    there is one. If that ends the line, it is the last one of it. O(1), or O(line) if it ends.
    """
    load = lease.load
    ahead_s = (load.remaining_tokens(now) - lease.uncached_tokens) / load.rate.value
    waits = ahead_s >= LEAST_S and _may_wait(lease, now)
    if not (waits or load.overtake(lease)) or (waits and load.serial.explores()):
        return None
    turn = TurnInLine(lease, min(MAX_S, MARGIN * ahead_s + LEAST_S))
    lease.lead = lease.ahead
    load.join_line(lease, turn.call)
    if turn.over:
        turn.most_s = 0.0
    lease.ledger.lines[lease.replica] = load
    return turn
