"""`workers: N`: starts N workers, replaces ended ones, and stops them together. It serves no request itself.

An ended worker is replaced at once, a short-lived one after a growing pause. A worker without a heartbeat for `hung_s`, or with
an unread channel, is killed, and so replaced. Other workers get its new connections (`handover.py`) after `silent_s` of
silence, or at once when it has ended. The configuration is read here, and sent to all workers in one order with the commands of
operators.
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

from gateway.cluster.listeners import Address, addresses_of, listen, refuse_new, url_of
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

HEALTHY_S = 1.5  # workers with a heartbeat within this time (three heartbeats) get connections of others
LOOK_S = 0.5
CHANNEL_UNSENT_BYTES = 64 << 20
CRASH_PAUSE_S = 0.1  # pause in which workers that crash together all end, because connections passed to a dying worker are lost
HAND_OVER_S = 0.2  # time to pass on connections before their listener is closed
TRIES = 3  # short-lived workers before the start has failed
# A stop takes at most limits.drain_timeout_s and this time: the last snapshot (5 s), the workers' ends, and CLOSE_S. The grace
# periods of the chart and of docs/operations.md ("Going down") rely on it.
END_S = 10.0
CLOSE_S = 2.0  # part of END_S, for the goodbye to other gateways, and the last log lines
HURRY_S = 7.0  # time for a worker to end without waiting for requests

# The child imports modules from the same paths as this process, independent of its working directory.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gateway.features.workers.worker import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits for workers, in seconds.

    hung_s: without a heartbeat for this time, a worker is killed. start_s: likewise before its first one, because a start takes
    long on a busy machine. silent_s: without a heartbeat, or without serving, for this time, other workers also get its new
    connections. short_life_s: a worker that ends earlier was short-lived. pause_s: before a short-lived worker is replaced:
    first, longest.
    """

    hung_s: float = 30.0
    start_s: float = 300.0
    silent_s: float = 2.5
    short_life_s: float = 5.0
    pause_s: tuple[float, float] = 0.5, 30.0


PATIENCE = Patience()


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One of the N workers, with its successors.

    worker: its number at the hub. handover_socket: to its Receiver. handover: while open, passes its connections to others.
    """

    listeners: Sequence[socket.socket] = ()
    process: asyncio.subprocess.Process | None = None
    worker: int = 0
    handover_socket: socket.socket | None = None
    handover: Handover | None = None
    short_lives: int = 0  # consecutive
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    def send_signal(self, number: int) -> None:
        """Sends a signal to its process, if there is one."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its last messages are still being read
                self.process.send_signal(number)

    def close(self) -> None:
        """Closes the listeners."""
        self.stop_handover()
        for listener in self.listeners:
            listener.close()
        self.listeners = ()

    def stop_handover(self) -> None:
        """Leaves its connections to itself."""
        if self.handover:
            self.handover.close()
            self.handover = None


class Supervisor:
    """To be created in the event loop."""

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
        """sides: the sockets for operators and for Prometheus, on which all workers accept. snapshot: the file read at start
        and written at the end. boot: returns the Python program of the next worker. slots: one per worker, set by `run`.
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
        self._served = False  # all workers have served at the same time
        self._stopping = asyncio.Event()
        self._addresses: Sequence[tuple[int, Address]] = ()

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, started: Callable[[str], None]) -> None:
        """Runs until `stop` is set and every worker has ended. started: called with the base URL when all of them serve.

        Raises OSError if the address cannot be bound, StartError if no worker can be started.
        """
        self._addresses = addresses_of(*self._config.address)
        lasting = asyncio.create_task(self._lasting.run())
        try:
            self.hub.snapshots.first = await unless(stop, self._lasting.snapshots()) or ()
            if not stop.is_set():
                await self._run_workers(stop, hurry, started)
        finally:
            await self._lasting.close()
            lasting.cancel()
            await asyncio.gather(lasting, return_exceptions=True)

    async def _run_workers(self, stop: asyncio.Event, hurry: asyncio.Event, started: Callable[[str], None]) -> None:
        self.slots = [WorkerSlot(listen(self._addresses)) for _ in range(WORKERS.of(self._config))]
        keepers = [asyncio.create_task(self._keep_running(slot)) for slot in self.slots]
        watchers = [asyncio.create_task(self._watch_workers()), asyncio.create_task(self._watch_source())]
        due: float | None = None  # when the workers should have ended, plus the drain time
        try:
            if await self._all_up(stop):
                self.hub.snapshots.first, self.hub.snapshots.again = (), self._lasting.snapshots
                self._lasting.started()
                started(url_of(self._addresses[0][1], secure=self._config.tls.on))
            await stop.wait()
            due = time.monotonic() + END_S - CLOSE_S
            if self._served:  # otherwise the workers have only a part of the file's prefixes
                await unless(hurry, self._save_snapshot())
        finally:
            self._stopping.set()
            for task in watchers:
                task.cancel()
            for slot in self.slots:
                for listener in slot.listeners:
                    refuse_new(listener)
                slot.close()  # the workers accept the established connections
            await self._end(keepers, hurry, due or time.monotonic() + END_S - CLOSE_S)
            await asyncio.gather(*watchers, return_exceptions=True)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.hub.config

    def begin_leaving(self) -> None:
        """Announces the shutdown. Until `stop` is set, requests are served."""
        self.hub.begin_leaving()

    async def _save_snapshot(self) -> None:
        """Saves the snapshot before the workers end, because they provide it."""
        await asyncio.sleep(BOOKED_S)
        await self._lasting.keep()

    async def _all_up(self, stop: asyncio.Event) -> bool:
        """Waits until all serve. False: `stop` was set. Raises StartError."""
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

    async def _keep_running(self, slot: WorkerSlot) -> None:
        """Keeps a worker running in this slot until the gateway stops."""
        while not self._stopping.is_set():
            started, status, problem = time.monotonic(), 0, ""
            try:
                status = await self._run_worker(slot)
            except OSError as error:  # lack of processes or sockets may be temporary
                problem = str(error)
            if self._stopping.is_set():
                return
            slot.short_lives = slot.short_lives + 1 if time.monotonic() - started < self._patience.short_life_s else 0
            lives = {"short_lives": slot.short_lives}
            if problem:
                log.error("worker could not be started", extra={"error": problem, **lives})
            else:
                log.error("worker ended", extra={"worker": slot.worker, "status": status, **lives})
                self.hub.count_restart()
            await self._stops_within(CRASH_PAUSE_S)
            self._hand_over(slot)
            if not self._served and slot.short_lives >= TRIES:
                slot.failed.set()
                return
            if slot.short_lives > 1:
                await self._pause(slot)

    async def _pause(self, slot: WorkerSlot) -> None:
        """Waits before the next attempt. If another worker is healthy, connections are passed to it, and the listener is
        closed. Otherwise they wait here, for the first healthy worker or for this worker's successor.
        """
        first_s, longest_s = self._patience.pause_s
        due = time.monotonic() + min(longest_s, first_s * 2.0 ** min(slot.short_lives - 2, 30))
        while not self._stopping.is_set() and (left_s := due - time.monotonic()) > 0:
            if not slot.listeners or not self._receivers():
                await self._stops_within(min(LOOK_S, left_s))
                continue
            if not (slot.handover and slot.handover.open):
                self._hand_over(slot)
            await self._stops_within(min(HAND_OVER_S, left_s))
            if (
                self._receivers() and slot.handover and not slot.handover.has_waiting()
            ):  # closing would reset waiting connections
                slot.close()

    async def _stops_within(self, seconds: float) -> None:
        """Waits for `seconds`, or until the gateway stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _run_worker(self, slot: WorkerSlot) -> int:
        """Runs one worker. Returns its exit status, as `subprocess` does."""
        slot.listeners = slot.listeners or listen(self._addresses)
        ours, its = socket.socketpair()
        slot.handover_socket, handed = socket.socketpair()
        slot.handover_socket.setblocking(False)
        try:
            sockets = [*(("clients", listener) for listener in slot.listeners), *self._sides, ("handed", handed)]
            files = [its.fileno(), *(each.fileno() for _, each in sockets)]
            names = (f"{name}={each.fileno()}" for name, each in sockets)
            command = [sys.executable, "-c", self._boot(), json.dumps(sys.path), str(its.fileno()), self._gateway_id, *names]
            # In its own session, because the terminal's signals are for the supervisor.
            slot.process = await asyncio.create_subprocess_exec(
                *command, pass_fds=files, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        finally:
            its.close()
            handed.close()
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: Channel(from_worker), sock=ours)
        slot.worker = self.hub.join(channel)
        log.info("worker started", extra={"worker": slot.worker, "pid": slot.process.pid})
        if self._stopping.is_set():  # the stop came while the worker was starting
            slot.send_signal(signal.SIGTERM)
        try:
            status = await slot.process.wait()
            await channel.closed.wait()  # until its last messages are read
            return status
        finally:
            slot.process = None
            slot.handover_socket.close()
            slot.handover_socket = None
            self.hub.leave(slot.worker)

    async def _watch_workers(self) -> None:
        due = time.monotonic() + LOOK_S
        while True:
            await asyncio.sleep(LOOK_S)
            late_s = time.monotonic() - due
            if late_s > LOOK_S:  # this process was suspended, so it may not have read their heartbeats
                self.hub.excuse_pause(late_s)
            due = time.monotonic() + LOOK_S
            try:
                self._kill_hung()
                self._share_connections()
                self.hub.sweep()
            except Exception:  # a bug must not stop the watching
                log.exception("watching the workers failed")

    def _kill_hung(self) -> None:
        silent = set(self.hub.silent(self._patience.hung_s, self._patience.start_s))
        for slot in self.slots:
            state = self.hub.workers.get(slot.worker)
            if state and slot.process and (slot.worker in silent or state.channel.unsent > CHANNEL_UNSENT_BYTES):
                log.error("worker hangs: it is killed", extra={"worker": slot.worker, "pid": slot.process.pid})
                slot.send_signal(signal.SIGKILL)

    def _share_connections(self) -> None:
        """Passes connections of workers that do not accept to healthy workers, if there are any."""
        healthy, unhealthy = set(self.hub.healthy(HEALTHY_S)), set(self.hub.unhealthy(self._patience.silent_s))
        for slot in self.slots:
            if slot.worker in healthy:
                slot.stop_handover()
            elif slot.worker in unhealthy and healthy and slot.listeners and not (slot.handover and slot.handover.open):
                if slot.handover is None:
                    serving = self.hub.workers[slot.worker].serving
                    level, state = (logging.WARNING, "silent") if serving else (logging.INFO, "not serving")
                    log.log(level, f"worker is {state}: others take its new connections", extra={"worker": slot.worker})
                self._hand_over(slot)

    def _hand_over(self, slot: WorkerSlot) -> None:
        """Passes new connections of this worker to others, until it is healthy (`_share_connections`)."""
        slot.stop_handover()
        slot.handover = Handover(slot.listeners, self._receivers)

    def _receivers(self) -> Sequence[socket.socket]:
        healthy = set(self.hub.healthy(HEALTHY_S))
        return [slot.handover_socket for slot in self.slots if slot.handover_socket and slot.worker in healthy]

    # -- all of them

    async def _watch_source(self) -> None:
        while self._source is not None:
            try:
                config = await self._source.next()
            except ConfigError as error:
                self.hub.command(RejectConfig(str(error)))
            except Exception:  # a bug must not stop the watching
                log.exception("reload failed")
            else:
                self.hub.command(Reconfigure.to(possible(self.hub.config, config)))

    def _signal(self, number: int) -> None:
        for slot in self.slots:
            slot.send_signal(number)

    async def _end(self, keepers: Sequence[asyncio.Task[None]], hurry: asyncio.Event, due: float) -> None:
        """Waits for the workers' requests within their time limit, then kills the remaining workers."""
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
