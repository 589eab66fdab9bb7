"""Prompts that maximise the memory of the index: nodes of few blocks, edges that split and merge."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.types import KEY_BYTES, BlockKeys


@dataclass(frozen=True, slots=True)
class Adversary:
    """prompts: endless. count: enough of them to exceed a bound of 16 MiB, if it were not enforced."""

    title: str
    prompts: Callable[[random.Random], Iterator[BlockKeys]]
    count: int


def blocks(chance: random.Random, count: int) -> BlockKeys:
    return chance.randbytes(count * KEY_BYTES)


def single(chance: random.Random) -> Iterator[BlockKeys]:
    """One block each, all different."""
    while True:
        yield blocks(chance, 1)


def late(chance: random.Random) -> Iterator[BlockKeys]:
    """One long head, then one block that differs."""
    head = blocks(chance, 200)
    while True:
        yield head + blocks(chance, 1)


def everywhere(chance: random.Random) -> Iterator[BlockKeys]:
    """Few prompts, left at every block for one that differs: each edge is split down to single blocks."""
    trunks = [blocks(chance, 40) for _ in range(200)]
    while True:
        keep = chance.randrange(40) * KEY_BYTES
        yield chance.choice(trunks)[:keep] + blocks(chance, 1)


def alternating(chance: random.Random) -> Iterator[BlockKeys]:
    """Long prompts and prefixes of them in turns, so that use diverges at ever other places, among fresh ones that push."""
    trunks = [blocks(chance, 400) for _ in range(40)]
    while True:
        trunk = chance.choice(trunks)
        yield trunk
        yield blocks(chance, 3)
        yield trunk[: chance.randrange(1, 400) * KEY_BYTES]
        yield blocks(chance, 3)


def long(chance: random.Random) -> Iterator[BlockKeys]:
    """20,000 blocks each (5 MB of text), all different."""
    while True:
        yield blocks(chance, 20_000)


ADVERSARIES: Mapping[str, Adversary] = MappingProxyType(
    {
        "single": Adversary("distinct prompts of one block", single, 30_000),
        "late": Adversary("one head of 200 blocks, then a block that differs", late, 30_000),
        "everywhere": Adversary("200 prompts of 40 blocks, left at every block", everywhere, 30_000),
        "alternating": Adversary("long prompts, prefixes of them and short ones in turns", alternating, 52_000),
        "long": Adversary("distinct prompts of 20,000 blocks", long, 400),
    }
)
