"""The interface of a policy: it orders the candidates for a prompt, best first.

`order` depends only on the prompt, the candidates, the given randomness and the notes of `booked`. It changes nothing, so that
a dry run ranks like a real request. Ties are broken by chance, never by index: index order would send the traffic of several
gateways to the same replica.

A new policy is a file here (or, for the simulator only, in `router/simulation/`), and a line in the table (`table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from router.types import Candidate, Prompt, Random


class Policy(Protocol):
    """The interface of a policy (see the module)."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        """All candidates (not empty), best first."""

    def booked(self, replica: str) -> None:
        """This replica was booked. Called after each decision, but not after a dry run."""


Policies = Mapping[str, Callable[[], Policy]]
"""Policy factories by name."""


def ranked(candidates: Sequence[Candidate], key: Callable[[Candidate], float], chance: Random) -> list[Candidate]:
    """The candidates by key, lowest first; equal keys in random order."""
    return sorted(candidates, key=lambda candidate: (key(candidate), chance.random()))


class KeyPolicy:
    """A policy that ranks by a key, without state."""

    def __init__(self, key: Callable[[Candidate], float]) -> None:
        self._key = key

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return ranked(candidates, self._key, chance)

    def booked(self, replica: str) -> None:
        """Nothing to remember."""
