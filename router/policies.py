"""How candidates are ranked: the default policy and the baselines, by name.

A policy orders candidates, best first, and reads nothing but the prompt, the candidates and the given chance, so that a dry
run ranks as the real one would. `booked` tells it which candidate was taken in the end. Ties are broken by chance, never by
index: index order herds the traffic of several gateways onto the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from router.sticky import Sticky
from router.types import Candidate, Prompt, Random

MOST_TURNS: Final = 4096


class Policy(Protocol):
    """order: all candidates (not empty), best first. booked: this one was taken."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]: ...

    def booked(self, replica: str) -> None: ...


def ranked(candidates: Sequence[Candidate], key: Callable[[Candidate], float], chance: Random) -> list[Candidate]:
    """Lowest key first; equal keys in random order."""
    return sorted(candidates, key=lambda candidate: (key(candidate), chance.random()))


class Stateless:
    """A policy that ranks by a key and remembers nothing."""

    def __init__(self, key: Callable[[Candidate], float]) -> None:
        self._key = key

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return ranked(candidates, self._key, chance)

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


class RoundRobin:
    """The replica that was taken longest ago. Stays fair when replicas join, leave or fail.

    It remembers the turns of the MOST_TURNS replicas that were taken last.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._taken: dict[str, int] = {}

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return ranked(candidates, lambda candidate: self._taken.get(candidate.replica, 0), chance)

    def booked(self, replica: str) -> None:
        self._turn += 1
        self._taken.pop(replica, None)
        self._taken[replica] = self._turn
        if len(self._taken) > MOST_TURNS:
            del self._taken[next(iter(self._taken))]


class PowerOfTwo:
    """Of two random replicas, the one with fewer requests in flight; the others follow in random order."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        shuffled = sorted(candidates, key=lambda _: chance.random())
        return sorted(shuffled[:2], key=lambda candidate: candidate.inflight) + shuffled[2:]

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "cost": lambda: Stateless(lambda candidate: candidate.cost.total_s),
        "round_robin": RoundRobin,
        "least_loaded": lambda: Stateless(lambda candidate: candidate.inflight),
        "power_of_two": PowerOfTwo,
        "sticky": Sticky,
        "longest_prefix": lambda: Stateless(lambda candidate: -candidate.matched_blocks),
        "random": lambda: Stateless(lambda candidate: 0.0),
    }
)
