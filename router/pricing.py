"""What one prompt would cost on every replica at one moment: where the trie, the ledger and the rents meet the cost.

`cheapest` is what every request pays for, so it prices as few replicas as it can: the holder of the longest match first, and
of the others only those whose floor is below that: the terms that take no time to add up, in tokens, with the running prefill
taken to be over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from router.cost import DECODE_TOKENS, DUPLICATE_WEIGHT, cost, discounted, reuse_chance
from router.load import Ledger, ReplicaLoad
from router.replication import Rents
from router.trie import RadixTrie
from router.types import KEY_BYTES, Candidate, Cost, Decision, Prompt, Random


class Quotes:
    """matched: replica -> leading blocks that it is believed to hold; longest: the most of them on any of `replicas`."""

    __slots__ = (
        "_gap_s",
        "_ledger",
        "_lifetime",
        "_now",
        "_per_block",
        "_prompt",
        "_rent",
        "_replicas",
        "_trie",
        "least",
        "longest",
        "matched",
        "total",
    )

    def __init__(
        self, trie: RadixTrie, ledger: Ledger, prompt: Prompt, units_per_token: float, replicas: Collection[str], now: float
    ) -> None:
        self._trie = trie
        self._ledger = ledger
        self._prompt = prompt
        self._replicas = replicas
        self._now = now
        self._per_block = prompt.block_units / units_per_token  # tokens
        self._lifetime = trie.lifetime
        self._gap_s = ledger.turn_gap.value
        self._rent = 0.0
        self.total = round(prompt.units / units_per_token)
        self.matched = trie.match(prompt.keys, now)
        self.longest = _longest(self.matched, replicas)
        self.least = self.total - self.tokens(self.longest)

    @property
    def shared_prefix(self) -> bytes:
        """What names the longest match: the key of its last block; empty if nobody holds anything."""
        end = self.longest * KEY_BYTES
        return self._prompt.keys[end - KEY_BYTES : end] if end else b""

    def discount(self, rents: Rents) -> None:
        """Take off the price of a copy what was paid for want of it."""
        self._rent = rents.paid(self.shared_prefix) if self.longest else 0.0

    def tokens(self, blocks: int) -> int:
        """Leading blocks of the prompt, in tokens."""
        return min(self.total, round(blocks * self._per_block))

    def price(self, name: str, load: ReplicaLoad, blocks: int, uncached: int) -> Cost:
        """The cost on a replica, its load settled, that holds so many blocks, but not so many tokens."""
        now = self._now
        full = cost(
            booked=load.remaining_tokens(now) if load.waiting else 0,
            uncached=uncached,
            duplicate=uncached - self.least,
            evicted=self._evicted(name, blocks, uncached) if self._lifetime else 0.0,
            decoding=load.decoding,
            prefill_rate=load.rate.value,
            return_rate=load.return_rate(now, self._gap_s) if uncached else 0.0,
        )
        return discounted(full, self._rent) if self._rent and blocks < self.longest else full

    def _evicted(self, name: str, blocks: int, uncached: int) -> float:
        """Tokens that a replica would have to forget, each times the chance that it will be asked for again."""
        new = self._prompt.blocks - blocks
        out, used = self._trie.room(name, new)
        if not out or not new or self._lifetime is None:
            return 0.0
        return uncached * out / new * reuse_chance(self._now - used, self._lifetime.value)

    def cheapest(self, chance: Random) -> tuple[Candidate, bool]:
        """The head of what `candidate` would give by cost, and whether a replica is idle that lacks the longest match."""
        matched, longest, total, least = self.matched, self.longest, self.total, self.least
        loads, load_of, now = self._ledger.loads, self._ledger.of, self._now
        least_s = bound_s = float("inf")
        best, ties, idle = "", 1, False
        price = Cost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        first = next((name for name in self._replicas if matched.get(name) == longest), "") if longest else ""
        for name in (first, *self._replicas) if first else self._replicas:
            load = loads.get(name) or load_of(name)
            blocks = matched.get(name, 0)
            uncached = total - self.tokens(blocks) if blocks else total
            head = load.settle(now) if load.waiting else None
            floor = uncached + DUPLICATE_WEIGHT * (uncached - least) + DECODE_TOKENS * load.decoding
            if head:
                floor += load.booked_tokens - head.uncached_tokens
            elif blocks < longest:
                idle = True
            if floor > bound_s * load.rate.value or (best and name == first):
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
        return self.candidate(best, price), idle

    def candidate(self, name: str, price: Cost | None = None) -> Candidate:
        """What is known of a replica, and its price unless it is known already."""
        load, blocks = self._ledger.of(name), self.matched.get(name, 0)
        load.settle(self._now)
        matched = self.tokens(blocks)
        price = price or self.price(name, load, blocks, self.total - matched)
        return Candidate(
            replica=name,
            matched_blocks=blocks,
            matched_tokens=matched,
            uncached_tokens=self.total - matched,
            booked_tokens=load.remaining_tokens(self._now),
            inflight=load.inflight,
            decoding=load.decoding,
            active_tokens=load.active_tokens,
            prefill_rate=load.rate.value,
            cost=price,
        )

    def decision(self, best: Candidate) -> Decision:
        """What the choice of `best` comes to, in a word."""
        if not self._prompt.keys:
            reason = "blind"
        elif not self.longest:
            reason = "cold"
        else:
            reason = "warm" if best.matched_blocks == self.longest else "spill"
        return Decision(best, reason, self.total, self.tokens(self.longest))


def _longest(matched: Mapping[str, int], replicas: Collection[str]) -> int:
    """The longest match of the candidates; others may hold more."""
    if not matched:
        return 0
    holder = max(matched, key=matched.__getitem__)
    if holder in replicas:
        return matched[holder]
    return max((blocks for name, blocks in matched.items() if name in replicas), default=0)
