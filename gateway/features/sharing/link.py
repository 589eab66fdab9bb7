"""Connects the routers of this gateway with the routers of other gateways, through a stream in a Valkey or Redis server.

    publish, reset ──► Outbox ──► XADD ──► (the stream) ──► XREAD ──► EntryReader ──► Routers

It is a second transport of the replication log, beside the workers' hub. No request waits for it. Events are written and read
in batches. The stream has only the last WINDOW_S seconds. A new gateway gets a snapshot from a sibling. A gateway that has
missed entries asks for them again (`peer_gateways.py` detects that).

While the store is unavailable, each gateway continues alone. Its events wait in the outbox: seconds of high load, or minutes of
low load. If there are too many, it later publishes its open bookings, and offers a snapshot of the prefixes used since.

With many gateways each writes and reads less often, because the work of a reader grows with the number of batches.
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
from gateway.features.sharing.entry_reader import EntryReader, Routers
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
from gateway.features.sharing.outbox import MAX_UNSENT_BYTES, Outbox
from gateway.features.sharing.peer_gateways import DEAD_S
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

WINDOW_S: Final = 30.0  # length of the stream
MAX_ENTRIES: Final = 200_000  # length of the stream, if the store's clock does not bound it
STREAM_TTL_S: Final = 3600  # the stream expires this long after the last gateway has ended
RENEW_S: Final = 10.0  # between two renewals of these bounds
HEARTBEAT_S: Final = 1.0  # between heartbeats of an idle gateway
BLOCK_MS: Final = 500  # longest wait of a read
RETRY_S: Final = 0.2, 2.0  # pause before the next attempt to connect: first, longest
GOODBYE_S: Final = 1.0

Connect = Callable[[SharingConfig], AbstractAsyncContextManager[Any]]


class Link:
    """The connection of one gateway to the store. `run` is to be a task. `publish`, `reset` and `want_open` are synchronous and
    never fail.
    """

    def __init__(
        self,
        sharing: SharingConfig,
        format: str,  # noqa: A002  (of block keys)
        routers: Routers,
        metrics: SharingMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect | None = None,
        unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """unsent_bytes: limit of waiting events while the store is unavailable. connect: default: over the network."""
        self.me = secrets.token_hex(8)
        self._sharing = sharing
        self._routers = routers
        self._metrics = metrics
        self._clock = clock
        self._connect = connect or partial(store.connected, resolver=Resolver())
        self._format = format.encode()
        # The braces put all keys on one node of a cluster.
        prefix = f"warmroute:{{{quote(sharing.cluster, safe='')}}}:"
        self._stream = f"{prefix}log"
        self._host = socket.gethostname()[:256]
        self._store_clock = StoreClock()
        self._outbox = Outbox(clock, unsent_bytes)
        self.entry_reader = EntryReader(
            me=self.me,
            format=format,
            routers=routers,
            outbox=self._outbox,
            store_clock=self._store_clock,
            clock=clock,
            metrics=metrics,
        )
        self._snapshots = SnapshotExchange(
            entry_reader=self.entry_reader, routers=routers, metrics=metrics, clock=clock, prefix=prefix, add=self._add
        )
        self._client: Any = None  # while connected, after a first read and a first write
        self._working: set[str] = set()  # "reads", "writes": succeeded in this connection
        self._unsent = asyncio.Event()  # set: messages wait to be written
        self._write_lock = asyncio.Lock()
        self._seq = 0
        self._pending: tuple[int, tuple[Item, ...]] | None = None  # (seq, items) of an envelope that may be in the store
        self._position = Position()
        self._read_at, self._renewed_at = -DEAD_S, -RENEW_S
        self._closed = False
        self._failing = "", ""  # why the store is unavailable: the reason, the error
        self._worked = False  # it has been connected once
        self._begin_metrics()

    def _begin_metrics(self) -> None:
        for reason in ("unreachable", "full", "denied", "garbage", "other"):
            self._metrics.errors.add((reason,), 0)
        self._show()

    # -- from our routers

    def publish(self, source: int, batch: EventBatch) -> None:
        """Sends the next events of one of our routers."""
        self._add(batch, source, len(batch.events))

    def reset(self, source: int) -> None:
        """One of our routers has ended, or its events were lost: all its published bookings count as closed."""
        self._add(Reset(), source)

    def want_open(self) -> None:
        """Asks the other gateways for their open bookings, for a new router of ours."""
        for gateway in self.entry_reader.peers.alive:
            self._add(Want(gateway))

    def _add(self, message: Kind, source: int = ALL, size: int = 0) -> None:
        before = self._outbox.dropped
        self._outbox.add((source, message), size)
        if self._outbox.dropped != before:
            if not before:
                log.warning("bookings for other gateways are dropped: the store does not accept them")
            self._metrics.dropped.add((), self._outbox.dropped - before)
        self._unsent.set()

    # -- at the start and at the end

    async def first_snapshot(self) -> Snapshot | None:
        """A snapshot of a sibling. None: there is no other gateway, or none answers in time."""
        return await self._snapshots.first_snapshot()

    def started(self) -> None:
        """The first snapshot has been applied, or there is none."""
        self._snapshots.started()

    async def close(self) -> None:
        """Writes the remaining messages and the goodbye, if the store accepts them at once."""
        self._closed = True
        self._add(Reset(ended=True))
        try:
            async with asyncio.timeout(GOODBYE_S):
                while self._client is not None and (self._outbox or self._pending):
                    await self._write_one(self._client)
        except Exception as error:  # noqa: BLE001  (the library raises other errors, too, if its connection is closed at this time)
            log.debug("no goodbye to other gateways", extra={"error": str(error)})

    # -- the connection

    async def run(self) -> None:
        """Exchanges events until cancelled. Raises only because of a bug."""
        await first_of([self._keep_connected(), self._expire(), self._snapshots.apply()])

    async def _keep_connected(self) -> None:
        pause_s = RETRY_S[0]
        while True:
            started = self._clock()
            try:
                async with self._connect(self._sharing) as client:
                    await self._exchange(client)
            except store.store_errors() as error:
                self._failed(error)
            except Exception as error:  # a bug must not stop the sharing
                log.exception("sharing failed")
                self._failed(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._failed(CancelledWithin())
            finally:
                self._client, self._outbox.connected = None, False
                self._snapshots.lost()
                self._working.clear()
                self._store_clock.forget()
                self._show()
            pause_s = RETRY_S[0] if self._clock() - started > RETRY_S[1] else min(RETRY_S[1], pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _exchange(self, client: Any) -> None:
        await self._attach(client)
        await first_of([self._read(client), self._write(client), self._snapshots.serve(client)])

    async def _attach(self, client: Any) -> None:
        """Finds the store's time, and the position in the stream."""
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
        """A write or a read has succeeded. After both, the store works."""
        self._working.add(did)
        if self._client is None and len(self._working) == 2:
            self._client, self._worked = client, True
            self._failing = "", ""
            log.info("the store is there: this gateway shares what it knows", extra={"cluster": self._sharing.cluster})
            self._show()

    @property
    def state(self) -> SharingState:
        """The state for operators."""
        now, peers = self._clock(), self.entry_reader.peers.alive.values()
        seen = [OtherGateway(each.gateway, each.host, now - each.since, now - each.seen) for each in peers]
        reason, error = self._failing
        problem = f"{reason} ({error})" if reason else ""
        up = self._client is not None
        return SharingState(self.me, self._sharing.cluster, up, problem, tuple(seen), self.entry_reader.refused)

    def describe(self, _question: bytes) -> bytes:
        """The state for other processes of this gateway."""
        return encode_state(self.state)

    def _show(self) -> None:
        self._metrics.up.set((), self._client is not None)
        self._metrics.gateways.set((), len(self.entry_reader.peers.alive))

    # -- writing

    async def _write(self, client: Any) -> None:
        while True:
            if self._closed:
                await asyncio.Event().wait()
            await self._write_one(client)
            self._up(client, "writes")
            if (since := self._outbox.reopen()) is not None:
                self._announce_loss(since)
            if self._clock() - self._renewed_at > RENEW_S:
                await client.expire(self._stream, STREAM_TTL_S)
                await client.xtrim(self._stream, maxlen=MAX_ENTRIES, approximate=True)
                self._renewed_at = self._clock()
            await asyncio.sleep(pause_s(len(self.entry_reader.peers.alive)))
            if not self._outbox:
                self._unsent.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._unsent.wait()

    async def _write_one(self, client: Any) -> None:
        """Writes the next envelope, or repeats the pending one with the same number."""
        async with self._write_lock:
            if self._pending is None:
                if self._closed and not self._outbox:
                    return  # no heartbeat after the goodbye
                self._seq += 1
                self._pending = self._seq, self._outbox.take()
            seq, items = self._pending
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
                    await self._delete_stream(client)
                raise
            self._pending, self._outbox.connected = None, True
            self._store_clock.measure(before, now := self._clock(), order_of(entry)[0] / 1000)
            if not self._position.note_written(entry, now):
                await self._delete_stream(client)

    async def _delete_stream(self, client: Any) -> None:
        log.error("the stream in the store cannot be continued: it is deleted", extra={"key": self._stream})
        await client.delete(self._stream)

    def _announce_loss(self, since: float) -> None:
        """Messages were dropped since this time, but now the store accepts them again."""
        self._add(Reset())
        self._routers.join()
        self._snapshots.offer_to_all(since)

    # -- reading

    async def _read(self, client: Any) -> None:
        while True:
            asked, limit = self._position.id, self._position.max_entries
            entries = await self._read_some(client)
            self._read_at = self._clock()
            self._up(client, "reads")
            for entry, fields in entries if asked == self._position.id else ():
                written_at = self._position.note_read(entry)
                self._read_at = self._clock()
                for _ in self.entry_reader.entry(written_at, fields or {}):
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            self.entry_reader.answer()
            if self._outbox:
                self._unsent.set()
            self._snapshots.read(to_end=len(entries) < limit)
            self._show()
            if len(entries) < limit:
                await asyncio.sleep(pause_s(len(self.entry_reader.peers.alive)))

    async def _read_some(self, client: Any) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        """The next entries. After a timeout fewer entries are read; entries that still cannot be read are skipped. The loss is
        detected, and the writer asked to repeat. Raises InvalidReplyError.
        """
        try:
            found = await client.xread({self._stream: self._position.id}, count=self._position.max_entries, block=BLOCK_MS)
        except Exception as error:
            if store.is_late(error):
                self._position.note_timeout()
            raise
        self._position.note_answer()
        entries: list[tuple[bytes, dict[bytes, bytes] | None]] = found[0][1] if found else []
        for entry, _ in entries:
            order_of(entry)  # raises before any entry is applied
        return entries

    async def _expire(self) -> None:
        """Removes silent gateways; if nothing can be read, all of them."""
        due = self._clock() + HEARTBEAT_S
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = self._clock()
            late, due = now - due > HEARTBEAT_S, now + HEARTBEAT_S
            if late:  # this process was suspended: entries of that time are not read yet
                continue
            try:
                if now - self._read_at > DEAD_S:
                    self.entry_reader.expire_all()
                else:
                    self.entry_reader.expire(self._read_at)
                self._show()
            except Exception:  # a bug must not stop the expiry
                log.exception("a silent gateway was not removed")

    def __repr__(self) -> str:
        return f"<Link {self.me} to {self._stream}, {self._outbox!r}, {self.entry_reader.peers!r}>"


def link_of(
    config: Config,
    routers: Routers,
    metrics: SharingMetrics,
    clock: Callable[[], float] = time.monotonic,
    unsent_bytes: int = MAX_UNSENT_BYTES,
) -> Link | None:
    """The link of this gateway. None: sharing is off."""
    if SHARING.of(config).url == OFF:
        return None
    return Link(SHARING.of(config), format_of(config.routing), routers, metrics, clock=clock, unsent_bytes=unsent_bytes)
