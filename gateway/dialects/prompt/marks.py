"""Breakpoints: the places in a prompt up to which a client wants it cached.

Anthropic's `cache_control` and OpenAI's `prompt_cache_breakpoint` stand on tools and on parts of the content. They do not enter
the prompt. Clients move the breakpoint forward with every turn: the place of the previous one is in this prompt, too, but may
be unmarked. So the ends of the parts before the last breakpoint are added, as many as Anthropic's API looks back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

MARKER: Final = "cache_control"
OPENAI_MARKER: Final = "prompt_cache_breakpoint"

MAX_MARKS: Final = 4  # the last ones count
LOOKBACK: Final = 20

_FIVE_MINUTES: Final = 300
_HALF_HOUR: Final = 1800
_HOUR: Final = 3600
_ENDS: Final = (b"\x1d", b"\x1e")  # separators before the next part, or turn


class Marks:
    """The breakpoints of a prompt under construction."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found = list[tuple[int, int]]()

    def add(self, part: Mapping[str, Any], at: int) -> None:
        """Adds the breakpoint of a part, if it has one. at: number of parts of the prompt up to the end of this part."""
        marker = part.get(MARKER)
        if marker is not None:
            hour = isinstance(marker, dict) and marker.get("ttl") == "1h"
            self._found.append((at, _HOUR if hour else _FIVE_MINUTES))
        elif part.get(OPENAI_MARKER) is not None:
            self._found.append((at, _HALF_HOUR))

    def places(self, parts: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
        """(offset in the joined parts, seconds for which the prompt is to be cached up to there), unordered; 0 seconds: the end
        of a part before the last breakpoint. O(parts) if there are breakpoints.
        """
        if not self._found:
            return ()
        last, wanted = max(at for at, _ in self._found), self._found[-MAX_MARKS:]
        ends = [0, *accumulate(map(len, parts[:last]))]
        before, at = list[tuple[int, int]](), last - 1
        while at > 0 and len(before) < LOOKBACK:
            if parts[at][:1] in _ENDS:
                before.append((ends[at], 0))
            at -= 1
        return (*((ends[at], seconds) for at, seconds in wanted), *before)
