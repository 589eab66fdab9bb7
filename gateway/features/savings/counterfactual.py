"""What other policies would have found cached: the same requests, on shadows of the replicas' caches.

    decision ──► for each policy: a replica, what its shadow holds of the prompt; then the prompt is put there
    end      ──► the tokens that each would have had cached, beside those that the engine has reported

All shadows are in one prefix index of their own, of bounded memory, in which each policy has replicas of its own. They have the
capacities of the real ones, but in units of prompts (bytes), of which a block has an exact number: tokens are estimates, poor
ones before the first answers, and a path of the index keeps the weight that its first prompt had. A match ends within a block,
anywhere: half a block counts.

- ROUND_ROBIN; LEAST_LOADED (requests in flight of this process, if each took as long as it did); SESSION (rendezvous hash of
  the session, else of the prompt's head, without a bound on load);
- ACTUAL: the replica that was chosen. What its shadow finds, against what the engines have reported, is the error of them all.

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

MAX_REPLICAS: Final = 4096  # that have shadows; those of others are forgotten
_SWEPT: Final = 32  # entries that are looked at for their age, with each request
_SCALE_TOKENS: Final = 32_768  # of prompts, with which half of what was known of a replica's scale is forgotten
_NEWS: Final = 0.01  # by which a capacity has to change to be set again


class ShadowPlacement:
    """A request under all policies. cached: tokens of its prompt that each of POLICIES would have found; replicas: where."""

    __slots__ = ("cached", "replicas")

    def __init__(self, cached: tuple[float, ...], replicas: tuple[str, ...]) -> None:
        self.cached = cached
        self.replicas = replicas


class Shadow:
    """A replica under all policies. names: in the index. capacity: units of prompts, None: not known. scale: units per token of
    the prompts that went to any of its shadows. turn: when round robin chose it last; since: when it was made, in its turns.
    inflight: of LEAST_LOADED.
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
    """See the top of this file. capacity: KV tokens of a replica, None: not known. ttl_s, memory_bytes: of the index. most:
    replicas that have shadows.
    """

    def __init__(
        self,
        chance: Random,
        capacity: Callable[[str], int | None],
        ttl_s: float,
        memory_bytes: int,
        most: int = MAX_REPLICAS,
    ) -> None:
        self._chance = chance
        self._most = most
        self._capacity = capacity
        self._trie = RadixTrie(ttl_s, memory_bytes)
        self._shadows: dict[str, Shadow] = {}
        self._turn = 0

    def choose(self, prompt: Prompt, candidates: Collection[str], chosen: str, tokens: int, now: float) -> ShadowPlacement:
        """A request was sent to `chosen`. candidates: where it may have gone. tokens: of its prompt, as estimated.

        O(candidates), and what the index takes for a match and an insertion by each policy.
        """
        names = candidates if 0 < len(candidates) <= self._most // 2 else [chosen]
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

    def ended(self, placed: ShadowPlacement) -> None:
        """It is over, however."""
        if shadow := self._shadows.get(placed.replicas[1]):
            shadow.inflight = max(0, shadow.inflight - 1)

    def follow(self, prompt: Prompt, candidates: Collection[str], chosen: str, tokens: int, now: float) -> None:
        """Another process has sent a request to `chosen`."""
        self.ended(self.choose(prompt, candidates, chosen, tokens, now))

    def _shadow(self, name: str, kept: Collection[str]) -> Shadow:
        """Made if there is none. Where there is no room, those go whose turn is longest ago, some at once; the kept ones, half
        of all at most, stay. O(1) mostly.
        """
        shadow = self._shadows.get(name)
        if shadow is None:
            if len(self._shadows) >= self._most:
                stay = set(kept)
                others = sorted([each for each in self._shadows if each not in stay], key=self._last_turn)
                for oldest in others[: max(1, self._most // 8)]:
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
        """A prompt goes there, of so many units and tokens."""
        if units > 0 and tokens > 0:
            shadow.scale.learn(units, tokens, tokens)
        known, former = self._capacity(name), shadow.capacity
        capacity = None if known is None else int(known * shadow.scale.value)
        if capacity != former and (capacity is None or former is None or abs(capacity - former) > _NEWS * former):
            shadow.capacity = capacity
            for each in shadow.names:
                self._trie.add_replica(each, capacity)

    def _next(self, shadows: dict[str, Shadow]) -> str:
        """Of the least recently chosen ones, any."""
        self._turn += 1
        _, _, name = min([(shadow.turn, self._chance.random(), name) for name, shadow in shadows.items()])
        shadows[name].turn = self._turn
        return name

    def _idle(self, shadows: dict[str, Shadow]) -> str:
        """Of those with the fewest requests in flight, any."""
        return min([(shadow.inflight, self._chance.random(), name) for name, shadow in shadows.items()])[2]

    def check(self) -> None:
        """For tests: raises AssertionError if its books are wrong."""
        self._trie.check()
        assert len(self._shadows) <= self._most

    def __repr__(self) -> str:
        return f"<Counterfactual of {len(self._shadows)} replicas, {self._trie!r}>"


def _hashed(prompt: Prompt, names: Collection[str]) -> str:
    """The highest of a hash of session and replica."""
    key = key_of(prompt)
    return max(names, key=lambda name: weight(key, name))
