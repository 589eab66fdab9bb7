"""Snapshots from and for other gateways: the first one, wanted ones, offered ones (`offers.py`).

    Incoming.wants ──► collect ──► offers.put ──► Offer          Incoming.offers ──► offers.get ──► first, or `take_in`

What a gateway begins with is the answer to its own question. What others offer meanwhile waits until that is taken in, for it
is newer. If no answer comes in time, it begins alone, takes in a late one beside what it has learned by then, and asks again.
An offer is fetched while no other snapshot is being taken in; a fetched one is taken in even if the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from gateway.cluster.messages import EVERYTHING_S, Want
from gateway.features.sharing import offers
from gateway.features.sharing.incoming import MARGIN_S, Incoming, Routers
from gateway.features.sharing.messages import Kind, Offer
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.server import client as store
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.sharing")

Wanted = tuple[str, float]
Offered = tuple[Offer, float]

ATTACH_S: Final = 3.0  # that a start waits for the store
SIBLINGS: Final = 2  # that a new gateway asks for a snapshot
HEARD_S: Final = 2.0  # that it waits for one which is certainly alive: two heartbeats
SIBLING_S: Final = 8.0  # that each of them has for it
LOOK_S: Final = 0.25  # whether it is still there, and the store
AGAIN_S: Final = 30.0  # between two questions of a gateway that began alone because no answer came in time
TRIES: Final = 3  # to give or to take one, while the store is lost each time
PACE_S: Final = 0.1  # between two of them: each is work for everybody
MOST_GIVEN_BYTES: Final = 512 << 20  # of this gateway in the store: one that asks for more may be mistaken, or hostile
MAX_TAKEN: Final = 256  # keys of snapshots that were taken, and are not taken again


class SnapshotExchange:
    """See the top of this file.

    work: a snapshot is wanted, or offered. attached: the store is there, and the others are known. heard: the stream was read,
    whether something had come or not.
    """

    def __init__(
        self,
        *,
        incoming: Incoming,
        routers: Routers,
        metrics: SharingMetrics,
        clock: Callable[[], float],
        prefix: str,
        add: Callable[[Kind], None],
        sibling_s: float = SIBLING_S,
    ) -> None:
        """prefix: of the keys in the store. add: publish an item. sibling_s: that a sibling has for what a start wants."""
        self.work = asyncio.Event()
        self.attached = asyncio.Event()
        self.heard = asyncio.Event()
        self._incoming = incoming
        self._routers = routers
        self._metrics = metrics
        self._clock = clock
        self._prefix = prefix
        self._add = add
        self._sibling_s = sibling_s
        self._notices = Notices(clock)
        self._tries = 0
        self._begun = False
        self._lacks = False  # it began alone, but others may know something
        self._ask_at = -math.inf
        self._first: asyncio.Future[Snapshot | None] | None = None
        self._fetched: Snapshot | None = None  # that is being taken in
        self._given: deque[tuple[float, int]] = deque()  # when, bytes: of the last offers.KEEP_S
        self._taken: deque[str] = deque(maxlen=MAX_TAKEN)
        self._arrived = asyncio.Event()

    def read(self, *, all_of_it: bool) -> None:
        """The stream was read; all_of_it: to its end."""
        self.heard.set()
        if all_of_it:
            self.attached.set()
            self._ask_again()
        if self._incoming.wants or self._incoming.offers:
            self.work.set()

    def lost(self) -> None:
        """The store is away."""
        self.attached.clear()

    def tell_all(self, since: float) -> None:
        """The others have missed all events since then: offer all of them a snapshot."""
        self._incoming.wants.append(("", since - MARGIN_S))
        self.work.set()

    def _ask_again(self) -> None:
        now, others = self._clock(), self._incoming.others.alive
        if self._lacks and self._begun and others and now >= self._ask_at:
            self._ask_at = now + AGAIN_S
            self._add(Want(random.choice(list(others)), EVERYTHING_S))

    async def first(self) -> Snapshot | None:
        """A snapshot of a sibling; None: there is no other gateway, or none answers in time."""
        self._first = asyncio.get_running_loop().create_future()
        try:
            await self._attached()
            since, asked = self._clock(), set[str]()
            while len(asked) < SIBLINGS and (sibling := await self._sibling(since, asked)):
                asked.add(sibling)
                self._add(Want(sibling, EVERYTHING_S))
                if await self._answered(self._first, sibling):
                    if found := self._first.result():
                        self._lacks = False
                        return found
                    self._first = asyncio.get_running_loop().create_future()  # it knows nothing
                    continue
                log.warning("another gateway gives no snapshot", extra={"gateway": sibling})
                self._lacks, self._ask_at = True, self._clock() + AGAIN_S
        except TimeoutError:
            self._lacks = True
            log.warning("the store cannot be used yet: this gateway begins alone")
        finally:
            self._first = None
        return None

    async def _attached(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(ATTACH_S):
            await self.attached.wait()

    async def _answered(self, answer: asyncio.Future[Any], sibling: str) -> bool:
        """True: it comes in time. Raises TimeoutError if the store is lost meanwhile, and does not come back soon."""
        for _ in range(math.ceil(self._sibling_s / LOOK_S)):
            done, _ = await asyncio.wait([answer], timeout=LOOK_S)
            if done or sibling not in self._incoming.others.alive:
                return bool(done)
            await self._attached()
        return False

    def begun(self) -> None:
        """The first snapshot has been taken in, or there is none."""
        self._begun = True
        self.work.set()

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
        """Give snapshots that others want, and take those that they offer; one at a time."""
        self.work.set()
        while True:
            await self.work.wait()
            self.work.clear()
            while waiting := self._next():
                # Removed when it is done: if the store is lost meanwhile, it is tried again.
                self._tries += 1
                if self._tries > TRIES:
                    self._say("a snapshot was not exchanged", "the store was lost each time")
                else:
                    await self._exchange(client, waiting)
                self._remove(waiting)
                self._tries = 0
                await asyncio.sleep(PACE_S)

    def _next(self) -> Wanted | Offered | None:
        """The next task."""
        for offered in self._incoming.offers:
            at_once = offered[0].first and (self._first is not None or not self._lacks)
            if at_once or (self._begun and self._fetched is None):
                return offered
        return self._incoming.wants[0] if self._incoming.wants else None

    def _remove(self, done: Wanted | Offered) -> None:
        """It may have been pushed out already."""
        for waiting in (self._incoming.offers, self._incoming.wants):
            with contextlib.suppress(ValueError):
                waiting.remove(done)  # type: ignore[arg-type]

    async def take_in(self) -> None:
        """Take in fetched snapshots, one after the other, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                if self._fetched:
                    await self._routers.restore(self._fetched)
            except Exception:  # a bug in it must not end the exchange
                log.exception("a snapshot of another gateway was not taken in")
            finally:
                self._fetched = None
                self.work.set()

    async def _exchange(self, client: Any, waiting: Wanted | Offered) -> None:
        """Raises only if the store is lost: what fails by itself (a key of another type, no memory) would fail for ever."""
        of, at = waiting
        try:
            if isinstance(of, Offer):
                await self._take(client, of, at)
            else:
                await self._give(client, of, at)
        except Exception as error:
            if store.reason_of(error) == "unreachable":
                raise
            self._say("a snapshot was not exchanged", f"{type(error).__name__}: {error}"[:300])

    def _say(self, text: str, error: str) -> None:
        self._notices.say(text, log.warning, text, {"error": error})

    async def _give(self, client: Any, to: str, since: float) -> None:
        at, key, all_of_it = self._clock(), "", since == -math.inf
        try:
            if self._in_store(at) > MOST_GIVEN_BYTES:
                raise KnowledgeError("too many were asked for within a minute")
            snapshot = await self._routers.collect(at - since, offers.MAX_BYTES)
        except KnowledgeError as error:
            log.info("no snapshot for another gateway", extra={"gateway": to, "error": str(error)})
            snapshot = None
        if snapshot is not None:
            self._given.append((at, snapshot.size))
            at, key = snapshot.at, await offers.put(client, self._prefix, snapshot)
            log.info("snapshot offered to another gateway", extra={"gateway": to or "all", "bytes": snapshot.size})
        if key or to:
            self._add(Offer(to, key, at, first=all_of_it))

    def _in_store(self, now: float) -> int:
        """Bytes of snapshots from here, if nobody has taken one."""
        while self._given and self._given[0][0] < now - offers.KEEP_S:
            self._given.popleft()
        return sum([size for _, size in self._given])

    async def _take(self, client: Any, offer: Offer, at: float) -> None:
        waits = self._first if self._first and not self._first.done() and offer.first and offer.to else None
        if not offer.key:
            if waits:
                waits.set_result(None)
            elif offer.first:
                self._lacks = False
            return
        if offer.first and not (waits or self._lacks):  # it has been answered by another one
            await offers.remove(client, self._prefix, offer.key)
            return
        if offer.key in self._taken:
            return
        try:
            snapshot = await offers.get(client, self._prefix, offer.key, at)
        except offers.SnapshotGone as error:
            self._say("a snapshot of another gateway cannot be had", str(error))
            return
        except KnowledgeError as error:
            self._metrics.refused.add(("garbage",))
            self._say("a snapshot of another gateway is not taken in", str(error))
            return
        self._taken.append(offer.key)
        if offer.first:
            self._lacks = False
        if waits is None:
            self._fetched = snapshot
            self._arrived.set()
        elif not waits.done():
            waits.set_result(snapshot)
        if offer.to:
            with contextlib.suppress(*store.store_errors()):  # it ends by itself
                await offers.remove(client, self._prefix, offer.key)

    def __repr__(self) -> str:
        return f"<SnapshotExchange, {len(self._incoming.wants)} wanted, {len(self._incoming.offers)} offered>"
