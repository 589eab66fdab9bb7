"""Prompt -> chained 64-bit block keys.

A prompt is cut into blocks of a fixed size; the key of a block is the digest of the key before it (of the seed, for the first
one) and of the block's bytes. So equal keys mean equal prefixes, and two prompts share exactly as many leading keys as they
share leading full blocks. The partial last block has no key: an engine would not share it either.

The seed separates prompts that must never match: model, adapter, cache salt. A collision (2^-64 per pair) causes a wrong
prediction, never a wrong answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import xxhash

from router.residency import ID_BYTES
from router.types import KEY_BYTES, BlockKeys

KEPT_SEEDS: Final = 1024
KEPT_CHARS: Final = 256


def seed(parts: tuple[str, ...]) -> int:
    """A 64-bit seed from names (model, adapter, salt). Parts are length-prefixed: ("ab", "c") differs from ("a", "bc").

    Clients choose the names: the seeds of KEPT_SEEDS short ones are cached, long ones are hashed each time.
    """
    chars = 0
    for part in parts:
        chars += len(part)
    return _kept(parts) if chars <= KEPT_CHARS else _hashed(parts)


def _hashed(parts: tuple[str, ...]) -> int:
    hasher = xxhash.xxh3_64()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        hasher.update(len(raw).to_bytes(8, "little") + raw)
    return hasher.intdigest()


_kept: Final = lru_cache(maxsize=KEPT_SEEDS)(_hashed)


def text_keys(data: bytes, block_bytes: int, seed: int) -> BlockKeys:
    """Keys of the full blocks of `data`. O(len(data)), one pass (about 0.3 us a kB)."""
    digest, key = xxhash.xxh3_64_digest, seed.to_bytes(KEY_BYTES, "little")
    keys = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        key = digest(key + data[end - block_bytes : end])
        keys.append(key)
    return b"".join(keys)


def token_bytes(ids: Iterable[int]) -> bytes:
    """Token ids, ID_BYTES each. Raises ValueError for an id that is not in 0 .. 2^32-1."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError("token ids are integers between 0 and 4294967295") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_keys(ids: Iterable[int], block_tokens: int, seed: int) -> BlockKeys:
    """Keys of the full blocks of a token-id prompt. Raises ValueError as `token_bytes`."""
    return text_keys(token_bytes(ids), block_tokens * ID_BYTES, seed)


def shared_blocks(left: BlockKeys, right: BlockKeys) -> int:
    """Number of leading blocks that two runs of keys share. Binary search over chained keys: O(log n) comparisons."""
    low, high = 0, min(len(left), len(right)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * KEY_BYTES
        if left[end - KEY_BYTES : end] == right[end - KEY_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low
