"""Start-up of a serving process: file limit, garbage collection, memory budget, event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gateway.config.schema import Config, LimitConfig
from gateway.config.sections import processes_of

log = logging.getLogger("warmroute.gateway")

_MAX_FILES = 1 << 20
_MAX_RESERVE = 512  # file descriptors for listeners, operators, probes, the parser process, log and files
_SHARE = 4  # requests may hold this part of the memory if the configuration sets no limit


# Thresholds of the three generations: new objects less freed ones, then collections of the previous generation. So a full
# collection examines at most 80,000 new objects and _MOST_LOOKED_AT old ones.
_COLLECT_AFTER: Final = (5_000, 3, 2)
_OLDEST: Final = 2  # generation
_MOST_LOOKED_AT: Final = 30_000  # old objects that a full collection may examine


def relax_garbage_collection() -> None:
    """Bounds the pauses of the garbage collector, which would otherwise scan the whole prefix index."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    """If many objects survive a full collection, exempts them from later ones. Most of them belong to the index, and are freed
    by reference counting.

    The objects of a running request are exempted too, and would leak if they became part of a cycle. But requests make no
    cycles (tests/gateway/request/test_garbage.py), and drop their bodies at the end.
    """
    if phase == "stop" and info["generation"] == _OLDEST and len(gc.get_objects(_OLDEST)) > _MOST_LOOKED_AT:
        gc.freeze()


def raise_file_limit() -> None:
    """Every stream takes two file descriptors; the usual soft limit of 1024 is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(config: Config, files: int | None = None) -> int:
    """Maximum number of client connections of this process: as configured, but limited by its file descriptors. files: their
    number; None: the limit in force.

    A request takes two, one to its client and one to its replica. A quarter of all, at most _MAX_RESERVE, is left for other
    uses.
    """
    if files is None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return config.limits.connections
    return max(1, min(config.limits.connections, (files - min(files // 4, _MAX_RESERVE)) // 2))


def warn_of_connections(config: Config, files: int | None = None) -> None:
    """Logs if fewer connections than configured are possible. It is a warning, except for the default number if at least half
    of it is possible.
    """
    limit, configured = connection_limit(config, files), config.limits.connections
    if limit < configured:
        calm = configured == LimitConfig().connections and limit >= configured // 2
        level = logging.INFO if calm else logging.WARNING
        extra = {"configured": configured, "in_force": limit}
        log.log(level, "limits.connections is more than the open files allow (ulimit -n)", extra=extra)


def budget_bytes(config: Config) -> int:
    """Memory in bytes that this process's requests may hold: one worker's part of the gateway's budget."""
    mib = config.limits.inflight_mb
    whole = mib << 20 if mib else memory_bytes() // _SHARE
    return whole // processes_of(config)


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory in bytes that this process and its siblings may use: the machine's, or less if a cgroup has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The limits of the process's cgroup and of its parents, in both versions of cgroups."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.strip("/")
        # Inside a container the path may be the host's, where it does not exist; the container's own is the top.
        for folder in {top, inner, *(parent for parent in inner.parents if parent.is_relative_to(top))}:
            text = _text(folder / name).strip()
            if text.isdigit():
                yield int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:  # no such cgroup, or no cgroups at all
        return ""


def run(main: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine in the fastest available event loop."""
    try:
        import uvloop
    except ImportError:  # not on every platform; asyncio's own loop does the same, slower
        asyncio.run(main)
    else:
        uvloop.run(main)
