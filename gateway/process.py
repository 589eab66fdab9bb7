"""What every process that serves does for itself before it does so."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Coroutine
from typing import Any

_MAX_FILES = 1 << 20


def relax_garbage_collection() -> None:
    """Nothing on a request's way makes cycles, and going through all of the prefix index for nothing takes its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def raise_file_limit() -> None:
    """Every stream takes two file descriptors; the usual soft limit of 1024 is for other programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(main: Coroutine[Any, Any, Any]) -> None:
    """In an event loop, the fastest that there is."""
    try:
        import uvloop
    except ImportError:  # not on every platform; asyncio's own loop does the same, slower
        asyncio.run(main)
    else:
        uvloop.run(main)
