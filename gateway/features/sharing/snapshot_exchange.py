"""Snapshots from and for other gateways: the first one, wanted ones, offered ones (`offers.py`).

    EntryReader.wants ──► collect ──► offers.put ──► Offer          EntryReader.offers ──► offers.get ──► first, or `apply`

A gateway starts with the answer to its own question. Offers that arrive in the meantime are applied later, because they are
newer. If no answer arrives in time, it starts alone, merges a late answer into its index, and asks again. An
offer is fetched when no other snapshot is being applied. A fetched one is applied even if the connection is lost.
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
from gateway.features.sharing.entry_reader import MARGIN_S, EntryReader, Routers
from gateway.features.sharing.messages import Kind, Offer
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.server import client as store
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.sharing")

Wanted = tuple[str, float]
Offered = tuple[Offer, float]

ATTACH_S: Final = 3.0  # wait of a start for the store
SIBLINGS: Final = 2  # gateways that a new gateway asks for a snapshot
HEARD_S: Final = 2.0  # wait for a gateway that is certainly alive: two heartbeats
SIBLING_S: Final = 8.0  # time limit of each answer
LOOK_S: Final = 0.25  # between two checks of the sibling and the store
AGAIN_S: Final = 30.0  # between two questions of a gateway that started alone because no answer came in time
TRIES: Final = 3  # attempts at an exchange while the store is lost each time
PACE_S: Final = 0.1  # between two exchanges, because each is work for several gateways
MAX_STORED_BYTES: Final = 512 << 20  # snapshots of this gateway in the store; larger demands are errors or attacks
MAX_FETCHED: Final = 256  # remembered keys of fetched snapshots


class SnapshotExchange:
    """work: a snapshot is wanted or offered. attached: the store is connected, and the other gateways are known. heard: the
    stream was read, with or without new entries.
    """

    def __init__(
        self,
        *,
        entry_reader: EntryReader,
        routers: Routers,
        metrics: SharingMetrics,
        clock: Callable[[], float],
        prefix: str,
        add: Callable[[Kind], None],
        sibling_s: float = SIBLING_S,
    ) -> None:
        """prefix: of the keys in the store. add: publishes an item. sibling_s: time limit of a sibling's answer at a start."""
        self.work = asyncio.Event()
        self.attached = asyncio.Event()
        self.heard = asyncio.Event()
        self._entry_reader = entry_reader
        self._routers = routers
        self._metrics = metrics
        self._clock = clock
        self._prefix = prefix
        self._add = add
        self._sibling_s = sibling_s
        self._notices = Notices(clock)
        self._tries = 0
        self._started = False
        self._incomplete = False  # it started alone, but others may have a snapshot
        self._ask_at = -math.inf
        self._first: asyncio.Future[Snapshot | None] | None = None
        self._fetched: Snapshot | None = None  # being applied
        self._stored: deque[tuple[float, int]] = deque()  # (time, bytes) of the last offers.KEEP_S
        self._fetched_keys: deque[str] = deque(maxlen=MAX_FETCHED)
        self._arrived = asyncio.Event()

    def read(self, *, to_end: bool) -> None:
        """The stream was read. to_end: to its end."""
        self.heard.set()
        if to_end:
            self.attached.set()
            self._ask_again()
        if self._entry_reader.wants or self._entry_reader.offers:
            self.work.set()

    def lost(self) -> None:
        """The store is unavailable."""
        self.attached.clear()

    def offer_to_all(self, since: float) -> None:
        """The others have missed all events since then: offers all of them a snapshot."""
        self._entry_reader.wants.append(("", since - MARGIN_S))
        self.work.set()

    def _ask_again(self) -> None:
        now, peers = self._clock(), self._entry_reader.peers.alive
        if self._incomplete and self._started and peers and now >= self._ask_at:
            self._ask_at = now + AGAIN_S
            self._add(Want(random.choice(list(peers)), EVERYTHING_S))

    async def first_snapshot(self) -> Snapshot | None:
        """A snapshot of a sibling. None: there is no other gateway, or none answers in time."""
        self._first = asyncio.get_running_loop().create_future()
        try:
            await self._attached()
            since, asked = self._clock(), set[str]()
            while len(asked) < SIBLINGS and (sibling := await self._sibling(since, asked)):
                asked.add(sibling)
                self._add(Want(sibling, EVERYTHING_S))
                if await self._answered(self._first, sibling):
                    if found := self._first.result():
                        self._incomplete = False
                        return found
                    self._first = asyncio.get_running_loop().create_future()  # the sibling knows no prefixes
                    continue
                log.warning("another gateway has sent no snapshot", extra={"gateway": sibling})
                self._incomplete, self._ask_at = True, self._clock() + AGAIN_S
        except TimeoutError:
            self._incomplete = True
            log.warning("the store cannot be used yet: this gateway starts alone")
        finally:
            self._first = None
        return None

    async def _attached(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(ATTACH_S):
            await self.attached.wait()

    async def _answered(self, answer: asyncio.Future[Any], sibling: str) -> bool:
        """True if the answer arrives in time. Raises TimeoutError if the store is lost and does not return soon."""
        for _ in range(math.ceil(self._sibling_s / LOOK_S)):
            done, _ = await asyncio.wait([answer], timeout=LOOK_S)
            if done or sibling not in self._entry_reader.peers.alive:
                return bool(done)
            await self._attached()
        return False

    def started(self) -> None:
        """The first snapshot has been applied, or there is none."""
        self._started = True
        self.work.set()

    async def _sibling(self, since: float, asked: Collection[str]) -> str | None:
        """A gateway to ask, preferably one with an envelope since then. A gateway without one may have been killed a moment
        ago, such as this gateway's predecessor. None: there is no other gateway.
        """
        peers, heard = self._entry_reader.peers, set[str]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while not (heard := peers.heard_since(since).difference(asked)) and not peers.alive.keys() <= set(asked):
                    self.heard.clear()
                    await self.heard.wait()
        candidates = sorted(heard or peers.alive.keys() - set(asked))
        return random.choice(candidates) if candidates else None

    async def serve(self, client: Any) -> None:
        """Serves wanted snapshots and fetches offered ones, one at a time, until cancelled."""
        self.work.set()
        while True:
            await self.work.wait()
            self.work.clear()
            while waiting := self._next():
                # Removed when done: if the store is lost in the meantime, it is tried again.
                self._tries += 1
                if self._tries > TRIES:
                    self._say("a snapshot was not exchanged", "the store was lost each time")
                else:
                    await self._exchange(client, waiting)
                self._remove(waiting)
                self._tries = 0
                await asyncio.sleep(PACE_S)

    def _next(self) -> Wanted | Offered | None:
        """The next want or offer."""
        for offered in self._entry_reader.offers:
            at_once = offered[0].first and (self._first is not None or not self._incomplete)
            if at_once or (self._started and self._fetched is None):
                return offered
        return self._entry_reader.wants[0] if self._entry_reader.wants else None

    def _remove(self, done: Wanted | Offered) -> None:
        """Removes it, unless the bounded queue has dropped it."""
        for waiting in (self._entry_reader.offers, self._entry_reader.wants):
            with contextlib.suppress(ValueError):
                waiting.remove(done)  # type: ignore[arg-type]

    async def apply(self) -> None:
        """Applies fetched snapshots, one after the other, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                if self._fetched:
                    await self._routers.restore(self._fetched)
            except Exception:  # a bug must not stop the exchange
                log.exception("a snapshot of another gateway was not applied")
            finally:
                self._fetched = None
                self.work.set()

    async def _exchange(self, client: Any, waiting: Wanted | Offered) -> None:
        """Raises only if the store is lost. Other failures (a key of another type, no memory) would repeat for ever."""
        of, at = waiting
        try:
            if isinstance(of, Offer):
                await self._fetch(client, of, at)
            else:
                await self._serve_want(client, of, at)
        except Exception as error:
            if store.reason_of(error) == "unreachable":
                raise
            self._say("a snapshot was not exchanged", f"{type(error).__name__}: {error}"[:300])

    def _say(self, text: str, error: str) -> None:
        self._notices.say(text, log.warning, text, {"error": error})

    async def _serve_want(self, client: Any, to: str, since: float) -> None:
        at, key, to_end = self._clock(), "", since == -math.inf
        try:
            if self._in_store(at) > MAX_STORED_BYTES:
                raise KnowledgeError("too many snapshots were wanted within a minute")
            snapshot = await self._routers.collect(at - since, offers.MAX_BYTES)
        except KnowledgeError as error:
            log.info("no snapshot for another gateway", extra={"gateway": to, "error": str(error)})
            snapshot = None
        if snapshot is not None:
            self._stored.append((at, snapshot.size))
            at, key = snapshot.at, await offers.put(client, self._prefix, snapshot)
            log.info("snapshot offered to another gateway", extra={"gateway": to or "all", "bytes": snapshot.size})
        if key or to:
            self._add(Offer(to, key, at, first=to_end))

    def _in_store(self, now: float) -> int:
        """Bytes of snapshots from this gateway in the store, if none was fetched."""
        while self._stored and self._stored[0][0] < now - offers.KEEP_S:
            self._stored.popleft()
        return sum([size for _, size in self._stored])

    async def _fetch(self, client: Any, offer: Offer, at: float) -> None:
        waits = self._first if self._first and not self._first.done() and offer.first and offer.to else None
        if not offer.key:
            if waits:
                waits.set_result(None)
            elif offer.first:
                self._incomplete = False
            return
        if offer.first and not (waits or self._incomplete):  # another gateway has answered first
            await offers.remove(client, self._prefix, offer.key)
            return
        if offer.key in self._fetched_keys:
            return
        try:
            snapshot = await offers.get(client, self._prefix, offer.key, at)
        except offers.SnapshotMissing as error:
            self._say("a snapshot of another gateway is missing", str(error))
            return
        except KnowledgeError as error:
            self._metrics.refused.add(("garbage",))
            self._say("a snapshot of another gateway was refused", str(error))
            return
        self._fetched_keys.append(offer.key)
        if offer.first:
            self._incomplete = False
        if waits is None:
            self._fetched = snapshot
            self._arrived.set()
        elif not waits.done():
            waits.set_result(snapshot)
        if offer.to:
            with contextlib.suppress(*store.store_errors()):  # it expires
                await offers.remove(client, self._prefix, offer.key)

    def __repr__(self) -> str:
        return f"<SnapshotExchange, {len(self._entry_reader.wants)} wanted, {len(self._entry_reader.offers)} offered>"
