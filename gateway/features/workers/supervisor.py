"""`workers: N`: starts N workers, replaces those that end, and takes them down together. It serves no request itself.

A worker that ends is replaced at once, one that does not live long after a pause that grows. One without a heartbeat for
`hung_s`, or that does not read its channel, is killed, and so replaced. Other workers get its new connections (`handover.py`)
after `silent_s` of silence, or at once when it has ended. The configuration is read here, and goes to all workers in one order
with what operators want.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.cluster.listeners import Address, addresses_of, listen, url_of
from gateway.cluster.messages import Reconfigure, RejectConfig
from gateway.cluster.reload import possible
from gateway.cluster.side_sockets import NO_SIDES, SideSockets
from gateway.commands.serving import StartError
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.source import ConfigSource
from gateway.features.sharing.link import link_of
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.state import TOPIC
from gateway.features.snapshots.keeper import Keeper, SnapshotFile
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.snapshot import format_of
from gateway.features.snapshots.warm_start import WarmStart
from gateway.features.workers.channel import Channel
from gateway.features.workers.handover import Handover
from gateway.features.workers.hub import Hub
from gateway.features.workers.hub_knowledge import BOOKED_S
from gateway.features.workers.messages import from_worker
from gateway.features.workers.section import WORKERS
from gateway.features.workers.sharing import HubRouters
from gateway.tasks import unless
from gateway.upstream.loop_guard import new_id

log = logging.getLogger("warmroute.workers")

WELL_S = 1.5  # workers with a heartbeat within that time may get them; three heartbeats
LOOK_S = 0.5
CHANNEL_UNSENT_BYTES = 64 << 20
TOGETHER_S = 0.1  # in which workers that crash together are all seen to have ended: what is passed to a dying one is lost
HAND_OVER_S = 0.2  # that connections get to be passed on before their listener is closed
TRIES = 3  # to start a worker, before anything has served
# A stop takes limits.drain_timeout_s and this long at most: the last snapshot (5 s), the workers' ends, and CLOSE_S. The grace
# periods of the chart and of docs/operations.md ("Going down") rely on it.
END_S = 10.0
CLOSE_S = 2.0  # of it, for the goodbye to other gateways, and the last lines of the log
HURRY_S = 7.0  # that a worker takes to end when it does not wait for requests

# The child finds its modules where we found ours, whatever its working directory is.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gateway.features.workers.worker import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Patience:
    """With workers, in seconds.

    hung_s: without a heartbeat, then it is killed. silent_s: without one, or without serving, then its new connections go to
    the others as well.
    short_life_s: what ends before that did not live long. pause_s: before such a worker is replaced: at first, at most.
    """

    hung_s: float = 30.0
    silent_s: float = 2.5
    short_life_s: float = 5.0
    pause_s: tuple[float, float] = 0.5, 30.0


PATIENCE = Patience()


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The place of one of the N workers, which successors take over.

    worker: its number at the hub. handing: leads to its Receiver. handover: gives its connections to others, while it is open.
    """

    listeners: Sequence[socket.socket] = ()
    process: asyncio.subprocess.Process | None = None
    worker: int = 0
    handing: socket.socket | None = None
    handover: Handover | None = None
    short_lives: int = 0  # in a row
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    def send_signal(self, number: int) -> None:
        """To its process, if there is one."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its last messages are being read
                self.process.send_signal(number)

    def close(self) -> None:
        """No connection can be made here any more."""
        self.keep()
        for listener in self.listeners:
            listener.close()
        self.listeners = ()

    def keep(self) -> None:
        """Its connections are for itself only."""
        if self.handover:
            self.handover.close()
            self.handover = None


class Supervisor:
    """See the top of this file. Made within the event loop."""

    def __init__(
        self,
        config: Config,
        source: ConfigSource[Config] | None,
        *,
        sides: SideSockets = NO_SIDES,
        snapshot: SnapshotFile | None = None,
        patience: Patience = PATIENCE,
        boot: Callable[[], str] = lambda: BOOT,
    ) -> None:
        """sides: the sockets for operators and for Prometheus, on which all workers accept. snapshot: what the first workers
        begin with, and the last ones leave. boot: the Python program that the next worker runs. slots: one for each worker,
        filled by `run`.
        """
        self.slots: list[WorkerSlot] = []
        self.hub = Hub(config, time.monotonic, self._on_serving)
        self._config = config
        self._source = source
        self._sides = sides
        routers = HubRouters(self.hub)
        link = self.hub.link = link_of(config, routers, self.hub.ended.of(SharingMetrics))
        if link:
            self.hub.topics.answers(TOPIC, link.describe)
        keeper = Keeper(snapshot, routers.collect, self.hub.ended.of(SnapshotMetrics)) if snapshot else None
        self._lasting = WarmStart(format_of(config.routing), keeper, link)
        self._gateway_id = new_id()
        self._patience = patience
        self._boot = boot
        self._all_serve = asyncio.Event()
        self._served = False  # all of them did, once
        self._stopping = asyncio.Event()
        self._addresses: Sequence[tuple[int, Address]] = ()

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, started: Callable[[str], None]) -> None:
        """Until `stop` is set and every worker has ended. started: is called with the base URL once all of them serve.

        Raises OSError if the address cannot be had, StartError if no worker can be started.
        """
        self._addresses = addresses_of(*self._config.address)
        lasting = asyncio.create_task(self._lasting.run())
        try:
            self.hub.snapshots.first = await unless(stop, self._lasting.first()) or ()
            if not stop.is_set():
                await self._run_workers(stop, hurry, started)
        finally:
            await self._lasting.close()
            lasting.cancel()
            await asyncio.gather(lasting, return_exceptions=True)

    async def _run_workers(self, stop: asyncio.Event, hurry: asyncio.Event, started: Callable[[str], None]) -> None:
        self.slots = [WorkerSlot(listen(self._addresses)) for _ in range(WORKERS.of(self._config))]
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self.slots]
        beside = [asyncio.create_task(self._watch_workers()), asyncio.create_task(self._watch_source())]
        due: float | None = None  # when the workers should have ended, beside the time that their requests have
        try:
            if await self._all_up(stop):
                self.hub.snapshots.first, self.hub.snapshots.again = (), self._lasting.first
                self._lasting.begun()
                started(url_of(self._addresses[0][1]))
            await stop.wait()
            due = time.monotonic() + END_S - CLOSE_S
            if self._served:  # else the workers know only a part of the file
                await unless(hurry, self._keep_knowledge())
        finally:
            self._stopping.set()
            for task in beside:
                task.cancel()
            for slot in self.slots:
                slot.close()  # the workers accept what is established
            await self._end(keepers, hurry, due or time.monotonic() + END_S - CLOSE_S)
            await asyncio.gather(*beside, return_exceptions=True)

    @property
    def config(self) -> Config:
        """The one in force."""
        return self.hub.config

    def begin_leaving(self) -> None:
        """The gateway will go down; until `stop` is set it serves whatever comes."""
        self.hub.begin_leaving()

    async def _keep_knowledge(self) -> None:
        """Before the workers end, for they are asked."""
        await asyncio.sleep(BOOKED_S)
        await self._lasting.keep()

    async def _all_up(self, stop: asyncio.Event) -> bool:
        """Wait until all serve. False if they need not any more. Raises StartError."""
        events = [self._all_serve, stop, *(slot.failed for slot in self.slots)]
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._all_serve.is_set():
            self._served = True
        elif not stop.is_set():
            raise StartError(f"a worker ended {TRIES} times before it could serve; see the log")
        return self._served

    def _on_serving(self, _who: int) -> None:
        serving = sum(state.serving for state in self.hub.workers.values())
        if serving == len(self.slots):
            self._all_serve.set()

    # -- one worker

    async def _keep(self, slot: WorkerSlot) -> None:
        """Have a worker in this slot until all go down."""
        while not self._stopping.is_set():
            started, status, problem = time.monotonic(), 0, ""
            try:
                status = await self._live(slot)
            except OSError as error:  # no process, no socket: maybe later
                problem = str(error)
            if self._stopping.is_set():
                return
            slot.short_lives = slot.short_lives + 1 if time.monotonic() - started < self._patience.short_life_s else 0
            lives = {"short_lives": slot.short_lives}
            if problem:
                log.error("worker could not be started", extra={"error": problem, **lives})
            else:
                log.error("worker ended", extra={"worker": slot.worker, "status": status, **lives})
                self.hub.restarted()
            await self._stops_within(TOGETHER_S)
            self._hand_over(slot)
            if not self._served and slot.short_lives >= TRIES:
                slot.failed.set()
                return
            if slot.short_lives > 1:
                await self._pause(slot)

    async def _pause(self, slot: WorkerSlot) -> None:
        """Before the next try. As soon as another worker is well, connections are for the others, and the listener is closed.
        While none is, they wait here: for the first that is, or for this worker's successor.
        """
        least, most = self._patience.pause_s
        due = time.monotonic() + min(most, least * 2.0 ** min(slot.short_lives - 2, 30))
        while not self._stopping.is_set() and (left_s := due - time.monotonic()) > 0:
            if not slot.listeners or not self._receivers():
                await self._stops_within(min(LOOK_S, left_s))
                continue
            if not (slot.handover and slot.handover.open):
                self._hand_over(slot)
            await self._stops_within(min(HAND_OVER_S, left_s))
            if self._receivers() and slot.handover and not slot.handover.waits():  # to close resets those that wait
                slot.close()

    async def _stops_within(self, seconds: float) -> None:
        """Wait for `seconds`, or until all go down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _live(self, slot: WorkerSlot) -> int:
        """One worker's life. Returns how it ended, as `subprocess` has it."""
        slot.listeners = slot.listeners or listen(self._addresses)
        ours, its = socket.socketpair()
        slot.handing, handed = socket.socketpair()
        slot.handing.setblocking(False)
        try:
            sockets = [*(("clients", listener) for listener in slot.listeners), *self._sides, ("handed", handed)]
            files = [its.fileno(), *(each.fileno() for _, each in sockets)]
            names = (f"{name}={each.fileno()}" for name, each in sockets)
            command = [sys.executable, "-c", self._boot(), json.dumps(sys.path), str(its.fileno()), self._gateway_id, *names]
            # In a session of its own: the terminal's signals are for the supervisor.
            slot.process = await asyncio.create_subprocess_exec(
                *command, pass_fds=files, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        finally:
            its.close()
            handed.close()
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: Channel(from_worker), sock=ours)
        slot.worker = self.hub.join(channel)
        log.info("worker started", extra={"worker": slot.worker, "pid": slot.process.pid})
        if self._stopping.is_set():  # it was asked for while it was being started
            slot.send_signal(signal.SIGTERM)
        try:
            status = await slot.process.wait()
            await channel.closed.wait()  # its last messages are read
            return status
        finally:
            slot.process = None
            slot.handing.close()
            slot.handing = None
            self.hub.leave(slot.worker)

    async def _watch_workers(self) -> None:
        due = time.monotonic() + LOOK_S
        while True:
            await asyncio.sleep(LOOK_S)
            late_s = time.monotonic() - due
            if late_s > LOOK_S:  # it was stopped, or has no CPU: it may not have read what they sent
                self.hub.credit_pause(late_s)
            due = time.monotonic() + LOOK_S
            try:
                self._kill_hung()
                self._relieve()
                self.hub.sweep()
            except Exception:  # a bug in one look must not end the watching
                log.exception("watching the workers failed")

    def _kill_hung(self) -> None:
        silent = set(self.hub.silent(self._patience.hung_s))
        for slot in self.slots:
            state = self.hub.workers.get(slot.worker)
            if state and slot.process and (slot.worker in silent or state.channel.unsent > CHANNEL_UNSENT_BYTES):
                log.error("worker hangs: it is killed", extra={"worker": slot.worker, "pid": slot.process.pid})
                slot.send_signal(signal.SIGKILL)

    def _relieve(self) -> None:
        """Have the connections of workers that do not accept accepted by others, if there are any that do."""
        well, unwell = set(self.hub.healthy(WELL_S)), set(self.hub.unhealthy(self._patience.silent_s))
        for slot in self.slots:
            if slot.worker in well:
                slot.keep()
            elif slot.worker in unwell and well and slot.listeners and not (slot.handover and slot.handover.open):
                if slot.handover is None:
                    serving = self.hub.workers[slot.worker].serving
                    level, state = (logging.WARNING, "silent") if serving else (logging.INFO, "not serving")
                    log.log(level, f"worker is {state}: others take its new connections", extra={"worker": slot.worker})
                self._hand_over(slot)

    def _hand_over(self, slot: WorkerSlot) -> None:
        """Other workers get its new connections, until it is well: `_relieve`."""
        slot.keep()
        slot.handover = Handover(slot.listeners, self._receivers)

    def _receivers(self) -> Sequence[socket.socket]:
        well = set(self.hub.healthy(WELL_S))
        return [slot.handing for slot in self.slots if slot.handing and slot.worker in well]

    # -- all of them

    async def _watch_source(self) -> None:
        while self._source is not None:
            try:
                config = await self._source.next()
            except ConfigError as error:
                self.hub.command(RejectConfig(str(error)))
            except Exception:  # a bug in one reading must not end the watching
                log.exception("reload failed")
            else:
                self.hub.command(Reconfigure.to(possible(self.hub.config, config)))

    def _signal(self, number: int) -> None:
        for slot in self.slots:
            slot.send_signal(number)

    async def _end(self, keepers: Sequence[asyncio.Task[None]], hurry: asyncio.Event, due: float) -> None:
        """Let the workers' requests finish, for as long as they may; then kill the rest."""
        self._signal(signal.SIGTERM)
        ended = asyncio.ensure_future(asyncio.wait(keepers))
        hurried = asyncio.ensure_future(hurry.wait())
        patience_s = max(0.0, due - time.monotonic()) + self.hub.config.limits.drain_timeout_s
        await asyncio.wait([ended, hurried], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set() and not ended.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait([ended], timeout=HURRY_S)
        hurried.cancel()
        self._signal(signal.SIGKILL)
        await ended
