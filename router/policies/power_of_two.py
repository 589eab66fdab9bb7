"""Power of two choices."""

from __future__ import annotations

from collections.abc import Sequence

from router.types import Candidate, Prompt, Random


class PowerOfTwo:
    """Prefers, among two random replicas, the less loaded one by requests in flight; the others follow in random order."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        shuffled = sorted(candidates, key=lambda _: chance.random())
        return sorted(shuffled[:2], key=lambda candidate: candidate.inflight) + shuffled[2:]

    def booked(self, replica: str) -> None:
        """Nothing to remember."""
