"""All objects of one kind, kept up to date by a list and then watches.

    list ──► watch ──► the server ends it, or it is cut ──► watch from the last version
      ▲        └── 410, an unreadable or late event, RELIST_AFTER failures, RELIST_S ─────────────────┐
      └─────────────────────────────────────────────────────────────────────────────────────────────┘

A list replaces all objects, so deleted ones disappear. A failure is retried after a pause that doubles up to MAX_BACKOFF_S
(minus the duration of the attempt); the objects stay in the meantime. An empty list right after a failure is requested once
more, because a restarted server may have no objects yet. A server restored from a backup continues from an earlier version, and
would send nothing for a long time. Therefore the objects are listed again after several failures, and periodically.

Only the result of `read` is kept of each object.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Final

from gateway.features.discovery.kubernetes.api import (
    BOOKMARK,
    DELETED,
    MAX_OBJECTS,
    Api,
    Event,
    KubernetesError,
    Object,
    RelistNeeded,
)
from gateway.features.discovery.kubernetes.objects import ObjectEndpoints, PodEndpoint

log = logging.getLogger("warmroute.discovery")

BACKOFF_S: Final = 0.1  # a cut watch continues almost at once
MAX_BACKOFF_S: Final = 2.5  # with EMPTY_S, a recovered server is known within 5 s
MAX_RETRY_AFTER_S: Final = 30.0
SHORT_S: Final = 1.0  # a shorter watch counts as a failure
EMPTY_S: Final = 2.0  # pause before an empty list is requested once more
RELIST_AFTER: Final = 3
RELIST_S: Final = 1800.0
RELIST_RETRY_S: Final = 60.0


class Watcher:
    """clock: monotonic seconds. sleep: a parameter for tests."""

    def __init__(
        self,
        name: str,
        api: Api,
        read: Callable[[Object], Sequence[PodEndpoint]],
        report_problem: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """name: for logs. report_problem: called with each problem, and with "" when it is over."""
        self._name = name
        self._api = api
        self._read = read
        self._report_problem = report_problem
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._objects: dict[str, ObjectEndpoints] = {}
        self._version = ""  # version for the next watch; "": list first
        self._listed_at = -math.inf
        self._failures = 0  # consecutive
        self._unlisted = 0  # failures since the last list
        self._relist: RelistNeeded | None = None  # why the objects may differ from the server's
        self._warned = False  # the current outage has been logged

    async def watch(self, *, expects: bool) -> AsyncIterator[Collection[ObjectEndpoints]]:
        """All objects at first, and after each change. expects: see MemberSource."""
        while True:
            failure: KubernetesError | None = None
            tried, begun = self._clock(), math.inf
            try:
                if await self._list_if_needed(expects=expects):
                    yield self._objects.values()
                async with aclosing(self._api.watch(self._version)) as watched:
                    async for events in watched:
                        begun = min(begun, self._clock())
                        self._report_problem("")
                        self._ends_failures(begun)
                        changed = [self._apply(event) for event in events]
                        if any(changed):
                            yield self._objects.values()
                        if self._relist:
                            raise self._relist
            except KubernetesError as error:
                failure = error
            if not self._ends_failures(begun) and failure is None:
                failure = KubernetesError("the server ends each watch at once")
            if failure:
                await self._retry_after(failure, self._clock() - tried if begun == math.inf else 0.0)

    async def _list_if_needed(self, *, expects: bool) -> bool:
        """Returns True if objects have changed."""
        if not self._version:
            return await self._list(recheck_empty=expects if self._listed_at == -math.inf else self._failures > 0)
        if self._clock() - self._listed_at <= RELIST_S:
            return False
        try:  # a watch may work even if a list fails
            return await self._list(recheck_empty=False)
        except KubernetesError as error:
            log.info("objects could not be listed again", extra={"source": self._name, "error": str(error)})
            self._listed_at = self._clock() - RELIST_S + RELIST_RETRY_S
            return False

    async def _list(self, *, recheck_empty: bool) -> bool:
        """Returns True if objects have changed, or for the first list. recheck_empty: request an empty list once more."""
        first = self._listed_at == -math.inf
        listed = await self._api.list_all(self._read_of)
        if recheck_empty and (first or self._objects) and not listed.objects:
            await self._sleep(EMPTY_S)
            listed = await self._api.list_all(self._read_of)
        before = [(name, each.endpoints) for name, each in sorted(self._objects.items())]
        self._objects = dict(listed.objects)
        self._version, self._listed_at, self._unlisted, self._relist = listed.version, self._clock(), 0, None
        self._report_problem("")
        return first or before != [(name, each.endpoints) for name, each in sorted(self._objects.items())]

    def _read_of(self, object_: Object) -> ObjectEndpoints:
        return ObjectEndpoints(_number(object_["metadata"].get("resourceVersion")), self._read(object_))

    def _apply(self, event: Event) -> bool:
        """Applies an event. Returns True if endpoints have changed. An event older than its predecessor changes nothing,
        because its object may have been deleted since; all objects are listed again.
        """
        if _number(event.version) < _number(self._version):
            self._relist = RelistNeeded("events are out of order", expected=True)
            return False
        self._version = event.version
        if event.type == BOOKMARK:
            return False
        known = self._objects.get(event.name)
        if event.type == DELETED:
            return self._objects.pop(event.name, None) is not None
        if known is None and len(self._objects) >= MAX_OBJECTS:
            self._relist = RelistNeeded(f"more than {MAX_OBJECTS:,} objects")
            return False
        now = self._objects[event.name] = self._read_of(event.object)
        return known is None or known.endpoints != now.endpoints

    def _ends_failures(self, begun: float) -> bool:
        """Ends a series of failures if the watch has lasted SHORT_S. begun: its start."""
        if self._clock() - begun < SHORT_S:
            return False
        if self._warned:
            log.info("the API server answers again", extra={"source": self._name})
        self._failures, self._warned = 0, False
        return True

    async def _retry_after(self, error: KubernetesError, took_s: float) -> None:
        """Handles a failure, and waits before the next attempt. took_s: duration of the attempt, if no watch has begun."""
        about = {"source": self._name, "error": str(error)}
        self._report_problem(str(error))
        self._failures += 1
        self._unlisted += 1
        if isinstance(error, RelistNeeded) or self._unlisted >= RELIST_AFTER:
            self._version = ""
        if isinstance(error, RelistNeeded) and error.expected:
            log.info("objects are listed again", extra=about)
        elif not self._warned:
            self._warned = True
            log.warning("the API server does not answer correctly", extra=about)
        await self._api.renew()
        pause_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(self._failures - 1, 10)) * (0.5 + self._chance() / 2)
        await self._sleep(max(0.0, pause_s - took_s, min(error.retry_after_s, MAX_RETRY_AFTER_S)))


def _number(version: object) -> int:
    """The version as a number. All known servers use numbers, although the API does not guarantee it. 0: not a number."""
    text = str(version)
    return int(text) if text.isdecimal() and len(text) < 40 else 0
