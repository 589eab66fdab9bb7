"""Which columns of a table have room, and how wide they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

PADDING: Final = 2  # characters beside each column


class Column(NamedTuple):
    """width: characters, at least; one that `grows` gets its part of what is left over. rank: what has the highest goes first
    where there is no room.
    """

    name: str
    width: int
    rank: int = 0
    right: bool = False
    grows: bool = False


def fitted(columns: Sequence[Column], width: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """(which one, its width), in their order. One is there in any case. wanted: widths of what is in them: one that grows has
    that first, before any has more.
    """
    chosen = list(range(len(columns)))
    while len(chosen) > 1 and sum([columns[at].width + PADDING for at in chosen]) > width:
        chosen.remove(max(chosen, key=lambda at: (columns[at].rank, at)))
    widths = {at: columns[at].width for at in chosen}
    left = max(0, width - sum([each + PADDING for each in widths.values()]))
    growing = [at for at in chosen if columns[at].grows]
    while left > 0 and (short := [at for at in growing if widths[at] < wanted[at]]):
        at = min(short, key=lambda at: widths[at])
        widths[at] += 1
        left -= 1
    for number, at in enumerate(growing):
        widths[at] += left // len(growing) + (number < left % len(growing))
    return [(at, widths[at]) for at in chosen]
