"""Coding agents through gateways: which turns stay where their conversation is, what is cached, how long the first token takes.

    python -m bench.agents [--quick] [--only warmroute,smg] [--kinds messages-claude-code] [--report]
    python -m bench.agents --replay [--report]

Prints tables; --report writes agents.md and agents.json (agents-replay.md, .json). The stand-in replicas: `standin.py`; what
clients send: `kinds.py`. Systems that are not installed are left out (`scripts/peers.sh` installs them). --variant NAME=FLAGS:
one more warmroute, with these flags of `warmroute serve`. --replay: recorded coding agents, beside the simulator (`replay.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.agents.dialogues import Shape
from bench.agents.engine import Model
from bench.agents.kinds import KINDS
from bench.agents.replay import CLAUDE_CODE, Replayed, replayed, sample, simulated
from bench.agents.replay import report as replay_report
from bench.agents.report import kept, report
from bench.agents.run import Plan, Score, run
from bench.gateway.systems import SYSTEMS, NotStarted, Setting, System
from bench.measure.machine import REPORTS, command, versions

PEERS = ("sglang-router", "smg", "vllm-router")
HOURS, SPEED = 0.25, 20.0  # of --replay
QUICK = {"conversations": 12, "turns": 4, "concurrent": 6, "think_s": 0.1}


def warmroute() -> System:
    """Of this checkout: compiled, if `hatch_build.py` has compiled these sources."""
    known = {system.name: system for system in SYSTEMS}
    chosen = known["warmroute"] if known["warmroute"].path else known["warmroute-plain"]
    return dataclasses.replace(chosen, name="warmroute")


def variant(name: str, flags: Sequence[str]) -> System:
    ours = warmroute()

    def with_flags(at: Setting) -> list[str]:
        return [*ours.command(at), *flags]

    return dataclasses.replace(ours, name=name, command=with_flags)


def systems(variants: Sequence[str]) -> list[System]:
    peers = [system for system in SYSTEMS if system.name in PEERS]
    more = [variant(name, shlex.split(flags)) for name, _, flags in (text.partition("=") for text in variants)]
    return [warmroute(), *more, *peers, variant("round-robin", ["--policy", "round_robin"])]


def watch(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(chosen: Sequence[System], kinds: Sequence[str], plan: Plan) -> Iterator[Score]:
    """Kind by kind, so that neighbours in a table were measured one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in (kind for kind in KINDS if kind.name in kinds):
            for number, system in enumerate(chosen):
                try:
                    score = run(system, kind, plan, Path(folder) / f"{kind.name}-{number}")
                except NotStarted as error:
                    score = Score(system.name, kind.name)
                    score.errors[f"did not start: {error}"] += 1
                yield score
                watch(f"{kind.name}, {system.name}: {score.stay_share:.0%} stay, {score.cached_share:.1%} cached")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=(__doc__ or "").splitlines()[0])
    plan = Plan()

    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(flag, type=type(default), default=None, metavar="N", help=f"{text} (default: {default:g})")

    def names(flag: str, text: str) -> None:
        parser.add_argument(flag, type=lambda given: given.split(","), default=None, metavar="A,B", help=text)

    parser.add_argument("--quick", action="store_true", help="less of everything")
    names("--only", "systems (default: all that are installed)")
    names("--kinds", f"of {', '.join(kind.name for kind in KINDS)} (default: all)")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more warmroute; repeatable")
    number("--conversations", plan.conversations, "how many")
    number("--turns", plan.turns, "of each")
    number("--concurrent", plan.concurrent, "conversations at a time")
    number("--think-s", plan.think_s, "mean pause between turns")
    number("--answer-tokens", plan.answer_tokens, "of each answer")
    number("--replicas", plan.replicas, "stand-ins")
    number("--seed", plan.seed, "of all texts and pauses")
    number("--kv-tokens", plan.model.kv_tokens, "that each stand-in's cache holds")
    number("--prefill-rate", plan.model.prefill_rate, "tokens/s")
    number("--decode-rate", plan.model.decode_rate, "tokens/s of a sequence")
    number("--tools", plan.shape.tools, "bytes of tools")
    number("--system", plan.shape.system, "bytes of system prompt")
    number("--turn", plan.shape.turn, "bytes that each turn adds")
    parser.add_argument("--engine", choices=["vllm", "llamacpp"], default="vllm", help="as whom the stand-ins act")
    parser.add_argument("--keep", action="store_true", help="the stand-ins keep responses, each its own")
    parser.add_argument("--replay", action="store_true", help="recorded coding agents instead, beside the simulator")
    number("--hours", HOURS, "of the trace that --replay sends")
    number("--speed", SPEED, "times as fast as recorded")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=REPORTS, metavar="DIR", help="write it (default: bench/reports)"
    )
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> Plan:
    """What is not given is the plan's, or the quick one's."""
    given = {key: value for key, value in vars(options).items() if value is not None}

    def of(kind: Callable[..., Any]) -> dict[str, Any]:
        return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}  # type: ignore[arg-type]

    own = (QUICK if options.quick else {}) | of(Plan)
    return Plan(**own, shape=Shape(**of(Shape)), model=Model(**of(Model)))


def installed(options: argparse.Namespace) -> list[System]:
    """The chosen systems. Raises SystemExit for a name that no system has."""
    known = systems(options.variant)
    if unknown := set(options.only or ()) - {system.name for system in known}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not one of {', '.join(system.name for system in known)}")
    chosen = [system for system in known if not options.only or system.name in options.only]
    for system in chosen:
        if not system.path:
            watch(f"{system.name} is left out; {system.install} installs it")
    return [system for system in chosen if system.path]


def write(folder: Path, name: str, text: str, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n", "utf-8")
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def replay_all(options: argparse.Namespace, made_by: str, chosen: Sequence[System]) -> None:
    """Ours, if none are chosen, beside the simulator with the same policy and with a bound."""
    given = sample(options.hours or HOURS, options.seed or 0)
    simulations = [simulated(given, policy) for policy in ("cost", "round_robin", "pooled")]
    found = list[Replayed]()
    with tempfile.TemporaryDirectory() as folder:
        for system in (system for system in chosen if options.only or system.name == "warmroute"):
            for kind in options.kinds or [CLAUDE_CODE]:
                found.append(replayed(system, kind, given, options.speed or SPEED, Path(folder) / str(len(found))))
                watch(f"{system.name}, {kind}: {found[-1].hit_ratio:.1%} cached")
    text = "\n".join(replay_report(made_by, given, options.speed or SPEED, simulations, found))
    if options.report:
        kept = {"made_by": made_by, "simulated": list(map(asdict, simulations)), "replayed": list(map(asdict, found))}
        write(options.report, "agents-replay", text, kept)
    print(text)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    plan, chosen = planned(options), installed(options)
    made_by = command("bench.agents", arguments)
    libraries = [f"{system.name} {system.version()}" for system in chosen if system.package != "warmroute"]
    made_by = f"Made by `{made_by}`: {versions(libraries)}."
    if options.replay:
        replay_all(options, made_by, chosen)
        return
    kinds = options.kinds or [kind.name for kind in KINDS]
    if unknown := set(kinds) - {kind.name for kind in KINDS}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not one of {', '.join(kind.name for kind in KINDS)}")
    scores = list(measure(chosen, kinds, plan))
    text = "\n".join(report(made_by, plan, scores))
    if options.report:
        write(options.report, "agents", text, {"made_by": made_by, "plan": asdict(plan), "scores": list(map(kept, scores))})
    print(text)


if __name__ == "__main__":
    main()
