"""`warmroute simulate TRACE`: replays a recorded workload through the production router, and prints what users would feel.

The bounds `pooled` (one cache and one queue for the whole fleet) and `infinite` (the same with endless memory) stand beside
the policies: no placement can be expected to beat them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gateway.config import RoutingConfig
from router import POLICIES, Router
from router.simulate import FleetSpec, Result, RouterPlacement, Served, SharedQueue, Simulation, summary
from router.workloads import ClosedLoop, OpenLoop, Source, TraceError, agents, mooncake

BOUNDS = ("pooled", "infinite")
_ENDLESS = 1 << 50  # tokens
_PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload that can be replayed: a fresh source per run. block_tokens: the length of its blocks."""

    source: Callable[[], Source]
    block_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(flag, default=default, type=type(default), metavar="N", help=f"{text} (default: %(default)s)")

    policies, spec = ", ".join((*POLICIES, *BOUNDS)), FleetSpec()
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="JSON lines, may be gzipped; Mooncake's or the agents' format"
    )
    parser.add_argument("--policy", default="cost", metavar="A,B", help=f"of {policies} (default: %(default)s)")
    number("--replicas", spec.replicas, "their number")
    number("--kv-tokens", spec.kv_tokens, "KV cache of a replica, tokens")
    number("--prefill-rate", spec.prefill_rate, "tokens/s of a replica")
    number("--decode-rate", spec.decode_rate, "tokens/s of a sequence")
    number("--batch-limit", spec.batch_limit, "sequences that a replica runs at once")
    number("--speed", 1.0, "Mooncake: replay so many times faster")
    number("--users", 6, "agents: users per replica")
    number("--max-input", 200_000, "agents: leave out sessions with a longer prompt, tokens")
    number("--hours", 1.0, "agents: simulated hours")
    number("--seed", 0, "of all chance in it")
    parser.add_argument("--json", action="store_true", help='print {"results": [...]} instead of a table')


def run(options: argparse.Namespace) -> int:
    """Simulate every policy that was asked for; returns the exit status."""
    names = options.policy.split(",")
    try:
        _check(names, options)
        trace = _load(options)
        results = [_simulate(name, options, trace) for name in names]
    except TraceError as error:
        return _refuse(f"{options.trace}: {error}")
    except argparse.ArgumentTypeError as error:
        return _refuse(str(error))
    print(json.dumps({"results": [asdict(result) for result in results]}) if options.json else table(results))
    return 0


def _refuse(message: str) -> int:
    print(f"warmroute: {message}", file=sys.stderr)
    return 2


def _check(names: Sequence[str], options: argparse.Namespace) -> None:
    """Raises ArgumentTypeError. All numbers but the seed must be positive."""
    if unknown := [name for name in names if name not in (*POLICIES, *BOUNDS)]:
        raise argparse.ArgumentTypeError(f"--policy: {unknown[0]!r} is not one of {', '.join((*POLICIES, *BOUNDS))}")
    for name, value in vars(options).items():
        if type(value) in (int, float) and name != "seed" and not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')}: {value} is not a number above 0")


def table(results: Sequence[Result]) -> str:
    quantiles = "".join(f"{name:>9}" for name in ("p50", "p90", "p99"))
    head = f"{'policy':<14} {'requests':>9} {'hits':>7} {'TTFT mean':>10}{quantiles} {'e2e mean':>9} {'skew':>6}"
    rows = (
        f"{one.policy:<14} {one.requests:>9} {one.hit_ratio:>7.1%} {one.ttft_mean_s:>10.3f} {one.ttft_p50_s:>8.3f} "
        f"{one.ttft_p90_s:>8.3f} {one.ttft_p99_s:>8.3f} {one.e2e_mean_s:>9.2f} {one.load_skew:>6.2f}"
        for one in results
    )
    return "\n".join([head, *rows])


def _simulate(name: str, options: argparse.Namespace, trace: Trace) -> Result:
    spec = FleetSpec(options.replicas, options.kv_tokens, options.prefill_rate, options.decode_rate, options.batch_limit)
    simulated = replace(spec, kv_tokens=_ENDLESS) if name == "infinite" else spec
    routing = RoutingConfig()
    if name in BOUNDS:
        simulation = Simulation(simulated, trace.source(), SharedQueue(), shared=True)
    else:
        memory, chance = routing.memory_mb << 20, random.Random(options.seed)
        router = Router(policy=name, ttl_s=routing.ttl_s, memory_bytes=memory, chance=chance)
        simulation = Simulation(spec, trace.source(), RouterPlacement(router, spec, trace.block_tokens))
    served = list(_watched(name, simulation.run()))
    if not served:
        raise TraceError("no request begins in the simulated time (--hours)")
    return summary(name, spec, served, simulation.busy_s)


def _watched(name: str, served: Iterable[Served]) -> Iterable[Served]:
    """With a line on a terminal that tells how far it is."""
    shown, begun = sys.stderr.isatty(), time.monotonic()
    for number, one in enumerate(served, 1):
        if shown and number % _PROGRESS_EVERY == 0:
            print(f"\r{name}: {number} requests, {time.monotonic() - begun:.0f} s", end="", file=sys.stderr, flush=True)
        yield one
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _load(options: argparse.Namespace) -> Trace:
    """The trace in whichever format it is. Raises TraceError."""
    rows = _rows(options.trace)
    if "hash_ids" in rows[0]:
        arrivals = list(mooncake(rows, random.Random(options.seed), options.speed))
        return Trace(lambda: OpenLoop(arrivals), arrivals[0][1].prompt.block_units)
    if "requests" not in rows[0]:
        raise TraceError("neither Mooncake's format (hash_ids) nor the agents' (requests)")
    sessions = list(agents(rows, options.max_input))
    if not sessions:
        raise TraceError(f"no session has all its prompts within {options.max_input} tokens (--max-input)")
    random.Random(options.seed).shuffle(sessions)
    users, horizon = options.users * options.replicas, options.hours * 3600
    block_tokens = sessions[0][0][1].prompt.block_units
    return Trace(lambda: ClosedLoop(sessions, users, horizon, random.Random(options.seed)), block_tokens)


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
