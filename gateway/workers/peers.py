"""A worker's side: it tells the others what its router books, does what theirs have booked, and asks them where it must.

What is booked goes out in batches, BATCH_S after the first of it: a system call for every event would cost more than the
decision, and every batch wakes the supervisor and all other workers. Each worker keeps the whole prefix index and all open
leases, so that choosing asks nobody; the price is that what one books all others book as well.

While the supervisor does not read, at most about UNSENT_BYTES wait for it: further events are dropped. When it reads again, one
RESYNC frame with the open bookings takes the place of all that was dropped. What only the prefix index would have learned from
the dropped events stays unknown to the other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import math
import pickle
from collections.abc import Callable
from dataclasses import replace

from gateway.config import Config
from gateway.errors import internal_error, supervisor_silent, workers_silent
from gateway.everywhere import Command, Drain, Join, Local, Take
from gateway.exposition import Shared, merge, pack, render
from gateway.metrics import Metrics
from gateway.tallies import MAX_LABEL_SETS
from gateway.typed import ConfigError
from gateway.workers.channel import (
    ALIVE,
    ANSWER,
    ASKED,
    COMMAND,
    CURRENT,
    EVENTS,
    GONE,
    HUB,
    JOINED,
    RESYNC,
    SCRAPE,
    TOLD,
    Channel,
)
from gateway.workers.commands import DRAIN, REPLICA
from router.follow import Follower, Journal

log = logging.getLogger("warmroute.workers")

BATCH_S = 0.02
TELL_S = 0.1, 1.0  # the pause after counters were told; then this long again while no request is routed
TELL_SHARE = 0.01  # of the time, as far as TELL_MOST_S allows
TELL_MOST_S = 0.5  # from one time to the next while requests are routed: what was not told is lost with a worker that is killed
SCRAPE_S = 2.0  # who does not answer by then is counted as it told last
COMMAND_S = 30.0  # a replica that joins is asked first
PASSED_ON_S = 3.0  # the supervisor passes a question on within this time, or it is not asked at all
ALIVE_S = 0.5  # between two signs of life
UNSENT_BYTES = 8 << 20
RESYNC_S = 0.5  # how often it looks whether the supervisor reads again
BUG = ""  # the answer to a command that failed for no good reason


def part_of(config: Config) -> Config:
    """A worker's part of what is bounded for the whole gateway, but for the places in pools, which they share."""

    def part(whole: int) -> int:
        return math.ceil(whole / config.workers)

    pools = tuple(replace(pool, max_queue=part(pool.max_queue)) for pool in config.pools)
    return replace(config, pools=pools, limits=replace(config.limits, connections=part(config.limits.connections)))


class _Asking:
    """A question to all workers.

    known: the last snapshot of each worker that was asked, None until the supervisor has passed the question on. answers: by
    worker.
    """

    def __init__(self) -> None:
        self.passed_on = asyncio.Event()
        self.known: dict[int, bytes] | None = None
        self.answers: dict[int, bytes] = {}
        self.all_answered = asyncio.Event()

    @property
    def silent(self) -> list[int]:
        """The workers that have not answered."""
        return sorted((self.known or {}).keys() - self.answers.keys())

    def look(self) -> None:
        if self.known is not None:
            self.passed_on.set()
        if self.known is not None and self.known.keys() <= self.answers.keys():
            self.all_answered.set()

    def gone(self, who: int) -> None:
        if self.known is not None:
            self.known.pop(who, None)
            self.look()


class Peers:
    """See the top of this file; `Everywhere`, for the rest of this worker. Made within the event loop."""

    def __init__(self, local: Local, channel: Channel, orphaned: Callable[[], None]) -> None:
        """orphaned: the supervisor is gone."""
        self.follower = Follower(local.router)
        self._local = local
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._journal = Journal(self._wake)
        self._since = 0.0  # the first of what it has to tell
        self._resyncing = False  # events are dropped until the supervisor has read what waits for it
        self._busy = asyncio.Event()  # something was booked since the counters were told
        self._current = asyncio.Event()
        self._early: list[tuple[int, int, bytes]] | None = []  # what came before the commands in force were done
        self._commands: asyncio.Queue[tuple[int, int, int, bytes]] = asyncio.Queue()
        self._scrapes: set[tuple[int, int]] = set()  # (asker, its number) of those that want this worker's counters
        self._scraped = asyncio.Event()  # there are some
        self._pages = Shared(self._page)
        self._questions = 0
        self._asking: dict[int, _Asking] = {}
        local.router.journal = self._journal
        channel.receive(self._receive, orphaned)

    # -- what this worker does

    def _wake(self) -> None:
        self._since = self._local.clock()
        self._loop.call_later(BATCH_S, self._flush)

    def _flush(self) -> None:
        self._busy.set()
        events = self._journal.take()
        if self._resyncing:
            return
        if self._channel.unsent > UNSENT_BYTES:
            log.warning("the supervisor does not read: events are dropped", extra={"unsent_bytes": self._channel.unsent})
            self._resyncing = True
            self._loop.call_later(RESYNC_S, self._resync)
            return
        self._channel.send(EVENTS, HUB, 0, marshal.dumps((self._since, events)))

    def _resync(self) -> None:
        if self._channel.unsent:
            self._loop.call_later(RESYNC_S, self._resync)
            return
        self._resyncing = False
        self._journal.take()  # what it has to tell is part of what is open
        self._channel.send(RESYNC, HUB, 0, marshal.dumps((self._local.clock(), self._journal.still_open())))

    # -- what the others say

    def _receive(self, kind: int, who: int, number: int, payload: bytes) -> None:
        if kind in (EVENTS, GONE, RESYNC):
            if self._early is None:
                self._follow(kind, who, payload)
            else:
                self._early.append((kind, who, payload))
        elif kind == SCRAPE:
            self._scrapes.add((who, number))
            self._scraped.set()
        elif kind in (COMMAND, CURRENT):
            self._commands.put_nowait((kind, who, number, payload))
        elif kind == JOINED and self._journal.open and not self._resyncing:
            self._channel.send(EVENTS, HUB, 0, marshal.dumps((self._local.clock(), self._journal.still_open())))
        elif asking := self._asking.get(number):
            if kind == ASKED:
                asking.known = pickle.loads(payload)
            elif kind == ANSWER:
                asking.answers[who] = payload
            asking.look()

    def _follow(self, kind: int, who: int, payload: bytes) -> None:
        if kind == GONE:
            self.follower.gone(who, self._local.clock())
            for asking in self._asking.values():
                asking.gone(who)
        else:
            since, events = marshal.loads(payload)
            if kind == RESYNC:
                self.follower.gone(who, since)
            for name in self.follower.apply(who, events):
                self._local.fleet.zero_hits(name)
            if self._early is None:
                self._local.metrics.worker_lag_seconds.observe((), self._local.clock() - since)
        self._share_places()

    def _catch_up(self) -> None:
        """The commands in force are done; so is, from here on, whatever comes."""
        for kind, who, payload in self._early or ():
            self._follow(kind, who, payload)
        self._early = None
        self._current.set()

    def _share_places(self) -> None:
        ledger = self._local.router.ledger
        for pool in self._local.fleet.pools:
            pool.admission.others(sum(ledger.of(state.name).elsewhere for state in pool.replicas))

    # -- everywhere

    async def do(self, command: Command) -> None:
        """Also raises GatewayError 503: nobody was asked, or not all of them have answered."""
        until = self._local.clock() + PASSED_ON_S
        asking = await self._ask(COMMAND, pickle.dumps((_key(command), command, until)), COMMAND_S)
        for answer in asking.answers.values():
            error = pickle.loads(answer)
            if error is not None:
                raise internal_error() if error == BUG else ConfigError(error)
        if asking.silent:
            raise workers_silent(asking.silent)

    async def page(self) -> bytes:
        """Also raises GatewayError 503: nobody was asked."""
        return await self._pages.get()

    async def _page(self) -> bytes:
        asking = await self._ask(SCRAPE, b"", SCRAPE_S)
        answers = {**(asking.known or {}), **asking.answers}
        whole = Metrics().page
        whole.hold(MAX_LABEL_SETS * (len(answers) + 1))  # each has folded its own: what is left is no more than that
        for who, answer in answers.items():
            if answer:
                await merge(whole, answer, ended=who == HUB)
        return await render(whole)

    async def _ask(self, kind: int, payload: bytes, timeout_s: float) -> _Asking:
        """Ask all workers, this one too, and wait for their answers, `timeout_s` at most. Raises GatewayError 503."""
        if self._channel.unsent > UNSENT_BYTES:
            raise supervisor_silent()
        self._questions += 1
        number, asking = self._questions, _Asking()
        self._asking[number] = asking
        self._channel.send(kind, HUB, number, payload)
        try:
            async with asyncio.timeout(PASSED_ON_S + 1.0):  # it may be passed on in the last moment
                await asking.passed_on.wait()
            async with asyncio.timeout(timeout_s):
                await asking.all_answered.wait()
        except TimeoutError:
            if asking.known is None:
                log.warning("the supervisor does not answer")
                raise supervisor_silent() from None
            log.warning("not all workers answer", extra={"silent": asking.silent})
        finally:
            del self._asking[number]
        return asking

    async def ready(self) -> None:
        await self._current.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_alive())
            group.create_task(self._keep_telling())
            group.create_task(self._keep_doing())
            group.create_task(self._keep_answering())

    async def _keep_alive(self) -> None:
        """The supervisor gives this worker's connections to others when it hears nothing (`handover.py`)."""
        while True:
            if not self._channel.unsent:
                self._channel.send(ALIVE)
            await asyncio.sleep(ALIVE_S)

    async def _keep_telling(self) -> None:
        busy_s, idle_s = TELL_S
        while True:
            begun = self._local.clock()
            if not self._channel.unsent:
                self._busy.clear()
                self._channel.send(TOLD, HUB, 0, await pack(self._local.page()))
            took_s = self._local.clock() - begun  # with the requests that had their turns meanwhile
            await asyncio.sleep(max(busy_s, min(TELL_MOST_S, took_s / TELL_SHARE) - took_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._busy.wait()

    async def _keep_answering(self) -> None:
        """Send this worker's counters to the workers that are asked for a page; one copy for all that wait."""
        while True:
            await self._scraped.wait()
            self._scraped.clear()
            scrapes, self._scrapes = self._scrapes, set()
            payload = await pack(self._local.page())
            for who, number in scrapes:
                self._channel.send(ANSWER, who, number, payload)

    async def _keep_doing(self) -> None:
        """Commands, in the order that is the same for all workers."""
        await self._replay()
        self._catch_up()
        while True:
            _, who, number, payload = await self._commands.get()
            command = pickle.loads(payload)[1]
            if isinstance(command, Take):
                command = Take(part_of(command.config))
            error: str | None = None
            try:
                await self._local.do(command)
            except ConfigError as wrong:
                error = str(wrong)
            except Exception:  # a bug in one command must not end the obeying
                log.exception("command failed")
                error = BUG
            self._channel.send(ANSWER, who, number, pickle.dumps(error))

    async def _replay(self) -> None:
        """The commands from before this worker was started: all up to CURRENT."""
        before: list[Drain | Join] = []
        while (frame := await self._commands.get())[0] == COMMAND:
            command = pickle.loads(frame[3])[1]
            if isinstance(command, Drain | Join):
                before.append(command)
        try:
            await self._local.replay(before)
        except Exception:  # a bug here must not keep the worker from serving
            log.exception("replay of commands failed")

    def __repr__(self) -> str:
        return f"<Peers, {self._journal!r}, {self.follower!r}>"


def _key(command: Command) -> str:
    """What a command is about: a later one on the same makes it pointless."""
    match command:
        case Drain(name, _):
            return f"{DRAIN}{name}"
        case Join(_, replica):
            return f"{REPLICA}{replica.name}"
    return "configuration"
