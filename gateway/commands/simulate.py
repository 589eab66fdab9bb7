"""`warmroute simulate TRACE`: replays a workload through the production router, and prints waiting times and cache hits.

The workload is recorded (a file) or generated (gen:NAME, see `router.simulation.generators`). It is placed by the router's own
policies, by the rules of peers, or by two bounds that no policy can be expected to beat: `pooled` (one cache and one queue for
the whole fleet) and `infinite` (the same with unlimited memory).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.commands import plot
from gateway.commands.replaying import money
from gateway.commands.replaying.recorded import (
    RecordedFleet,
    ReplayOptions,
    about,
    middle_of,
    recorded_fleet,
)
from gateway.commands.replaying.trace_lines import trace_lines
from gateway.commands.replaying.what_if import Variant, sentence, variant
from gateway.config.schema import RoutingConfig
from router import Router
from router.simulation.fleet import (
    Compared,
    FleetSpec,
    Held,
    Result,
    ServedRequest,
    SharedQueue,
    Simulation,
    everything,
    remember,
    summary,
)
from router.simulation.gateways import Gateways
from router.simulation.generators import GENERATORS
from router.simulation.policies import SIMULATED
from router.simulation.recorded import ENGINE_BLOCK, ClosedReplay, OpenReplay, is_header
from router.simulation.split import SplitPlacement, SplitSimulation
from router.simulation.workloads import ClosedLoop, OpenLoop, TraceError, Turn, WorkloadSource, agents, mooncake
from router.types import Random

BOUNDS = ("pooled", "infinite")
NAMES = (*SIMULATED, *BOUNDS)
GENERATED = "gen:"
TRACE_HOURS, TRACE_USERS = 1.0, 6
MAX_GATEWAYS = 1000
_ENDLESS = 1 << 50  # tokens
REPLAYS, MAX_REPLAYS = 5, 1000
PRICES = ("price_input", "price_cached", "price_output", "gpu_hour")
_PROGRESS_EVERY = 500

DESCRIPTION = (
    "Replay a recorded or generated workload through the production router on a simulated fleet. Results of each policy: token"
    " hit ratio, time to first token (TTFT), end-to-end time (s), load skew (the busiest replica's prefill over the mean)."
)


@dataclass(frozen=True, slots=True)
class Fronts:
    """gateways: their number. delay_s: seconds until they know each other's decisions (inf: never)."""

    gateways: int
    delay_s: float


ONE = Fronts(1, math.inf)


def fronts_of(options: argparse.Namespace) -> Fronts:
    """The gateways of the options. The default of --sharing-delay is the time between batches of gateways with a store
    (docs/scaling.md).
    """
    if options.gateways == 1:
        return ONE
    if options.sharing_delay is not None:
        return Fronts(options.gateways, options.sharing_delay)
    from gateway.cluster.replication import BATCH_S, pause_s

    return Fronts(options.gateways, BATCH_S + pause_s(options.gateways - 1))


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload to replay: makes a new source per run. compared: selects the requests that count. held: the caches at the
    start.
    """

    source: Callable[[], WorkloadSource]
    horizon_s: float = 0.0  # of a closed loop
    compared: Compared = everything
    held: Sequence[Held] = ()

    def share_done(self, source: WorkloadSource, number: int, now: float) -> float:
        """Progress of a run that has answered `number` requests, 0 to 1."""
        if isinstance(source, OpenLoop | OpenReplay | ClosedReplay):
            return min(1.0, number / len(source))
        return min(1.0, now / self.horizon_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(flag, default=default, type=type(default), metavar="N", help=f"{text} (default: %(default)s)")

    def of_fleet(flag: str, default: float, text: str) -> None:
        was = f"default: {default}; of a recording: as it was"
        parser.add_argument(flag, type=type(default), metavar="N", help=f"{text} ({was})")

    spec = FleetSpec()
    kinds = ", ".join(GENERATED + name for name in GENERATORS)
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"JSON lines (`warmroute record`'s, Mooncake's or the agents' format, may be gzipped), or {kinds}",
    )
    of = f"policies to compare: {', '.join(NAMES)} (default: cost; of a recording: as it was)"
    parser.add_argument("--policy", metavar="A,B", help=of)
    keys = "policy=, prefill=, decode=, speed=, prefillers="
    text = f"the same load on another fleet: replicas=12,kv=2M; also {keys}. May be repeated"
    parser.add_argument("--what-if", metavar="KEY=VALUE,...", action="append", default=[], help=text)
    of_fleet("--replicas", spec.replicas, "number of replicas")
    of_fleet("--kv-tokens", spec.kv_tokens, "KV cache of a replica, in tokens")
    of_fleet("--prefill-rate", spec.prefill_rate, "prefill tokens/s of a replica")
    of_fleet("--decode-rate", spec.decode_rate, "generated tokens/s of a sequence")
    text = "of the replicas, how many only compute prompts for the others (default: 0: each does both)"
    parser.add_argument("--prefillers", type=int, metavar="N", help=text)
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
    _add_recording_arguments(parser)
    money.add_arguments(parser)
    number("--seed", 0, "seed of all random choices")
    parser.add_argument("--json", action="store_true", help='print {"results": [...]} instead of a table')
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw TTFT and hits over time; needs the extra 'plot'")


def _add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    text = "recordings: the pool to replay (default: the one with the most requests)"
    parser.add_argument("--pool", type=int, metavar="N", help=text)
    text = "recordings: send all requests at their recorded times, and not a conversation's next one after the answer before it"
    parser.add_argument("--open", action="store_true", help=text)
    text = "recordings: replays of each row, each with other chances; the row is their median (default: %(default)s)"
    parser.add_argument("--runs", type=int, metavar="N", default=REPLAYS, help=text)
    text = "recordings: seconds at the beginning that are not in the numbers (default: a tenth, 60 to 600, at most a third)"
    parser.add_argument("--warm-up", type=float, metavar="S", help=text)
    text = "recordings: tokens of a block of the engine's cache (default: %(default)s)"
    parser.add_argument("--engine-block", type=int, metavar="N", default=ENGINE_BLOCK, help=text)


def run(options: argparse.Namespace) -> int:
    """Simulate each policy of --policy, and each --what-if; returns the exit status."""
    runs, curves = list[SimulationRun](), list[plot.Curve]()
    try:
        variants = _check(options)
        opened = open_trace(options)
        for name, base, changed in [*_plans(options, opened), *_variants(options, opened, variants)]:
            one, served = _simulated(options, opened, name, base, changed)
            runs.append(one)
            if options.plot and changed is None:
                curves.append(plot.Curve.of(name, served, bound=name in BOUNDS))
        if options.plot:
            spec = runs[0].spec
            title = f"{Path(options.trace).name}: {spec.replicas} replicas, {spec.kv_tokens:,} KV tokens each"
            plot.draw(options.plot, curves, title)
    except TraceError as error:
        return _fail(f"{options.trace}: {error}")
    except plot.PlotError as error:
        return _fail(f"--plot: {error}")
    except argparse.ArgumentTypeError as error:
        return _fail(str(error))
    _show(options, opened, runs)
    return 0


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One row. result: the median of its replays. replays: their results. variant: None for a policy of the base."""

    result: Result
    replays: Sequence[Result]
    spec: FleetSpec
    variant: Variant | None
    money: money.RunCost | None

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The least and the largest value of several replays."""
        values = [getattr(each, name) for each in self.replays]
        return (min(values), max(values)) if len(values) > 1 else None


Plan = tuple[str, FleetSpec, Variant | None]


def _plans(options: argparse.Namespace, opened: OpenedTrace) -> list[Plan]:
    policy = options.policy or (opened.recorded.policy if opened.recorded else "cost")
    return [(name, opened.spec, None) for name in policy.split(",")]


def _variants(options: argparse.Namespace, opened: OpenedTrace, variants: Sequence[Variant]) -> list[Plan]:
    """The plans of the variants. Unchanged values are as in the first row."""
    first, base = _plans(options, opened)[0][0], opened.spec
    names = ("replicas", "kv_tokens", "prefill_rate", "decode_rate", "prefillers")
    plans = list[Plan]()
    for one in variants:
        changes = {name: value for name in names if (value := getattr(one, name)) is not None}
        if one.prefill_rate and base.learned_rate:
            changes["learned_rate"] = one.prefill_rate
        plans.append((one.policy or first, dataclasses.replace(base, **changes), one))
    return plans


def _simulated(
    options: argparse.Namespace, opened: OpenedTrace, name: str, spec: FleetSpec, changed: Variant | None
) -> tuple[SimulationRun, list[ServedRequest]]:
    workload = opened.workload(options.speed * (changed.speed or 1.0 if changed else 1.0))
    watch, results, served = sys.stderr.isatty(), list[Result](), list[ServedRequest]()
    for number in range(options.runs if opened.recorded else 1):
        result, served = replay(name, spec, workload, options.seed + number, fronts_of(options), watch=watch)
        results.append(result)
    prices = money.prices_of(options)
    cost = money.cost_of(prices, spec, served) if prices else None
    return SimulationRun(middle_of(results), results, spec, changed, cost), served


def _show(options: argparse.Namespace, opened: OpenedTrace, runs: Sequence[SimulationRun]) -> None:
    fronts, recorded = fronts_of(options), opened.recorded
    was = recorded.measured(opened.spec) if recorded else None
    if options.json:
        rows = [_row(one, fronts) for one in runs]
        about_it = {"measured": asdict(was)} if was else {}
        if recorded and not was:
            print(f"warmroute: note: {recorded.unmeasured()}", file=sys.stderr)
        fleet = {"fleet": asdict(opened.spec)} if recorded else {}
        print(json.dumps({**about_it, **fleet, "results": rows}))
        return
    if recorded:
        print("\n".join(about(recorded, opened.spec, vars(options))))
    print_results([*([was] if was else []), *(_labelled(one) for one in runs)], [one.money for one in runs])
    if fronts.gateways > 1:
        delay = "not shared" if math.isinf(fronts.delay_s) else f"sharing delay {fronts.delay_s:.4g} s"
        print(f"gateways: {fronts.gateways}, {delay}")
    for one in runs:
        if one.variant:
            both = (one.money, runs[0].money) if one.money and runs[0].money else None
            print(sentence(one.variant, one.result, runs[0].result, one.range_of("ttft_p90_s"), both))


def _labelled(run: SimulationRun) -> Result:
    return dataclasses.replace(run.result, policy=run.variant.text) if run.variant else run.result


def _row(run: SimulationRun, fronts: Fronts) -> dict[str, Any]:
    """A row for JSON. sharing_delay_s is null if nothing is shared: for a bound, which is one queue for all, or a single
    gateway.
    """
    gateways, delay_s = (1, math.inf) if run.result.policy in BOUNDS else (fronts.gateways, fronts.delay_s)
    row = {**asdict(run.result), "gateways": gateways, "sharing_delay_s": None if math.isinf(delay_s) else delay_s}
    if run.variant:
        row["what_if"] = run.variant.text
    if len(run.replays) > 1:
        row["replays"] = [asdict(each) for each in run.replays]
    if run.money:
        row |= {**asdict(run.money), "hourly_usd": run.money.hourly_usd}
    return row


def _fail(message: str) -> int:
    print(f"warmroute: {message}", file=sys.stderr)
    return 2


def _check(options: argparse.Namespace) -> list[Variant]:
    """The variants of --what-if. Raises ArgumentTypeError, or PlotError. All numbers except the seed, a pool's and prices must
    be positive, and only the delay may be infinite.
    """
    names = [] if options.policy is None else options.policy.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"--policy: {unknown[0]!r} is not one of {', '.join(NAMES)}")
    for name, value in vars(options).items():
        if name in PRICES and value is not None and not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')}: {value} is not a price in USD, 0 or more")
        if name == "warm_up" and value is not None and not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"--warm-up: {value} is not a number of seconds, 0 or more")
        if name in (*PRICES, "pool", "seed", "warm_up"):
            continue
        good = value > 0 and (value < math.inf or name == "sharing_delay") if type(value) in (int, float) else True
        if not good:
            raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')}: {value} is not a number above 0")
    if options.runs > MAX_REPLAYS:
        raise argparse.ArgumentTypeError(f"--runs: {options.runs} is more than {MAX_REPLAYS}")
    if options.gateways > MAX_GATEWAYS:
        raise argparse.ArgumentTypeError(f"--gateways: {options.gateways} is more than {MAX_GATEWAYS}")
    if options.sharing_delay is not None and options.gateways == 1:
        raise argparse.ArgumentTypeError("--sharing-delay: there is nothing to share with one gateway (--gateways)")
    if options.plot:
        plot.check(options.plot)
    return [variant(text, NAMES) for text in options.what_if]


def print_results(results: Sequence[Result], costs: Sequence[money.RunCost | None] = ()) -> None:
    """A row per policy. costs: of the last rows."""
    from gateway.commands.tables import number, print_table, text

    names: tuple[str, ...] = ("requests", "hits", "TTFT mean", "p50", "p90", "p99", "e2e mean", "skew")
    if any(costs):
        names += ("USD/h",)
    rows = [
        (
            one.policy,
            str(one.requests),
            f"{one.hit_ratio:.1%}",
            *(f"{wait:.3f}" for wait in (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)),
            f"{one.e2e_mean_s:.2f}",
            f"{one.load_skew:.2f}",
            *([f"{cost.hourly_usd:,.2f}" if cost else ""] if any(costs) else []),
        )
        for one, cost in zip(results, [*([None] * (len(results) - len(costs))), *costs], strict=True)
    ]
    print_table((text("policy"), *map(number, names)), rows)


# -- one run


def replay(
    name: str, spec: FleetSpec, workload: Workload, seed: int, fronts: Fronts = ONE, *, watch: bool = False
) -> tuple[Result, list[ServedRequest]]:
    """One policy, peer's rule or bound on one workload. Raises TraceError if no request begins in it."""
    source = workload.source()
    if name in BOUNDS:
        fleet = dataclasses.replace(spec, kv_tokens=_ENDLESS) if name == "infinite" else spec
        simulation = Simulation(fleet, source, SharedQueue(), shared=True, held=workload.held)
    elif spec.prefillers:
        if spec.prefillers >= spec.replicas or fronts.gateways > 1:
            raise TraceError("prefillers need other replicas beside them, and one gateway (--gateways)")
        split = SplitPlacement(_router(name, random.Random(seed)), spec)
        remember(split.router, spec, workload.held)
        simulation = SplitSimulation(spec, source, split, held=workload.held)
    else:
        routers = [_router(name, random.Random(seed + number)) for number in range(fronts.gateways)]
        placement = Gateways(routers, spec, delay_s=fronts.delay_s, chance=random.Random(f"front {seed}"))
        for router in routers:
            remember(router, spec, workload.held)
        simulation = Simulation(spec, source, placement, held=workload.held)
    running = simulation.run()
    if watch:
        running = _watched(name, running, lambda number, now: workload.share_done(source, number, now))
    served = list(running)
    if not served:
        raise TraceError("no request begins in the simulated time (--hours)")
    return summary(name, spec, served, simulation.busy_s, workload.compared), served


def _router(policy: str, chance: Random) -> Router:
    routing = RoutingConfig()
    memory = routing.memory_mb << 20
    return Router(policy=policy, policies=SIMULATED, ttl_s=routing.ttl_s, memory_bytes=memory, chance=chance)


def _watched(name: str, served: Iterator[ServedRequest], share: Callable[[int, float], float]) -> Iterator[ServedRequest]:
    """Shows a progress bar on the terminal, and removes it when the run ends. share: progress, from (requests,
    simulated time).
    """
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


@dataclass(frozen=True, slots=True)
class OpenedTrace:
    """An opened trace. spec: the simulated fleet. workload: makes it at a speed. recorded: set for a recording."""

    spec: FleetSpec
    workload: Callable[[float], Workload]
    recorded: RecordedFleet | None = None


def open_trace(options: argparse.Namespace) -> OpenedTrace:
    """The trace, in any format, or the generator. Raises TraceError."""
    spec = _spec_of(options, FleetSpec())
    if options.trace.startswith(GENERATED):
        return OpenedTrace(spec, lambda speed: _generated(options, spec.replicas, speed))
    rows = trace_lines(Path(options.trace))
    first = next(rows, None)
    if first is None:
        raise TraceError("JSON objects, one a line, are expected")
    rows = itertools.chain([first], rows)
    if is_header(first):
        fleet = recorded_fleet(rows, options.pool, options.warm_up)
        spec = _spec_of(options, fleet.spec(FleetSpec()))
        return OpenedTrace(spec, lambda speed: _recorded(options, fleet, spec, speed), fleet)
    if "hash_ids" in first:
        listed = list(rows)

        def workload(speed: float) -> Workload:
            source = OpenLoop(mooncake(listed, random.Random(options.seed), speed))
            return Workload(lambda: source)

        workload(options.speed)  # reports its errors first
        return OpenedTrace(spec, workload)
    if "requests" not in first:
        raise TraceError("neither Mooncake's format (hash_ids), nor the agents' (requests), nor a recording (format)")
    sessions = _sessions(options, rows)
    return OpenedTrace(spec, lambda _speed: _users(options, spec.replicas, sessions))


def load(options: argparse.Namespace) -> Workload:
    """The workload of the base. Raises TraceError."""
    return open_trace(options).workload(options.speed)


def _spec_of(options: argparse.Namespace, base: FleetSpec) -> FleetSpec:
    """The fleet with the options of the user."""
    names = ("replicas", "kv_tokens", "prefill_rate", "decode_rate", "batch_limit", "prefillers")
    return dataclasses.replace(base, **{name: value for name in names if (value := getattr(options, name, None)) is not None})


def _recorded(options: argparse.Namespace, fleet: RecordedFleet, spec: FleetSpec, speed: float) -> Workload:
    how, runs = ReplayOptions(options.open, options.engine_block), itertools.count()

    def source() -> WorkloadSource:
        """A different source for each run."""
        chance = random.Random(options.seed + next(runs))
        return fleet.source(chance, spec, how, speed)

    return Workload(source, compared=fleet.compared, held=fleet.held(random.Random(options.seed), how))


def _sessions(options: argparse.Namespace, rows: Iterable[dict[str, Any]]) -> list[list[Turn]]:
    sessions = list(agents(rows, options.max_input))
    if not sessions:
        raise TraceError(f"no session has all its prompts within {options.max_input} tokens (--max-input)")
    random.Random(options.seed).shuffle(sessions)
    return sessions


def _users(options: argparse.Namespace, replicas: int, sessions: list[list[Turn]]) -> Workload:
    users, horizon = (options.users or TRACE_USERS) * replicas, (options.hours or TRACE_HOURS) * 3600
    return Workload(lambda: ClosedLoop(sessions, users, horizon, random.Random(options.seed)), horizon)


def _generated(options: argparse.Namespace, replicas: int, speed: float) -> Workload:
    name = options.trace.removeprefix(GENERATED)
    if name not in GENERATORS:
        raise TraceError(f"not one of {', '.join(GENERATED + known for known in GENERATORS)}")
    generator: Any = GENERATORS[name]
    known = {field.name for field in dataclasses.fields(generator)}
    changes: dict[str, Any] = {
        key: value for key in ("hours", "users") if key in known and (value := getattr(options, key)) is not None
    }
    if "rate" in known:
        changes["rate"] = generator.rate * speed
    generator = dataclasses.replace(generator, **changes)

    def source() -> WorkloadSource:
        made: WorkloadSource = generator.source(replicas, random.Random(options.seed))
        return made

    first = source()
    return Workload((lambda: first) if isinstance(first, OpenLoop) else source, generator.hours * 3600)
