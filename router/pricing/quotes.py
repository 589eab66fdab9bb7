"""The costs of one prompt on every replica at one moment, from the trie, the ledger and the rents.

Where an engine reports all its blocks (`know`), these replace the match of the index, except for prompts that are being
computed. Where it reports a part of them, the longer one of both counts.

`cheapest` runs for every request, so it prices as few replicas as possible: first the holder of the longest match, then only
those others whose lower bound is smaller. The bound has the terms that are cheap to compute, in tokens, with the running
prefill assumed to be over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from router.index.blocks import shared_blocks
from router.index.trie import RadixTrie
from router.learning.adapters import Adapters
from router.learning.sessions import COINCIDENCE_BLOCKS, Session, Sessions
from router.learning.shares import CacheShares
from router.load import BookingLedger, ReplicaLoad
from router.pricing.cost import DECODE_TOKENS, DUPLICATE_WEIGHT, FREE_SHARE, cost, delay, discounted, starting
from router.pricing.replication import Rents
from router.residency import HeldPrefix, PromptTokens, Residency
from router.types import KEY_BYTES, Candidate, Cost, Decision, Prompt, Random

NO_COST: Final = Cost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_NEVER_S: Final = math.inf
MOST_LEASES: Final = 64  # of a replica, that are compared with a prompt


class Quotes:
    """now: time of the question. matched: replica -> leading blocks that it is believed to hold. sent: likewise, blocks
    that it was sent, more than it holds only where it has several caches (`learning/shares.py`). longest: the maximum over
    `replicas`. shared_prefix: the key of the last block of the longest match; empty without a match. total: tokens of the
    prompt. least: tokens uncached on the holder of the longest match. block_weight: of a block of the prompt
    (`Prompt.block_weight`). unseen: replica -> units of the prompt that it may hold of the session beyond the longest match, if
    there are any.
    """

    __slots__ = (
        "_adapters",
        "_blocks",
        "_evicts",
        "_expected",
        "_gap_s",
        "_holder",
        "_known",
        "_ledger",
        "_per_block",
        "_rent",
        "_starting",
        "_trie",
        "block_weight",
        "least",
        "longest",
        "matched",
        "now",
        "prompt",
        "replicas",
        "sent",
        "shared_prefix",
        "total",
        "unseen",
    )

    def __init__(
        self,
        trie: RadixTrie,
        ledger: BookingLedger,
        prompt: Prompt,
        units_per_token: float,
        replicas: Collection[str],
        now: float,
        shares: CacheShares | None = None,
    ) -> None:
        self._trie = trie
        self._ledger = ledger
        self.prompt = prompt
        self.replicas = replicas
        self.now = now
        self._per_block = prompt.block_units / units_per_token  # tokens
        self.block_weight = prompt.block_weight(units_per_token)
        self._blocks = prompt.blocks
        self._evicts = trie.lifetime is not None
        self._gap_s = ledger.turn_gap.value
        self._rent = 0.0
        self._adapters: Adapters | None = None
        self._starting = ledger.starting
        self.unseen: dict[str, int] = {}
        self._expected: dict[str, int] = {}  # expected tokens among the unseen ones
        self._known: dict[str, HeldPrefix] | None = None  # reported by engines
        self.total = int(prompt.units / units_per_token + 0.5)
        self.matched = self.sent = trie.match(prompt.keys, now)
        if shares:
            self.matched = shares.believed(self.sent)
        if ledger.lines:
            self._follow_lines()
        self._find_longest()

    def _find_longest(self) -> None:
        """The longest match, from `matched`. O(replicas)."""
        self._holder, self.longest = _longest(self.matched, self.replicas) if self.matched else ("", 0)
        end = self.longest * KEY_BYTES
        self.shared_prefix = self.prompt.keys[end - KEY_BYTES : end] if end else b""
        self.least = self.total - self.tokens(self.longest)

    def know(self, residency: Residency, tokens: PromptTokens) -> None:
        """Replace the matches of the index by the reports of engines. O(replicas), plus their lookups and leases."""
        prompt = self.prompt
        if not prompt.keys:
            return
        if tokens.whole and tokens.count:
            self.total = tokens.count
            self._per_block = prompt.block_units * tokens.count / prompt.units
        known, self.matched = dict[str, HeldPrefix](), dict(self.matched)
        for name in self.replicas:
            held = residency.held(tokens, name)
            if held is None:
                continue
            believed = self._computing(name) if held.certain else self.matched.get(name, 0)
            if (least := self.tokens(believed)) > held.saved:
                held = HeldPrefix(max(least, held.cached), least, held.certain)
            if held.saved > self.total:  # an estimate, if not all tokens are known
                held = HeldPrefix(held.cached, self.total, held.certain)
            known[name] = held
            self.matched[name] = min(int(held.saved / self._per_block + 0.5), self._blocks)
        if not known:
            return
        self._known = known
        self._find_longest()
        for held in known.values():
            self.least = min(self.least, self.total - held.saved)

    def _follow_lines(self) -> None:
        """Match the prompts that wait in line, too: they are credited only when they are sent. O(lines x MOST_LEASES)."""
        lines, keys, matched = self._ledger.lines, self.prompt.keys, dict(self.matched)
        for name, load in tuple(lines.items()):
            lease, longest, left, waits = load.last, matched.get(name, 0), MOST_LEASES, False
            while lease is not None and left:
                if lease.lead is not None:
                    waits, end = True, longest * KEY_BYTES
                    longer = lease.keys[end : end + KEY_BYTES] == keys[end : end + KEY_BYTES]
                    if longer and (shared := shared_blocks(lease.keys, keys)) > longest:
                        longest = matched[name] = shared
                lease, left = lease.ahead, left - 1
            if not waits:
                del lines[name]
        self.matched = matched

    def _computing(self, name: str) -> int:
        """Leading blocks of the prompt that the replica's open leases compute. O(MOST_LEASES)."""
        load = self._ledger.loads.get(name)
        lease, longest, left = load.last if load is not None else None, 0, MOST_LEASES
        while lease is not None and left:
            longest = max(longest, shared_blocks(lease.keys, self.prompt.keys))
            lease, left = lease.ahead, left - 1
        return longest

    def discount(self, rents: Rents) -> None:
        """Apply the discount for copies of the prompt's longest match."""
        self._rent = rents.paid(self.shared_prefix) if self.longest else 0.0

    def price_adapters(self, adapters: Adapters) -> None:
        """Add the time to load the prompt's adapter, where it is not loaded."""
        self._adapters = adapters

    def rent_of(self, best: Candidate) -> float:
        """The rent in seconds of waiting at a holder of the longest match: its queue without the work that computes the match.

        0 without a match. O(leases in the queue).
        """
        if not self.longest:
            return 0.0
        load = self._ledger.of(best.replica)
        own = load.prefix_work(self.shared_prefix, self.longest * KEY_BYTES, self.tokens(self.longest), self.now)
        return max(0.0, best.cost.queue_s - own / best.prefill_rate)

    def expect(self, sessions: Sessions, session: Session, share: float, since: float, units_per_token: float) -> None:
        """Apply the discount for the part of the prompt's session that is probably cached beyond the longest match. share: of
        its unseen units that are expected. since: older answers are ignored.
        """
        prompt = self.prompt
        matched = self.longest * prompt.block_units
        least = COINCIDENCE_BLOCKS * prompt.block_units if self._blocks else 0
        for name in session.holders:
            unseen = min(sessions.held(session, name, since), prompt.units) - matched
            if unseen > least and name in self.replicas and (self._known is None or name not in self._known):
                self.unseen[name] = unseen
                if expected := min(int(share * unseen / units_per_token), self.least):
                    self._expected[name] = expected

    def tokens(self, blocks: int) -> int:
        """Leading blocks of the prompt, in tokens."""
        tokens = int(blocks * self._per_block + 0.5)
        return tokens if tokens < self.total else self.total

    def price(self, name: str, load: ReplicaLoad, blocks: int, uncached: int) -> Cost:
        """The cost on a replica (its load advanced) that holds `blocks` of the prompt and would compute `uncached` tokens."""
        now, beyond = self.now, uncached - self.least
        booked, decoding, after = load.remaining_tokens(now) if load.first else 0, float(load.decoding), 0
        if load.line:
            booked, after = load.before(uncached, now)
        if load.foreign is not None:
            booked += load.foreign.tokens(now, load.rate.value)
            decoding += load.foreign.running(now)
        rate, work, others_s = load.rate.value, load.rate.pool.conversation, 0.0
        if uncached:
            returns, mean_s = work.returning * load.return_rate(now, self._gap_s), math.inf
            if self._ledger.has_lines and load.orders(now):
                mean_s = work.request_s
            others_s = delay(booked / rate, uncached / rate, returns, mean_s) + after * uncached / rate
        if self.longest and (busy := load.busy(now) - FREE_SHARE) > 0:
            others_s += busy * work.value
        full = cost(
            booked=booked,
            uncached=uncached,
            duplicate=beyond if beyond > 0 else 0,
            evicted=self._evicted(name, blocks, uncached) if self._evicts else 0.0,
            decoding=decoding,
            prefill_rate=rate,
            others_s=others_s,
        )
        if self._starting and name in self._starting and not (blocks and blocks == self.longest) and name not in self._expected:
            full = full._replace(start_s=starting(full.prefill_s, now - self._starting[name]))
        if self._adapters is not None and (load_s := self._adapters.load_s(name, self.prompt.adapter)):
            full = full._replace(adapter_s=load_s)
        return discounted(full, self._rent) if self._rent and blocks < self.longest else full

    def _session_price(self, name: str, load: ReplicaLoad, blocks: int, uncached: int) -> Cost:
        """`price`, with the discount for expected tokens of the session. uncached: without the expected tokens."""
        full = self.price(name, load, blocks, uncached + self._expected[name])
        whole: float = sum(full)  # with types of their own, for mypyc
        less: float = sum(self.price(name, load, blocks, uncached))
        return full._replace(session_s=less - whole)

    def _evicted(self, name: str, blocks: int, uncached: int) -> float:
        """Tokens that a replica would have to evict, weighted by their probability of reuse."""
        weight = (self._blocks - blocks) * self.block_weight
        return uncached * self._trie.eviction_loss(name, weight, self.now) / weight if weight else 0.0

    def cheapest(self, chance: Random) -> tuple[Candidate, bool]:
        """(the candidate with the least cost, True if an idle replica lacks the longest match)."""
        matched, longest, total, least, known = self.matched, self.longest, self.total, self.least, self._known
        loads, load_of, now = self._ledger.loads, self._ledger.of, self.now
        lacking = total + DUPLICATE_WEIGHT * (total - least)  # lower bound for an idle replica without any match
        least_s = bound_s = _NEVER_S
        best, price, ties, idle = "", NO_COST, 1, False
        first = self._holder if len(self.replicas) > 1 else ""
        for name in (first, *self.replicas) if first else self.replicas:
            load = loads.get(name) or load_of(name)
            blocks = matched.get(name, 0)
            if known is not None and name in known:
                uncached = total - known[name].saved
                floor = uncached + DUPLICATE_WEIGHT * (uncached - least) + DECODE_TOKENS * load.decoding
            elif blocks:
                uncached = least if blocks == longest else total - self.tokens(blocks)
                floor = uncached + DUPLICATE_WEIGHT * (uncached - least) + DECODE_TOKENS * load.decoding
            else:
                uncached, floor = total, lacking + DECODE_TOKENS * load.decoding
            dear = floor > bound_s * load.rate.value
            if dear and (idle or blocks == longest):
                continue
            ahead = load.least_before(now) if load.first is not None or load.foreign is not None else None
            if ahead is not None:
                floor += ahead
            elif blocks < longest:
                idle = True
            if dear or floor > bound_s * load.rate.value or (best and name == first):
                continue
            quote = self.price(name, load, blocks, uncached)
            seconds = sum(quote)
            if seconds < least_s:
                best, price, ties, least_s = name, quote, 1, seconds
                bound_s = (seconds + self._rent) * (1 + 1e-9)  # or rounding would decide ties
            elif seconds == least_s:
                ties += 1
                if chance.random() * ties < 1:
                    best, price = name, quote
        if self._expected:
            best, price = self._cheapest_holder(best, price, least_s)
        return self.candidate(best, price), idle

    def _cheapest_holder(self, best: str, price: Cost, least_s: float) -> tuple[str, Cost]:
        """The best, or a holder of the session that is cheaper with its discount. O(holders)."""
        for name in self._expected:
            load = self._ledger.of(name)
            load.advance(self.now)
            quote = self._session_price(name, load, self.matched.get(name, 0), self._uncached(name))
            if (seconds := sum(quote)) < least_s:
                best, price, least_s = name, quote, seconds
        return best, price

    def _uncached(self, name: str) -> int:
        """Tokens of the prompt that a replica is expected to compute."""
        if self._known is not None and name in self._known:
            return self.total - self._known[name].saved
        blocks = self.matched.get(name, 0)
        uncached = self.least if blocks == self.longest else self.total - self.tokens(blocks)
        return uncached - self._expected.get(name, 0) if self._expected else uncached

    def candidate(self, name: str, price: Cost | None = None) -> Candidate:
        """A replica's state with its price. price: given only if its load was advanced for it; else computed here."""
        load, blocks = self._ledger.of(name), self.matched.get(name, 0)
        uncached = self._uncached(name)
        if price is None:
            load.advance(self.now)
            session = name in self._expected
            price = (self._session_price if session else self.price)(name, load, blocks, uncached)
        fields = (
            name,
            blocks,
            self._known[name].cached if self._known is not None and name in self._known else self.tokens(blocks),
            uncached,
            load.remaining_tokens(self.now) if load.first else 0,
            load.inflight,
            load.decoding,
            load.active_tokens,
            load.rate.value,
            price,
        )
        return tuple.__new__(Candidate, fields)  # as in `cost`

    def candidates(self) -> list[Candidate]:
        """Every replica's state with its price. O(replicas)."""
        return [self.candidate(name) for name in self.replicas]

    def decision(self, best: Candidate) -> Decision:
        """The decision for `best`, with its reason."""
        if self.longest and best.matched_blocks == self.longest:
            reason = "warm"
        elif best.replica in self._expected:
            reason = "session"
        elif not self.longest:
            reason = "cold" if self.prompt.keys else "blind"
        else:
            reason = "spill"
        return Decision(best, reason, self.total, self.total - self.least)


def _longest(matched: Mapping[str, int], replicas: Collection[str]) -> tuple[str, int]:
    """(holder of the longest match among `replicas`, "" without one; its length). matched: not empty."""
    holder, longest = "", 0
    for name, blocks in matched.items():
        if blocks > longest and name in replicas:
            holder, longest = name, blocks
    return holder, longest
