"""The models that clients see: the union of what the replicas list.

It is made in one go and replicas choose how long it is, so it is bounded: 30 to 60 ms. Where two replicas list the same id, it
has the first one's entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from gateway.api.openai import model_list
from gateway.ask import ModelEntry
from gateway.pools import Pool

MAX_SHOWN: Final = 8192  # models
MAX_SHOWN_BYTES: Final = 8 << 20  # of their entries
_MAX_LOOKUPS: Final = 2 * MAX_SHOWN  # of models whose pool is asked for: others list them, too
_MAX_ENTRIES: Final = 100_000  # of replicas, most of which list what others do


class Catalog:
    """See the top of this file. entries: by id, as JSON; names, sorted; answer: the one to GET /v1/models."""

    __slots__ = ("answer", "entries", "names")

    def __init__(self, listed: Iterable[tuple[Pool, str, ModelEntry]], home: Callable[[str], tuple[str, Pool] | None]) -> None:
        """listed: what each replica lists, with its pool. home: of a model's name, whose second is the pool that serves it."""
        self.entries = _union(listed, home)
        self.names = sorted(self.entries)
        self.answer = model_list(self.entries.values())

    def __repr__(self) -> str:
        return f"<Catalog of {len(self.names)} models>"


def _union(listed: Iterable[tuple[Pool, str, ModelEntry]], home: Callable[[str], tuple[str, Pool] | None]) -> dict[str, bytes]:
    union: dict[str, bytes] = {}
    bytes_left, lookups_left = MAX_SHOWN_BYTES, _MAX_LOOKUPS
    for pool, name, entry in islice(listed, _MAX_ENTRIES):
        if name in union:
            continue
        lookups_left -= 1
        if (found := home(name)) and found[1] is pool:
            bytes_left -= len(entry.shown)
            if bytes_left < 0:
                break
            union[name] = entry.shown
        if len(union) == MAX_SHOWN or not lookups_left:
            break
    return union
