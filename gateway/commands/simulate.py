"""`warmroute simulate TRACE`: replays a workload through the production router, and prints waiting times and cache hits.

The workload is recorded (a file) or generated (gen:NAME, see `router.simulation.generators`). It is placed by the router's own
policies, by the rules of peers, or by two bounds that no policy can be expected to beat: `pooled` (one cache and one queue for
the whole fleet) and `infinite` (the same with unlimited memory).
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.commands import plot
from gateway.config.schema import RoutingConfig
from router import Router
from router.simulation.fleet import FleetSpec, Result, Served, SharedQueue, Simulation, summary
from router.simulation.gateways import Gateways
from router.simulation.generators import GENERATORS
from router.simulation.policies import SIMULATED
from router.simulation.workloads import ClosedLoop, OpenLoop, Source, TraceError, agents, mooncake
from router.types import Random

BOUNDS = ("pooled", "infinite")
NAMES = (*SIMULATED, *BOUNDS)
GENERATED = "gen:"
TRACE_HOURS, TRACE_USERS = 1.0, 6
MAX_GATEWAYS = 1000
_ENDLESS = 1 << 50  # tokens
_PROGRESS_EVERY = 500

DESCRIPTION = (
    "Replay a recorded or generated workload through the production router on a simulated fleet. Results of each policy: token"
    " hit ratio, time to first token (TTFT), end-to-end time (s), load skew (the busiest replica's prefill over the mean)."
)


@dataclass(frozen=True, slots=True)
class Fronts:
    """How many gateways there are, and after how many seconds they know of each other's decisions (inf: never)."""

    gateways: int
    delay_s: float


ONE = Fronts(1, math.inf)


def fronts_of(options: argparse.Namespace) -> Fronts:
    """Without --sharing-delay: by the batches in which gateways write to a store, and read from it (docs/scaling.md)."""
    if options.gateways == 1:
        return ONE
    if options.sharing_delay is not None:
        return Fronts(options.gateways, options.sharing_delay)
    from gateway.cluster.replication import BATCH_S
    from gateway.cluster.store.link import pause_s

    return Fronts(options.gateways, BATCH_S + pause_s(options.gateways - 1))


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload to replay: makes a fresh source per run."""

    source: Callable[[], Source]
    horizon_s: float = 0.0  # of a closed loop

    def share_done(self, source: Source, number: int, now: float) -> float:
        """Progress of a run that has answered `number` requests, 0 to 1."""
        return min(1.0, number / len(source) if isinstance(source, OpenLoop) else now / self.horizon_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(flag, default=default, type=type(default), metavar="N", help=f"{text} (default: %(default)s)")

    spec = FleetSpec()
    kinds = ", ".join(GENERATED + name for name in GENERATORS)
    parser.add_argument(
        "trace", metavar="TRACE", help=f"JSON lines (Mooncake's or the agents' format, may be gzipped), or {kinds}"
    )
    parser.add_argument(
        "--policy", default="cost", metavar="A,B", help=f"policies to compare: {', '.join(NAMES)} (default: %(default)s)"
    )
    number("--replicas", spec.replicas, "number of replicas")
    number("--kv-tokens", spec.kv_tokens, "KV cache of a replica, in tokens")
    number("--prefill-rate", spec.prefill_rate, "prefill tokens/s of a replica")
    number("--decode-rate", spec.decode_rate, "generated tokens/s of a sequence")
    number("--batch-limit", spec.batch_limit, "sequences that a replica runs at once")
    number("--speed", 1.0, "open loops: factor on the arrival rate")
    number("--gateways", 1, "gateways, each with a router of its own; a request comes to any of them")
    delay = "several gateways: seconds until the others know of a decision; inf: they do not share (default: as with a store)"
    parser.add_argument("--sharing-delay", type=float, metavar="S", help=delay)
    own = "generators have their own"
    users = f"closed loops: users per replica (default: {TRACE_USERS}; {own})"
    parser.add_argument("--users", type=int, metavar="N", help=users)
    number("--max-input", 200_000, "agents' traces: longest prompt of a session, in tokens; other sessions are left out")
    hours = f"agents' traces and generators: simulated hours (default: {TRACE_HOURS:g}; {own})"
    parser.add_argument("--hours", type=float, metavar="N", help=hours)
    number("--seed", 0, "seed of all random choices")
    parser.add_argument("--json", action="store_true", help='print {"results": [...]} instead of a table')
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw TTFT and hits over time; needs the extra 'plot'")


def run(options: argparse.Namespace) -> int:
    """Simulate each policy of --policy; returns the exit status."""
    names = options.policy.split(",")
    spec = FleetSpec(options.replicas, options.kv_tokens, options.prefill_rate, options.decode_rate, options.batch_limit)
    results, curves = [], []
    try:
        _check(names, options)
        workload, fronts = load(options), fronts_of(options)
        for name in names:
            result, served = replay(name, spec, workload, options.seed, fronts, watch=sys.stderr.isatty())
            results.append(result)
            if options.plot:
                curves.append(plot.Curve.of(name, served, bound=name in BOUNDS))
        if options.plot:
            plot.draw(
                options.plot, curves, f"{Path(options.trace).name}: {spec.replicas} replicas, {spec.kv_tokens:,} KV tokens each"
            )
    except TraceError as error:
        return _fail(f"{options.trace}: {error}")
    except plot.PlotError as error:
        return _fail(f"--plot: {error}")
    except argparse.ArgumentTypeError as error:
        return _fail(str(error))
    if options.json:
        print(json.dumps({"results": [_row(result, fronts) for result in results]}))
    else:
        print_results(results)
        if fronts.gateways > 1:
            delay = "not shared" if math.isinf(fronts.delay_s) else f"sharing delay {fronts.delay_s:.4g} s"
            print(f"gateways: {fronts.gateways}, {delay}")
    return 0


def _row(result: Result, fronts: Fronts) -> dict[str, Any]:
    """For JSON. A bound is one queue for all; null: there is nobody to share with, or nothing is shared."""
    gateways, delay_s = (1, math.inf) if result.policy in BOUNDS else (fronts.gateways, fronts.delay_s)
    return {**asdict(result), "gateways": gateways, "sharing_delay_s": None if math.isinf(delay_s) else delay_s}


def _fail(message: str) -> int:
    print(f"warmroute: {message}", file=sys.stderr)
    return 2


def _check(names: Sequence[str], options: argparse.Namespace) -> None:
    """Raises ArgumentTypeError, or PlotError. All numbers but the seed must be positive, and only the delay may be infinite."""
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"--policy: {unknown[0]!r} is not one of {', '.join(NAMES)}")
    for name, value in vars(options).items():
        good = value > 0 and (value < math.inf or name == "sharing_delay") if type(value) in (int, float) else True
        if not good and name != "seed":
            raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')}: {value} is not a number above 0")
    if options.gateways > MAX_GATEWAYS:
        raise argparse.ArgumentTypeError(f"--gateways: {options.gateways} is more than {MAX_GATEWAYS}")
    if options.sharing_delay is not None and options.gateways == 1:
        raise argparse.ArgumentTypeError("--sharing-delay: there is nothing to share with one gateway (--gateways)")
    if options.plot:
        plot.check(options.plot)


def print_results(results: Sequence[Result]) -> None:
    """A row per policy."""
    from gateway.commands.tables import number, print_table, text

    names = ("requests", "hits", "TTFT mean", "p50", "p90", "p99", "e2e mean", "skew")
    rows = [
        (
            one.policy,
            str(one.requests),
            f"{one.hit_ratio:.1%}",
            *(f"{wait:.3f}" for wait in (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)),
            f"{one.e2e_mean_s:.2f}",
            f"{one.load_skew:.2f}",
        )
        for one in results
    ]
    print_table((text("policy"), *map(number, names)), rows)


# -- one run


def replay(
    name: str, spec: FleetSpec, workload: Workload, seed: int, fronts: Fronts = ONE, *, watch: bool = False
) -> tuple[Result, list[Served]]:
    """One policy, peer's rule or bound on one workload. Raises TraceError if no request begins in it."""
    source = workload.source()
    if name in BOUNDS:
        fleet = dataclasses.replace(spec, kv_tokens=_ENDLESS) if name == "infinite" else spec
        simulation = Simulation(fleet, source, SharedQueue(), shared=True)
    else:
        routers = [_router(name, random.Random(seed + number)) for number in range(fronts.gateways)]
        placement = Gateways(routers, spec, delay_s=fronts.delay_s, chance=random.Random(f"front {seed}"))
        simulation = Simulation(spec, source, placement)
    running = simulation.run()
    if watch:
        running = _watched(name, running, lambda number, now: workload.share_done(source, number, now))
    served = list(running)
    if not served:
        raise TraceError("no request begins in the simulated time (--hours)")
    return summary(name, spec, served, simulation.busy_s), served


def _router(policy: str, chance: Random) -> Router:
    routing = RoutingConfig()
    memory = routing.memory_mb << 20
    return Router(policy=policy, policies=SIMULATED, ttl_s=routing.ttl_s, memory_bytes=memory, chance=chance)


def _watched(name: str, served: Iterator[Served], share: Callable[[int, float], float]) -> Iterator[Served]:
    """With a progress bar on the terminal, which is removed when the run ends. share: done, of (requests, simulated time)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[requests]} requests"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task(name, total=1.0, requests=0)
        for number, one in enumerate(served, 1):
            if number % _PROGRESS_EVERY == 0:
                progress.update(task, completed=share(number, one.finished), requests=number, refresh=True)
            yield one


# -- workloads


def load(options: argparse.Namespace) -> Workload:
    """The trace, in either format, or the generator. Raises TraceError."""
    if options.trace.startswith(GENERATED):
        return _generated(options)
    rows = _rows(Path(options.trace))
    if "hash_ids" in rows[0]:
        source = OpenLoop(mooncake(rows, random.Random(options.seed), options.speed))
        return Workload(lambda: source)
    if "requests" not in rows[0]:
        raise TraceError("neither Mooncake's format (hash_ids) nor the agents' (requests)")
    sessions = list(agents(rows, options.max_input))
    if not sessions:
        raise TraceError(f"no session has all its prompts within {options.max_input} tokens (--max-input)")
    random.Random(options.seed).shuffle(sessions)
    users, horizon = (options.users or TRACE_USERS) * options.replicas, (options.hours or TRACE_HOURS) * 3600
    return Workload(lambda: ClosedLoop(sessions, users, horizon, random.Random(options.seed)), horizon)


def _generated(options: argparse.Namespace) -> Workload:
    name = options.trace.removeprefix(GENERATED)
    if name not in GENERATORS:
        raise TraceError(f"not one of {', '.join(GENERATED + known for known in GENERATORS)}")
    generator: Any = GENERATORS[name]
    known = {field.name for field in dataclasses.fields(generator)}
    changes: dict[str, Any] = {
        key: value for key in ("hours", "users") if key in known and (value := getattr(options, key)) is not None
    }
    if "rate" in known:
        changes["rate"] = generator.rate * options.speed
    generator = dataclasses.replace(generator, **changes)

    def source() -> Source:
        made: Source = generator.source(options.replicas, random.Random(options.seed))
        return made

    first = source()
    return Workload((lambda: first) if isinstance(first, OpenLoop) else source, generator.hours * 3600)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        rows += (json.loads(line) for line in text.splitlines() if line.strip())
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"a damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"row {len(rows) + 1} is not JSON: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise TraceError("JSON objects, one a line, are expected")
    return rows
