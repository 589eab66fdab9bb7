"""Snapshots from and for other gateways: one to begin with, those that others want, those that are offered (`offers.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection
from typing import Any, Final

from gateway.cluster.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.cluster.store import client as store
from gateway.cluster.store import offers
from gateway.cluster.store.incoming import MARGIN_S, Incoming, Routers
from gateway.cluster.store.messages import Item, Offer, Want
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.sharing")

ATTACH_S: Final = 3.0  # that a start waits for the store
SIBLINGS: Final = 2  # that a new gateway asks for a snapshot
HEARD_S: Final = 2.0  # that it waits for one which is certainly alive: two heartbeats
SIBLING_S: Final = 8.0  # that each of them has for it
TRIES: Final = 3  # to give or to take one, while the store is lost each time
PACE_S: Final = 0.1  # between two of them: each is work for everybody
EVERYTHING_S: Final = 1e9


class SnapshotExchange:
    """See the top of this file.

    work: a snapshot is wanted, or offered. attached: the others are known. heard: the stream was read, whether something had
    come or not.
    """

    def __init__(
        self,
        *,
        incoming: Incoming,
        routers: Routers,
        metrics: Metrics,
        clock: Callable[[], float],
        prefix: str,
        add: Callable[[Item], None],
    ) -> None:
        """prefix: of the keys in the store. add: publish an item."""
        self.work = asyncio.Event()
        self.attached = asyncio.Event()
        self.heard = asyncio.Event()
        self._incoming = incoming
        self._routers = routers
        self._metrics = metrics
        self._clock = clock
        self._prefix = prefix
        self._add = add
        self._notices = Notices(clock)
        self._tries = 0
        self._first: asyncio.Future[Snapshot | None] | None = None

    def read(self, *, all_of_it: bool) -> None:
        """The stream was read; all_of_it: to its end."""
        self.heard.set()
        if all_of_it:
            self.attached.set()
        if self._incoming.wants or self._incoming.offers:
            self.work.set()

    def tell_all(self, since: float) -> None:
        """The others have missed what was used since then: offer it to all of them."""
        self._incoming.wants.append(("", self._clock() - since + MARGIN_S))
        self.work.set()

    async def first(self) -> Snapshot | None:
        """A snapshot of a sibling; None: there is no other gateway, or none answers in time."""
        self._first = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ATTACH_S):
                await self.attached.wait()
            since, asked = self._clock(), set[str]()
            while len(asked) < SIBLINGS and (sibling := await self._sibling(since, asked)):
                asked.add(sibling)
                self._add(Want(sibling, EVERYTHING_S))
                done, _ = await asyncio.wait([self._first], timeout=SIBLING_S)
                if done and (found := self._first.result()):
                    return found
                if done:  # it knows nothing
                    self._first = asyncio.get_running_loop().create_future()
                    continue
                log.warning("another gateway gives no snapshot", extra={"gateway": sibling})
        except TimeoutError:
            log.warning("the store does not answer: this gateway begins alone")
        finally:
            self._first = None
        return None

    async def _sibling(self, since: float, asked: Collection[str]) -> str | None:
        """A gateway to be asked, at best one that has written since then: one that has not may have been killed a moment ago,
        as this gateway's predecessor, perhaps. None: there is no other.
        """
        others, heard = self._incoming.others, set[str]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while not (heard := others.heard_since(since).difference(asked)) and not others.alive.keys() <= set(asked):
                    self.heard.clear()
                    await self.heard.wait()
        candidates = sorted(heard or others.alive.keys() - set(asked))
        return random.choice(candidates) if candidates else None

    async def serve(self, client: Any) -> None:
        """Give snapshots to those who want one, and take those that are offered; one at a time."""
        self.work.set()
        while True:
            await self.work.wait()
            self.work.clear()
            while waiting := self._incoming.offers or self._incoming.wants:
                # Removed when it is done: if the store is lost meanwhile, it is tried again.
                first = waiting[0]
                self._tries += 1
                if self._tries > TRIES:
                    self._say("a snapshot was not exchanged", "the store was lost each time")
                else:
                    await self._exchange(client)
                if waiting and waiting[0] is first:  # it may have been pushed out
                    waiting.popleft()
                self._tries = 0
                await asyncio.sleep(PACE_S)

    async def _exchange(self, client: Any) -> None:
        """The first one that waits. Raises only if the store is lost: what fails by itself (a key of another type, no memory)
        would fail for ever.
        """
        try:
            if self._incoming.offers:
                await self._take(client, *self._incoming.offers[0])
            else:
                await self._give(client, *self._incoming.wants[0])
        except Exception as error:
            if store.reason_of(error) == "unreachable":
                raise
            self._say("a snapshot was not exchanged", f"{type(error).__name__}: {error}"[:300])

    def _say(self, text: str, error: str) -> None:
        self._notices.say(text, log.warning, text, {"error": error})

    async def _give(self, client: Any, to: str, since_s: float) -> None:
        at, key = self._clock(), ""
        began = since_s == EVERYTHING_S
        try:
            snapshot = await self._routers.collect(since_s + self._clock() - at, offers.MAX_BYTES)
        except KnowledgeError as error:
            log.info("no snapshot for another gateway", extra={"gateway": to, "error": str(error)})
            snapshot = None
        if snapshot is not None:
            at, key = snapshot.at, await offers.put(client, self._prefix, snapshot)
            log.info("snapshot offered to another gateway", extra={"gateway": to or "all", "bytes": snapshot.size})
        if key or to:
            self._add(Offer(to, key, at, first=began))

    async def _take(self, client: Any, offer: Offer, at: float) -> None:
        waits = self._first if self._first and not self._first.done() else None
        if not offer.key:
            if waits:
                waits.set_result(None)
            return
        if offer.first and not waits:  # it came too late: what this gateway knows by now is newer
            await offers.remove(client, self._prefix, offer.key)
            return
        try:
            snapshot = await offers.get(client, self._prefix, offer.key, at)
        except KnowledgeError as error:
            self._metrics.sharing_refused.add(("garbage",))
            self._say("a snapshot of another gateway is not taken in", str(error))
            return
        if offer.to:
            await offers.remove(client, self._prefix, offer.key)
        if waits and not waits.done():
            waits.set_result(snapshot)
        else:
            await self._routers.restore(snapshot)

    def __repr__(self) -> str:
        return f"<SnapshotExchange, {len(self._incoming.wants)} wanted, {len(self._incoming.offers)} offered>"
