"""The segments of an outline (`outline.py`), and how they go from one process to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.dialects.prompt.volatile import Volatile

TOOL: Final = "tool"
FIELDS: Final = "field"
TURNS: Final = "turn"
TEXT: Final = "text"


class Segment(NamedTuple):
    """A part of a prompt. name: of a tool, of a field, or the role of a turn. size: bytes. digest: of its bytes; loose: of them
    with volatile texts masked. summary: it reads like that of a conversation.
    """

    kind: str
    name: str
    size: int
    digest: int
    loose: int
    volatile: tuple[Volatile, ...]
    summary: bool


Outline = tuple[Segment, ...]

Packed = Sequence[tuple[str, str, int, int, int, tuple[tuple[str, int, int], ...], bool]]


def packed(outline: Outline) -> Packed:
    """As tuples of plain values."""
    return [
        (
            each.kind,
            each.name,
            each.size,
            each.digest,
            each.loose,
            tuple((one.kind, one.at, one.digest) for one in each.volatile),
            each.summary,
        )
        for each in outline
    ]


def unpacked(values: Sequence[Sequence[Any]]) -> Outline:
    """values: as `packed` made them, or lists in the place of its tuples, as decoders make them."""
    return tuple(
        [
            Segment(kind, name, size, digest, loose, tuple([Volatile(*one) for one in volatile]), summary)
            for kind, name, size, digest, loose, volatile, summary in values
        ]
    )
