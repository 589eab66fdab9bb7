"""What an object holds, directly or not: whether names are still anywhere in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

_NOT_HELD = (
    types.ModuleType,
    type,
    logging.Logger,
    asyncio.AbstractEventLoop,
    types.CodeType,
    types.BuiltinFunctionType,
    types.AsyncGeneratorType,  # a watch has its last event until the next one
)


def held(root: object, ignored: Iterable[object] = ()) -> Iterator[tuple[object, object]]:
    """Each object that is reachable from `root`, without modules, classes and event loops, and one that refers to it.

    ignored: what is not looked into. O(objects).
    """
    seen = {id(root), *map(id, ignored)}
    waiting = [root]
    while waiting:
        holder = waiting.pop()
        for each in _referents(holder):
            if id(each) not in seen and not isinstance(each, _NOT_HELD):
                seen.add(id(each))
                waiting.append(each)
                yield each, holder


def _referents(holder: object) -> list[Any]:
    if isinstance(holder, types.FunctionType):  # not its module's globals
        return [*(holder.__closure__ or ()), *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()]
    return gc.get_referents(holder)


def texts_in(root: object, pattern: str, ignored: Iterable[object] = ()) -> dict[str, str]:
    """Strings in it that match, and what holds each."""
    found = dict[str, str]()
    for each, holder in held(root, ignored):
        text = each.decode("latin-1") if isinstance(each, bytes) else each if isinstance(each, str) else ""
        if re.search(pattern, text):
            found[text[:60]] = f"{type(holder).__name__} {str(holder)[:200]}"
    return found


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
