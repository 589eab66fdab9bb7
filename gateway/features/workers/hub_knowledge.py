"""Snapshots of the workers' prefix index, and recent events, as far as they pass through the hub.

A snapshot is collected by one worker, for the snapshot file and for other gateways (`collect`); one that comes from another
gateway is given to all workers (`restore`). A new worker is brought up to date:

    it joins        from now on the hub holds back the events that it would get, and the others publish what they have open
    + GATHER_S      other workers that join until now share the collection
    + BOOKED_S      what was booked before it joined is known to all by now: one of those that serve is asked for a snapshot
    then            it gets the snapshot, the events since it joined, and Current

So an event is in the snapshot, among those that follow it, or in both if it came during the collection; then it is booked once,
and its prefix used twice. Where no worker serves, or none gives a whole snapshot within BEGIN_S, or all fall silent meanwhile,
it gets what the gateway began with, as long as that is kept, or would begin with now (`again`: of another gateway, and the
file, which is a minute old at most), and all recent events.
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
from gateway.features.workers.messages import SNAPSHOT, Ask, Part, TopicAnswer, encode
from gateway.features.workers.transfer import SnapshotReceiver, send

log = logging.getLogger("warmroute.workers")

HISTORY_BYTES: Final = 16 << 20
MESSAGE_BYTES: Final = 160  # of memory that a message of the history takes beside its payload
BOOKED_S: Final = 5 * BATCH_S  # until what one worker has booked is known to all
GATHER_S: Final = 0.1  # in which workers that end together are replaced
HEALTHY_S: Final = 1.5  # a worker with a heartbeat within that time is asked for a snapshot, if there is one
COLLECT_S: Final = 14.0  # that this may take: then another one may be asked, within BEGIN_S
BEGIN_S: Final = 30.0  # that a new worker waits for the snapshot of another one
SILENT_S: Final = 5.0  # without a heartbeat of any, then it waits no longer: nobody serves
LOOK_S: Final = 0.5
TRIES: Final = 2  # workers that are asked for it, if the first one ends meanwhile
TAKE_S: Final = 60.0  # that a worker may take for a snapshot, before it is given another one


class BatchHistory:
    """Recent events, as messages, within a number of bytes. They are numbered in their order. All is O(1) amortised."""

    def __init__(self, most_bytes: int) -> None:
        self.size = 0  # bytes of memory
        self.begin = self.end = 0  # the number of the first message, and of the next one
        self._most_bytes = most_bytes
        self._messages: deque[tuple[float, int, bytes]] = deque()  # when, worker, payload

    def add(self, now: float, worker: int, payload: bytes) -> None:
        self._messages.append((now, worker, payload))
        self.end += 1
        self.size += MESSAGE_BYTES + len(payload)
        while self.size > self._most_bytes:
            self._drop()

    def forget(self, before: float) -> None:
        """Forget the messages from before then."""
        while self._messages and self._messages[0][0] < before:
            self._drop()

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """(worker, payload) of each message from that number on, as far as they are kept. O(messages)."""
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
    """given: the last snapshot that it was sent, by number. taken: it has restored that, or has ended. beginning: gets it what
    it begins with.
    """

    channel: Channel
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)  # the chunks of two snapshots must not mix
    given: int = 0
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    beginning: asyncio.Task[None] | None = None


class HubSnapshots:
    """See the top of this file. first: what workers begin with while none serves. again: what the gateway would begin with
    now.
    """

    def __init__(self, healthy: Callable[[float], Iterator[int]], begin_s: float = BEGIN_S) -> None:
        """healthy: the workers that serve, with a heartbeat within that time. begin_s: see BEGIN_S."""
        self.first: Sequence[Snapshot] = ()
        self.again: Callable[[], Awaitable[Sequence[Snapshot]]] | None = None
        self._found_again: asyncio.Task[Sequence[Snapshot]] | None = None
        self._healthy = healthy
        self._begin_s = begin_s
        self._workers: dict[int, _Worker] = {}
        self._number = 0  # of the last question, or snapshot
        self._collecting = asyncio.Lock()
        self._asked = 0, 0  # the worker that was asked for a snapshot, the question's number
        self._arrival = SnapshotReceiver()
        self._answer: asyncio.Future[Snapshot | None] | None = None
        self._gathering: asyncio.Task[Snapshot | None] | None = None  # a collection that more new workers may share
        self._collections: set[asyncio.Task[Snapshot | None]] = set()  # for new workers
        self._giving = asyncio.Lock()

    def join(self, number: int, channel: Channel, begin: Callable[[bool], None]) -> None:
        """A new worker. begin: called once it has its snapshot, if there is one; with whether the snapshot has all events from
        before now. At once if there is nothing to wait for.
        """
        worker = self._workers[number] = _Worker(channel)
        if self.first or self.again or any(self._healthy(HEALTHY_S)):
            worker.beginning = asyncio.ensure_future(self._begin(number, worker, begin))
        else:
            begin(False)

    def leave(self, number: int) -> None:
        """A worker has ended."""
        worker = self._workers.pop(number)
        worker.taken.set()
        if worker.beginning:
            worker.beginning.cancel()
        if number == self._asked[0] and self._answer and not self._answer.done():
            self._answer.set_exception(KnowledgeError("the worker that collected it has ended"))

    # -- what a new worker begins with

    async def _begin(self, number: int, worker: _Worker, begin: Callable[[bool], None]) -> None:
        covered = False
        try:
            found = await self._of_another(number)
            whole = found if found and not found.header.partial else None
            for snapshot in [whole] if whole else self.first or await self._kept() or filter(None, [found]):
                await self._give(worker, snapshot)
            covered = whole is not None
        except Exception:  # a bug in it must not keep the worker from serving
            log.exception("a new worker gets no snapshot")
        begin(covered)

    async def _of_another(self, number: int) -> Snapshot | None:
        """A snapshot of a worker that serves; None: there is no such worker, or it knows nothing."""
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

    async def _kept(self) -> Sequence[Snapshot]:
        """The snapshots that the gateway would begin with now. Workers that start together share them."""
        if self.again is None:
            return ()
        if self._found_again is None:
            self._found_again = asyncio.ensure_future(self._of_the_gateway(self.again))
            self._found_again.add_done_callback(self._ended_again)
        return await asyncio.shield(self._found_again)

    def _ended_again(self, _task: asyncio.Task[Sequence[Snapshot]]) -> None:
        self._found_again = None

    async def _of_the_gateway(self, again: Callable[[], Awaitable[Sequence[Snapshot]]]) -> Sequence[Snapshot]:
        try:
            async with asyncio.timeout(self._begin_s):
                return await again()
        except Exception:  # a bug in it must not keep workers from serving
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
            raise KnowledgeError(f"there is none within {self._begin_s:g} s") from None

    def _collected(self, collection: asyncio.Task[Snapshot | None]) -> None:
        self._collections.discard(collection)
        if not collection.cancelled():
            collection.exception()  # its worker may have ended

    # -- from one worker

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """A snapshot of any worker; None: it knows nothing. Raises KnowledgeError if no worker can give one now."""
        async with self._collecting:
            number = next(self._healthy(HEALTHY_S), None) or next(self._healthy(math.inf), None)
            if number is None:
                raise KnowledgeError("no worker is serving")
            self._number += 1
            answer = self._answer = asyncio.get_running_loop().create_future()
            self._arrival, self._asked = SnapshotReceiver(), (number, self._number)
            self._workers[number].channel.send(Ask(self._number, SNAPSHOT, encode((since_s, most_bytes))))
            try:
                async with asyncio.timeout(COLLECT_S):
                    found = await answer
            except TimeoutError:
                raise KnowledgeError("a worker does not answer") from None
            finally:
                self._answer = None
                if answer.done() and not answer.cancelled():
                    answer.exception()  # the caller may have been cancelled in the same moment
            return replace(found, source=f"worker {number}") if found else None

    def receive(self, worker: int, message: Part | TopicAnswer) -> None:
        """A worker sends its snapshot, or has none; or it has restored one. A late answer is ignored. Raises MessageError."""
        answer = self._answer
        if isinstance(message, TopicAnswer) and message.number == self._workers[worker].given:
            self._workers[worker].taken.set()
        elif (worker, message.number) != self._asked or answer is None or answer.done():
            return
        elif isinstance(message, Part):
            if arrived := self._arrival.receive(message):
                answer.set_result(arrived.snapshot)
        elif message.error is not None:
            answer.set_exception(KnowledgeError(message.error))
        else:
            answer.set_result(None)

    # -- to all workers

    async def restore(self, snapshot: Snapshot) -> None:
        """Let all workers take in a snapshot. Returns when they have: more of them must not wait in a worker than one."""
        async with self._giving:
            workers = tuple(self._workers.values())
            for worker in workers:
                await self._give(worker, snapshot)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TAKE_S):
                    for worker in workers:
                        if worker in self._workers.values():
                            await worker.taken.wait()

    async def _give(self, worker: _Worker, snapshot: Snapshot) -> None:
        async with worker.sending:
            self._number += 1
            worker.given = self._number
            worker.taken.clear()
            await send(worker.channel, worker.given, snapshot)

    def __repr__(self) -> str:
        return f"<HubSnapshots for {len(self._workers)} workers>"
