"""The ledger: open leases, and the load and learned speed of each replica.

A `Lease` is one request booked on a replica, open from `BookingLedger.open` to its one `close`; before that it may `move` to
another replica (failover) and get its `first_token`. Until the first token its uncached prompt tokens are booked prefill work,
after it the lease counts as a decoding sequence. Every event is idempotent and ignored once the lease is closed, so that no
order of events can make a count wrong; counts never need a floor at zero.

An engine serves prompts roughly FIFO. So the first of a replica's waiting leases is assumed to be in prefill since its turn
began: at its booking, or at the end of the previous turn if that is later. Two consequences:
- The remaining booked work shrinks while that prefill runs (`remaining_tokens`): a prompt of 100,000 tokens that is nearly done
  counts less than a prompt that has just begun.
- (tokens computed) / (first token - begin of the turn) measures the replica's speed also under load. The lease keeps that time;
  the rate is learned at the end of the answer, from the computed tokens that the engine reports, because a wrong prediction of
  its cache would make the learned speed wrong.

A plain answer shows no first token, and the first token of several prompts does not show the duration of their prefill: such a
lease is `silent`. Its prefill counts as over at the estimated end of its work (`advance`), or at its first token, if that comes
earlier; otherwise a long answer would count as queued until its end. Nothing is learned from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from router.learning.foreign import BUSY_S, ForeignLoad
from router.learning.learned import Median
from router.learning.rates import PrefillRate, PrefillRates
from router.learning.serial import SerialPrefill
from router.types import KEY_BYTES, BlockKeys

AGEING: Final = 0.1  # seconds of prefill by which a request of the line goes sooner for each second that it has waited
TOGETHER_S: Final = 0.1  # prompts of the line that take less are sent together
TURN_GAP_S = 15.0, 1.0, 300.0  # from an answer to the next turn: initial value, minimum, maximum


@dataclass(slots=True)
class ReplicaLoad:
    """Counts over one replica's open leases, its learned speed, and its expected returns of conversations.

    first, last: of the leases before their first token, a linked list: the sent ones in order, then the waiting ones, still in
    the gateway. line: the leases that wait for their turn (`late.py`), with the function to call then. overtaken: tokens of
    requests that were sent past the line. ended: all requests of the line are called.
    """

    rate: PrefillRate
    inflight: int = 0  # open leases
    further: int = 0  # sequences of these, beyond one for each
    remote_inflight: int = 0  # open leases booked by other routers
    remote_further: int = 0  # sequences of these, beyond one for each
    decoding: int = 0  # open leases past their first token
    presumed: int = 0  # of these, silent ones: mostly past the estimated end of their prefill only
    booked_tokens: int = 0  # uncached prompt tokens of leases before their first token
    remote_booked_tokens: int = 0  # of these, booked by other routers
    active_tokens: int = 0  # prompt tokens of all open leases
    first: Lease | None = None
    last: Lease | None = None
    turn_ended: float = float("-inf")
    answered: float = 0.0  # exponentially decayed count of closed leases; time constant: turn_gap
    answered_at: float = float("-inf")  # time at which the last lease was closed
    worked: float = 0.0  # exponentially decayed seconds of estimated prefill; time constant: BUSY_S
    worked_at: float = float("-inf")  # time at which the last prefill ended
    counted_to: float = float("-inf")  # the time until then is counted in `worked`, or was idle
    computed_at: float = float("-inf")  # time of the last first token, or good end of an answer with a token
    serial: SerialPrefill = field(default_factory=SerialPrefill)
    line: dict[Lease, Callable[[], None]] = field(default_factory=dict)
    overtaken: int = 0
    ended: bool = False
    foreign: ForeignLoad | None = None  # load of others; None: its engine has reported none

    @property
    def waiting(self) -> list[Lease]:
        """The leases from first to last. O(n)."""
        found, lease = [], self.first
        while lease is not None:
            found.append(lease)
            lease = lease.behind
        return found

    def enqueue(self, lease: Lease) -> None:
        last = self.last
        if last is None:
            self.first = lease
        else:
            last.behind, lease.ahead = lease, last
        self.last = lease

    def enqueue_sent(self, lease: Lease) -> None:
        """Put a lease behind the sent ones, and before the ones still in the gateway. O(sent)."""
        ahead, behind = None, self.first
        while behind is not None and behind.lead is None:
            ahead, behind = behind, behind.behind
        lease.ahead, lease.behind = ahead, behind
        if ahead is None:
            self.first = lease
        else:
            ahead.behind = lease
        if behind is None:
            self.last = lease
        else:
            behind.ahead = lease

    def leave_queue(self, lease: Lease) -> None:
        ahead, behind = lease.ahead, lease.behind
        if ahead is None:
            self.first = behind
        else:
            ahead.behind = behind
        if behind is None:
            self.last = ahead
        else:
            behind.ahead = ahead
        lease.ahead = lease.behind = None

    def advance(self, now: float) -> Lease | None:
        """End the prefill of silent leases at the head of the queue whose estimated time is over. O(1) amortised.

        Returns the first lease of the queue; None if it is empty.
        """
        while (first := self.first) is not None:
            if not first.silent or first.lead is not None:
                return first
            ends = max(first.sent, self.turn_ended) + first.uncached_tokens / self.rate.value
            if ends > now:
                return first
            first.prefilled(ends)
        return None

    def remaining_tokens(self, now: float) -> int:
        """Booked prefill work less the estimated progress of the running prefill. O(1)."""
        first = self.first
        if first is None:
            return 0
        since, booked = first.sent, self.booked_tokens
        if first.lead is not None:
            return booked
        done = int((now - (since if since > self.turn_ended else self.turn_ended)) * self.rate.value)
        if done <= 0:
            return booked
        return booked - (done if done < first.uncached_tokens else first.uncached_tokens)

    def prefix_work(self, prefix: BlockKeys, end: int, tokens: int, now: float) -> int:
        """The part of `remaining_tokens` that computes a prefix. prefix: the key of its last block, which ends at `end` in the
        keys of a prompt. tokens: its length. O(leases before their first token).
        """
        lease, found = self.first, 0
        done = self.booked_tokens - self.remaining_tokens(now)  # by the first of them
        while lease is not None:
            if lease.keys[end - KEY_BYTES : end] == prefix:
                missing = tokens - (lease.prompt_tokens - lease.uncached_tokens) - done
                if missing > 0:
                    found += missing
            lease, done = lease.behind, 0
        return found

    def least_before(self, now: float) -> int | None:
        """A lower bound of the prefill work before a new request; None: the replica is idle. O(1) amortised."""
        head = self.advance(now) if self.first else None
        if head is not None:
            return 0 if self.line else self.booked_tokens - head.uncached_tokens
        return 0 if self.foreign is not None and self.foreign.tokens(now, self.rate.value) else None

    def before(self, uncached: int, now: float) -> tuple[int, int]:
        """(prefill work before a new request of so many uncached tokens, requests of the line that would go after it).
        O(line).
        """
        work, after, seconds = self.remaining_tokens(now), 0, uncached / self.rate.value
        for lease in self.line:
            if self._order(lease, now) > seconds:
                work, after = work - lease.uncached_tokens, after + 1
        return work, after

    def orders(self, now: float) -> bool:
        """True if a stream with others before it waits in line, and the shortest goes first."""
        first = self.first
        return (first is None or not first.silent) and self.binds_late(now)

    def binds_late(self, now: float) -> bool:
        """True if the replica is proven to compute one prompt at a time, and has no load of others."""
        if not self.serial.proven or self.remote_inflight:
            return False
        return self.foreign is None or not self.foreign.waiting(now, self.rate.value)

    def join_line(self, lease: Lease, call: Callable[[], None]) -> None:
        if not self.line:
            self.overtaken, self.ended = 0, False
        self.line[lease] = call
        if self.ended:
            call()

    def overtake(self, lease: Lease) -> bool:
        """A request is to be sent past the line, if there is one. True: the line ends, because that takes TOGETHER_S in all.
        O(1); O(line) at its end.
        """
        if not self.line:
            return False
        self.overtaken += lease.uncached_tokens
        if self.overtaken > TOGETHER_S * self.rate.value:
            self.end_line()
        return self.ended

    def end_line(self) -> None:
        """Call all requests of the line, and later ones until the line is empty, so that nothing is sent before it."""
        if not self.ended:
            self.ended = True
            for call in tuple(self.line.values()):
                call()

    def call_next(self, now: float) -> None:
        """Call the next requests of the line, once all sent streams have their first token; all of it, if it is safe no longer.
        O(leases before theirs); O(line) for each that is called.
        """
        if not self.binds_late(now):
            self.end_line()
        if self.ended:
            return
        lease = self.first
        while lease is not None:
            if lease not in self.line and not lease.silent and not lease.follows:
                return
            lease = lease.behind
        together = TOGETHER_S * self.rate.value
        while self.line and together > 0:
            first = min(self.line, key=lambda lease: self._order(lease, now))
            together -= first.uncached_tokens
            self.line.pop(first)()

    def _order(self, lease: Lease, now: float) -> float:
        """The lease with the least goes first: seconds of its prefill, less a share of its wait."""
        return lease.uncached_tokens / self.rate.value - AGEING * (now - lease.since)

    @property
    def sequences(self) -> int:
        """All that the engine runs, or is to run, for the open leases."""
        return self.inflight + self.further

    @property
    def sent_sequences(self) -> int:
        """The same without the leases that wait in the gateway. O(these)."""
        sent, lease = self.sequences, self.last
        while lease is not None and lease.lead is not None:
            sent, lease = sent - lease.sequences, lease.ahead
        return sent

    @property
    def own_inflight(self) -> int:
        """Open leases booked by this router."""
        return self.inflight - self.remote_inflight

    @property
    def own_booked_tokens(self) -> int:
        return self.booked_tokens - self.remote_booked_tokens

    def own_remaining_tokens(self, now: float) -> int:
        """The part of `remaining_tokens` booked by this router. O(1).

        The sum over routers that follow each other is the replica's remaining work, as far as they know each other's bookings
        in time.
        """
        first = self.first
        if first is None or first.remote:
            return self.own_booked_tokens
        return self.remaining_tokens(now) - self.remote_booked_tokens

    def busy(self, now: float) -> float:
        """The share of the time in which the replica has computed prompts lately, also for others, by estimates."""
        own = self._worked(now) / BUSY_S
        return own if self.foreign is None else own + self.foreign.busy(now)

    def _worked(self, now: float) -> float:
        ago = now - self.worked_at
        return self.worked * (math.exp(-ago / BUSY_S) if ago > 0 else 1.0)

    def count_work(self, lease: Lease, now: float) -> None:
        """The replica has computed the prompt of a lease of the queue.

        Text of long tokens seems more work than it is. But one prompt cannot take longer than its request has waited, and no
        time counts twice, however many wait.
        """
        first, begun = self.first, self.counted_to
        if first is not None and first.sent > begun:
            begun = first.sent
        waited_s = now - (lease.sent if lease.sent > begun else begun)
        seconds = min(lease.uncached_tokens / self.rate.value, max(0.0, waited_s))
        self.counted_to = begun + seconds
        self.rate.pool.conversation.worked(seconds)
        self.worked = self._worked(now) + seconds
        self.worked_at = max(self.worked_at, now)

    def return_rate(self, now: float, gap_s: float) -> float:
        """Expected returns of conversations per second, with a mean gap of gap_s between an answer and the next turn."""
        ago = now - self.answered_at
        return self.answered * (math.exp(-ago / gap_s) if ago > 0 else 1.0) / gap_s

    def count_answer(self, now: float, gap_s: float) -> None:
        self.answered = self.return_rate(now, gap_s) * gap_s + 1
        self.answered_at = max(self.answered_at, now)

    def count_return(self, now: float, gap_s: float, idle_s: float) -> None:
        """A conversation answered idle_s ago has returned: it is no longer expected."""
        self.answered = max(0.0, self.return_rate(now, gap_s) * gap_s - math.exp(-idle_s / gap_s))
        self.answered_at = max(self.answered_at, now)


class Lease:
    """One request booked on a replica. Made by `BookingLedger.open`; `close` it exactly once, in a `finally`.

    since: time of its booking on this replica. silent: its answer shows no first token, or a token that does not show the
    duration of the prefill. remote: another router has booked it. prefill_s: duration of the prefill, once known. load: the
    replica's. ahead, behind: its neighbours in the queue. keys, sequences: of its prompt, set by its booking. lead: the lease
    for which it waits before it is sent, or None (`leading.py`, `late.py`). follows: it waits for a lead that computes its
    prefix. sent: time of its booking, or of the end of that wait. behind_foreign: expected requests of others before it.
    queued: in the engine, behind another own one. watchers: called when it gets its first token, moves, or ends.
    """

    __slots__ = (
        "ahead",
        "behind",
        "behind_foreign",
        "closed",
        "decoding",
        "follows",
        "keys",
        "lead",
        "ledger",
        "load",
        "moves",
        "prefill_s",
        "prompt_tokens",
        "queued",
        "remote",
        "replica",
        "sent",
        "sequences",
        "silent",
        "since",
        "uncached_tokens",
        "watchers",
    )

    def __init__(
        self,
        ledger: BookingLedger,
        replica: str,
        prompt_tokens: int,
        uncached_tokens: int,
        since: float,
        *,
        silent: bool,
        remote: bool,
    ) -> None:
        self.ledger = ledger
        self.replica = replica
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.since = self.sent = since
        self.moves = 0
        self.silent = silent
        self.remote = remote
        self.sequences = 1
        self.decoding = False
        self.prefill_s: float | None = None
        self.closed = False
        self.keys: BlockKeys = b""
        self.ahead: Lease | None = None
        self.behind: Lease | None = None
        self.lead: Lease | None = None
        self.follows = False
        self.watchers: list[Callable[[], None]] | None = None
        self.behind_foreign = 0.0
        self.queued = False
        self.load = ledger.enter(self)

    def widen(self, sequences: int) -> None:
        """Its prompt is so many sequences."""
        self.load.further += sequences - self.sequences
        if self.remote:
            self.load.remote_further += sequences - self.sequences
        self.sequences = sequences

    def first_token(self, now: float) -> None:
        """The prompt is prefilled: its tokens are no longer booked."""
        if self.closed or self.decoding:
            return
        self.load.computed_at = now
        if self.ahead is not None and self.ahead.lead is None and not self.ahead.remote and self.ahead.sent < self.sent:
            self.load.serial.learn(self.uncached_tokens, 0.0, self.load.rate.value)  # it was computed before an earlier one
        if not self.silent:
            seconds = now - max(self.sent, self.load.turn_ended)
            if self.behind_foreign:
                self._learn_foreign(seconds)
            else:
                self.prefill_s = seconds
                self.queued = self.sent < self.load.turn_ended
        self.prefilled(now)

    def _learn_foreign(self, seconds: float) -> None:
        """The time to its first token includes work of others."""
        load = self.load
        if load.foreign is not None and self.sent >= load.turn_ended:  # no request of ours was before it
            load.foreign.learn(self.behind_foreign, seconds * load.rate.value - self.uncached_tokens)

    def prefilled(self, now: float) -> None:
        """The prefill is over, as observed or as estimated."""
        load = self.load
        self.decoding = True
        load.decoding += 1
        load.presumed += self.silent
        load.booked_tokens -= self.uncached_tokens
        if self.remote:
            load.remote_booked_tokens -= self.uncached_tokens
        load.count_work(self, now)
        if load.foreign is not None:
            load.foreign.computed(self.uncached_tokens)
        load.leave_queue(self)
        load.turn_ended, self.lead = max(load.turn_ended, now), None
        if load.line:
            load.line.pop(self, None)
            load.call_next(now)
        if self.watchers is not None:
            self._tell()

    def follow(self, lead: Lease) -> None:
        """It waits for a lead that computes its prefix."""
        self.lead, self.follows = lead, True

    def release(self, now: float) -> None:
        """It waits for no other lease any more, and is sent."""
        if self.lead is not None:
            load = self.load
            load.line.pop(self, None)
            self.lead, self.follows, self.sent = None, False, now
            if load.foreign is not None:
                self.behind_foreign = load.foreign.waiting(now, load.rate.value)
            self.pass_waiting()

    def pass_waiting(self) -> None:
        """It is sent: before the leases that still wait in the gateway. O(1) without these, else O(sent)."""
        if self.ahead is not None and self.ahead.lead is not None:
            self.load.leave_queue(self)
            self.load.enqueue_sent(self)

    def withdraw(self, now: float) -> None:
        """Before a new choice, which it does not delay itself: its tokens are no longer booked, until it moves."""
        if self.closed or self.decoding:
            return
        if self.load.first is self:
            self.load.turn_ended = max(self.load.turn_ended, now)
        self.load.booked_tokens -= self.uncached_tokens
        if self.remote:
            self.load.remote_booked_tokens -= self.uncached_tokens
        self.uncached_tokens = 0

    def move(self, replica: str, prompt_tokens: int, uncached_tokens: int, now: float) -> None:
        """Book on another replica instead (failover). Ignored if closed."""
        if self.closed:
            return
        self._leave(now)
        self.replica, self.prompt_tokens, self.uncached_tokens, self.since = replica, prompt_tokens, uncached_tokens, now
        self.decoding, self.prefill_s, self.queued = False, None, False
        self.lead, self.follows, self.sent, self.behind_foreign = None, False, now, 0.0
        self.moves += 1
        self.load = self.ledger.enter(self)
        if self.watchers is not None:
            self._tell()

    def close(self, now: float) -> bool:
        """Release the booking. True the first time; later calls return False and have no effect."""
        if self.closed:
            return False
        self._leave(now)
        self.load.count_answer(now, self.ledger.turn_gap.value)
        self.closed, self.lead = True, None
        if self.watchers is not None:
            self._tell()
        return True

    def _tell(self) -> None:
        for watcher in tuple(self.watchers or ()):
            watcher()

    def _leave(self, now: float) -> None:
        load = self.load
        load.inflight -= 1
        load.further -= self.sequences - 1
        load.active_tokens -= self.prompt_tokens
        if self.remote:
            load.remote_inflight -= 1
            load.remote_further -= self.sequences - 1
        if self.decoding:
            load.decoding -= 1
            load.presumed -= self.silent
            return
        load.booked_tokens -= self.uncached_tokens
        if self.remote:
            load.remote_booked_tokens -= self.uncached_tokens
        if load.first is self:
            load.turn_ended = max(load.turn_ended, now)  # its turn is over, without a result
        load.leave_queue(self)
        if load.line:
            load.line.pop(self, None)
            load.call_next(now)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "decoding" if self.decoding else "waiting"
        return f"<Lease {state} on {self.replica}, {self.uncached_tokens} of {self.prompt_tokens} tokens uncached>"


class BookingLedger:
    """All open leases, by replica. Operations are O(1). loads: of replicas that had bookings; `of` also returns others.
    starting: the times at which replicas have just come up. lines: the loads of replicas with a line, and of some that had one.
    has_lines: requests may wait in line.
    """

    def __init__(self) -> None:
        self.loads: dict[str, ReplicaLoad] = {}
        self.lines: dict[str, ReplicaLoad] = {}
        self.has_lines = False
        self.starting: dict[str, float] = {}
        self.rates = PrefillRates()
        self.turn_gap = Median(*TURN_GAP_S)

    def of(self, replica: str) -> ReplicaLoad:
        """A replica's load; that of a replica without bookings so far is empty."""
        return self.loads.get(replica) or ReplicaLoad(self.rates.of(replica))

    def open(
        self, replica: str, prompt_tokens: int, uncached_tokens: int, now: float, *, silent: bool = False, remote: bool = False
    ) -> Lease:
        return Lease(self, replica, prompt_tokens, uncached_tokens, now, silent=silent, remote=remote)

    def enter(self, lease: Lease) -> ReplicaLoad:
        """Count a lease at its replica. Called by leases only."""
        load = self.loads.get(lease.replica)
        if load is None:
            load = self.loads[lease.replica] = ReplicaLoad(self.rates.enter(lease.replica))
        load.inflight += 1
        load.further += lease.sequences - 1
        load.active_tokens += lease.prompt_tokens
        load.booked_tokens += lease.uncached_tokens
        if lease.remote:
            load.remote_inflight += 1
            load.remote_further += lease.sequences - 1
            load.remote_booked_tokens += lease.uncached_tokens
        if load.foreign is not None:
            lease.behind_foreign = load.foreign.waiting(lease.since, load.rate.value)
        load.enqueue(lease)
        return load

    def reported(self, replica: str, running: int, waiting: int, own: int, now: float) -> None:
        """An engine has reported its load. own: sequences of ours that were there meanwhile, at most. O(1)."""
        load = self.loads.get(replica)
        if load is None or load.foreign is None:
            if running + waiting <= own:
                return
            if load is None:
                load = self.loads[replica] = ReplicaLoad(self.rates.enter(replica))
            load.foreign = ForeignLoad()
        load.foreign.report(running, waiting, own, now)

    def shared(self, replica: str, now: float) -> bool:
        """True if a replica's engine has lately shown requests of others."""
        load = self.loads.get(replica)
        return load is not None and load.foreign is not None and load.foreign.watched(now)

    def record_return(self, load: ReplicaLoad, idle_s: float, weight: float, next_turn: bool, now: float) -> None:
        """A replica got a prompt that extends an earlier prompt, idle for idle_s. next_turn: most of it matches. weight: see
        `Median`.
        """
        if next_turn:
            load.count_return(now, self.turn_gap.value, idle_s)
        self.turn_gap.learn(idle_s, weight)

    def restore(self, replica: str, rate: tuple[float, float], answered: float, answered_at: float) -> None:
        """Take over the learned values of another ledger for a replica without bookings here. rate: the sums of its rate."""
        if replica not in self.loads:
            load = self.loads[replica] = ReplicaLoad(self.rates.enter(replica))
            load.rate.restore(rate)
            load.answered, load.answered_at = answered, answered_at

    def remove(self, replica: str) -> None:
        """Remove an idle replica's entry; a busy one stays until its leases are closed."""
        load = self.loads.get(replica)
        if load is None or not load.inflight:
            self.loads.pop(replica, None)
            self.rates.remove(replica)

    def forget_starts(self, until: float) -> None:
        """Replicas that came up until then start no longer. O(replicas that start)."""
        for name in [name for name, at in self.starting.items() if at <= until]:
            del self.starting[name]

    @property
    def open_leases(self) -> int:
        return sum(load.inflight for load in self.loads.values())

    def check(self) -> None:
        """Raises AssertionError if the counts are inconsistent; tests compare them with their leases."""
        for name, load in self.loads.items():
            assert 0 <= load.presumed <= load.decoding <= load.inflight <= load.sequences
            assert load.booked_tokens >= 0
            waiting = load.waiting
            assert load.booked_tokens == sum(lease.uncached_tokens for lease in waiting)
            assert len(waiting) == load.inflight - load.decoding
            assert [lease.ahead for lease in waiting] == [None, *waiting][:-1]
            assert load.last is (waiting[-1] if waiting else None)
            assert all(lease.lead is not None and lease in waiting for lease in load.line)
            assert not any(lease.lead is None and lease.ahead is not None and lease.ahead.lead is not None for lease in waiting)
            assert 0 <= load.remote_inflight <= load.inflight
            assert 0 <= load.remote_further <= load.further
            assert load.remote_booked_tokens == sum(lease.uncached_tokens for lease in waiting if lease.remote)
            assert load.active_tokens >= 0
            assert load.rate.value > 0
            assert load.rate is self.rates.of(name)

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {load.inflight} ({load.booked_tokens} tokens)" for name, load in self.loads.items())
        return f"<Ledger {rows}>"
