"""What the ledger costs: the observer, in the way of each request, and the writing of a row, off the event loop.

    python -m bench.accounting [--rows 40000] [--postgres URL] [--out bench/reports]

Writes ledger.md. The databases have to be empty: SQLite's is made in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure.machine import REPORTS, command, versions
from gateway.accounting.consumed import Consumed
from gateway.accounting.meter import Bill
from gateway.config.schema import LedgerConfig
from gateway.dialects.usage import Usage
from gateway.features.ledger import buffer as hot
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import MAX_BATCH, Ledger
from gateway.request.record import SettledRequest
from gateway.telemetry.metrics import Metrics

_TENANTS = 20
_ROUNDS = 5
_TICK_S = 0.001


@dataclass(frozen=True)
class Written:
    """Of one database. CPU of the process, of its event loop's thread, seconds in all, per row; the loop's longest pause."""

    name: str
    cpu_us: float
    loop_us: float
    wall_us: float
    pause_ms: float


def records(count: int) -> list[SettledRequest]:
    found = []
    for number in range(count):
        made = SettledRequest(f"wr-0123456789abcdef-{number}", "/v1/chat/completions", 1.0)
        made.subject.label = made.subject.model = "qwen3-coder-30b"
        made.sender.tenant, made.placement.pool, made.placement.replica = (
            f"tenant-{number % _TENANTS}",
            "default",
            "10.0.0.1:8000",
        )
        made.status, made.subject.stream, made.answer.first_byte, made.ended = 200, True, 1.2, 3.5
        made.placement.predicted_cached_tokens, made.placement.available_cached_tokens = 900, 950
        made.spent.consumed = Consumed(Usage(1200, 150, 900))
        made.spent.bill = Bill(300_000_000, 90_000_000, 225_000_000, 810_000_000)
        found.append(made)
    return found


def ledger_of(url: str) -> Ledger:
    return Ledger(LedgerConfig(url=url, buffer_mb=4096), Metrics(), time.time, time.monotonic)


def observer_us(count: int) -> float:
    """The least of the rounds."""
    some, best = records(count), float("inf")
    for _ in range(_ROUNDS):
        observe = LedgerEntries(ledger_of("sqlite:///never"))
        begun = time.thread_time()
        for each in some:
            observe(each)
        best = min(best, (time.thread_time() - begun) / count * 1e6)
    return best


async def written(name: str, url: str, count: int) -> Written:
    ledger, pause, done = ledger_of(url), 0.0, asyncio.Event()
    observe = LedgerEntries(ledger)
    await ledger.flush()
    for each in records(count):
        observe(each)

    async def ticks() -> None:
        nonlocal pause
        while not done.is_set():
            begun = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            pause = max(pause, time.perf_counter() - begun - _TICK_S)

    beside = asyncio.create_task(ticks())
    cpu, loop, wall = time.process_time(), time.thread_time(), time.perf_counter()
    if not await ledger.flush():
        raise RuntimeError(f"{name} does not take it")
    cpu, loop, wall = time.process_time() - cpu, time.thread_time() - loop, time.perf_counter() - wall
    done.set()
    await beside
    await ledger.close()
    per_row = 1e6 / count
    return Written(name, cpu * per_row, loop * per_row, wall * per_row, pause * 1000)


def report(observer: float, found: Sequence[Written], how: str) -> str:
    compiled = "compiled" if str(hot.__file__).endswith(".so") else "not compiled"
    names = " | ".join(each.name for each in found)
    rows = {
        "CPU of the process, us a row": [f"{each.cpu_us:.1f}" for each in found],
        "of it in the event loop's thread": [f"{each.loop_us:.1f}" for each in found],
        "time, us a row": [f"{each.wall_us:.1f}" for each in found],
        "longest pause of the event loop meanwhile, ms": [f"{each.pause_ms:.1f}" for each in found],
    }
    lines = ["# What the ledger costs", "", f"`{how}`: {versions()}; the gateway's modules are {compiled}.", ""]
    lines += [f"The observer, at the end of each request: **{observer:.2f} us**.", ""]
    lines += [f"Rows of {_TENANTS} tenants, {MAX_BATCH} in a transaction, with their sums, as fast as they go in:", ""]
    lines += [f"| | {names} |", "|---|" + "---|" * len(found)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accounting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=40_000, metavar="N")
    parser.add_argument("--postgres", default="", metavar="URL", help="of an empty database")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    how = command("bench.accounting", ["--rows", str(options.rows), *(["--postgres", "URL"] if options.postgres else [])])
    observer = observer_us(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        found = [asyncio.run(written("SQLite", f"sqlite:///{folder}/ledger.sqlite", options.rows))]
    if options.postgres:
        found.append(asyncio.run(written("Postgres", options.postgres, options.rows)))
    text = report(observer, found, how)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ledger.md").write_text(text)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
