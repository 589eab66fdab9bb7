"""The contestants: our router, and three other indexes. All route the same prompts.

`Warmroute` is the production router. The others are simple or existing alternatives:

- `PlainPygtrie`: one node per block in a `pygtrie.Trie`, each with a dictionary replica -> last use.
- `BlockDicts`: one dictionary entry per block with the set of its holders, and an `OrderedDict` per replica for LRU. What most
  routers of the field do.
- `Gorgo`: the `gorgo` policy and the token trie of `gorgo-lb` (PyPI), where it is installed. Called as documented:
  insert on dispatch, counters at dispatch, first token and end.

The first two of these hash the prompt with our function, match it, pick the replica with the least booked plus uncached
tokens, and credit it. They have no TTL, no price for copies and evictions, no learned speed, no correction of predictions
and no removal of failed requests. Only `BlockDicts` has a capacity; `PlainPygtrie` and `Gorgo` never forget, and none but ours
has a memory bound.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, Protocol

import pygtrie

from router import Booking, Outcome, Prompt, Replica, Router, seed, text_keys
from router.types import KEY_BYTES, BlockKeys, Random

BLOCK_BYTES, BLOCK_TOKENS = 256, 64
TOKEN_BYTES = BLOCK_BYTES // BLOCK_TOKENS
MODEL = "model"
DAY_S = 86_400.0
RTT_S = 0.001


class Contestant(Protocol):
    """Timed: `choose`, `first_token`, `close`. A ticket is the handle that `choose` returns."""

    name: str

    def grow(self, blocks: int) -> None:
        """Let all replicas together have room for `blocks`, where there is a capacity."""

    @property
    def blocks(self) -> int:
        """Block credits, summed over replicas."""

    def choose(self, text: bytes, now: float) -> Any: ...

    def first_token(self, ticket: Any, now: float) -> None: ...

    def close(self, ticket: Any, now: float) -> None: ...

    def work(self, ticket: Any) -> tuple[str, int, int]:
        """(the chosen replica, tokens of the prompt, those that it has to compute)."""


class Warmroute:
    """The production router, with engines that report exactly the predicted cached tokens."""

    name = "warmroute"

    def __init__(self, replicas: Sequence[str], chance: Random, block_tokens: int = BLOCK_TOKENS) -> None:
        self.router = Router(policy="cost", ttl_s=DAY_S, memory_bytes=1 << 32, chance=chance)
        self._replicas = replicas
        self._block_tokens = block_tokens

    def grow(self, blocks: int) -> None:
        for name in self._replicas:
            self.router.add(Replica(name, blocks // len(self._replicas) * self._block_tokens))

    @property
    def blocks(self) -> int:
        return self.router.trie.blocks

    def choose(self, text: bytes, now: float) -> Booking:
        return self.decide(prompt_of(text), now)

    def decide(self, prompt: Prompt, now: float) -> Booking:
        return self.router.choose(prompt, self._replicas, now)

    def first_token(self, ticket: Booking, now: float) -> None:
        ticket.first_token(now)

    def close(self, ticket: Booking, now: float) -> None:
        ticket.close(Outcome(True, ticket.decision.prompt_tokens, ticket.decision.best.matched_tokens), now)

    def work(self, ticket: Booking) -> tuple[str, int, int]:
        return ticket.decision.best.replica, ticket.decision.prompt_tokens, ticket.decision.best.uncached_tokens


class Ticket:
    """A request of the contestants that keep no more. Lengths in units of the prompt, of which `per_token` make a token."""

    __slots__ = ("per_token", "replica", "uncached", "units")

    def __init__(self, replica: str, units: int, uncached: int, per_token: int) -> None:
        self.replica = replica
        self.units = units
        self.uncached = uncached
        self.per_token = per_token

    def work(self) -> tuple[str, int, int]:
        return self.replica, self.units // self.per_token, self.uncached // self.per_token


class LeastCost:
    """Match, pick by booked plus uncached tokens, book, credit. `match` and `credit` are the index's part."""

    def __init__(self, replicas: Sequence[str], chance: Random) -> None:
        self._booked = dict.fromkeys(replicas, 0)

    def match(self, path: Sequence[bytes]) -> dict[str, int]:
        raise NotImplementedError

    def credit(self, replica: str, path: Sequence[bytes], now: float) -> None:
        raise NotImplementedError

    def choose(self, text: bytes, now: float) -> Ticket:
        return self.decide(prompt_of(text), now)

    def decide(self, prompt: Prompt, now: float) -> Ticket:
        path = split(prompt.keys)
        found, booked, block = self.match(path), self._booked, prompt.block_units
        best = min(booked, key=lambda name: booked[name] - found.get(name, 0) * block)
        ticket = Ticket(best, prompt.units, prompt.units - found.get(best, 0) * block, TOKEN_BYTES if prompt.scale else 1)
        booked[best] += ticket.uncached
        self.credit(best, path, now)
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._booked[ticket.replica] -= ticket.uncached

    def close(self, ticket: Ticket, now: float) -> None:
        """Nothing that it keeps ends here."""

    def work(self, ticket: Ticket) -> tuple[str, int, int]:
        return ticket.work()


class PlainPygtrie(LeastCost):
    name = "pygtrie"

    def __init__(self, replicas: Sequence[str], chance: Random) -> None:
        super().__init__(replicas, chance)
        self.trie: Any = pygtrie.Trie()
        self.blocks = 0

    def grow(self, blocks: int) -> None:
        """It has no capacity."""

    def match(self, path: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        for depth, step in enumerate(self.trie.prefixes(path), 1):
            found.update(dict.fromkeys(step.value, depth))
        return found

    def credit(self, replica: str, path: Sequence[bytes], now: float) -> None:
        if not path:
            return
        self.trie.setdefault(path, {})
        for step in itertools.islice(self.trie.walk_towards(path), 1, None):  # the first one is the root
            holders = step.get()
            if holders is None:
                holders = step.setdefault({})
            if replica not in holders:
                self.blocks += 1
            holders[replica] = now


class BlockDicts(LeastCost):
    name = "dictionaries"

    def __init__(self, replicas: Sequence[str], chance: Random) -> None:
        super().__init__(replicas, chance)
        self.holders: dict[bytes, set[str]] = {}
        self.used: dict[str, OrderedDict[bytes, None]] = {name: OrderedDict() for name in replicas}
        self.capacity = 1 << 60  # blocks of a replica

    def grow(self, blocks: int) -> None:
        self.capacity = blocks // len(self.used)

    @property
    def blocks(self) -> int:
        return sum(map(len, self.used.values()))

    def match(self, path: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        for depth, key in enumerate(path, 1):
            holders = self.holders.get(key)
            if not holders:
                break
            found.update(dict.fromkeys(holders, depth))
        return found

    def credit(self, replica: str, path: Sequence[bytes], now: float) -> None:
        used, holders = self.used[replica], self.holders
        for key in reversed(path):  # so that the stale end is always a prompt's tail
            if key in used:
                used.move_to_end(key)
            else:
                used[key] = None
                holders.setdefault(key, set()).add(replica)
        while len(used) > self.capacity:
            stale, _ = used.popitem(last=False)
            holders[stale].discard(replica)
            if not holders[stale]:
                del holders[stale]


class Gorgo:
    """Its prompts are token ids: every 4 bytes of the text are taken for one, and no tokenizer is timed."""

    name = "gorgo-lb"

    def __init__(self, replicas: Sequence[str], chance: Random) -> None:
        import gorgo  # type: ignore[import-not-found, import-untyped, unused-ignore]  # not a dependency: `installed` has looked

        self._context = gorgo.RouteContext
        self._decide = gorgo.get_policy("gorgo").fn
        self.trie = gorgo.RadixTrie()
        self._weights = gorgo.make_default_store()
        self._replicas = list(replicas)
        self._metrics = {
            name: gorgo.ReplicaSnapshot(num_running_reqs=1, num_queue_reqs=0, num_used_tokens=0, latency=RTT_S)
            for name in replicas
        }
        self._queued, self._uncached, self._inflight = (dict.fromkeys(replicas, 0) for _ in range(3))
        self._credited = 0

    def grow(self, blocks: int) -> None:
        """It has no capacity."""

    @property
    def blocks(self) -> int:
        return self._credited // BLOCK_TOKENS

    def choose(self, text: bytes, now: float) -> Ticket:
        ids = array("I", text[: len(text) // TOKEN_BYTES * TOKEN_BYTES])
        tokens, queued, inflight = len(ids), self._queued, self._inflight
        decision = self._decide(
            self._context(
                self._replicas, self._metrics, queued, self._uncached, inflight, self.trie, ids, tokens, self._weights
            )
        )
        best = decision.target
        uncached = round(decision.scores[best] - queued[best] - RTT_S * 1000)  # its score less the other parts
        ticket = Ticket(best, tokens, uncached, 1)
        queued[best] += tokens
        self._uncached[best] += ticket.uncached
        inflight[best] += 1
        self.trie.insert(ids, best)
        self._credited += ticket.uncached
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._queued[ticket.replica] -= ticket.units
        self._uncached[ticket.replica] -= ticket.uncached

    def close(self, ticket: Ticket, now: float) -> None:
        self._inflight[ticket.replica] -= 1

    def work(self, ticket: Ticket) -> tuple[str, int, int]:
        return ticket.work()


KINDS: dict[str, Any] = {kind.name: kind for kind in (Warmroute, PlainPygtrie, BlockDicts, Gorgo)}


def prompt_of(text: bytes) -> Prompt:
    """As the gateway makes it."""
    return Prompt(text_keys(text, BLOCK_BYTES, seed((MODEL, ""))), len(text), BLOCK_BYTES, MODEL)


def split(keys: BlockKeys) -> list[bytes]:
    """One key each."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def installed() -> Iterator[tuple[str, str]]:
    """(name, version of what it stands on) of those that can be measured here."""
    for name, package in zip(KINDS, ("warmroute", "pygtrie", "", "gorgo-lb"), strict=True):
        try:
            yield name, metadata.version(package) if package else ""
        except metadata.PackageNotFoundError:
            if name != Gorgo.name:
                yield name, "from a checkout"
