"""Counts the work of steps, independent of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def lines_of(steps: Iterator[object], between: Callable[[int], object] = lambda _: None) -> list[int]:
    """Lines of Python executed in each step; 0 for compiled code. between: called after each step, with its number."""
    lines, found = 0, list[int]()

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    more = True
    while more:
        lines = 0
        sys.settrace(trace)
        try:
            more = next(steps, found) is not found
        finally:
            sys.settrace(before)
        between(len(found))
        found.append(lines)
    return found
