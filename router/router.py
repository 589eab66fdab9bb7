"""Where the parts meet: one synchronous `choose` before a request, a few `observe` calls after it.

`choose` matches the prompt, prices every candidate, ranks, books the head and credits it with the prompt's blocks, all in
one call without an await: two requests can never decide on the same stale view. The credit comes at booking, not at the
answer, so that siblings in a burst meet on one replica.

Belief is corrected by what happens: success confirms the credit, failure takes it back, the engine's own count of cached
tokens trims what it turned out not to hold, a replica that leaves or restarts is purged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from router.cost import cost
from router.load import Lease, Ledger
from router.policies import POLICIES
from router.trie import RadixTrie
from router.types import Candidate, Decision, Outcome, Prompt, Random, Replica

DEFAULT_UNITS_PER_TOKEN = 4.0  # bytes of canonical text, believed until an engine has counted
SCALE_PRIOR_TOKENS = 200.0
SCALE_HALF_LIFE_TOKENS = 20_000.0


@dataclass(slots=True)
class Scale:
    """Units per token of one model, learned from (units, tokens) pairs; sums with a half-life."""

    units: float = SCALE_PRIOR_TOKENS * DEFAULT_UNITS_PER_TOKEN
    tokens: float = SCALE_PRIOR_TOKENS

    @property
    def units_per_token(self) -> float:
        return self.units / self.tokens

    def learn(self, units: int, tokens: int) -> None:
        if units <= 0 or tokens <= 0 or not 0.01 < units / tokens < 1000:
            return  # nonsense, or a prompt that is mostly an image
        keep = 0.5 ** (tokens / SCALE_HALF_LIFE_TOKENS)
        self.units = self.units * keep + units
        self.tokens = self.tokens * keep + tokens


class Booking:
    """One request's way through the router: its decision and its open lease. `Router.choose` makes it, `close` ends it."""

    __slots__ = ("_router", "chosen", "decision", "lease", "prompt")

    def __init__(self, router: Router, prompt: Prompt, decision: Decision, lease: Lease) -> None:
        self._router = router
        self.prompt = prompt
        self.decision = decision
        self.chosen = decision.best
        self.lease = lease

    def first_token(self, now: float) -> None:
        """The answer's first byte came."""
        self.lease.first_token(now)

    def move(self, candidate: Candidate, now: float) -> None:
        """The replica failed before its first byte: book on another candidate of the ranking instead."""
        self._router.move(self, candidate, now)

    def close(self, outcome: Outcome, now: float) -> None:
        """The request is over. Only the first call counts."""
        self._router.observe(self, outcome, now)

    def __repr__(self) -> str:
        return f"<Booking on {self.chosen.replica}, {self.decision.reason}, {self.lease!r}>"


class Router:
    """See the top of this file. Time comes as an argument, chance through the constructor; no call blocks."""

    def __init__(self, *, policy: str, ttl_s: float, memory_bytes: int, chance: Random) -> None:
        self.trie = RadixTrie(ttl_s, memory_bytes)
        self.ledger = Ledger()
        self.policy_name = policy
        self._policy = POLICIES[policy]()
        self._chance = chance
        self._replicas: dict[str, Replica] = {}
        self._scales: dict[str, Scale] = {}

    # -- replicas

    def add(self, replica: Replica, block_tokens: float) -> None:
        """A replica joined, or its capacity changed. block_tokens: the length of a block, to bound what we believe it holds."""
        self._replicas[replica.name] = replica
        capacity = replica.capacity_tokens
        self.trie.add_replica(replica.name, None if capacity is None else max(1, int(capacity / block_tokens)))

    def remove(self, name: str) -> None:
        """A replica left: nothing is expected of it any more. Its open leases still close."""
        self._replicas.pop(name, None)
        self.trie.remove_replica(name)
        self.ledger.remove(name)

    def restarted(self, name: str) -> None:
        """A replica lost its cache."""
        self.trie.purge(name)

    # -- before a request

    def tokens(self, prompt: Prompt, units: int) -> int:
        """`units` of a prompt in tokens, by what was learned of its scale."""
        return round(units / self.units_per_token(prompt.scale))

    def units_per_token(self, scale: str) -> float:
        if not scale:
            return 1.0
        known = self._scales.get(scale)
        return known.units_per_token if known else DEFAULT_UNITS_PER_TOKEN

    def rank(self, prompt: Prompt, replicas: Collection[str], now: float) -> Decision:
        """What `choose` would decide, without booking anything. `replicas` (not empty): the live candidates' names.

        O(edges on the prompt's path x their holders + replicas log replicas).
        """
        matched = self.trie.match(prompt.keys, now)
        longest = max((matched.get(name, 0) for name in replicas), default=0)
        candidates = [self._candidate(prompt, name, matched.get(name, 0), longest, now) for name in replicas]
        ranking = tuple(self._policy.order(candidates, self._chance))
        return Decision(ranking, _reason(prompt, ranking[0], longest), self.tokens(prompt, prompt.units))

    def choose(self, prompt: Prompt, replicas: Collection[str], now: float, *, silent: bool = False) -> Booking:
        """Rank, book the best and credit it with the prompt. Raises ValueError if there are no candidates.

        silent: the answer is plain, so that nobody will tell when its first token was there.
        """
        if not replicas:
            raise ValueError("no replica to choose from")
        decision = self.rank(prompt, replicas, now)
        best = decision.best
        self._policy.booked(best.replica)
        self.trie.insert(best.replica, prompt.keys, now)
        return Booking(self, prompt, decision, self.ledger.open(best.replica, best.uncached_tokens, now, silent=silent))

    # -- after it

    def move(self, booking: Booking, candidate: Candidate, now: float) -> None:
        """See Booking.move."""
        if booking.lease.closed:
            return
        self._take_back(booking)
        booking.chosen = candidate
        booking.lease.move(candidate.replica, candidate.uncached_tokens, now)
        self.trie.insert(candidate.replica, booking.prompt.keys, now)

    def observe(self, booking: Booking, outcome: Outcome, now: float) -> None:
        """See Booking.close. What the engine reports is checked before it is believed."""
        if not booking.lease.close(now):
            return
        if booking.chosen.replica not in self._replicas:
            self.ledger.remove(booking.chosen.replica)
            return
        if not outcome.ok:
            self._take_back(booking)
            return
        self._learn_rate(booking.lease, outcome)
        self._learn_scale(booking.prompt, outcome.prompt_tokens)
        self._trim(booking, outcome)
        self.trie.insert(booking.chosen.replica, booking.prompt.keys, now)

    def _candidate(self, prompt: Prompt, name: str, matched_blocks: int, longest: int, now: float) -> Candidate:
        load = self.ledger.of(name)
        load.settle(now)
        booked = load.remaining_tokens(now)
        total = self.tokens(prompt, prompt.units)
        matched = min(total, self.tokens(prompt, matched_blocks * prompt.block_units))
        elsewhere = min(total, self.tokens(prompt, longest * prompt.block_units))
        return Candidate(
            replica=name,
            matched_blocks=matched_blocks,
            matched_tokens=matched,
            uncached_tokens=total - matched,
            booked_tokens=booked,
            inflight=load.inflight,
            decoding=load.decoding,
            prefill_rate=load.prefill_rate,
            cost=cost(
                booked=booked,
                uncached=total - matched,
                duplicate=elsewhere - matched,
                decoding=load.decoding,
                prefill_rate=load.prefill_rate,
                arrival_rate=load.arrival_rate(now),
            ),
        )

    def _take_back(self, booking: Booking) -> None:
        """The replica did not compute the prompt: leave it only what it was believed to hold before."""
        self.trie.forget(booking.chosen.replica, booking.prompt.keys, booking.chosen.matched_blocks)

    def _learn_rate(self, lease: Lease, outcome: Outcome) -> None:
        """From what the engine really had to compute, where it says so; else from what we believed."""
        if lease.prefill_s is not None:
            known = outcome.prompt_tokens is not None and outcome.cached_tokens is not None
            tokens = (outcome.prompt_tokens or 0) - (outcome.cached_tokens or 0) if known else lease.uncached_tokens
            self.ledger.of(lease.replica).learn(tokens, lease.prefill_s)

    def _learn_scale(self, prompt: Prompt, tokens: int | None) -> None:
        if prompt.scale and tokens is not None:
            self._scales.setdefault(prompt.scale, Scale()).learn(prompt.units, tokens)

    def _trim(self, booking: Booking, outcome: Outcome) -> None:
        """Forget what the engine turned out not to hold, on other branches too: it evicted the blocks that they hang on."""
        cached, prompt = outcome.cached_tokens, booking.prompt
        if cached is None or cached < 0:
            return
        held = int(cached * self.units_per_token(prompt.scale) / prompt.block_units)
        # One block of doubt: tokens are an estimate, and an engine's own blocks end elsewhere than ours.
        if held + 1 < booking.chosen.matched_blocks:
            self.trie.forget(booking.chosen.replica, prompt.keys, held + 1)

    # -- for metrics and proof

    @property
    def replicas(self) -> Mapping[str, Replica]:
        return self._replicas

    def check(self) -> None:
        """Assert the invariants of all parts. O(everything)."""
        self.trie.check()
        self.ledger.check()
        assert set(self.trie.held()) == set(self._replicas)

    def __repr__(self) -> str:
        return f"<Router {self.policy_name}, {self.ledger!r}, {self.trie!r}>"


def _reason(prompt: Prompt, best: Candidate, longest: int) -> str:
    if not prompt.blocks:
        return "blind"
    if not longest:
        return "cold"
    return "warm" if best.matched_blocks == longest else "spill"
