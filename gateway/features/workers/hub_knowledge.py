"""Snapshots of the workers' prefix index, and recent events, as they pass through the hub.

One worker collects a snapshot, for the snapshot file and for other gateways (`collect`). A snapshot of another gateway is sent
to all workers (`restore`). A new worker is brought up to date:

    it joins        the hub holds back its events from now on, and the others publish their open bookings
    + GATHER_S      other workers that join until now share the collection
    + BOOKED_S      bookings from before it joined are known to all: a serving worker is asked for a snapshot
    then            it gets the snapshot, the events since it joined, and CatchUpEnd

So an event is in the snapshot, among the later events, or in both if it occurred during the collection. Then it is booked once,
and its prefix is marked as used twice. If no worker serves, or none sends a complete snapshot within BEGIN_S, or all fall
silent, the new worker gets the snapshots of the gateway's start while they are held, or the ones with which it would start now
(`again`: of another gateway, and the file, which is at most a minute old), and all recent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.cluster.replication import BATCH_S
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import SNAPSHOT, Ask, SnapshotPart, TopicAnswer, encode
from gateway.features.workers.transfer import SnapshotReceiver, send

log = logging.getLogger("warmroute.workers")

HISTORY_BYTES: Final = 16 << 20
MESSAGE_BYTES: Final = 160  # memory of a message in the history without its payload
BOOKED_S: Final = 5 * BATCH_S  # until a booking of one worker is known to all
GATHER_S: Final = 0.1  # within which workers that ended together are replaced
HEALTHY_S: Final = 1.5  # a worker with a heartbeat within this time is preferred for a snapshot
COLLECT_S: Final = 14.0  # time limit of a collection; then another worker may be asked, within BEGIN_S
BEGIN_S: Final = 30.0  # longest wait of a new worker for a snapshot of another worker
SILENT_S: Final = 5.0  # without any heartbeat for this time, no worker serves, and the wait ends
LOOK_S: Final = 0.5
TRIES: Final = 2  # workers that are asked, if the first one ends in the meantime
TAKE_S: Final = 60.0  # time limit of a worker for a snapshot, before the next one is sent


class BatchHistory:
    """Recent events, as numbered messages, bounded in bytes. All operations are O(1) amortised."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0  # memory in bytes
        self.begin = self.end = 0  # numbers of the first and the next message
        self._max_bytes = max_bytes
        self._messages: deque[tuple[float, int, bytes]] = deque()  # time, worker, payload

    def add(self, now: float, worker: int, payload: bytes) -> None:
        self._messages.append((now, worker, payload))
        self.end += 1
        self.size += MESSAGE_BYTES + len(payload)
        while self.size > self._max_bytes:
            self._drop()

    def forget(self, before: float) -> None:
        """Drops the messages from before that time."""
        while self._messages and self._messages[0][0] < before:
            self._drop()

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """(worker, payload) of the held messages from that number on. O(messages)."""
        for at, (_, worker, payload) in enumerate(self._messages, self.begin):
            if at >= number:
                yield worker, payload

    def _drop(self) -> None:
        self.size -= MESSAGE_BYTES + len(self._messages.popleft()[2])
        self.begin += 1

    def __repr__(self) -> str:
        return f"<History of {len(self._messages)} messages, {self.size} bytes>"


@dataclass(slots=True, eq=False)
class _Worker:
    """sent_number: number of the last snapshot sent to it. restored: set when it has restored that snapshot, or has ended.
    beginning: sends its first snapshots.
    """

    channel: Channel
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)  # the chunks of two snapshots must not interleave
    sent_number: int = 0
    restored: asyncio.Event = field(default_factory=asyncio.Event)
    beginning: asyncio.Task[None] | None = None


class HubSnapshots:
    """first: the snapshots for workers that start while none serves. again: returns the snapshots with which the gateway would
    start now.
    """

    def __init__(self, healthy: Callable[[float], Iterator[int]], begin_s: float = BEGIN_S) -> None:
        """healthy: returns the serving workers with a heartbeat within that time. begin_s: see BEGIN_S."""
        self.first: Sequence[Snapshot] = ()
        self.again: Callable[[], Awaitable[Sequence[Snapshot]]] | None = None
        self._found_again: asyncio.Task[Sequence[Snapshot]] | None = None
        self._healthy = healthy
        self._begin_s = begin_s
        self._workers: dict[int, _Worker] = {}
        self._number = 0  # number of the last question or snapshot
        self._collecting = asyncio.Lock()
        self._asked = 0, 0  # the worker asked for a snapshot, and the question's number
        self._arrival = SnapshotReceiver()
        self._answer: asyncio.Future[Snapshot | None] | None = None
        self._gathering: asyncio.Task[Snapshot | None] | None = None  # a collection that further new workers may share
        self._collections: set[asyncio.Task[Snapshot | None]] = set()  # for new workers
        self._restoring = asyncio.Lock()

    def join(self, number: int, channel: Channel, begin: Callable[[bool], None]) -> None:
        """Registers a new worker. begin: called when it has its snapshot, at once if there is nothing to wait for; with True if
        the snapshot contains all earlier events.
        """
        worker = self._workers[number] = _Worker(channel)
        if self.first or self.again or any(self._healthy(HEALTHY_S)):
            worker.beginning = asyncio.ensure_future(self._begin(number, worker, begin))
        else:
            begin(False)

    def leave(self, number: int) -> None:
        """Unregisters an ended worker."""
        worker = self._workers.pop(number)
        worker.restored.set()
        if worker.beginning:
            worker.beginning.cancel()
        if number == self._asked[0] and self._answer and not self._answer.done():
            self._answer.set_exception(KnowledgeError("the worker that collected it has ended"))

    # -- snapshots for a new worker

    async def _begin(self, number: int, worker: _Worker, begin: Callable[[bool], None]) -> None:
        covered = False
        try:
            found = await self._collect_shared(number)
            complete = found if found and not found.header.partial else None
            for snapshot in [complete] if complete else self.first or await self._gateway_snapshots() or filter(None, [found]):
                await self._send(worker, snapshot)
            covered = complete is not None
        except Exception:  # a bug must not keep the worker from serving
            log.exception("a new worker gets no snapshot")
        begin(covered)

    async def _collect_shared(self, number: int) -> Snapshot | None:
        """A snapshot of a serving worker. None: no worker serves, or it knows no prefixes."""
        if not any(self._healthy(HEALTHY_S)):
            return None
        if self._gathering is None:
            self._gathering = asyncio.ensure_future(self._collect_for_new())
            self._collections.add(self._gathering)
            self._gathering.add_done_callback(self._collected)
        collection = self._gathering
        try:
            while not collection.done():
                await asyncio.wait([collection], timeout=LOOK_S)
                if not collection.done() and not any(self._healthy(SILENT_S)):
                    raise KnowledgeError("no worker serves any more")
            found = collection.result()
        except KnowledgeError as error:
            log.warning("a new worker gets no snapshot", extra={"worker": number, "reason": str(error)})
            return None
        return found

    async def _gateway_snapshots(self) -> Sequence[Snapshot]:
        """The snapshots with which the gateway would start now. Workers that start together share them."""
        if self.again is None:
            return ()
        if self._found_again is None:
            self._found_again = asyncio.ensure_future(self._load_again(self.again))
            self._found_again.add_done_callback(self._ended_again)
        return await asyncio.shield(self._found_again)

    def _ended_again(self, _task: asyncio.Task[Sequence[Snapshot]]) -> None:
        self._found_again = None

    async def _load_again(self, again: Callable[[], Awaitable[Sequence[Snapshot]]]) -> Sequence[Snapshot]:
        try:
            async with asyncio.timeout(self._begin_s):
                return await again()
        except Exception:  # a bug must not keep workers from serving
            log.exception("new workers get no snapshot of the file, or of another gateway")
            return ()

    async def _collect_for_new(self) -> Snapshot | None:
        try:
            async with asyncio.timeout(self._begin_s):
                await asyncio.sleep(GATHER_S)
                self._gathering = None
                await asyncio.sleep(BOOKED_S)
                for _ in range(TRIES - 1):
                    with contextlib.suppress(KnowledgeError):
                        return await self.collect()
                return await self.collect()
        except TimeoutError:
            raise KnowledgeError(f"no worker has sent one within {self._begin_s:g} s") from None

    def _collected(self, collection: asyncio.Task[Snapshot | None]) -> None:
        self._collections.discard(collection)
        if not collection.cancelled():
            collection.exception()  # retrieved to avoid a warning: its worker may have ended

    # -- snapshots from one worker

    async def collect(self, since_s: float = math.inf, max_bytes: int = MAX_BYTES) -> Snapshot | None:
        """A snapshot of any worker. None: it knows no prefixes. Raises KnowledgeError if no worker can send one now."""
        async with self._collecting:
            number = next(self._healthy(HEALTHY_S), None) or next(self._healthy(math.inf), None)
            if number is None:
                raise KnowledgeError("no worker is serving")
            self._number += 1
            answer = self._answer = asyncio.get_running_loop().create_future()
            self._arrival, self._asked = SnapshotReceiver(), (number, self._number)
            self._workers[number].channel.send(Ask(self._number, SNAPSHOT, encode((since_s, max_bytes))))
            try:
                async with asyncio.timeout(COLLECT_S):
                    found = await answer
            except TimeoutError:
                raise KnowledgeError("a worker does not answer") from None
            finally:
                self._answer = None
                if answer.done() and not answer.cancelled():
                    answer.exception()  # the caller may have been cancelled at the same time
            return replace(found, source=f"worker {number}") if found else None

    def receive(self, worker: int, message: SnapshotPart | TopicAnswer) -> None:
        """A part of a worker's snapshot, or its answer that there is none, or that it has restored one. Late answers are
        ignored. Raises MessageError.
        """
        answer = self._answer
        if isinstance(message, TopicAnswer) and message.number == self._workers[worker].sent_number:
            self._workers[worker].restored.set()
        elif (worker, message.number) != self._asked or answer is None or answer.done():
            return
        elif isinstance(message, SnapshotPart):
            if arrived := self._arrival.receive(message):
                answer.set_result(arrived.snapshot)
        elif message.error is not None:
            answer.set_exception(KnowledgeError(message.error))
        else:
            answer.set_result(None)

    # -- snapshots for all workers

    async def restore(self, snapshot: Snapshot) -> None:
        """Makes all workers restore a snapshot. Returns afterwards, so that at most one snapshot waits in a worker."""
        async with self._restoring:
            workers = tuple(self._workers.values())
            for worker in workers:
                await self._send(worker, snapshot)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TAKE_S):
                    for worker in workers:
                        if worker in self._workers.values():
                            await worker.restored.wait()

    async def _send(self, worker: _Worker, snapshot: Snapshot) -> None:
        async with worker.sending:
            self._number += 1
            worker.sent_number = self._number
            worker.restored.clear()
            await send(worker.channel, worker.sent_number, snapshot)

    def __repr__(self) -> str:
        return f"<HubSnapshots for {len(self._workers)} workers>"
