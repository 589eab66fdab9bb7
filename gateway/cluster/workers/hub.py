"""Message hub: broadcasts each worker's messages to all others in one total order, and replays recent history to a new worker.

Batches of routing events are forwarded as they came, and kept for a while, so that a worker that replaces another begins with
what the others know: what sources of replicas have found, the commands of operators (`command_log.py`), then the recent batches
(HISTORY_BYTES, and no older than the prefix index would remember), then the open bookings, which the other workers publish for
it. The counters of a worker that has ended stay in the sum. A worker that sends what does not decode is disconnected, and so
ends (`channel.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.cluster.messages import Batch, Command, Leave, Reconfigure, encode_config
from gateway.cluster.snapshots.knowledge import MAX_BYTES
from gateway.cluster.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.cluster.store.link import Link
from gateway.cluster.workers.channel import HUB, Channel
from gateway.cluster.workers.command_log import CommandLog, Replayed
from gateway.cluster.workers.messages import (
    AskSharing,
    Collect,
    Counters,
    Current,
    Execute,
    Executed,
    Forwarded,
    Found,
    Gone,
    Joined,
    Known,
    Leaving,
    Message,
    Part,
    Publish,
    Replace,
    Scrape,
    Scraped,
    Sent,
    Serving,
    Sharing,
    Stopping,
    Taken,
    Welcome,
    Whole,
    encode,
    from_worker,
)
from gateway.cluster.workers.transfer import Arrival, send
from gateway.config.schema import MAX_SOURCES, Config
from gateway.fleet.membership import KEPT, SHOWN_S
from gateway.telemetry.exposition import SnapshotError, merge_slices, packed
from gateway.telemetry.metrics import Metrics

log = logging.getLogger("warmroute.workers")

HISTORY_BYTES = 16 << 20
SWEEP_S = 60.0  # between two looks for counters of replicas that have left
HEALTHY_S = 1.5  # a worker with a heartbeat within that time is asked for a snapshot, if there is one
COLLECT_S = 30.0  # that this may take
TAKE_S = 60.0  # that a worker may take for a snapshot, before it is given another one
FORGOTTEN_S = 2 * SHOWN_S + 60  # after that no worker counts for a replica that has left


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker.

    counters: its last snapshot, empty before the first. last_frame_at: time of its last frame. last_healthy_at: likewise, while
    it serves; until then the time when it was started.
    """

    channel: Channel
    last_frame_at: float
    last_healthy_at: float
    serving: bool = False
    stopping: bool = False
    counters: bytes = b""
    reported: bool = False  # they were sent while it served: it knew all replicas by then
    took: asyncio.Event = field(default_factory=asyncio.Event)  # the last snapshot, or it has ended


class Hub:
    """See the top of this file."""

    def __init__(
        self, config: Config, clock: Callable[[], float], on_serving: Callable[[int], None], history_bytes: int = HISTORY_BYTES
    ) -> None:
        """on_serving: called for each worker that begins to serve."""
        self.config = config
        self.workers: dict[int, WorkerState] = {}
        self.ended = Metrics()  # counters of the workers that have ended, and the supervisor's own
        self._clock = clock
        self._on_serving = on_serving
        self._most_history_bytes = history_bytes
        self._joined = 0
        self._history: deque[tuple[float, int, bytes]] = deque()  # when, worker, message
        self._history_bytes = 0
        self._commands = CommandLog()
        self._found: dict[str, bytes] = {}  # the last message about each source
        self._swept_at = clock()
        self._departure: float | None = None  # the last time that replicas may have left; None: all of those are forgotten
        self._commanded = 0  # commands of its own
        self.first: Snapshot | None = None  # that new workers begin with
        self._feeding: set[asyncio.Future[None]] = set()
        self.link: Link | None = None  # to other gateways
        self._leaving = False
        self._one_at_a_time = asyncio.Lock()
        self._giving = asyncio.Lock()
        self._transfer = asyncio.Lock()  # the parts of two snapshots must not mix
        self._arrival = Arrival()
        self._collector = HUB  # the worker that was asked for a snapshot
        self._collected: asyncio.Future[Snapshot | None] | None = None

    def join(self, channel: Channel) -> int:
        """A new worker. Returns its number, which no other has or had."""
        self._joined += 1
        worker = self._joined
        state = WorkerState(channel, last_frame_at=self._clock(), last_healthy_at=self._clock())
        channel.send(Welcome(encode_config(self.config)), worker)
        if self._leaving:
            channel.send(Leaving())
        for payload in self._found.values():
            channel.forward(payload, HUB)
        for asker, payload in self._commands.replay(worker):
            channel.forward(payload, asker)
        self._forget_history()
        for _, source, payload in self._history:
            channel.forward(payload, source)
        if self.first:
            self._feeding.add(task := asyncio.ensure_future(self._feed(channel, self.first)))
            task.add_done_callback(self._feeding.discard)
        else:
            channel.send(Current())
        for other in self.workers.values():
            other.channel.send(Joined(), worker)
        self.workers[worker] = state
        if self.link:
            self.link.want_open()
        channel.receive(lambda *frame: self._receive(worker, *frame), lambda: None)
        return worker

    async def _feed(self, channel: Channel, snapshot: Snapshot) -> None:
        """Let a new worker begin with what is known."""
        try:
            async with self._transfer:
                await send(channel, snapshot)
        finally:
            channel.send(Current())

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """What the workers know, as any of them does. Raises KnowledgeError if none can say it now."""
        async with self._one_at_a_time:
            worker = next(self.healthy(HEALTHY_S), None) or next(self.healthy(math.inf), None)
            if worker is None:
                raise KnowledgeError("no worker is serving")
            self._collected = asyncio.get_running_loop().create_future()
            self._arrival, self._collector = Arrival(), worker
            self.workers[worker].channel.send(Collect(since_s, most_bytes))
            try:
                async with asyncio.timeout(COLLECT_S):
                    return await self._collected
            except TimeoutError:
                raise KnowledgeError("a worker does not answer") from None
            finally:
                self._collector = HUB

    def _arrived(self, worker: int, message: Sent) -> None:
        """A worker sends its snapshot."""
        if worker != self._collector or self._collected is None or self._collected.done():
            return
        if isinstance(message, Whole) and not message.known:
            self._collected.set_result(None)
        elif arrived := self._arrival.receive(message):
            self._collected.set_result(arrived)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        state = self.workers.pop(worker)
        if worker == self._collector and self._collected is not None and not self._collected.done():
            self._collected.set_exception(KnowledgeError("the worker that collected it has ended"))
        state.channel.close()
        state.took.set()
        self._commands.ended(worker)
        self._add_ended(worker, state.counters)
        self.ended_elsewhere(worker)
        if self.link:
            self.link.reset(worker)

    def begin_leaving(self) -> None:
        """The whole gateway will go down."""
        self._leaving = True
        self._broadcast(HUB, encode(Leaving()))

    # -- other gateways

    def publish(self, source: int, batch: Batch) -> None:
        """Events of another gateway's router, by a number that no worker has."""
        payload = encode(Publish(batch))
        self._remember(source, payload)
        self._broadcast(source, payload)

    def ended_elsewhere(self, source: int) -> None:
        """A router has ended."""
        gone = encode(Gone())
        self._remember(source, gone)
        self._broadcast(source, gone)

    def announce_newcomer(self) -> None:
        """Somebody does not know what the workers have open: they publish it."""
        self._broadcast(HUB, encode(Joined()))

    async def restore(self, snapshot: Snapshot) -> None:
        """Let all workers take in a snapshot. Returns when they have: more of them must not wait in a worker than one."""
        async with self._giving:
            states = tuple(self.workers.values())
            for state in states:
                async with self._transfer:
                    state.took.clear()
                    await send(state.channel, snapshot)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TAKE_S):
                    for state in states:
                        if state in self.workers.values():
                            await state.took.wait()

    # -- one worker

    def _add_ended(self, worker: int, counters: bytes) -> None:
        if not counters:
            return
        try:
            for _ in merge_slices(self.ended.instruments, counters, ended=True):
                pass
        except SnapshotError as error:
            log.error("a worker's counters are lost", extra={"worker": worker, "error": str(error)})
        self._forget_departed()

    def sweep(self) -> None:
        """Forget what ended workers have counted for replicas that left long ago. To be called often; mostly O(1)."""
        now = self._clock()
        if self._departure is not None and now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._forget_departed()

    def _forget_departed(self) -> None:
        """Drop the counters of replicas and pools that no living worker counts for any more. O(1) if none has left."""
        if self._departure is None:
            return
        counted = Metrics().instruments
        for state in self.workers.values():
            if not state.reported:
                return
            try:
                for _ in merge_slices(counted, state.counters):
                    pass
            except SnapshotError:
                return
        if not self.workers:
            return
        for label in ("replica", "pool"):
            self.ended.instruments.keep(label, counted.values_of(label))
        if self._clock() - self._departure > FORGOTTEN_S:
            self._departure = None

    def command(self, command: Command) -> None:
        """From here to all workers."""
        self._commanded += 1
        execute = Execute(self._commanded, command, math.inf)
        self._execute(HUB, execute, encode(execute))

    def _receive(self, worker: int, to: int, message: Message, payload: bytes) -> None:
        state = self.workers.get(worker)
        if state is None:  # it has left already; this was still on its way
            return
        state.last_frame_at = self._clock()
        if state.serving:
            state.last_healthy_at = state.last_frame_at
        match message:
            case Publish() | Replace():
                self._remember(worker, payload)
                self._broadcast(worker, payload, but=worker)
                if self.link:
                    if isinstance(message, Replace):
                        self.link.reset(worker)
                    self.link.publish(worker, message.batch)
            case Found(source):
                self._remember_found(source, payload)
            case Known() | Part() | Whole():
                self._arrived(worker, message)
            case Taken():
                state.took.set()
            case Counters(page):
                state.counters, state.reported = page, state.serving
            case Serving() | Stopping():
                self._serves(worker, state, isinstance(message, Serving))
            case _:
                self._receive_question(worker, to, message, payload)

    def _receive_question(self, worker: int, to: int, message: Message, payload: bytes) -> None:
        """A question, or the answer to one."""
        state = self.workers[worker]
        match message:
            case Scraped(_, page):
                state.counters = page  # what was shown once stays in the sum, also if this worker is killed now
                self._answer(worker, to, payload)
            case Executed(number, error, internal):
                if self._commands.is_pending(to, number):
                    self._commands.answered(worker, to, number, accepted=error is None and not internal)
                self._answer(worker, to, payload)
            case Scrape(number):
                self._confirm_forwarding(state, number)
                state.channel.send(Scraped(number, packed(self.ended.instruments)), HUB)
                self._broadcast(worker, payload)
            case Execute():
                self._execute(worker, message, payload)
            case AskSharing(number):
                state.channel.send(Sharing(number, self.link.state if self.link else None), HUB)

    def _serves(self, worker: int, state: WorkerState, serving: bool) -> None:
        """It begins to serve, or drains."""
        state.stopping = state.stopping or not serving
        state.serving = not state.stopping  # it may have been stopped before it served
        if state.serving:
            self._on_serving(worker)

    def restarted(self) -> None:
        """A worker has ended unexpectedly."""
        self.ended.worker_restarts.add()

    def _confirm_forwarding(self, asker: WorkerState, number: int) -> None:
        snapshots = {worker: state.counters for worker, state in self.workers.items()}
        asker.channel.send(Forwarded(number, snapshots), HUB)

    def _answer(self, worker: int, asker: int, payload: bytes) -> None:
        if asker in self.workers:
            self.workers[asker].channel.forward(payload, worker)

    def _execute(self, asker: int, execute: Execute, payload: bytes) -> None:
        """To all workers, the asker too. `payload`: the message, encoded."""
        command = execute.command
        if self._clock() > execute.until or (isinstance(command, Replayed) and self._commands.full):
            return  # the asker gets no Forwarded, and gives up
        if asker in self.workers:
            self._confirm_forwarding(self.workers[asker], execute.number)
        if isinstance(command, Reconfigure):
            before, self.config = self.config, command.config
            names = {each.source for each in self.config.discovery} | {KEPT}
            self._found = {name: payload for name, payload in self._found.items() if name in names}
            self._commands.reconfigured(before, self.config)
            self._departure = self._clock()
        elif isinstance(command, Replayed):
            if isinstance(command, Leave):
                self._departure = self._clock()
            self._commands.send(asker, execute.number, command, payload, self.workers)
        self._broadcast(asker, payload)

    def replica_urls(self) -> list[str]:
        """Of the configuration, and of what its sources have found last."""
        urls = [replica.url for pool in self.config.pools for replica in pool.replicas]
        for message in map(from_worker, self._found.values()):
            if isinstance(message, Found):
                urls += [member.url for member in message.members]
        return list(dict.fromkeys(urls))

    def _broadcast(self, worker: int, payload: bytes, but: int = HUB) -> None:
        """A message of `worker`, to all others but one."""
        for name, state in self.workers.items():
            if name != but:
                state.channel.forward(payload, worker)

    def _remember_found(self, source: str, payload: bytes) -> None:
        """For workers that are started while the source does not answer. Replicas may have left it."""
        self._found.pop(source, None)
        self._found[source] = payload
        if len(self._found) > MAX_SOURCES + 1:
            del self._found[next(iter(self._found))]
        self._departure = self._clock()

    def _remember(self, worker: int, payload: bytes) -> None:
        self._history.append((self._clock(), worker, payload))
        self._history_bytes += len(payload)
        if self._history_bytes > self._most_history_bytes:
            self._forget_history()

    def _forget_history(self) -> None:
        since = self._clock() - self.config.routing.ttl_s
        while self._history and (self._history_bytes > self._most_history_bytes or self._history[0][0] < since):
            self._history_bytes -= len(self._history.popleft()[2])

    def silent(self, for_s: float) -> Iterator[int]:
        """The workers from which nothing came for `for_s`."""
        since = self._clock() - for_s
        return (worker for worker, state in self.workers.items() if state.last_frame_at < since)

    def unhealthy(self, for_s: float) -> Iterator[int]:
        """The workers that have not served for `for_s`, as far as heartbeats show."""
        since = self._clock() - for_s
        return (worker for worker, state in self.workers.items() if state.last_healthy_at < since)

    def healthy(self, within_s: float) -> Iterator[int]:
        """The workers that serve, with a heartbeat within that time."""
        since = self._clock() - within_s
        return (worker for worker, state in self.workers.items() if state.serving and state.last_healthy_at >= since)

    def credit_pause(self, for_s: float) -> None:
        """The supervisor itself did not run for `for_s`, so that no heartbeat could arrive."""
        now = self._clock()
        for state in self.workers.values():
            state.last_frame_at = min(now, state.last_frame_at + for_s)
            state.last_healthy_at = min(now, state.last_healthy_at + for_s)

    def __repr__(self) -> str:
        return f"<Hub of {', '.join(map(str, self.workers)) or 'no workers'}, {self._history_bytes} bytes of history>"
