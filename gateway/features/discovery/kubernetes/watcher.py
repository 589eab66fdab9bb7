"""All objects of one kind, kept up to date: list, then watch from there.

    list ──► watch ──► the server ends it, or it is cut ──► watch on from the last version
      ▲        └── 410, an event that cannot be read or is late, RELIST_AFTER failures, RELIST_S ──┐
      └────────────────────────────────────────────────────────────────────────────────────────────┘

A list replaces all: what was deleted meanwhile is gone. Whatever fails is tried again, after a pause that doubles up to
BACKOFF_MOST_S (less what the try has taken by itself); the objects stay as they were last. A list without any object, right
after a failure, is asked for once more before it is believed: a server that begins anew may have none yet. A server that was
restored from a backup goes on from an earlier version, and would send nothing for a long time: hence the lists after several
failures, and from time to time.

Of each object only what `read` returns is kept.
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
    CannotGoOn,
    Event,
    KubernetesError,
    Object,
)
from gateway.features.discovery.kubernetes.objects import PodEndpoint, Read

log = logging.getLogger("warmroute.discovery")

BACKOFF_S: Final = 0.1  # a watch that is cut goes on at once
BACKOFF_MOST_S: Final = 2.5  # what has come back is known within 5 s, also if it has nothing: EMPTY_S
RETRY_AFTER_MOST_S: Final = 30.0
SHORT_S: Final = 1.0  # a watch that ends sooner counts as a failure
EMPTY_S: Final = 2.0  # until an empty list is asked for once more
RELIST_AFTER: Final = 3
RELIST_S: Final = 1800.0
RELIST_RETRY_S: Final = 60.0


class Watcher:
    """See the top of this file. clock: monotonic seconds. sleep: asyncio.sleep, or a test's."""

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
        """name: for logs. report_problem: called with what is wrong, and with "" when nothing is any more."""
        self._name = name
        self._api = api
        self._read = read
        self._report_problem = report_problem
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._objects: dict[str, Read] = {}
        self._version = ""  # to watch on from; empty: list
        self._listed_at = -math.inf
        self._failures = 0  # in a row
        self._unlisted = 0  # failures since the last list
        self._doubt: CannotGoOn | None = None  # why the objects may not be those of the server
        self._warned = False  # of the present outage

    async def watch(self, *, expects: bool) -> AsyncIterator[Collection[Read]]:
        """All objects, each time that any has changed; the first time as soon as they are known. expects: see MemberSource."""
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
                        if self._doubt:
                            raise self._doubt
            except KubernetesError as error:
                failure = error
            if not self._ends_failures(begun) and failure is None:
                failure = KubernetesError("the server ends each watch at once")
            if failure:
                await self._failed(failure, self._clock() - tried if begun == math.inf else 0.0)

    async def _list_if_needed(self, *, expects: bool) -> bool:
        """Whether anything has changed."""
        if not self._version:
            return await self._list(doubts=expects if self._listed_at == -math.inf else self._failures > 0)
        if self._clock() - self._listed_at <= RELIST_S:
            return False
        try:  # a server that does not list now may watch all the same
            return await self._list(doubts=False)
        except KubernetesError as error:
            log.info("objects could not be listed again", extra={"source": self._name, "error": str(error)})
            self._listed_at = self._clock() - RELIST_S + RELIST_RETRY_S
            return False

    async def _list(self, *, doubts: bool) -> bool:
        """Whether anything has changed, or this is the first list. doubts: one without objects is not believed at once."""
        first = self._listed_at == -math.inf
        listed = await self._api.listed(self._read_of)
        if doubts and (first or self._objects) and not listed.objects:
            await self._sleep(EMPTY_S)
            listed = await self._api.listed(self._read_of)
        before = [(name, each.endpoints) for name, each in sorted(self._objects.items())]
        self._objects = dict(listed.objects)
        self._version, self._listed_at, self._unlisted, self._doubt = listed.version, self._clock(), 0, None
        self._report_problem("")
        return first or before != [(name, each.endpoints) for name, each in sorted(self._objects.items())]

    def _read_of(self, object_: Object) -> Read:
        return Read(_number(object_["metadata"].get("resourceVersion")), self._read(object_))

    def _apply(self, event: Event) -> bool:
        """Whether anything of an object has changed. An event that is older than the one before it changes nothing, for its
        object may have been deleted since; all objects are listed again.
        """
        if _number(event.version) < _number(self._version):
            self._doubt = CannotGoOn("events are not in their order", expected=True)
            return False
        self._version = event.version
        if event.type == BOOKMARK:
            return False
        known = self._objects.get(event.name)
        if event.type == DELETED:
            return self._objects.pop(event.name, None) is not None
        if known is None and len(self._objects) >= MAX_OBJECTS:
            self._doubt = CannotGoOn(f"more than {MAX_OBJECTS:,} objects")
            return False
        now = self._objects[event.name] = self._read_of(event.object)
        return known is None or known.endpoints != now.endpoints

    def _ends_failures(self, begun: float) -> bool:
        """Whether the watch that began then has lasted long enough for failures to be over."""
        if self._clock() - begun < SHORT_S:
            return False
        if self._warned:
            log.info("the API server answers again", extra={"source": self._name})
        self._failures, self._warned = 0, False
        return True

    async def _failed(self, error: KubernetesError, took_s: float) -> None:
        """took_s: until it failed, if no watch has begun."""
        about = {"source": self._name, "error": str(error)}
        self._report_problem(str(error))
        self._failures += 1
        self._unlisted += 1
        if isinstance(error, CannotGoOn) or self._unlisted >= RELIST_AFTER:
            self._version = ""
        if isinstance(error, CannotGoOn) and error.expected:
            log.info("objects are listed again", extra=about)
        elif not self._warned:
            self._warned = True
            log.warning("the API server does not answer as it should", extra=about)
        await self._api.renew()
        pause_s = min(BACKOFF_MOST_S, BACKOFF_S * 2 ** min(self._failures - 1, 10)) * (0.5 + self._chance() / 2)
        await self._sleep(max(0.0, pause_s - took_s, min(error.retry_after_s, RETRY_AFTER_MOST_S)))


def _number(version: object) -> int:
    """Versions are numbers with all servers that there are, although nothing says so. 0: this one is not."""
    text = str(version)
    return int(text) if text.isdecimal() and len(text) < 40 else 0
