"""`python -m bench.soak`: see the top of the package."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

try:
    from bench.measure.cpu import rss_bytes
    from bench.measure.machine import command, versions
    from bench.measure.mock import many_files
    from bench.soak import law, report
    from bench.soak.attacks import Target, attacks
    from bench.soak.clients import Attackers, Crowd
    from bench.soak.fleet import BYSTANDERS, MODEL, ROOT, Fleet, Setup, fleet
    from bench.soak.law import FAILING, Limits, Outcome, State, at_rest, requests_total, violations
    from bench.soak.watch import Watch
    from tests.chaos.wire import port_of
except ModuleNotFoundError as missing:  # it borrows from the tests
    raise SystemExit(f"bench.soak needs {missing.name}. Run `make install` first, then .venv/bin/python.") from None

WARM_S = 3.0
BESIDE_MB = 100  # of memory for each worker, beside the budget


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="A soak with a conservation law at its end.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1, help="of the gateway (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=20, help="well-behaved ones of each pool (default: %(default)s)")
    parser.add_argument("--attackers", type=int, default=4, help="hostile connections at once (default: %(default)s)")
    parser.add_argument("--only", default="", help=f"kinds of attacks, of: {', '.join(name for name, _ in attacks())}")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two events (default: %(default)s)")
    parser.add_argument("--calm", action="store_true", help="no events: nothing but the clients is hostile")
    parser.add_argument("--budget-mb", type=int, default=256, help="`limits.inflight_mb` (default: %(default)s)")
    parser.add_argument("--bomb-mb", type=int, default=32, help="MiB of decompressed JSON bombs (default: %(default)s)")
    parser.add_argument("--health-ms", type=float, default=1000.0, help="the longest of /health (default: %(default)s)")
    parser.add_argument("--grow-mb", type=float, default=100.0, help="of memory, of each process (default: %(default)s)")
    parser.add_argument("--answered", type=float, default=0.99, help="share of each group's requests (default: %(default)s)")
    parser.add_argument("--program", type=Path, default=ROOT, help="the gateway's folder, such as build/compiled (default: .)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the report is written (default: standard output)")
    options = parser.parse_args(arguments)
    if options.out:  # now, and not after half an hour
        try:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.open("a").close()
        except OSError as error:
            parser.error(f"--out: no report can be written there: {error}")
    return options


async def state_of(running: Fleet) -> State:
    stage = running.stage
    bookings, sockets = await at_rest(stage, running.setup.workers)
    return State(bookings, sockets, rss_bytes(stage.gateway.process.pid) / 2**20)


async def load(running: Fleet, options: argparse.Namespace, watch: Watch, target: Target) -> tuple[list[Crowd], Attackers]:
    """Everything at once, for as long as is asked for; at its end all clients have ended and the fleet is well."""
    url, count = running.stage.url, options.clients
    crowds = [Crowd(url, model, count, options.seed + at) for at, model in enumerate((MODEL, BYSTANDERS))]
    attackers = Attackers(target, options.attackers, options.seed, [name for name in options.only.split(",") if name])
    beside = [asyncio.create_task(each) for each in (watch.health_checks(), watch.resources())]
    over = asyncio.Event()
    events = asyncio.create_task(over.wait() if options.calm else running.inject_events(options.every, over))
    await asyncio.wait([events, *beside], timeout=options.minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    await events  # raises what went wrong there
    await running.recover()
    await asyncio.gather(attackers.stop(), *(crowd.stop() for crowd in crowds))
    await watch.next_answer()
    watch.take()  # of the answers since the last sample
    for task in beside:
        task.cancel()
    for result in await asyncio.gather(*beside, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return crowds, attackers


async def soak(options: argparse.Namespace, folder: Path) -> tuple[str, list[str]]:
    """The report, and what breaks the law."""
    peak_mb = options.budget_mb + BESIDE_MB * options.workers
    limits = Limits(options.health_ms / 1000, options.grow_mb, peak_mb, options.answered)
    gateway = Setup(options.program.resolve(), options.workers, options.budget_mb)
    async with fleet(folder, gateway, options.seed) as running:
        stage = running.stage
        await running.recover()
        target = Target(port_of(stage.url), (MODEL, BYSTANDERS), options.bomb_mb)
        warm = [Crowd(stage.url, model, options.clients, 99 + at) for at, model in enumerate((MODEL, BYSTANDERS))]
        await asyncio.sleep(WARM_S)
        await asyncio.gather(*(crowd.stop() for crowd in warm))
        start, before = await state_of(running), await requests_total(stage)
        watch = Watch(stage)
        try:
            crowds, attackers = await load(running, options, watch, target)
            end, after = await state_of(running), await requests_total(stage)
        except (OSError, EOFError, AssertionError) as error:
            where = "".join(traceback.format_exception(error))
            raise SystemExit(f"the soak could not go on: {where}{running.last_words()}") from error
        status, log_counts = await asyncio.to_thread(running.gateway.ended)
    seen = Outcome(
        tallies=dict(zip((FAILING, law.BYSTANDERS), (crowd.tally for crowd in crowds), strict=True)),
        attacks=attackers.outcomes,
        start=start,
        end=end,
        longest_health_s=watch.longest_health_s,
        health_answers=len(watch.health),
        health_failures=watch.failed.total(),
        peak_mb=watch.peak_mb,
        workers=options.workers,
        replicas=len(stage.replicas),
        clients=options.clients,
        attackers=options.attackers,
        workers_killed=running.done["worker killed"],
        requests_before=before,
        requests_after=after,
        exit_status=status,
        log=log_counts,
        slowest=watch.slowest[0] if watch.slowest else None,
    )
    broken = list(violations(seen, limits))
    made = [f"`{command('bench.soak', None)}`", versions()]
    return report.page(made, seen, watch, limits, Counter(running.done), target.traffic, broken), broken


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    many_files()
    with tempfile.TemporaryDirectory(prefix="warmroute-soak-") as folder:
        text, broken = asyncio.run(soak(options, Path(folder)))
    if options.out:
        options.out.write_text(text, "utf-8")
        print("\n".join(broken) or "the law holds")
    else:
        print(text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
