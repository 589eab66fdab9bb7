"""The prompts ever sent to each replica, as an upper bound of its cached tokens. Bounded memory, no false bound.

Of each prompt the keys of some blocks are stored: of the first, fourth, sixteenth, ... one. A key stands for all blocks before
it, so the first of these places whose key was never sent bounds the prefix that the replica can have seen. The keys are in a
Bloom filter of two generations: after PROMPTS prompts the older one is dropped. An accidental hit only loosens a bound. A
dropped key makes one too strict, but it is older than the caches of replicas.
"""

from __future__ import annotations

from typing import Final

from router.types import KEY_BYTES, BlockKeys

_BITS: Final = 23
_MASK: Final = (1 << _BITS) - 1
GROWTH: Final = 4
PROMPTS: Final = 200_000  # about four keys of two bits each: a fifth of all bits


class SentPrompts:
    """The prompts of all replicas of one process, in 2 MiB."""

    def __init__(self, prompts: int = PROMPTS) -> None:
        self._most = prompts
        self._count = 0
        self._now, self._before = bytearray(1 << _BITS - 3), bytearray(1 << _BITS - 3)

    def send(self, replica: str, keys: BlockKeys) -> int:
        """Store a prompt that is sent to the replica now. Returns the blocks of it that the replica can have seen before.
        O(log blocks).
        """
        salt = hash(replica)
        self._count += 1
        if self._count > self._most:
            self._count = 1
            self._now, self._before = bytearray(len(self._now)), self._now
        now, before = self._now, self._before
        blocks, place, known = len(keys) // KEY_BYTES, 1, True
        bound = blocks
        while place <= blocks:
            number = int.from_bytes(keys[(place - 1) * KEY_BYTES : place * KEY_BYTES], "little") ^ salt
            one, two = number & _MASK, (number >> _BITS) & _MASK
            byte_one, bit_one, byte_two, bit_two = one >> 3, 1 << (one & 7), two >> 3, 1 << (two & 7)
            if known and not (
                (now[byte_one] & bit_one and now[byte_two] & bit_two)
                or (before[byte_one] & bit_one and before[byte_two] & bit_two)
            ):
                known = False
                bound = place - 1
            now[byte_one] |= bit_one
            now[byte_two] |= bit_two
            place *= GROWTH
        return bound
