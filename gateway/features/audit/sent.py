"""The prompts ever sent to each replica, as an upper bound of its cached tokens. Bounded memory, no false bound.

Of each prompt the keys of some blocks are stored: of the 16th, 64th, 256th, ... one. A key stands for all blocks before
it, so the first of these places whose key was never sent bounds the prefix that the replica can have seen. The keys are in a
Bloom filter of two generations: after PROMPTS prompts the older one is dropped. An accidental hit only loosens a bound. A
dropped key makes one too strict, but it is older than the caches of replicas.
"""

from __future__ import annotations

from typing import Final

from router.types import KEY_BYTES, BlockKeys

_BITS: Final = 24
_MASK: Final = (1 << _BITS) - 1
FIRST: Final = 16
GROWTH: Final = 4
PROMPTS: Final = 200_000  # of two keys each: a fortieth of all bits


class SentPrompts:
    """The prompts of all replicas of one process, in 4 MiB."""

    def __init__(self, prompts: int = PROMPTS, first: int = FIRST) -> None:
        """prompts: of a generation. first: place of the first stored key."""
        self._first = first * KEY_BYTES
        self._most = prompts
        self._count = 0
        self._now, self._before = bytearray(1 << _BITS - 3), bytearray(1 << _BITS - 3)

    def send(self, replica: str, keys: BlockKeys) -> int:
        """Store a prompt that is sent to the replica now. Returns the blocks of it that the replica can have seen before.
        O(log blocks).
        """
        self._count += 1
        if self._count > self._most:
            self._count = 1
            self._now, self._before = bytearray(len(self._now)), self._now
        salt, now, place, end = hash(replica), self._now, self._first, len(keys)
        bound = -1
        while place <= end:
            bits = (int.from_bytes(keys[place - KEY_BYTES : place - KEY_BYTES + 4], "little") ^ salt) & _MASK
            byte, bit = bits >> 3, 1 << (bits & 7)
            if not now[byte] & bit:
                if bound < 0 and not self._before[byte] & bit:
                    bound = place // KEY_BYTES - 1
                now[byte] |= bit
            place *= GROWTH
        return end // KEY_BYTES if bound < 0 else bound
