"""Bounds the repetition of log lines: any writer to a shared store could otherwise cause any number of lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MOST: Final = 20  # lines of a kind
WITHIN_S: Final = 60.0


class Notices:
    """Counts the lines of each kind. Kinds are few: names in the code, or reasons of the operating system."""

    def __init__(self, clock: Callable[[], float], most: int = MOST, within_s: float = WITHIN_S) -> None:
        """most: lines of a kind in within_s seconds."""
        self._clock = clock
        self._most = most
        self._within_s = within_s
        self._kinds: dict[str, tuple[float, int]] = {}  # start of the window, number of lines

    def say(self, kind: str, write: Callable[..., None], text: str, about: dict[str, Any]) -> None:
        """Write a line, unless there were enough of its kind. Its `unsaid`: number of lines omitted before."""
        now = self._clock()
        since, number = self._kinds.get(kind, (now, 0))
        if now - since >= self._within_s:
            if number > self._most:
                about = {**about, "unsaid": number - self._most}
            since, number = now, 0
        self._kinds[kind] = since, number + 1
        if number < self._most:
            write(text, extra=about)
