"""Connects the routers of this gateway with those of others, through one stream of a Valkey or Redis server.

    publish, reset ──► Outbox ──► XADD ──► (the stream) ──► XREAD ──► Incoming ──► Routers

It is a second transport of the replication log, beside the workers' hub, and no request ever waits for it. Events are written
and read in batches. The stream has the last WINDOW_S seconds only: a new gateway gets a snapshot from a sibling, and one that
has missed entries asks for them again (`others.py` notices that).

While the store is away each gateway goes on alone. Its events wait in the outbox, for some seconds of load or minutes of less;
if they are too many, it later publishes its open bookings, and offers a snapshot of the prefixes used since.

With many gateways each writes and reads more rarely, for the work of a reader grows with the number of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from gateway.cluster.messages import EventBatch, Reset, Want
from gateway.cluster.replication import pause_s
from gateway.config.listen import OFF
from gateway.config.schema import Config
from gateway.features.sharing.clock import StoreClock
from gateway.features.sharing.incoming import Incoming, Routers
from gateway.features.sharing.messages import (
    ALL,
    ENVELOPE_FIELD,
    FORMAT_FIELD,
    GATEWAY_FIELD,
    VERSION,
    VERSION_FIELD,
    Envelope,
    Item,
    Kind,
    encode_envelope,
)
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.others import DEAD_S
from gateway.features.sharing.outbox import MOST_BYTES, Outbox
from gateway.features.sharing.position import BEGINNING, Position, order_of
from gateway.features.sharing.section import SHARING, SharingConfig
from gateway.features.sharing.server import client as store
from gateway.features.sharing.server.failures import explained
from gateway.features.sharing.snapshot_exchange import SnapshotExchange
from gateway.features.sharing.state import OtherGateway, SharingState, encode_state
from gateway.features.snapshots.snapshot import Snapshot, format_of
from gateway.tasks import CancelledWithin, first_of, is_cancelled
from gateway.upstream.resolver import Resolver

log = logging.getLogger("warmroute.sharing")

WINDOW_S: Final = 30.0  # of the stream
MAX_ENTRIES: Final = 200_000  # of the stream, if the store's clock does not bound it
FORGET_S: Final = 3600  # after the last gateway has ended
CARE_S: Final = 10.0  # between two times that these bounds are renewed
BEAT_S: Final = 1.0  # a gateway that has nothing to say shows that it lives
BLOCK_MS: Final = 500  # that a read waits for news
RETRY_S: Final = 0.2, 2.0  # the pause before the store is tried again: at first, at most
BYE_S: Final = 1.0

Connect = Callable[[SharingConfig], AbstractAsyncContextManager[Any]]


class Link:
    """See the top of this file. `run` is to be a task; `publish`, `reset` and `want_open` are synchronous and never fail."""

    def __init__(
        self,
        sharing: SharingConfig,
        format: str,  # noqa: A002  (of block keys)
        routers: Routers,
        metrics: SharingMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect | None = None,
        unsent_bytes: int = MOST_BYTES,
    ) -> None:
        """unsent_bytes: that wait while the store is away, then more is dropped. connect: default: over the network."""
        self.me = secrets.token_hex(8)
        self._sharing = sharing
        self._routers = routers
        self._metrics = metrics
        self._clock = clock
        self._connect = connect or partial(store.connected, resolver=Resolver())
        self._format = format.encode()
        # In braces: in a cluster of stores, all keys are at one node.
        prefix = f"warmroute:{{{quote(sharing.cluster, safe='')}}}:"
        self._stream = f"{prefix}log"
        self._host = socket.gethostname()[:256]
        self._store_clock = StoreClock()
        self._outbox = Outbox(clock, unsent_bytes)
        self.incoming = Incoming(
            me=self.me,
            format=format,
            routers=routers,
            outbox=self._outbox,
            store_clock=self._store_clock,
            clock=clock,
            metrics=metrics,
        )
        self._snapshots = SnapshotExchange(
            incoming=self.incoming, routers=routers, metrics=metrics, clock=clock, prefix=prefix, add=self._add
        )
        self._client: Any = None  # while it is connected, and has read and written
        self._does: set[str] = set()  # "reads", "writes"
        self._news = asyncio.Event()  # there is something to write
        self._writing = asyncio.Lock()
        self._seq = 0
        self._unsure: tuple[int, tuple[Item, ...]] | None = None  # an envelope that may or may not be in the store
        self._position = Position()
        self._read_at, self._cared_at = -DEAD_S, -CARE_S
        self._closed = False
        self._failing = "", ""  # why the store is away: the reason, the error
        self._worked = False  # it was there once
        self._begin_metrics()

    def _begin_metrics(self) -> None:
        for reason in ("unreachable", "full", "denied", "garbage", "other"):
            self._metrics.errors.add((reason,), 0)
        self._show()

    # -- from our own routers

    def publish(self, source: int, batch: EventBatch) -> None:
        """The next events of one of our routers."""
        self._add(batch, source, len(batch.events))

    def reset(self, source: int) -> None:
        """One of our routers has ended, or its events were lost: it has nothing open that was published before."""
        self._add(Reset(), source)

    def want_open(self) -> None:
        """A new router of ours does not know the open bookings of the others."""
        for gateway in self.incoming.others.alive:
            self._add(Want(gateway))

    def _add(self, message: Kind, source: int = ALL, size: int = 0) -> None:
        before = self._outbox.dropped
        self._outbox.add((source, message), size)
        if self._outbox.dropped != before:
            if not before:
                log.warning("the store does not take what is booked here: it is dropped")
            self._metrics.dropped.add((), self._outbox.dropped - before)
        self._news.set()

    # -- at the start and at the end

    async def first(self) -> Snapshot | None:
        """A snapshot of a sibling; None: there is no other gateway, or none answers in time."""
        return await self._snapshots.first()

    def begun(self) -> None:
        """The first snapshot has been taken in, or there is none."""
        self._snapshots.begun()

    async def close(self) -> None:
        """Write the rest, and say goodbye, if the store takes it at once."""
        self._closed = True
        self._add(Reset(ended=True))
        try:
            async with asyncio.timeout(BYE_S):
                while self._client is not None and (self._outbox or self._unsure):
                    await self._write_one(self._client)
        except Exception as error:  # noqa: BLE001  (also what the library raises if its connection is closed in this moment)
            log.debug("no goodbye to other gateways", extra={"error": str(error)})

    # -- the connection

    async def run(self) -> None:
        """Exchange events until cancelled. Raises only by a bug."""
        await first_of([self._keep_connected(), self._expire(), self._snapshots.take_in()])

    async def _keep_connected(self) -> None:
        pause_s = RETRY_S[0]
        while True:
            begun = self._clock()
            try:
                async with self._connect(self._sharing) as client:
                    await self._exchange(client)
            except store.store_errors() as error:
                self._failed(error)
            except Exception as error:  # a bug must not end the sharing
                log.exception("sharing failed")
                self._failed(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._failed(CancelledWithin())
            finally:
                self._client, self._outbox.taken = None, False
                self._snapshots.lost()
                self._does.clear()
                self._store_clock.forget()
                self._show()
            pause_s = RETRY_S[0] if self._clock() - begun > RETRY_S[1] else min(RETRY_S[1], pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _exchange(self, client: Any) -> None:
        await self._attach(client)
        await first_of([self._read(client), self._write(client), self._snapshots.serve(client)])

    async def _attach(self, client: Any) -> None:
        """Find out the store's time, and where to go on in the stream."""
        before = self._clock()
        seconds, micros = await client.time()
        time_s = int(seconds) + int(micros) / 1e6
        self._store_clock.measure(before, now := self._clock(), time_s)
        last = await client.xrevrange(self._stream, count=1)
        self._position.attach(last[0][0] if last else BEGINNING, time_s, now)

    def _failed(self, error: Exception) -> None:
        reason, text = store.reason_of(error), explained(error, self._sharing, worked=self._worked)
        self._metrics.errors.add((reason,))
        known, self._failing = self._failing[0], (reason, text)
        if known != reason:
            about = {"reason": reason, "url": self._sharing.url, "key": self._stream, "error": text}
            log.warning("the store is away: this gateway goes on alone", extra=about)

    def _up(self, client: Any, did: str) -> None:
        """Something was written, or read. Once both were, the store works."""
        self._does.add(did)
        if self._client is None and len(self._does) == 2:
            self._client, self._worked = client, True
            self._failing = "", ""
            log.info("the store is there: this gateway shares what it knows", extra={"cluster": self._sharing.cluster})
            self._show()

    @property
    def state(self) -> SharingState:
        """For operators."""
        now, others = self._clock(), self.incoming.others.alive.values()
        seen = [OtherGateway(each.gateway, each.host, now - each.since, now - each.seen) for each in others]
        reason, error = self._failing
        problem = f"{reason} ({error})" if reason else ""
        up = self._client is not None
        return SharingState(self.me, self._sharing.cluster, up, problem, tuple(seen), self.incoming.refused)

    def describe(self, _question: bytes) -> bytes:
        """For other processes of this gateway."""
        return encode_state(self.state)

    def _show(self) -> None:
        self._metrics.up.set((), self._client is not None)
        self._metrics.gateways.set((), len(self.incoming.others.alive))

    # -- writing

    async def _write(self, client: Any) -> None:
        while True:
            if self._closed:
                await asyncio.Event().wait()
            await self._write_one(client)
            self._up(client, "writes")
            if (since := self._outbox.reopen()) is not None:
                self._tell_all(since)
            if self._clock() - self._cared_at > CARE_S:
                await client.expire(self._stream, FORGET_S)
                await client.xtrim(self._stream, maxlen=MAX_ENTRIES, approximate=True)
                self._cared_at = self._clock()
            await asyncio.sleep(pause_s(len(self.incoming.others.alive)))
            if not self._outbox:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._news.wait()

    async def _write_one(self, client: Any) -> None:
        """The next envelope, or again the one of which it is not known whether it was written: it has the same number."""
        async with self._writing:
            if self._unsure is None:
                if self._closed and not self._outbox:
                    return  # no heartbeat after the goodbye
                self._seq += 1
                self._unsure = self._seq, self._outbox.take()
            seq, items = self._unsure
            before = self._clock()
            fields = {
                VERSION_FIELD: VERSION,
                FORMAT_FIELD: self._format,
                GATEWAY_FIELD: self.me.encode(),
                ENVELOPE_FIELD: encode_envelope(Envelope(seq, before, self._host, items)),
            }
            oldest_s = (self._store_clock.store(before) or 0.0) - WINDOW_S
            try:
                entry = await client.xadd(self._stream, fields, minid=str(max(0, int(oldest_s * 1000))), approximate=True)
            except store.store_errors() as error:
                if store.is_exhausted(error):
                    await self._begin_stream_anew(client)
                raise
            self._unsure, self._outbox.taken = None, True
            self._store_clock.measure(before, now := self._clock(), order_of(entry)[0] / 1000)
            if not self._position.wrote(entry, now):
                await self._begin_stream_anew(client)

    async def _begin_stream_anew(self, client: Any) -> None:
        log.error("the stream in the store cannot be continued: it is deleted", extra={"key": self._stream})
        await client.delete(self._stream)

    def _tell_all(self, since: float) -> None:
        """Items were dropped since then, but now the store takes them again."""
        self._add(Reset())
        self._routers.join()
        self._snapshots.tell_all(since)

    # -- reading

    async def _read(self, client: Any) -> None:
        while True:
            asked, most = self._position.id, self._position.most
            entries = await self._read_some(client)
            self._read_at = self._clock()
            self._up(client, "reads")
            for entry, fields in entries if asked == self._position.id else ():
                written_at = self._position.read(entry)
                self._read_at = self._clock()
                for _ in self.incoming.entry(written_at, fields or {}):
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            self.incoming.answer()
            if self._outbox:
                self._news.set()
            self._snapshots.read(all_of_it=len(entries) < most)
            self._show()
            if len(entries) < most:
                await asyncio.sleep(pause_s(len(self.incoming.others.alive)))

    async def _read_some(self, client: Any) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        """The next entries. What does not come in time is asked for again in smaller pieces, and at last passed over: what was
        missed is noticed, and asked of its writer. Raises InvalidReplyError.
        """
        try:
            found = await client.xread({self._stream: self._position.id}, count=self._position.most, block=BLOCK_MS)
        except Exception as error:
            if store.is_late(error):
                self._position.late()
            raise
        self._position.in_time()
        entries: list[tuple[bytes, dict[bytes, bytes] | None]] = found[0][1] if found else []
        for entry, _ in entries:
            order_of(entry)  # before anything is taken from them
        return entries

    async def _expire(self) -> None:
        """Others that are silent are dead; if nothing can be read, all of them are."""
        due = self._clock() + BEAT_S
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._clock()
            late, due = now - due > BEAT_S, now + BEAT_S
            if late:  # this process did not run: entries of that time are still to be read
                continue
            try:
                if now - self._read_at > DEAD_S:
                    self.incoming.expire_all()
                else:
                    self.incoming.expire(self._read_at)
                self._show()
            except Exception:  # a bug must not end the watching
                log.exception("a gateway that is gone was not forgotten")

    def __repr__(self) -> str:
        return f"<Link {self.me} to {self._stream}, {self._outbox!r}, {self.incoming.others!r}>"


def link_of(
    config: Config,
    routers: Routers,
    metrics: SharingMetrics,
    clock: Callable[[], float] = time.monotonic,
    unsent_bytes: int = MOST_BYTES,
) -> Link | None:
    """None: the gateway does not share."""
    if SHARING.of(config).url == OFF:
        return None
    return Link(SHARING.of(config), format_of(config.routing), routers, metrics, clock=clock, unsent_bytes=unsent_bytes)
