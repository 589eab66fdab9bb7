"""Simulates other policies: the same requests, on shadows of the replicas' caches.

    decision ──► for each policy: a replica, and the cached part of the prompt in its shadow; then the prompt is inserted there
    end      ──► the tokens that each policy would have found cached, compared with the tokens reported by the engine

All shadows share one prefix index of bounded memory, in which each policy has its own replicas. They have the capacities of the
real replicas, but in units of prompts (bytes), which are exact for a block. Tokens are estimates, poor ones before the first
answers, and a path of the index keeps the weight of its first prompt. A match may end anywhere within a block: half a block is
added.

- ROUND_ROBIN; LEAST_LOADED (requests in flight of this process, with their real durations); SESSION (rendezvous hash of the
  session, or of the prompt's head, without a bound on load);
- ACTUAL: the chosen replica. The difference between its shadow and the engines' reports is the error of all shadows.

Pure: time and chance are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from router import Prompt
from router.index.trie import RadixTrie
from router.learning.learned import Ratio
from router.learning.scales import DEFAULT_UNITS_PER_TOKEN
from router.policies.sticky import key_of, weight
from router.types import Random

ROUND_ROBIN: Final = "round_robin"
LEAST_LOADED: Final = "least_loaded"
SESSION: Final = "session"
ACTUAL: Final = "actual"
POLICIES: Final = (ROUND_ROBIN, LEAST_LOADED, SESSION, ACTUAL)

MAX_REPLICAS: Final = 4096  # replicas with shadows; the least recently chosen are dropped
_SWEPT: Final = 32  # index entries checked for their age, per request
_SCALE_TOKENS: Final = 32_768  # prompt tokens after which a replica's earlier scale has half its weight
_CAPACITY_CHANGE: Final = 0.01  # relative change of a capacity that is applied


class ShadowPlacement:
    """A request under all policies. cached: cached tokens under each of POLICIES. replicas: the chosen replica under each."""

    __slots__ = ("cached", "replicas")

    def __init__(self, cached: tuple[float, ...], replicas: tuple[str, ...]) -> None:
        self.cached = cached
        self.replicas = replicas


class Shadow:
    """A replica under all policies. names: in the index. capacity: units of prompts; None: unknown. scale: units per token of
    the prompts in any of its shadows. turn: of its last choice by round robin. since: the turn when it was made. inflight:
    under LEAST_LOADED.
    """

    __slots__ = ("capacity", "inflight", "names", "scale", "since", "turn")

    def __init__(self, name: str, since: int) -> None:
        self.since = since
        self.names = tuple([f"{policy} {name}" for policy in POLICIES])
        self.capacity: int | None = None
        self.scale = Ratio(DEFAULT_UNITS_PER_TOKEN, 1.0, _SCALE_TOKENS)
        self.turn = 0
        self.inflight = 0


class Counterfactual:
    """capacity: returns the KV tokens of a replica; None: unknown. ttl_s, memory_bytes: of the index. max_replicas: replicas
    with shadows.
    """

    def __init__(
        self,
        chance: Random,
        capacity: Callable[[str], int | None],
        ttl_s: float,
        memory_bytes: int,
        max_replicas: int = MAX_REPLICAS,
    ) -> None:
        self._chance = chance
        self._max_replicas = max_replicas
        self._capacity = capacity
        self._trie = RadixTrie(ttl_s, memory_bytes)
        self._shadows: dict[str, Shadow] = {}
        self._turn = 0

    def choose(self, prompt: Prompt, candidates: Collection[str], chosen: str, tokens: int, now: float) -> ShadowPlacement:
        """Places a request that was sent to `chosen` under each policy. candidates: the possible replicas. tokens: estimate for
        its prompt.

        O(candidates), plus a match and an insertion in the index for each policy.
        """
        names = candidates if 0 < len(candidates) <= self._max_replicas // 2 else [chosen]
        shadows = {name: self._shadow(name, names) for name in names}
        replicas = (self._next(shadows), self._idle(shadows), _hashed(prompt, names), chosen)
        block = tokens * prompt.block_units / prompt.units if prompt.units else 0.0
        cached, trie = list[float](), self._trie
        places = list[str]()
        for policy, name in enumerate(replicas):
            shadow = shadows.get(name) or self._shadow(name, shadows)
            self._resize(name, shadow, prompt.units, tokens)
            places.append(shadow.names[policy])
        held = trie.matched(places, prompt.keys, now)
        for place in places:
            blocks = held.get(place, 0)
            cached.append(min((blocks + 0.5) * block, tokens) if blocks else 0.0)
            trie.insert(place, prompt.keys, now, weight=prompt.block_units)
        shadows[replicas[1]].inflight += 1
        trie.sweep(now, _SWEPT)
        return ShadowPlacement(tuple(cached), replicas)

    def end(self, placed: ShadowPlacement) -> None:
        """The request has ended, successfully or not."""
        if shadow := self._shadows.get(placed.replicas[1]):
            shadow.inflight = max(0, shadow.inflight - 1)

    def follow(self, prompt: Prompt, candidates: Collection[str], chosen: str, tokens: int, now: float) -> None:
        """Another process has sent a request to `chosen`."""
        self.end(self.choose(prompt, candidates, chosen, tokens, now))

    def _shadow(self, name: str, kept: Collection[str]) -> Shadow:
        """The shadow of a replica, made if missing. If there is no room, several of the least recently chosen are dropped, but
        none of `kept`, which is at most half of all. O(1) mostly.
        """
        shadow = self._shadows.get(name)
        if shadow is None:
            if len(self._shadows) >= self._max_replicas:
                stay = set(kept)
                others = sorted([each for each in self._shadows if each not in stay], key=self._last_turn)
                for oldest in others[: max(1, self._max_replicas // 8)]:
                    for left in self._shadows.pop(oldest).names:
                        self._trie.remove_replica(left)
            shadow = self._shadows[name] = Shadow(name, self._turn)
            for each in shadow.names:
                self._trie.add_replica(each)
        return shadow

    def _last_turn(self, name: str) -> int:
        shadow = self._shadows[name]
        return max(shadow.turn, shadow.since)

    def _resize(self, name: str, shadow: Shadow, units: int, tokens: int) -> None:
        """Updates scale and capacity for a prompt of so many units and tokens."""
        if units > 0 and tokens > 0:
            shadow.scale.learn(units, tokens, tokens)
        known, previous = self._capacity(name), shadow.capacity
        capacity = None if known is None else int(known * shadow.scale.value)
        if capacity != previous and (
            capacity is None or previous is None or abs(capacity - previous) > _CAPACITY_CHANGE * previous
        ):
            shadow.capacity = capacity
            for each in shadow.names:
                self._trie.add_replica(each, capacity)

    def _next(self, shadows: dict[str, Shadow]) -> str:
        """A random one of the least recently chosen replicas."""
        self._turn += 1
        _, _, name = min([(shadow.turn, self._chance.random(), name) for name, shadow in shadows.items()])
        shadows[name].turn = self._turn
        return name

    def _idle(self, shadows: dict[str, Shadow]) -> str:
        """A random one of the replicas with the fewest requests in flight."""
        return min([(shadow.inflight, self._chance.random(), name) for name, shadow in shadows.items()])[2]

    def check(self) -> None:
        """For tests. Raises AssertionError if an invariant is broken."""
        self._trie.check()
        assert len(self._shadows) <= self._max_replicas

    def __repr__(self) -> str:
        return f"<Counterfactual of {len(self._shadows)} replicas, {self._trie!r}>"


def _hashed(prompt: Prompt, names: Collection[str]) -> str:
    """The replica with the highest hash of session and name."""
    key = key_of(prompt)
    return max(names, key=lambda name: weight(key, name))
