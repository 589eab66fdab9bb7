"""How candidates are ranked: the default policy and the baselines, by name.

A policy orders candidates, best first, and reads nothing but the candidates and the given chance, so that a dry run ranks
as the real one would. `booked` tells it which candidate was taken in the end. Ties are broken by chance, never by index:
index order herds the traffic of several gateways onto the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from router.types import Candidate, Random


class Policy(Protocol):
    """order: candidates, best first (all of them, so that failover needs no second decision). booked: this one was taken."""

    def order(self, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]: ...

    def booked(self, replica: str) -> None: ...


class Stateless:
    """A policy that ranks by a key and remembers nothing. Equal keys are in random order."""

    def __init__(self, key: Callable[[Candidate], float]) -> None:
        self._key = key

    def order(self, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: (self._key(candidate), chance.random()))

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


class RoundRobin:
    """The replica that was taken longest ago. Stays fair when replicas join, leave or fail."""

    def __init__(self) -> None:
        self._turn = 0
        self._taken: dict[str, int] = {}

    def order(self, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: (self._taken.get(candidate.replica, 0), chance.random()))

    def booked(self, replica: str) -> None:
        self._turn += 1
        self._taken[replica] = self._turn


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "cost": lambda: Stateless(lambda candidate: candidate.cost.total_s),
        "round_robin": RoundRobin,
        "least_loaded": lambda: Stateless(lambda candidate: candidate.inflight),
        "random": lambda: Stateless(lambda candidate: 0.0),
    }
)
