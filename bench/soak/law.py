"""The conservation law of a soak, and what is looked at for it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.soak.clients import Tally
from tests.chaos.load import ANSWERED, LOST, UNREACHED
from tests.chaos.stage import Stage

BOOKINGS = ("replica_inflight", "replica_booked_tokens", "pool_inflight", "pool_waiting")
SETTLE_S = 60.0
# What a worker opens later and keeps: an epoll for half-closed clients; both ends of the socket pair to its parser process, and
# that process's three standard files.
LATER = {"files": 4, "other sockets": 2}
VALID = ("half closed", "random model", "random names")  # kinds whose requests are whole and small: each gets a status
FAILING, BYSTANDERS = "clients of the pool that fails", "bystanders"  # the names of the two groups


@dataclass(frozen=True, slots=True)
class Limits:
    """health_s: the longest that /health may take. grow_mb: of memory, from the start to the end, for each process.

    peak_mb: of memory at any time, of all processes. answered: the share of the bystanders' requests that has to be answered.
    """

    health_s: float
    grow_mb: float
    peak_mb: float
    answered: float


@dataclass(frozen=True, slots=True)
class State:
    """A gateway at rest. bookings: the gauges of `BOOKINGS`, summed. sockets: as `Stage.sockets` counts them."""

    bookings: Mapping[str, float]
    sockets: Counter[str]
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was seen. workers_killed: each may take the requests with it that it had.

    clients: of each group. replicas: how many there are.
    """

    tallies: Mapping[str, Tally]
    attacks: Mapping[str, Counter[str]]
    start: State
    end: State
    longest_health_s: float
    health_failures: int
    peak_mb: float
    workers: int
    replicas: int
    clients: int
    attackers: int
    workers_killed: int
    requests_counted: float
    exit_status: int
    log: Mapping[str, Any]

    @property
    def processes(self) -> int:
        """The workers, and if there are several, their supervisor."""
        return self.workers + (self.workers > 1)

    @property
    def most_idle(self) -> int:
        return most_idle(self.workers, self.replicas)


def most_idle(workers: int, replicas: int) -> int:
    """Connections to replicas at rest: each worker asks each replica how it is, with a second question at times."""
    return 2 * workers * replicas


async def at_rest(stage: Stage, workers: int) -> tuple[Mapping[str, float], Counter[str]]:
    """Bookings and sockets when nothing is open any more and idle connections to replicas are closed, or after `SETTLE_S`."""
    end, most = time.monotonic() + SETTLE_S, most_idle(workers, len(stage.replicas))
    while True:
        for replica in stage.replicas:
            if replica.orders:
                await replica.is_to("hang_up")
        bookings = {name: await stage.total(name) for name in BOOKINGS}
        await asyncio.sleep(0.2)  # the connection of the last question is closed meanwhile
        sockets = stage.sockets()
        rests = not (any(bookings.values()) or sockets["clients"] or sockets["closed"]) and sockets["replicas"] <= most
        if rests or time.monotonic() > end:
            return bookings, sockets


async def requests_total(stage: Stage) -> float:
    return await stage.total("requests_total")


def violations(seen: Outcome, limits: Limits) -> Iterator[str]:
    """What breaks the law, in sentences."""
    for name, tally in seen.tallies.items():
        yield from of_requests(name, tally, seen)
    yield from of_bystanders(seen, limits)
    for kind, outcomes in seen.attacks.items():
        if outcomes["silent"]:
            yield f"{outcomes['silent']} hostile requests ({kind}) were never answered"
        if kind in VALID and outcomes["closed"] > seen.workers_killed * seen.attackers:
            yield f"{outcomes['closed']} valid requests ({kind}) got no answer: the gateway hung up"
    yield from of_the_end(seen, limits)
    if seen.peak_mb > limits.peak_mb:
        yield f"peak memory was {seen.peak_mb:.0f} MB, {limits.peak_mb:g} MB at most"
    if seen.longest_health_s > limits.health_s:
        yield f"/health was not answered for {seen.longest_health_s:.2f} s, {limits.health_s:g} s at most"
    if seen.health_failures > seen.workers_killed:
        yield f"{seen.health_failures} questions for /health were not answered with 200, {seen.workers_killed} may be"
    counted = sum(tally.sent for tally in seen.tallies.values())
    if not seen.workers_killed and seen.requests_counted < counted:
        yield f"the gateway counted {seen.requests_counted:g} requests, well-behaved clients alone sent {counted}"
    yield from of_the_log(seen)


def of_requests(name: str, tally: Tally, seen: Outcome) -> Iterator[str]:
    """Each is answered, cut with an error, or refused, but for those that ran in a worker that was killed."""
    allowed = seen.workers_killed * seen.clients
    if (lost := tally.fates[LOST]) > allowed:
        yield f"{lost} requests of {name} were lost, {allowed} may be: {dict(tally.whys)}"
    if tally.fates[UNREACHED]:
        yield f"{tally.fates[UNREACHED]} connections of {name} were refused"
    if not tally.fates[ANSWERED]:
        yield f"no request of {name} was answered"
    if tally.open:
        yield f"{tally.open} requests of {name} never ended"


def of_bystanders(seen: Outcome, limits: Limits) -> Iterator[str]:
    """Nothing is wrong with their replicas, so they are answered."""
    tally = seen.tallies[BYSTANDERS]
    due = tally.sent - tally.fates[LOST]
    if tally.fates[ANSWERED] < limits.answered * due:
        yield f"{tally.fates[ANSWERED]} of {due} requests of {BYSTANDERS} were answered, {limits.answered:.0%} have to be"


def of_the_end(seen: Outcome, limits: Limits) -> Iterator[str]:
    for name, value in seen.end.bookings.items():
        if value:
            yield f"{name} is {value:g} at the end"
    for kind in sorted(seen.start.sockets | seen.end.sockets):
        before = seen.most_idle if kind == "replicas" else seen.start.sockets[kind]
        before += seen.workers * LATER.get(kind, 0)
        if (after := seen.end.sockets[kind]) > before:
            yield f"open {kind}: {after} at the end, {before} may be"
    if seen.end.rss_mb > seen.start.rss_mb + limits.grow_mb * seen.processes:
        yield f"memory is {seen.end.rss_mb:.0f} MB at the end, {seen.start.rss_mb:.0f} MB at the start"


def of_the_log(seen: Outcome) -> Iterator[str]:
    if seen.exit_status:
        yield f"the gateway's exit status is {seen.exit_status}"
    if tracebacks := seen.log.get("tracebacks"):
        yield f"{tracebacks} tracebacks in the log"
    if unreadable := seen.log.get("unreadable"):
        yield f"{unreadable} log lines that are not JSON"
