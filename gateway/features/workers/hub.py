"""Message hub: broadcasts each worker's messages to all others in one total order, and brings a new worker up to date.

A worker that replaces another begins with what sources of replicas have found, the commands of operators (`command_log.py`), a
snapshot of a worker that serves, and the events since it joined; or, if none serves, with the recent events (HISTORY_BYTES, and
no older than the prefix index would remember): `hub_knowledge.py`. The other workers publish for it what they have open. The
counters of a worker that has ended stay in the sum. A worker that sends what does not decode is disconnected (`channel.py`).
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
from gateway.features.workers.command_log import CommandLog, Replayed
from gateway.features.workers.hub_knowledge import BEGIN_S, HISTORY_BYTES, BatchHistory, HubSnapshots
from gateway.features.workers.messages import (
    COUNTERS,
    LEAVING,
    MEMBERS,
    SNAPSHOT,
    Ask,
    Current,
    Execute,
    FoundMembers,
    Heartbeat,
    Message,
    Part,
    Publish,
    TopicAnswer,
    Welcome,
    decode_found,
    encode,
)
from gateway.features.workers.metrics import WorkerMetrics
from gateway.fleet.membership import KEPT, SHOWN_S
from gateway.telemetry.exposition import SnapshotError, merge_slices, packed

log = logging.getLogger("warmroute.workers")

SWEEP_S = 60.0  # between two looks for counters of replicas that have left
FORGOTTEN_S = 2 * SHOWN_S + 60  # after that no worker counts for a replica that has left


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker.

    counters: its last snapshot, empty before the first. last_frame_at: time of its last frame. last_healthy_at: likewise, while
    it serves; until then the time when it was started. follows: it gets the events of others at once.
    """

    channel: Channel
    last_frame_at: float
    last_healthy_at: float
    serving: bool = False
    stopping: bool = False
    counters: bytes = b""
    reported: bool = False  # they were sent while it served: it knew all replicas by then
    follows: bool = False


class Hub:
    """See the top of this file."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        on_serving: Callable[[int], None],
        history_bytes: int = HISTORY_BYTES,
        begin_s: float = BEGIN_S,
    ) -> None:
        """on_serving: called for each worker that begins to serve. begin_s: that a new one waits for another one's snapshot."""
        self.config = config
        self.workers: dict[int, WorkerState] = {}
        self.ended = new_metrics()  # counters of the workers that have ended, and the supervisor's own
        self.history = BatchHistory(history_bytes)
        self.snapshots = HubSnapshots(self.healthy, begin_s)
        self.topics = Topics()  # the supervisor's own answers
        self.link: Link | None = None
        self._clock = clock
        self._on_serving = on_serving
        self._joined = 0
        self._commands = CommandLog()
        self._found: dict[str, FoundMembers] = {}  # the last one of each source
        self._swept_at = clock()
        self._departure: float | None = None  # the last time that replicas may have left; None: all of those are forgotten
        self._commanded = 0  # commands of its own
        self._leaving = False

    def join(self, channel: Channel) -> int:
        """A new worker. Returns its number, which no other has or had."""
        self._joined += 1
        worker = self._joined
        state = WorkerState(channel, last_frame_at=self._clock(), last_healthy_at=self._clock())
        channel.send(Welcome(encode_config(self.config)), worker)
        if self._leaving:
            channel.send(Publish(LEAVING))
        for found in self._found.values():
            channel.send(Publish(MEMBERS, encode(found)))
        for asker, payload in self._commands.replay(worker):
            channel.forward(payload, asker)
        self._broadcast(worker, encode(Want()))
        self.workers[worker] = state
        now = self.history.end
        self.snapshots.join(worker, channel, lambda covered: self._follow(worker, state, now if covered else 0, now))
        if self.link:
            self.link.want_open()
        channel.receive(lambda *frame: self._receive(worker, *frame), lambda: None)
        return worker

    def _follow(self, worker: int, state: WorkerState, since: int, joined: int) -> None:
        """A new worker gets the events from number `since` on, further ones at once. joined: their number when it joined."""
        self.history.forget(self._clock() - self.config.routing.ttl_s)
        for source, payload in self.history.since(since):
            state.channel.forward(payload, source)
        state.channel.send(Current())
        state.follows = True
        if self.history.begin > joined:  # there were too many: what is open, too, may have been among those that are lost
            self._broadcast(worker, encode(Want()), but=worker)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        state = self.workers.pop(worker)
        self.snapshots.leave(worker)
        state.channel.close()
        self._commands.ended(worker)
        self._add_ended(worker, state.counters)
        self.ended_elsewhere(worker)
        if self.link:
            self.link.reset(worker)

    def begin_leaving(self) -> None:
        """The whole gateway will go down."""
        self._leaving = True
        self._broadcast(HUB, encode(Publish(LEAVING)))

    # -- other gateways

    def publish(self, source: int, batch: EventBatch) -> None:
        """Events of another gateway's router, by a number that no worker has."""
        self._pass_on(source, encode(batch))

    def ended_elsewhere(self, source: int) -> None:
        """A router has ended."""
        self._pass_on(source, encode(Reset(ended=True)))

    def announce_newcomer(self) -> None:
        """A new router does not know the workers' open bookings: they publish them."""
        self._broadcast(HUB, encode(Want()))

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
            case EventBatch() | Reset():
                self._pass_on(worker, payload)
                if self.link and isinstance(message, EventBatch):
                    self.link.publish(worker, message)
                elif self.link:
                    self.link.reset(worker)
            case Publish(topic, content):
                self._published(worker, state, topic, content, payload)
            case Part():
                self.snapshots.receive(worker, message)
            case Heartbeat("serving" | "stopping" as what):
                self._serves(worker, state, what == "serving")
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
            self._remember_found(decode_found(content))
        else:
            self._broadcast(worker, payload, but=worker)

    def _ask(self, asker: int, ask: Ask, payload: bytes) -> None:
        """To all workers; but a question that the hub itself answers goes to none."""
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
            self.workers[worker].counters = answer.answer  # a shown count stays in the sum, also if the worker is killed now
        elif answer.topic == SNAPSHOT:
            self.snapshots.receive(worker, answer)
        elif self._commands.is_pending(asker, answer.number):
            accepted = answer.error is None and not answer.internal
            self._commands.answered(worker, asker, answer.number, accepted=accepted)
        if asker in self.workers:
            self.workers[asker].channel.forward(payload, worker)

    def _serves(self, worker: int, state: WorkerState, serving: bool) -> None:
        """It begins to serve, or drains."""
        state.stopping = state.stopping or not serving
        state.serving = not state.stopping  # it may have been stopped before it served
        if state.serving:
            self._on_serving(worker)

    def restarted(self) -> None:
        """A worker has ended unexpectedly."""
        self.ended.of(WorkerMetrics).restarts.add()

    def _execute(self, asker: int, execute: Execute, payload: bytes) -> None:
        """To all workers, the asker too. `payload`: the message, encoded."""
        command = execute.command
        if self._clock() > execute.until or (isinstance(command, Replayed) and self._commands.full):
            return  # the asker gets no answer of the hub, and gives up
        if asker in self.workers:
            asked = encode(dict.fromkeys(self.workers, b""))
            self.workers[asker].channel.send(TopicAnswer(execute.number, asked), HUB)
        if isinstance(command, Reconfigure):
            before, self.config = self.config, command.config(type(self.config))
            names = {*sources_of(self.config), KEPT}
            self._found = {name: found for name, found in self._found.items() if name in names}
            self._commands.reconfigured(before, self.config)
            self._departure = self._clock()
        elif isinstance(command, Replayed):
            if isinstance(command, Leave):
                self._departure = self._clock()
            self._commands.send(asker, execute.number, command, payload, self.workers)
        self._broadcast(asker, payload)

    def replica_urls(self) -> list[str]:
        """URLs of the configuration, and of the members that its sources have found last."""
        urls = [replica.url for pool in self.config.pools for replica in pool.replicas]
        for found in self._found.values():
            urls += [member.url for member in found.members]
        return list(dict.fromkeys(urls))

    def _pass_on(self, source: int, payload: bytes) -> None:
        """Events of a router, or its end, to all others; new workers get them from the history."""
        self.history.add(self._clock(), source, payload)
        for name, state in self.workers.items():
            if state.follows and name != source:
                state.channel.forward(payload, source)

    def _broadcast(self, worker: int, payload: bytes, but: int = HUB) -> None:
        """A message of `worker`, to all others but one."""
        for name, state in self.workers.items():
            if name != but:
                state.channel.forward(payload, worker)

    def _remember_found(self, found: FoundMembers) -> None:
        """For workers that are started while the source does not answer. Replicas may have left it."""
        self._found.pop(found.source, None)
        self._found[found.source] = found
        if len(self._found) > MAX_SOURCES + 1:
            del self._found[next(iter(self._found))]
        self._departure = self._clock()

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
        return f"<Hub of {', '.join(map(str, self.workers)) or 'no workers'}, {self.history!r}>"
