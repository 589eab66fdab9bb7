"""Bytes made of bytes: cut, and changed a little."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random


def cut(data: bytes, chance: Random) -> list[bytes]:
    """The same bytes in a few pieces; some may be empty."""
    edges = [0, *sorted(chance.randint(0, len(data)) for _ in range(chance.choice([1, 2, 4, 9]))), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def mutate(data: bytes, chance: Random, tokens: Sequence[bytes]) -> bytes:
    """One to four small changes. tokens: what the format is made of."""
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randint(0, len(data))
        end = min(len(data), at + chance.choice([0, 1, 1, 2, 8, 40]))
        match chance.randrange(7):
            case 0:
                data = data[:at] + chance.choice(tokens) + data[at:]
            case 1:
                data = data[:at] + chance.choice(tokens) + data[end:]
            case 2:
                data = data[:at] + data[end:]
            case 3:
                data = data[:end] + data[at:]
            case 4:
                data = data[:at] + bytes([chance.randrange(256)]) + data[end:]
            case 5:
                data = data[:at] + chance.choice([b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"\x7f"]) + data[at:]
            case _:
                lines = data.split(b"\r\n")
                lines.insert(chance.randint(0, len(lines)), chance.choice(lines))
                data = b"\r\n".join(lines)
        data = data[:20_000]
    return data
