"""Round robin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.policies.policy import ranked
from router.types import Candidate, Prompt, Random

MAX_REMEMBERED: Final = 4096


class RoundRobin:
    """Prefers the least recently chosen replica. Stays fair when replicas join, leave or fail.

    State: the last turns of the MAX_REMEMBERED most recently chosen replicas.
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
        if len(self._taken) > MAX_REMEMBERED:
            del self._taken[next(iter(self._taken))]
