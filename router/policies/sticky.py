"""Sticky routing: a session's requests go to the same replica, as long as that replica has room.

A request's key is the session that its client names, else the head of its prompt: the key of its block number HEAD_BLOCKS,
which covers all earlier blocks. Replicas are ranked by a hash of (key, replica), highest first: rendezvous hashing. The order
of two replicas depends only on the key and these two: a joining replica takes its share of the keys, about one in n, from all
others, and a leaving one moves only its own keys. Gateways agree without communication.

The hash ignores load. With a bound, a replica that would have more than `bound` times the mean of requests in flight is
skipped; the key returns when there is room again. The mean counts the request to be placed, and the bound is rounded up, so
that some replica always has room (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads",
arXiv:1608.01350, on a rendezvous ranking instead of a ring).

A prompt with neither a session nor a full block is ranked randomly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from router.types import KEY_BYTES, Candidate, Prompt, Random

BOUND = 1.25
HEAD_BLOCKS = 8


class StickySessions:
    """Sticky routing (see the module). bound: None: a session's replica never changes because of load."""

    def __init__(self, bound: float | None = BOUND) -> None:
        self._bound = bound

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        """O(n log n) for n candidates, one hash each."""
        key = key_of(prompt)
        ranked = sorted(candidates, key=lambda one: weight(key, one.replica) if key else chance.random(), reverse=True)
        if self._bound is None:
            return ranked
        room = math.ceil(self._bound * (sum(one.inflight for one in candidates) + 1) / len(candidates))
        return sorted(ranked, key=lambda one: one.inflight >= room)  # a stable sort: full replicas come last

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


def key_of(prompt: Prompt) -> bytes:
    """The session key of a prompt; empty if it has none."""
    return prompt.session.encode("utf-8", "surrogatepass") or prompt.keys[: HEAD_BLOCKS * KEY_BYTES][-KEY_BYTES:]


def weight(key: bytes, replica: str) -> int:
    """The rendezvous hash of a key and a replica: 64 bits."""
    return xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(replica.encode("utf-8", "surrogatepass")))
