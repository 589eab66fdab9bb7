"""How often the log says the same: whoever writes into a store that gateways share could make any number of lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MOST: Final = 20  # of a kind
WITHIN_S: Final = 60.0


class Notices:
    """Counts what there is to say of each kind. Kinds are few, and are names in our code."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # since when, how many

    def say(self, kind: str, write: Callable[..., None], text: str, about: dict[str, Any]) -> None:
        """Write a line, unless there were MOST of its kind within WITHIN_S. Its `unsaid`: those that were left out before."""
        now = self._clock()
        since, number = self._kinds.get(kind, (now, 0))
        if now - since >= WITHIN_S:
            if number > MOST:
                about = {**about, "unsaid": number - MOST}
            since, number = now, 0
        self._kinds[kind] = since, number + 1
        if number < MOST:
            write(text, extra=about)
