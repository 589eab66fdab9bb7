"""How often the log says the same: whoever writes into a store that gateways share could make any number of lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MOST: Final = 20  # of a kind
WITHIN_S: Final = 60.0


class Notices:
    """Counts what there is to say of each kind. Kinds are few: names in our code, or reasons of the operating system."""

    def __init__(self, clock: Callable[[], float], most: int = MOST, within_s: float = WITHIN_S) -> None:
        """most: lines of a kind in within_s seconds."""
        self._clock = clock
        self._most = most
        self._within_s = within_s
        self._kinds: dict[str, tuple[float, int]] = {}  # since when, how many

    def say(self, kind: str, write: Callable[..., None], text: str, about: dict[str, Any]) -> None:
        """Write a line, unless there were enough of its kind. Its `unsaid`: those that were left out before."""
        now = self._clock()
        since, number = self._kinds.get(kind, (now, 0))
        if now - since >= self._within_s:
            if number > self._most:
                about = {**about, "unsaid": number - self._most}
            since, number = now, 0
        self._kinds[kind] = since, number + 1
        if number < self._most:
            write(text, extra=about)
