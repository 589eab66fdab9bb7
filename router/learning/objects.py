"""Objects that servers create and store, such as a response that a later request names by its id, and their replicas.

Only the replica of an object can continue or return it. Learned from answers. Bounded: beyond MAX_OBJECTS the ones least
recently named are forgotten, and each of them after TTL_S.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

MAX_OBJECTS: Final = 65_536
TTL_S: Final = 86_400.0


class Objects:
    """Objects are numbers (`session_key` of their ids). All operations O(1), but `check`."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[str, str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def put(self, number: int, replica: str, model: str, now: float) -> None:
        """The replica stores the object; requests about it are for this model."""
        self._known[number] = replica, model, now
        self._known.move_to_end(number)
        if len(self._known) > MAX_OBJECTS:
            self._known.popitem(last=False)

    def find(self, number: int, now: float) -> tuple[str, str] | None:
        """(replica, model) of an object; None if it is unknown."""
        known = self._known.get(number)
        if known is None:
            return None
        replica, model, at = known
        if now - at > TTL_S:
            del self._known[number]
            return None
        self._known.move_to_end(number)
        return replica, model

    def entries(self) -> Iterator[tuple[int, str, str, float]]:
        """(number, replica, model, time) of each object, for another router's `restore`. Objects may come and go meanwhile.
        O(1) each, after one copy of their numbers.
        """
        for number in list(self._known):
            known = self._known.get(number)
            if known is not None:
                yield number, *known

    def restore(self, number: int, replica: str, model: str, at: float) -> None:
        """Add an object of another router, unless it is known here."""
        if number not in self._known and len(self._known) < MAX_OBJECTS:
            self._known[number] = replica, model, at

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self._known) <= MAX_OBJECTS

    def __repr__(self) -> str:
        return f"<Objects: {len(self)}>"
