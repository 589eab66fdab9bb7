"""Values over time as bars of block characters, all from zero. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def bars(values: Sequence[float | None], width: int, height: int = 1) -> list[str]:
    """Lines of `width` characters, the upper one first: the newest values at the right, None as a gap. O(width * height)."""
    recent = list(values[-width:]) if width > 0 else []
    most = max([value for value in recent if value is not None], default=0.0)
    eighths = [_eighths(value, most, height) for value in recent]
    pad = " " * (max(0, width) - len(recent))
    return [pad + "".join([_EIGHTHS[min(8, max(0, each - 8 * row))] for each in eighths]) for row in range(height - 1, -1, -1)]


def _eighths(value: float | None, most: float, height: int) -> int:
    """At least one of them for what is more than nothing."""
    if value is None or value <= 0 or most <= 0:
        return 0
    return max(1, round(value / most * 8 * height))


def gauge(share: float | None, width: int) -> str:
    """A share of 1 as a bar of that width."""
    if share is None:
        return " " * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "░")[:width]
