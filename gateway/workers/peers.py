"""A worker's side: it tells the others what its router books, does what theirs have booked, and asks them where it must.

What is booked goes out in batches, BATCH_S after the first of it: a system call for every event would cost more than the
decision, and every batch wakes the supervisor and all other workers. Each worker keeps the whole prefix index and all open
leases, so that choosing asks nobody; the price is that what one books all others book as well.
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
from gateway.errors import internal_error
from gateway.everywhere import Command, Drain, Join, Local, Take
from gateway.exposition import Shared, merge, pack, render
from gateway.metrics import Metrics
from gateway.tallies import MAX_LABEL_SETS
from gateway.typed import ConfigError
from gateway.workers.channel import (
    ANSWER,
    ASKED,
    COMMAND,
    CURRENT,
    EVENTS,
    GONE,
    HUB,
    JOINED,
    SCRAPE,
    TOLD,
    Channel,
)
from router.follow import Follower, Journal

log = logging.getLogger("warmroute.workers")

BATCH_S = 0.02
TELL_S = 0.1, 1.0  # how often counters are told: while there are requests, and without any
TELL_SHARE = 0.01  # of the time, at most
SCRAPE_S = 2.0  # who does not answer by then is counted as it told last
COMMAND_S = 30.0  # a replica that joins is asked first
BUG = ""  # the answer to a command that failed for no good reason


def part_of(config: Config) -> Config:
    """A worker's part of what is bounded for the whole gateway, but for the places in pools, which they share."""

    def part(whole: int) -> int:
        return math.ceil(whole / config.workers)

    pools = tuple(replace(pool, max_queue=part(pool.max_queue)) for pool in config.pools)
    return replace(config, pools=pools, limits=replace(config.limits, connections=part(config.limits.connections)))


class _Asking:
    """A question to all workers. answers: what each said; known: of those who were asked, what is known of them anyway."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] | None = None
        self.answers: dict[int, bytes] = {}
        self.all_answered = asyncio.Event()

    def look(self) -> None:
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
        self._channel.send(EVENTS, HUB, 0, marshal.dumps((self._since, self._journal.take())))

    # -- what the others say

    def _receive(self, kind: int, who: int, number: int, payload: bytes) -> None:
        if kind in (EVENTS, GONE):
            if self._early is None:
                self._follow(kind, who, payload)
            else:
                self._early.append((kind, who, payload))
        elif kind == SCRAPE:
            self._scrapes.add((who, number))
            self._scraped.set()
        elif kind in (COMMAND, CURRENT):
            self._commands.put_nowait((kind, who, number, payload))
        elif kind == JOINED and self._journal.open:
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
        asking = await self._ask(COMMAND, pickle.dumps((_key(command), command)), COMMAND_S)
        for answer in asking.answers.values():
            error = pickle.loads(answer)
            if error is not None:
                raise internal_error() if error == BUG else ConfigError(error)

    async def page(self) -> bytes:
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
        """Ask all workers, this one too, and wait for their answers, for so long."""
        self._questions += 1
        number, asking = self._questions, _Asking()
        self._asking[number] = asking
        self._channel.send(kind, HUB, number, payload)
        try:
            async with asyncio.timeout(timeout_s):
                await asking.all_answered.wait()
        except TimeoutError:
            log.warning("not all workers answer", extra={"silent": sorted((asking.known or {}).keys() - asking.answers.keys())})
        finally:
            del self._asking[number]
        return asking

    async def ready(self) -> None:
        await self._current.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_telling())
            group.create_task(self._keep_doing())
            group.create_task(self._keep_answering())

    async def _keep_telling(self) -> None:
        busy_s, idle_s = TELL_S
        while True:
            begun = self._local.clock()
            self._channel.send(TOLD, HUB, 0, await pack(self._local.page()))
            await asyncio.sleep(max(busy_s, (self._local.clock() - begun) / TELL_SHARE))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._busy.wait()
            self._busy.clear()

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
        while True:
            kind, who, number, payload = await self._commands.get()
            if kind == CURRENT:
                self._catch_up()
                continue
            _, command = pickle.loads(payload)
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

    def __repr__(self) -> str:
        return f"<Peers, {self._journal!r}, {self.follower!r}>"


def _key(command: Command) -> str:
    """What a command is about: a later one on the same makes it pointless."""
    match command:
        case Drain(name, _):
            return f"drain {name}"
        case Join(_, replica):
            return f"replica {replica.name}"
    return "configuration"
