"""Message hub: broadcasts each worker's messages to all others in one total order, and brings a new worker up to date.

A new worker gets the members found by sources of replicas, the commands of operators (`command_log.py`), a snapshot of a
serving worker, and the events since it joined. If no worker serves, it gets the recent events instead (HISTORY_BYTES, and no
older than the prefix index remembers): `hub_knowledge.py`. The other workers publish their open bookings for it. The counters
of an ended worker stay in the sum. A worker that sends an invalid message is disconnected (`channel.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.cluster.messages import Command, EventBatch, Leave, Reconfigure, Reset, Want, encode_config
from gateway.cluster.topics import Topics
from gateway.config.schema import Config
from gateway.config.sections import MAX_SOURCES, sources_of
from gateway.features.sharing.link import Link
from gateway.features.table import new_metrics
from gateway.features.workers.channel import HUB, Channel
from gateway.features.workers.command_log import CommandLog, ReplicaCommand
from gateway.features.workers.hub_knowledge import BEGIN_S, HISTORY_BYTES, BatchHistory, HubSnapshots
from gateway.features.workers.messages import (
    COUNTERS,
    LEAVING,
    MEMBERS,
    SNAPSHOT,
    Ask,
    CatchUpEnd,
    Execute,
    Heartbeat,
    Message,
    Publish,
    SnapshotPart,
    SourceMembers,
    TopicAnswer,
    Welcome,
    decode_members,
    encode,
)
from gateway.features.workers.metrics import WorkerMetrics
from gateway.fleet.membership import KEPT, SHOWN_S
from gateway.telemetry.exposition import SnapshotError, merge_slices, packed

log = logging.getLogger("warmroute.workers")

SWEEP_S = 60.0  # between two removals of counters of departed replicas
FORGOTTEN_S = 2 * SHOWN_S + 60  # after this time no worker counts for a departed replica


@dataclass(slots=True, eq=False)
class WorkerState:
    """The state of one worker.

    counters: its last snapshot, empty before the first. last_frame_at: time of its last frame. last_healthy_at: time of its
    last frame while serving; before it serves, its start time. begun: it has sent a frame. follows: it gets the events of
    other workers at once.
    """

    channel: Channel
    last_frame_at: float
    last_healthy_at: float
    begun: bool = False
    serving: bool = False
    stopping: bool = False
    counters: bytes = b""
    reported: bool = False  # the counters were sent while it served, so that it knew all replicas
    follows: bool = False


class Hub:
    """The hub in the supervisor."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        on_serving: Callable[[int], None],
        history_bytes: int = HISTORY_BYTES,
        begin_s: float = BEGIN_S,
    ) -> None:
        """on_serving: called for each worker that begins to serve. begin_s: longest wait of a new worker for a snapshot."""
        self.config = config
        self.workers: dict[int, WorkerState] = {}
        self.ended = new_metrics()  # counters of ended workers and of the supervisor
        self.history = BatchHistory(history_bytes)
        self.snapshots = HubSnapshots(self.healthy, begin_s)
        self.topics = Topics()  # answers of the supervisor
        self.link: Link | None = None
        self._clock = clock
        self._on_serving = on_serving
        self._joined = 0
        self._commands = CommandLog()
        self._members: dict[str, SourceMembers] = {}  # by source, the last message
        self._swept_at = clock()
        self._departure: float | None = None  # time when replicas may have left last; None: no counters to remove
        self._last_command = 0  # number of commands from the hub
        self._leaving = False

    def join(self, channel: Channel) -> int:
        """Registers a new worker. Returns its number, which is unique."""
        self._joined += 1
        worker = self._joined
        state = WorkerState(channel, last_frame_at=self._clock(), last_healthy_at=self._clock())
        channel.send(Welcome(encode_config(self.config)), worker)
        if self._leaving:
            channel.send(Publish(LEAVING))
        for found in self._members.values():
            channel.send(Publish(MEMBERS, encode(found)))
        for asker, payload in self._commands.replay(worker):
            channel.forward(payload, asker)
        self._broadcast(worker, encode(Want()))
        self.workers[worker] = state
        now = self.history.end
        self.snapshots.join(worker, channel, lambda covered: self._start_following(worker, state, now if covered else 0, now))
        if self.link:
            self.link.want_open()
        channel.receive(lambda *frame: self._receive(worker, *frame), lambda: None)
        return worker

    def _start_following(self, worker: int, state: WorkerState, since: int, joined: int) -> None:
        """Sends the events from number `since` on, and later ones at once. joined: the number of the next event when it
        joined.
        """
        self.history.forget(self._clock() - self.config.routing.ttl_s)
        for source, payload in self.history.since(since):
            state.channel.forward(payload, source)
        state.channel.send(CatchUpEnd())
        state.follows = True
        if self.history.begin > joined:  # events were dropped since, possibly with open bookings
            self._broadcast(worker, encode(Want()), except_=worker)

    def leave(self, worker: int) -> None:
        """Unregisters an ended worker."""
        state = self.workers.pop(worker)
        self.snapshots.leave(worker)
        state.channel.close()
        self._commands.note_end(worker)
        self._add_counters_of_ended(worker, state.counters)
        self.end_router(worker)
        if self.link:
            self.link.reset(worker)

    def begin_leaving(self) -> None:
        """Announces that the whole gateway will shut down."""
        self._leaving = True
        self._broadcast(HUB, encode(Publish(LEAVING)))

    # -- other gateways

    def publish(self, source: int, batch: EventBatch) -> None:
        """Distributes events of another gateway's router. source: a number of no worker."""
        self._pass_on(source, encode(batch))

    def end_router(self, source: int) -> None:
        """A router has ended."""
        self._pass_on(source, encode(Reset(ended=True)))

    def publish_open_bookings(self) -> None:
        """Makes the workers publish their open bookings for a new router."""
        self._broadcast(HUB, encode(Want()))

    # -- one worker

    def _add_counters_of_ended(self, worker: int, counters: bytes) -> None:
        if not counters:
            return
        try:
            for _ in merge_slices(self.ended.instruments, counters, ended=True):
                pass
        except SnapshotError as error:
            log.error("a worker's counters are lost", extra={"worker": worker, "error": str(error)})
        self._remove_departed()

    def sweep(self) -> None:
        """Removes the counters of ended workers for replicas that left long ago. To be called often; mostly O(1)."""
        now = self._clock()
        if self._departure is not None and now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._remove_departed()

    def _remove_departed(self) -> None:
        """Removes the counters of replicas and pools that no living worker counts for. O(1) if none has left."""
        if self._departure is None:
            return
        counted = self.ended.fresh().instruments
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
        """Sends a command of the hub to all workers."""
        self._last_command += 1
        execute = Execute(self._last_command, command, math.inf)
        self._execute(HUB, execute, encode(execute))

    def _receive(self, worker: int, to: int, message: Message, payload: bytes) -> None:
        state = self.workers.get(worker)
        if state is None:  # it has left; the message was in transit
            return
        state.last_frame_at, state.begun = self._clock(), True
        if state.serving:
            state.last_healthy_at = state.last_frame_at
        match message:
            case EventBatch() | Reset():
                self._pass_on(worker, payload)
                if self.link and isinstance(message, EventBatch):
                    self.link.publish(worker, message)
                elif self.link:
                    self.link.reset(worker)
            case Publish(topic, content):
                self._published(worker, state, topic, content, payload)
            case SnapshotPart():
                self.snapshots.receive(worker, message)
            case Heartbeat("serving" | "stopping" as phase):
                self._set_serving(worker, state, phase == "serving")
            case _:
                self._receive_question(worker, to, message, payload)

    def _receive_question(self, worker: int, to: int, message: Message, payload: bytes) -> None:
        match message:
            case Ask():
                self._ask(worker, message, payload)
            case TopicAnswer():
                self._answered(worker, to, message, payload)
            case Execute():
                self._execute(worker, message, payload)

    def _published(self, worker: int, state: WorkerState, topic: str, content: bytes, payload: bytes) -> None:
        if topic == COUNTERS:
            state.counters, state.reported = content, state.serving
        elif topic == MEMBERS:
            self._store_members(decode_members(content))
        else:
            self._broadcast(worker, payload, except_=worker)

    def _ask(self, asker: int, ask: Ask, payload: bytes) -> None:
        """Sends a question to all workers, or answers it if the hub has the answer."""
        answers = {worker: state.counters if ask.topic == COUNTERS else b"" for worker, state in self.workers.items()}
        if ask.topic == COUNTERS:
            answers[HUB] = packed(self.ended.instruments)
        elif self.topics.has_answer(ask.topic):
            answers = {HUB: self.topics.answer(ask.topic, ask.question)}
        self.workers[asker].channel.send(TopicAnswer(ask.number, encode(answers)), HUB)
        if answers.keys() != {HUB}:
            self._broadcast(asker, payload)

    def _answered(self, worker: int, asker: int, answer: TopicAnswer, payload: bytes) -> None:
        if answer.topic == COUNTERS:
            self.workers[
                worker
            ].counters = answer.answer  # reported counts must stay in the sum even if the worker is killed now
        elif answer.topic == SNAPSHOT:
            self.snapshots.receive(worker, answer)
        elif self._commands.is_pending(asker, answer.number):
            accepted = answer.error is None and not answer.internal
            self._commands.note_answer(worker, asker, answer.number, accepted=accepted)
        if asker in self.workers:
            self.workers[asker].channel.forward(payload, worker)

    def _set_serving(self, worker: int, state: WorkerState, serving: bool) -> None:
        """The worker begins to serve, or drains."""
        state.stopping = state.stopping or not serving
        state.serving = not state.stopping  # it may be stopped before it serves
        if state.serving:
            self._on_serving(worker)

    def count_restart(self) -> None:
        """A worker has ended unexpectedly."""
        self.ended.of(WorkerMetrics).restarts.add()

    def _execute(self, asker: int, execute: Execute, payload: bytes) -> None:
        """Sends a command to all workers, including the asker. payload: the encoded message."""
        command = execute.command
        if self._clock() > execute.until or (isinstance(command, ReplicaCommand) and self._commands.full):
            return  # without an answer of the hub, the asker gives up
        if asker in self.workers:
            asked = encode(dict.fromkeys(self.workers, b""))
            self.workers[asker].channel.send(TopicAnswer(execute.number, asked), HUB)
        if isinstance(command, Reconfigure):
            before, self.config = self.config, command.config(type(self.config))
            names = {*sources_of(self.config), KEPT}
            self._members = {name: found for name, found in self._members.items() if name in names}
            self._commands.apply_config(before, self.config)
            self._departure = self._clock()
        elif isinstance(command, ReplicaCommand):
            if isinstance(command, Leave):
                self._departure = self._clock()
            self._commands.send(asker, execute.number, command, payload, self.workers)
        self._broadcast(asker, payload)

    def replica_urls(self) -> list[str]:
        """URLs in the configuration, and of the last members of its sources."""
        urls = [replica.url for pool in self.config.pools for replica in pool.replicas]
        for found in self._members.values():
            urls += [member.url for member in found.members]
        return list(dict.fromkeys(urls))

    def _pass_on(self, source: int, payload: bytes) -> None:
        """Passes events of a router, or its end, to all other workers. New workers get them from the history."""
        self.history.add(self._clock(), source, payload)
        for name, state in self.workers.items():
            if state.follows and name != source:
                state.channel.forward(payload, source)

    def _broadcast(self, worker: int, payload: bytes, except_: int = HUB) -> None:
        """Sends a message of `worker` to all workers except one."""
        for name, state in self.workers.items():
            if name != except_:
                state.channel.forward(payload, worker)

    def _store_members(self, found: SourceMembers) -> None:
        """Stores the members of a source for workers that start while the source does not answer."""
        self._members.pop(found.source, None)
        self._members[found.source] = found
        if len(self._members) > MAX_SOURCES + 1:
            del self._members[next(iter(self._members))]
        self._departure = self._clock()

    def silent(self, for_s: float, start_s: float) -> Iterator[int]:
        """The workers without a frame for `for_s`, or without their first one for `start_s`."""
        now = self._clock()
        return (
            worker for worker, state in self.workers.items() if state.last_frame_at < now - (for_s if state.begun else start_s)
        )

    def unhealthy(self, for_s: float) -> Iterator[int]:
        """The workers that have not served for `for_s`, according to their heartbeats."""
        since = self._clock() - for_s
        return (worker for worker, state in self.workers.items() if state.last_healthy_at < since)

    def healthy(self, within_s: float) -> Iterator[int]:
        """The serving workers with a heartbeat within that time."""
        since = self._clock() - within_s
        return (worker for worker, state in self.workers.items() if state.serving and state.last_healthy_at >= since)

    def excuse_pause(self, for_s: float) -> None:
        """The supervisor was suspended for `for_s`, so that it received no heartbeat."""
        now = self._clock()
        for state in self.workers.values():
            state.last_frame_at = min(now, state.last_frame_at + for_s)
            state.last_healthy_at = min(now, state.last_healthy_at + for_s)

    def __repr__(self) -> str:
        return f"<Hub of {', '.join(map(str, self.workers)) or 'no workers'}, {self.history!r}>"
