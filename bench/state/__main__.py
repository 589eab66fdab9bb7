"""What it costs to keep responses, in SQLite and, where one is given, in Postgres.

    python -m bench.state [--rows 100000] [--postgres URL] [--out bench/reports]

Writes state.md. The databases have to be empty: SQLite's is made in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Connection, Executable, text

from bench.measure.cpu import peak_bytes
from bench.measure.machine import REPORTS, command, versions
from bench.state.costs import DEPTHS, TURNS, Clock, Cost, Findings, opened, purge, puts, reads
from bench.state.killed import kill, kill_gateways, write_for_ever
from bench.state.requests import measured

_ALONE = 0.02  # of the rows
_KILLED = 0.05
_OVER_HTTP = 0.02


async def measure(name: str, url: str, folder: Path | None, rows: int) -> Findings:
    findings, clock = Findings(name, rows), Clock()
    async with opened(url, clock) as (database, store):
        await puts(store, findings, max(1, int(rows * _ALONE)))
        await reads(store, findings)
        if folder:
            findings.bytes = sum(each.stat().st_size for each in os.scandir(folder))
        else:
            query = text("SELECT pg_database_size(current_database())")
            findings.bytes = await database.read(lambda each: _number(each, query))
    await kill(url, findings, max(1, int(rows * _KILLED)))
    await kill_gateways(url, findings, max(2, int(rows * _KILLED)))
    async with opened(url, clock) as (_, store):
        await purge(store, clock, findings)
    return findings


def _number(connection: Connection, query: Executable) -> int:
    return int(connection.execute(query).scalar_one())


def report(found: Sequence[Findings], http: dict[str, float], wrong: dict[str, int], how: str) -> str:
    def each(cost: Cost) -> str:
        return f"{cost.wall_s * 1000:.2f} / {cost.cpu_s * 1000:.2f}"

    names = [findings.name for findings in found]
    rows: list[tuple[str, list[str]]] = [
        ("responses, in chains", [f"{f.rows:,} of {TURNS} turns" for f in found]),
        ("a put, among 100 that wait: ms / ms of CPU", [each(f.group) for f in found]),
        ("a put alone", [each(f.alone) for f in found]),
        *((f"a chain of {depth:,} read", [each(f.reads[depth]) for f in found]) for depth in DEPTHS),
        ("bytes on disk for a response of 6.2 kB", [f"{f.bytes / f.rows:,.0f}" for f in found]),
        ("all of it purged, by a clock that was set forward", [f"{f.purged:,} in {f.purge_s:.1f} s" for f in found]),
        (
            "longest pause of the event loop meanwhile (and with nothing to do)",
            [f"{f.purge_pause_s * 1000:.0f} ms ({f.quiet_pause_s * 1000:.0f} ms)" for f in found],
        ),
        (
            "acknowledged before a SIGKILL, beside all of these, and missing after it",
            [f"{f.acknowledged:,}, **{f.missing}**" for f in found],
        ),
        (
            "the same, of two gateways that are killed one after the other",
            [f"{f.acknowledged_of_two:,}, **{f.missing_of_two}**" for f in found],
        ),
    ]
    lines = ["# What it costs to keep responses", "", f"`{how}`: {versions()}.", ""]
    lines += ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    lines += ["", f"Peak memory of the process that did all this: {peak_bytes(os.getpid()) / 1e6:.0f} MB.", ""]
    lines += ["| a request of 2 kB over HTTP, in SQLite | CPU us of the gateway | not as it should be |", "|---|---|---|"]
    lines += [f"| {name} | {cost:.0f} | {wrong[name]} |" for name, cost in http.items()]
    return "\n".join(lines) + "\n"


async def everything(rows: int, postgres: str, how: str, write: Callable[[str], object]) -> None:
    """write: takes the report, and again a longer one."""
    found = list[Findings]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a").mkdir()
        http, wrong = await measured(f"sqlite:///{folder}/b.sqlite", max(1, int(rows * _OVER_HTTP)), 3)
        found.append(await measure("SQLite", f"sqlite:///{folder}/a/a.sqlite", folder / "a", rows))
        print(found[-1], file=sys.stderr, flush=True)
        write(report(found, http, wrong, how))
        if postgres:
            found.append(await measure("Postgres", postgres, None, rows))
            print(found[-1], file=sys.stderr, flush=True)
            write(report(found, http, wrong, how))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, metavar="N")
    parser.add_argument("--postgres", default="", metavar="URL", help="of an empty database")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    parser.add_argument("--write", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write:
        asyncio.run(write_for_ever(options.write))
        return
    how = command("bench.state", ["--rows", str(options.rows), *(["--postgres", "URL"] if options.postgres else [])])
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(everything(options.rows, options.postgres, how, (options.out / "state.md").write_text))


if __name__ == "__main__":
    main()
