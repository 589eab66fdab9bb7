"""What is measured of a store: puts, reads of chains, and the purge."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from gateway.database.database import Database
from gateway.features.histories.records import StoredResponse
from gateway.features.histories.store import Store
from gateway.features.histories.tables import TABLES

TTL_S = 86_400.0
TURNS = 100  # of a chain
AT_ONCE = 100  # puts that wait at the same time
DEPTHS = (1, 10, 100, 1000)
MANY = 1 << 40
_READS = 20


@dataclass(slots=True)
class Cost:
    """Seconds by the clock, and of CPU of this process with its threads, for each."""

    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Findings:
    """Of one database. alone, group: a put. reads: of a chain, by its depth. bytes: of all, on disk. purge_pause_s: the longest
    time for which the event loop did not turn; quiet_pause_s: the same while nothing is done. acknowledged: before a SIGKILL,
    by one process, and by two gateways; missing: after it.
    """

    name: str
    rows: int
    alone: Cost = field(default_factory=lambda: Cost(0, 0))
    group: Cost = field(default_factory=lambda: Cost(0, 0))
    reads: dict[int, Cost] = field(default_factory=dict)
    bytes: int = 0
    purge_s: float = 0.0
    purge_pause_s: float = 0.0
    quiet_pause_s: float = 0.0
    purged: int = 0
    acknowledged: int = 0
    missing: int = 0
    acknowledged_of_two: int = 0
    missing_of_two: int = 0


class Clock:
    """Unix seconds, which stand still, and are set forward by hand. They begin now: gateways use the store, too."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def opened(url: str, clock: Callable[[], float]) -> AsyncIterator[tuple[Database, Store]]:
    database = Database(url, TABLES)
    await database.open()
    store = Store(database, TTL_S, clock)
    try:
        yield database, store
    finally:
        await store.close()


def response(id_: str, parent: str = "") -> StoredResponse:
    """As an agent's turn: 2 kB of new items, 1 kB of output, 3 kB as the client has it."""
    message = b'{"type":"message","role":"user","content":"%b"}'
    return StoredResponse(
        owner="tenant:bench",
        id=id_,
        parent=parent,
        created_at=1.0,
        status="completed",
        input=message % (b"i" * 2000),
        output=message % (b"o" * 1000),
        response=b'{"id":"%b","output":"%b"}' % (id_.encode(), b"r" * 3000),
        names=(f"msg_{id_}",),
    )


async def timed(works: Iterable[Awaitable[object]]) -> Cost:
    """One after the other; for each."""
    begun, cpu, count = time.perf_counter(), time.process_time(), 0
    for work in works:
        await work
        count += 1
    return Cost((time.perf_counter() - begun) / count, (time.process_time() - cpu) / count)


async def puts(store: Store, findings: Findings, alone: int) -> None:
    """Chains of TURNS, AT_ONCE of them at a time; then some puts without company."""
    begun, cpu, chains = time.perf_counter(), time.process_time(), findings.rows // TURNS

    async def chain(number: int) -> None:
        for turn in range(TURNS):
            await store.put(response(f"c{number}-{turn}", f"c{number}-{turn - 1}" if turn else ""))

    for first in range(0, chains, AT_ONCE):
        await asyncio.gather(*(chain(number) for number in range(first, min(first + AT_ONCE, chains))))
    count = chains * TURNS
    findings.group = Cost((time.perf_counter() - begun) / count, (time.process_time() - cpu) / count)
    findings.alone = await timed(store.put(response(f"alone-{at}")) for at in range(alone))


async def reads(store: Store, findings: Findings) -> None:
    last = ""
    for turn in range(max(DEPTHS)):
        await store.put(response(f"deep-{turn}", last))
        last = f"deep-{turn}"
    for depth in DEPTHS:
        some = [await timed([store.chain("tenant:bench", f"deep-{depth - 1}", MANY)]) for _ in range(_READS)]
        findings.reads[depth] = Cost(
            statistics.median(each.wall_s for each in some), statistics.median(each.cpu_s for each in some)
        )


async def purge(store: Store, clock: Clock, findings: Findings) -> None:
    """Everything, as the gateway does it, without its pauses."""
    findings.quiet_pause_s = await longest_pause(lambda: asyncio.sleep(1))
    clock.now += 2 * TTL_S

    async def all_of_it() -> None:
        while more := await store.purge():
            findings.purged += more

    begun = time.perf_counter()
    findings.purge_pause_s = await longest_pause(all_of_it)
    findings.purge_s = time.perf_counter() - begun


async def longest_pause(work: Callable[[], Awaitable[object]]) -> float:
    """Of the event loop while that is done, seconds."""
    longest, last, done = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal longest, last
        while not done:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watching = asyncio.create_task(watch())
    await work()
    done = True
    await watching
    return longest
