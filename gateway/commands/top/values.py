"""From a gateway's JSON to what stands on a terminal: values of any kind, as texts without anything that a terminal obeys.

A gateway of another release, or somebody who answers in its place, may send any value for any field. A value of a wrong kind is
the same as none. Numbers, times and names have the units and the forms of the live page.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

MOST_CHARS: Final = 100  # of a text that is no message
MOST: Final = 1e18
NONE: Final = "–"
Json = dict[str, Any]


def text(value: object, most: int = MOST_CHARS) -> str:
    """A name or a message of unknown origin. Control characters, and those that turn a line around, are replaced."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= most else value[: most - 1] + "…"
    return "".join([char if char.isprintable() else "\ufffd" for char in cut])


def number(value: object) -> float | None:
    """None: it is none, or not between -MOST and MOST: what is made of those is finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if -MOST <= found <= MOST else None


def amount(value: object) -> float:
    """0 in place of none."""
    return number(value) or 0.0


def objects(value: object, most: int) -> list[Json]:
    """The first ones of a list; what is no object is left out."""
    return [each for each in value[:most] if isinstance(each, dict)] if isinstance(value, list) else []


def inside(value: object) -> Json:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# -- as texts


def count(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) < 1e12 else short(value)


def short(value: float | None) -> str:
    """12.3k"""
    if value is None:
        return NONE
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.{0 if abs(scaled) >= 100 else 1}f}{unit}" if abs(scaled) < 1e6 else f"{scaled:.1e}{unit}"
    return f"{value:.0f}"


def rate(value: float) -> str:
    return f"{value:.1f}" if value < 10 else short(value)


def percent(part: float | None) -> str:
    if part is None:
        return NONE
    if abs(part) >= 1000:
        return f"{short(part * 100)}%"
    return f"{part * 100:.{1 if 0 < part < 0.1 else 0}f}%"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    size = abs(seconds)
    if size == 0:
        return "0"
    if size < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if size < 1:
        return f"{seconds * 1000:.{1 if size < 0.01 else 0}f} ms"
    if size < 60:
        return f"{seconds:.{2 if size < 10 else 1}f} s"
    return age(seconds)


def age(seconds: float | None) -> str:
    """Coarsely."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return "now"
    for most, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{short(seconds / 86_400)} d"


def money(usd: float | None) -> str:
    if usd is None:
        return NONE
    size = abs(usd)
    if size == 0:
        return "$0"
    if size >= 1000:
        return f"${usd:,.0f}" if size < 1e6 else f"${short(usd)}"
    if size >= 0.1:
        return f"${usd:.2f}"
    if size >= 1e-6:
        digits = 1 - math.floor(math.log10(size))
        return f"${usd:.{min(8, digits)}f}"
    return "<$0.000001"


def clock(seconds: float | None) -> str:
    """Unix seconds as the time of the day, here."""
    try:
        return NONE if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return NONE


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return NONE
    if value >= 1 << 50:
        return f"{short(value)}B"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{max(0.0, value):.0f} B"


def digest(way: str) -> str:
    """The beginning of the last key of a way through the index."""
    return way.rpartition(".")[2][:8]
