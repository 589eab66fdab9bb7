"""The conservation law of a soak, and the state that it checks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.soak.attacks import EXPECTED
from bench.soak.clients import Tally
from bench.soak.health import PAUSE_S, Answer
from gateway.features.adoption.adoptions import MAX_GRACE_S
from tests.chaos.load import ANSWERED, LOST, UNREACHED, WRONG
from tests.chaos.stage import Stage

# Gauges, and what they come to at rest, at most. The question for them is a client's: one connection, and the head of one
# request, which is always the same, so that at the end nothing may come to more than at the start.
BOOKINGS: Mapping[str, float] = {
    "replica_inflight": 0,
    "replica_booked_tokens": 0,
    "pool_inflight": 0,
    "pool_waiting": 0,
    "pool_slots_taken": 0,
    "inflight_bytes": 256,
    "client_connections": 1,
}
SETTLE_S = 2 * MAX_GRACE_S + 30.0  # an answer without a client ends in its grace, and waits as long again for the same request
# What a worker opens later and keeps: both ends of the socket pair to its parser process, and that process's three standard
# files.
LATER = {"files": 3, "other sockets": 2}
AT_REST = ("clients", "closed")  # kinds of sockets of which there is none at rest
WORKER_ENDED = "worker ended"  # the message of the line
FAILING, BYSTANDERS = "clients of the pool that fails", "bystanders"  # the names of the two groups


@dataclass(frozen=True, slots=True)
class Limits:
    """health_s: the longest that /health may take. grow_mb: of memory, from the start to the end, for each process.

    peak_mb: of memory at any time, of all processes. answered: the share of each group's requests that has to be answered, and
    of each kind of hostile requests that has to come to what is expected.
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
    """All observations. workers_killed: each may lose its running requests.

    clients: of each group. replicas: how many there are. requests_before, requests_after: what the gateway has counted since it
    began, before and after the soak. health_answers: of any status. slowest: the one that took the longest.
    """

    tallies: Mapping[str, Tally]
    attacks: Mapping[str, Counter[str]]
    start: State
    end: State
    longest_health_s: float
    health_answers: int
    health_failures: int
    peak_mb: float
    workers: int
    replicas: int
    clients: int
    attackers: int
    workers_killed: int
    requests_before: float
    requests_after: float
    exit_status: int
    log: Mapping[str, Any]
    slowest: Answer | None = None

    @property
    def processes(self) -> int:
        """The workers, and if there are several, their supervisor."""
        return self.workers + (self.workers > 1)

    @property
    def most_idle(self) -> int:
        return most_idle(self.workers, self.replicas)


def most_idle(workers: int, replicas: int) -> int:
    """Connections to replicas at rest: each worker probes each replica, sometimes with a second request."""
    return 2 * workers * replicas


async def at_rest(stage: Stage, workers: int) -> tuple[Mapping[str, float], Counter[str]]:
    """Bookings and sockets when nothing is open any more and idle connections to replicas are closed, or after `SETTLE_S`."""
    end, most = time.monotonic() + SETTLE_S, most_idle(workers, len(stage.replicas))
    while True:
        for replica in stage.replicas:
            if replica.control:
                await replica.command("close_idle")
        bookings = {name: await stage.total(name) for name in BOOKINGS}
        await asyncio.sleep(0.2)  # the connection of the last question is closed meanwhile
        sockets = stage.sockets()
        booked = any(value > BOOKINGS[name] for name, value in bookings.items())
        rests = not (booked or sockets["clients"] or sockets["closed"]) and sockets["replicas"] <= most
        if rests or time.monotonic() > end:
            return bookings, sockets


async def requests_total(stage: Stage) -> float:
    return await stage.total("requests_total")


def violations(seen: Outcome, limits: Limits) -> Iterator[str]:
    """The violations of the law, in sentences."""
    for name, tally in seen.tallies.items():
        yield from of_requests(name, tally, seen)
    for name, tally in seen.tallies.items():
        yield from of_answers(name, tally, seen, limits)
    yield from of_attacks(seen, limits)
    yield from of_the_end(seen, limits)
    if seen.peak_mb > limits.peak_mb:
        yield f"peak memory was {seen.peak_mb:.0f} MB, {limits.peak_mb:g} MB at most"
    if not seen.health_answers:
        yield "/health was never answered"
    if seen.longest_health_s > limits.health_s:
        late = f"/health was not answered for {seen.longest_health_s:.2f} s, {limits.health_s:g} s at most"
        yield f"{late}{of_the_cpu(seen)}"
    if seen.health_failures > seen.workers_killed:
        yield f"{seen.health_failures} questions for /health were not answered with 200, {seen.workers_killed} may be"
    yield from of_counts(seen)
    yield from of_the_log(seen)


def of_the_cpu(seen: Outcome) -> str:
    """What the gateway's main thread did while /health was not answered for the longest time, where that is known: a machine
    with too much else to do is not the gateway's fault. With several workers the thread that is looked at is the supervisor's.
    """
    slowest = seen.slowest
    if seen.workers > 1 or slowest is None or not (slowest.ran_s or slowest.ready_s):
        return ""
    if slowest.took_s + PAUSE_S < seen.longest_health_s:  # the longest time was not over with an answer
        return ""
    waited, ran = f"{slowest.ready_s:.2f} s", f"{slowest.ran_s:.2f} s"
    return f"; of these its main thread waited {waited} for a CPU that others had, and ran {ran}"


def of_requests(name: str, tally: Tally, seen: Outcome) -> Iterator[str]:
    """Each is answered, cut with an error, or refused, but for those that ran in a worker that was killed."""
    if (lost := tally.fates[LOST]) > (allowed := may_be_lost(seen)):
        yield f"{lost} requests of {name} were lost, {allowed} may be: {dict(tally.reasons)}"
    if tally.fates[WRONG]:
        yield f"{tally.fates[WRONG]} answers to {name} were wrong: {dict(tally.reasons)}"
    if tally.fates[UNREACHED]:
        yield f"{tally.fates[UNREACHED]} connections of {name} were refused"
    if tally.open:
        yield f"{tally.open} requests of {name} never ended"


def may_be_lost(seen: Outcome) -> int:
    """Requests of one group: all that its clients had under way whenever a worker was killed."""
    return seen.workers_killed * seen.clients


def of_answers(name: str, tally: Tally, seen: Outcome, limits: Limits) -> Iterator[str]:
    """Nothing is wrong with the bystanders' replicas, and one of the other pool's is well at any time: they are answered."""
    due = tally.sent - min(tally.fates[LOST], may_be_lost(seen))
    if not tally.fates[ANSWERED] or tally.fates[ANSWERED] < limits.answered * due:
        yield f"{tally.fates[ANSWERED]} of {due} requests of {name} were answered, {limits.answered:.0%} have to be"


def of_attacks(seen: Outcome, limits: Limits) -> Iterator[str]:
    """Each comes to what its kind is to come to, but for those of killed workers, and for a few that are refused."""
    excess, excused = [], seen.workers_killed * seen.attackers
    for kind, outcomes in seen.attacks.items():
        if outcomes["silent"]:
            yield f"{outcomes['silent']} hostile requests ({kind}) were never answered"
        others = {what: count for what, count in outcomes.items() if what not in (*EXPECTED[kind], "silent")}
        if (count := sum(others.values())) > (1 - limits.answered) * outcomes.total():
            excess.append((count, f"{count} of {outcomes.total()} hostile requests ({kind}) came to {others}"))
        answers = {what for what in others if what.isdigit()}  # a worker that is killed gives none
        if answers and sum(others[what] for what in answers) > (1 - limits.answered) * outcomes.total():
            excused = 0
    if sum(count for count, _ in excess) > excused:
        yield from (sentence for _, sentence in excess)


def of_counts(seen: Outcome) -> Iterator[str]:
    """What the gateway counts, what it logs and what was sent agree. A worker that is killed takes its last lines with it."""
    if seen.workers_killed:
        return
    sent, counted = sum(tally.sent for tally in seen.tallies.values()), seen.requests_after - seen.requests_before
    if counted < sent:
        yield f"the gateway counted {counted:g} requests, well-behaved clients alone sent {sent}"
    if (logged := seen.log["requests"]) != seen.requests_after:
        yield f"the gateway counted {seen.requests_after:g} requests, and logged {logged}"


def of_the_end(seen: Outcome, limits: Limits) -> Iterator[str]:
    for when, state in (("start", seen.start), ("end", seen.end)):
        for name, value in state.bookings.items():
            most = min(BOOKINGS[name], seen.start.bookings[name]) if when == "end" else BOOKINGS[name]
            if value > most:
                yield f"{name} is {value:g} at the {when}, {most:g} at most"
        for kind in AT_REST:
            if count := state.sockets[kind]:
                yield f"open {kind}: {count} at the {when}, none may be"
    for kind in sorted((seen.start.sockets | seen.end.sockets).keys() - set(AT_REST)):
        allowed = seen.most_idle if kind == "replicas" else seen.start.sockets[kind] + seen.workers * LATER.get(kind, 0)
        if (after := seen.end.sockets[kind]) > allowed:
            yield f"open {kind}: {after} at the end, {allowed} may be"
    if seen.end.rss_mb > seen.start.rss_mb + limits.grow_mb * seen.processes:
        yield f"memory is {seen.end.rss_mb:.0f} MB at the end, {seen.start.rss_mb:.0f} MB at the start"


def of_the_log(seen: Outcome) -> Iterator[str]:
    if seen.exit_status:
        yield f"the gateway's exit status is {seen.exit_status}"
    of_worker = f"error: {WORKER_ENDED}"
    errors = {line: count for line, count in seen.log.get("messages", {}).items() if line.startswith("error: ")}
    if errors.pop(of_worker, 0) > seen.workers_killed:
        yield f"{seen.log['messages'][of_worker]} workers ended, {seen.workers_killed} were killed"
    if errors:
        yield f"errors in the log: {errors}"
    if tracebacks := seen.log.get("tracebacks"):
        yield f"{tracebacks} tracebacks in the log"
    if unreadable := seen.log.get("unreadable"):
        yield f"{unreadable} log lines that are not JSON"
