"""The segments of an outline (`outline.py`), and their form in messages between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.dialects.prompt.volatile import VolatileText

TOOL: Final = "tool"
FIELDS: Final = "field"
TURNS: Final = "turn"
TEXT: Final = "text"


class Segment(NamedTuple):
    """A part of a prompt. name: of a tool, of a field, or the role of a turn. size: bytes. digest: of its bytes. loose: digest
    of its bytes with volatile texts masked. summary: it reads like a summary of a conversation.
    """

    kind: str
    name: str
    size: int
    digest: int
    loose: int
    volatile: tuple[VolatileText, ...]
    summary: bool


Outline = tuple[Segment, ...]

Packed = Sequence[tuple[str, str, int, int, int, tuple[tuple[str, int, int], ...], bool]]


def packed(outline: Outline) -> Packed:
    """An outline as tuples of plain values."""
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
    """The inverse of `packed`. values: its tuples, or lists in their place, as decoders return them."""
    return tuple(
        [
            Segment(kind, name, size, digest, loose, tuple([VolatileText(*one) for one in volatile]), summary)
            for kind, name, size, digest, loose, volatile, summary in values
        ]
    )
