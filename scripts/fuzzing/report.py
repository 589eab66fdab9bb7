"""Runs all fuzzers one after the other and reports their inputs and outcomes as a page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.fuzzing import diff

MODES = {
    "answers": "replicas' answers: `http1.Answer` against a simple reader, any cutting",
    "tap": "streams of events: the usage tap, any cutting",
    "requests": "clients' bytes: a real gateway over real sockets, in front of a strict replica",
    "shapes": "JSON by shape and size, compressed too: a gateway whose event loop is watched",
    "headers": "headers: forwarding, operators, memory",
    "salts": "cache salts of several tenants, isolated and not",
    "models": "model names, listed by replicas and requested by clients",
}
GUIDED = ("answers", "tap")  # by the lines that they reach, where atheris is installed
FIRST_LINE = r"^\w+: (?P<tried>\d+) inputs in \d+ s, (?P<outcomes>\d+) outcomes, corpus (?P<corpus>\d+)$"
NOTE = r"^  note: (.+)$"
LAST_LINE = r"^stat::number_of_executed_units: (?P<tried>\d+)$"


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """The result of one fuzzer. found: its last printed line if it ended with an error; notes: its measurements."""

    mode: str
    how: str
    seed: int
    tried: int
    outcomes: str
    corpus: str
    found: str
    notes: tuple[str, ...] = ()


Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def captured(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; returns its output and exit status, also if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fuzz(mode: str, how: str, seconds: int, seed: int, run: Run = captured) -> Fuzzed:
    """Run a fuzzer in a process of its own, because it may end the process."""
    command = [sys.executable, "-m", "scripts.fuzz", mode, "--seconds", str(seconds), "--seed", str(seed)]
    plain = how != "atheris"
    done = run([*command, *(["--plain"] if plain else [])])
    said = done.stdout + done.stderr
    match = re.search(FIRST_LINE if plain else LAST_LINE, said, re.MULTILINE)
    fields = match.groupdict() if match else {}
    wrong = "" if done.returncode == 0 and match else said[-1000:]
    notes = tuple(re.findall(NOTE, said, re.MULTILINE))
    return Fuzzed(
        mode, how, seed, int(fields.get("tried", 0)), fields.get("outcomes", ""), fields.get("corpus", ""), wrong, notes
    )


def page(made_by: str, runs: list[Fuzzed], table: str) -> Iterator[str]:
    yield "# What the fuzzers tried\n"
    yield f"{made_by}\n"
    yield "Inputs are mutated from the corpus in `tests/corpus/http`, which every test run replays, or made up. Bytes are cut"
    yield "in several ways, which must give the same; inputs of shapes, salts and models are recipes of one or more requests."
    yield "*outcomes*: what came of them, refusals by their reason.\n"
    yield "| | chosen | seed | inputs | outcomes | corpus | bugs |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for run in runs:
        bugs = "**1**" if run.found else "0"
        yield f"| {MODES[run.mode]} | {run.how} | {run.seed} | {run.tried:,} | {run.outcomes} | {run.corpus} | {bugs} |"
    yield ""
    for run in runs:
        yield from (f"- {run.mode}: {note}" for note in run.notes)
    for run in runs:
        if run.found:
            yield f"\n**{run.mode}, seed {run.seed}, ended with:**\n\n```\n{run.found}\n```"
    yield "\n## The same bytes through three readers\n"
    yield "http1 may be stricter than aiohttp's client and nginx; it may not read anything else than they do.\n"
    yield table


def main(out: Path | None, seconds: int, seed: int) -> int:
    """seconds: for each. Exit status 1 if any found a bug."""
    guided = bool(importlib.util.find_spec("atheris"))
    runs = [fuzz(mode, "at random", seconds, seed) for mode in MODES]
    runs += [fuzz(mode, "atheris", seconds, seed) for mode in GUIDED if guided]
    rows, version = diff.compared(seconds * 100, Random(seed))
    made_by = f"Made by `python -m scripts.fuzz all --seconds {seconds} --seed {seed}`."
    text = "\n".join(page(made_by, runs, diff.table(rows, version)))
    print(text)
    if out:
        out.write_text(text, "utf-8")
    return int(any(run.found for run in runs) or any(row.wrong for row in rows))
