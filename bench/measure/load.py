"""The load: raw-protocol clients in a process of their own, which check every answer.

    python -m bench.measure.load closed '{"port": 8000, "pid": 123, "connections": 32, "requests": 10000, "seconds": 4}'
    python -m bench.measure.load open '{"port": 8000, "direct": 8001, "rate": 500, "beside": 100, "seconds": 5, "chunks": 25}'

Prints one JSON object. Closed loop: each connection sends its next request when its answer is complete. Open loop: requests
come when they come, as a Poisson process, or evenly spaced; some go to the replica itself, in the same process at the same
time, so that what the machine and this program add can be taken off. An answer is good if it has status 200, exactly the
words of the mock, and OpenAI's last event if it is a stream; everything else is an error, under its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import random
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import cast

import uvloop

from bench.measure.answer import Answer, BadAnswer
from bench.measure.cpu import cpu_seconds
from bench.measure.herd import dial
from bench.measure.mock import many_files
from bench.measure.prompts import Requests, arrivals
from bench.measure.replies import WORDS


@dataclass(frozen=True, slots=True)
class Closed:
    """port: of the system. pid: whose tree's CPU is read. chunks: of each stream; 0: not streamed. warm: requests before.
    at_once: all connect and send before the system has accepted any (`herd.py`); else each connects after the one before.

    No request is sent when `requests` were sent or `seconds` have passed; what has not come `patience` later is lost.
    """

    port: int
    pid: int = 0
    size: int = 2000
    chunks: int = 0
    connections: int = 32
    requests: int = 1000
    seconds: float = 60.0
    warm: int = 0
    at_once: bool = False
    patience: float = 60.0


@dataclass(frozen=True, slots=True)
class Open:
    """rate, beside: requests a second to the port and to the replica itself (direct); timed from `settle` seconds on."""

    port: int
    direct: int
    rate: float
    beside: float = 0.0
    seconds: float = 5.0
    chunks: int = 25
    size: int = 2000
    even: bool = False
    settle: float = 1.0
    seed: int = 1
    patience: float = 60.0


@dataclass(slots=True)
class Tally:
    """What came back. first: seconds from sending to the first word; gaps: from word to word; of what came after `since`."""

    expected: int = WORDS
    streamed: bool = False
    since: float = 0.0
    sent: int = 0
    good: int = 0
    words: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))

    @property
    def open(self) -> int:
        return self.sent - self.good - self.errors.total()

    def close(self, answer: Answer) -> None:
        """An answer is complete."""
        if answer.status != 200:
            self.errors[f"status {answer.status}"] += 1
        elif answer.words != self.expected:
            self.errors[f"{answer.words} words of {self.expected}"] += 1
        elif self.streamed and not answer.done:
            self.errors["no last event"] += 1
        else:
            self.good += 1

    def give_up(self) -> None:
        """What has not come by now is lost."""
        if self.open:
            self.errors["no answer"] += self.open

    def summary(self) -> dict[str, object]:
        times = {f"first_{name}": value for name, value in _spread(self.first).items()}
        times |= {f"gap_{name}": value for name, value in _spread(self.gaps).items()} if self.streamed else {}
        return {"sent": self.sent, "good": self.good, "words": self.words, "errors": dict(self.errors), **times}


def _spread(samples: array[float]) -> dict[str, float]:
    ordered = sorted(samples)
    if not ordered:
        return {}
    return {name: ordered[int(len(ordered) * share)] for name, share in (("p50", 0.5), ("p99", 0.99))} | {"max": ordered[-1]}


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time; `idle` is called when it can take the next, or has closed."""

    transport: asyncio.Transport

    def __init__(self, idle: Callable[[Connection], None]) -> None:
        self._idle = idle
        self._tally: Tally | None = None
        self._answer = Answer()
        self._sent = self._last = 0.0

    def send(self, request: bytes, tally: Tally) -> None:
        self.transport.write(request)
        self.sent(tally, time.monotonic())

    def sent(self, tally: Tally, at: float) -> None:
        """A request is on its way since then."""
        self._tally, self._answer = tally, Answer()
        tally.sent += 1
        self._sent = at

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one, but no subclass

    def data_received(self, data: bytes) -> None:
        tally, answer = self._tally, self._answer
        if tally is None:  # unsolicited
            self.transport.close()
            return
        known = answer.words
        try:
            complete = answer.feed(data)
        except (BadAnswer, ValueError) as error:
            self._fail(f"not HTTP: {error}")
            return
        if answer.words != known:
            self._time(tally, known, answer.words)
        if complete:
            tally.close(answer)
            self._tally = None
            self._idle(self)

    def _time(self, tally: Tally, known: int, words: int) -> None:
        now = time.monotonic()
        tally.words += words - known
        if self._sent >= tally.since and not known:
            tally.first.append(now - self._sent)
        if tally.streamed and now >= tally.since:
            if known:
                tally.gaps.append(now - self._last)
            tally.gaps.extend([0.0] * (words - known - 1))
        self._last = now

    def _fail(self, reason: str) -> None:
        if self._tally is not None:
            self._tally.errors[reason] += 1
            self._tally = None
            self.transport.abort()
            self._idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"cut off: {type(exc).__name__}" if exc else "cut off")


class ClosedLoop:
    """See `Closed`. `run` once for each tally; the connections stay."""

    def __init__(self, job: Closed) -> None:
        self._job = job
        self._requests = Requests(job.size, job.chunks)
        self._connections: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._left, self._until = 0, 0.0
        self._tally = self.tally()
        self.in_time = 0  # good answers of the last run before its time was up
        self._all = asyncio.Event()

    def tally(self) -> Tally:
        return Tally(self._job.chunks or WORDS, bool(self._job.chunks))

    async def run(self, requests: int, tally: Tally) -> None:
        self._left, self._until, self._tally = requests, time.monotonic() + self._job.seconds, tally
        self._all.clear()
        if self._job.at_once and not self._connections:
            await self._connect_at_once(min(requests, self._job.connections))
        else:
            while len(self._connections) < self._job.connections:
                await self._connect()
            for connection in self._connections[:requests]:
                self._next(connection)
        if requests:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all.wait(), self._job.seconds + self._job.patience)
            tally.give_up()

    async def _connect(self) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._next), "127.0.0.1", self._job.port
        )
        self._connections.append(connection)

    async def _connect_at_once(self, count: int) -> None:
        begun = time.monotonic()
        self._left -= count
        dialled = dial(self._job.port, self._requests, count)
        await asyncio.gather(*(self._adopt(sock, rest, begun) for sock, rest in dialled))

    async def _adopt(self, sock: socket.socket, rest: bytes, begun: float) -> None:
        connection = Connection(self._next)
        connection.sent(self._tally, begun)
        self._connections.append(connection)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        connection.transport.write(rest)

    def _next(self, connection: Connection) -> None:
        if time.monotonic() < self._until:
            self.in_time = self._tally.good
        if not self._left or time.monotonic() >= self._until:
            if not self._tally.open:
                self._all.set()
        elif connection.usable:
            self._left -= 1
            connection.send(next(self._requests), self._tally)
        else:
            task = asyncio.get_running_loop().create_task(self._replace(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replace(self, connection: Connection) -> None:
        self._connections.remove(connection)
        try:
            await self._connect()
        except OSError as error:
            self._tally.sent += 1
            self._tally.errors[f"cannot connect: {type(error).__name__}"] += 1
            if not self._tally.open:
                self._all.set()
        else:
            self._next(self._connections[-1])

    def close(self) -> None:
        for connection in self._connections:
            connection.transport.abort()


class Lane:
    """Connections to one port, as many as are needed at a time."""

    def __init__(self, port: int, requests: Requests, tally: Tally) -> None:
        self.tally = tally
        self._port, self._requests = port, requests
        self._free: list[Connection] = []
        self._made: list[Connection] = []

    async def send(self) -> None:
        while self._free:
            if (connection := self._free.pop()).usable:
                break
        else:
            await self.open(1)
            connection = self._free.pop()
        connection.send(next(self._requests), self.tally)

    async def open(self, count: int) -> None:
        for _ in range(count):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._free.append), "127.0.0.1", self._port
            )
            self._free.append(connection)
            self._made.append(connection)

    def close(self) -> None:
        for connection in self._made:
            connection.transport.abort()


async def closed_loop(job: Closed) -> dict[str, object]:
    load = ClosedLoop(job)
    await load.run(job.warm, load.tally())
    tally = load.tally()
    spent, begun = cpu_seconds(job.pid) if job.pid else 0.0, time.monotonic()
    await load.run(job.requests, tally)
    seconds = time.monotonic() - begun
    spent = cpu_seconds(job.pid) - spent if job.pid else 0.0
    load.close()
    return {"seconds": seconds, "cpu_s": spent, "in_time": load.in_time, **tally.summary()}


async def open_loop(job: Open) -> dict[str, object]:
    begun = time.monotonic()
    requests = Requests(job.size, job.chunks)
    lanes = [
        Lane(port, requests, Tally(job.chunks or WORDS, bool(job.chunks), begun + job.settle))
        for port in (job.port, job.direct)
    ]
    rates = (job.rate, job.beside)
    chances = [None if job.even else random.Random(job.seed + number) for number in range(2)]
    streams = [
        zip(arrivals(rate, job.seconds, chance), repeat(lane), strict=False)
        for rate, chance, lane in zip(rates, chances, lanes, strict=True)
    ]
    for at, lane in heapq.merge(*streams, key=lambda arrival: arrival[0]):
        # The loop's timers count milliseconds; less would be a busy loop on the mock's core.
        if (early := begun + at - time.monotonic()) > 0:
            await asyncio.sleep(max(early, 0.001))
        try:
            await lane.send()
        except OSError as error:
            lane.tally.sent += 1
            lane.tally.errors[f"cannot connect: {type(error).__name__}"] += 1
    patient = time.monotonic() + job.patience
    while any(lane.tally.open for lane in lanes) and time.monotonic() < patient:  # noqa: ASYNC110  (many lanes, without an event)
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - begun
    for lane in lanes:
        lane.tally.give_up()
        lane.close()
    return {"seconds": seconds, "through": lanes[0].tally.summary(), "direct": lanes[1].tally.summary()}


def main(arguments: list[str]) -> None:
    kind, text = arguments
    many_files()
    fields = json.loads(text)
    run = closed_loop(Closed(**fields)) if kind == "closed" else open_loop(Open(**fields))
    print(json.dumps(uvloop.run(run)))


def command(job: Closed | Open) -> list[str]:
    """What runs it in a process of its own."""
    kind = "closed" if isinstance(job, Closed) else "open"
    return [sys.executable, "-m", "bench.measure.load", kind, json.dumps(asdict(job))]


if __name__ == "__main__":
    main(sys.argv[1:])
