"""Fuzzers: random invalid and unusual inputs until time is up; an exit status other than 0 is a bug.

    python -m scripts.fuzz answers            # replicas' answers: http1.Answer against a simple reader, any chunking
    python -m scripts.fuzz tap                # streams: the stream readers, any chunking
    python -m scripts.fuzz requests           # clients' bytes: a real gateway, a strict replica
    python -m scripts.fuzz shapes             # JSON by shape and size, compressed too: a gateway whose event loop is watched
    python -m scripts.fuzz headers            # headers: forwarding, operators, memory
    python -m scripts.fuzz salts              # cache salts: isolation of tenants
    python -m scripts.fuzz models             # model names: routing, and the labels of metrics
    python -m scripts.fuzz diff --out FILE    # answers that http1, aiohttp and nginx read differently, as a table
    python -m scripts.fuzz all --out FILE     # all of them one after the other, as a page

Inputs are made from the corpus in `tests/corpus/http`, which `upstream/test_fuzz.py` replays; the inputs of shapes, salts and
models are recipes, of which bodies are made. Options: --seconds N, --seed N (what failed can be run again), --keep (add what
led to something new to the corpus). Where `atheris` is installed, `answers` and `tap` let it choose the inputs by the lines
that they reach; `--plain` does without.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

CORPUS = Path(__file__).parents[1] / "tests" / "corpus" / "http"
LARGEST = 3000  # bytes of an input that is worth keeping
PLAIN = {"answers": "scripts.fuzzing.answers", "tap": "scripts.fuzzing.streams"}  # parts of a gateway, one input at a time
WHOLE = ("requests", "shapes", "headers", "salts", "models")  # a whole gateway
NOTE = "  note: "

One = Callable[[bytes, Random], tuple[bytes, str]]


@dataclass(slots=True)
class Run:
    """Inputs and outcomes. corpus: the known inputs, and the first input of each new kind of outcome. notes: measurements of
    the run.
    """

    mode: str
    chance: Random
    corpus: list[bytes]
    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fresh: list[bytes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def some(self) -> bytes:
        return self.chance.choice(self.corpus) if self.corpus else b""

    def count(self, data: bytes, kind: str) -> None:
        self.tried += 1
        if kind not in self.kinds and len(data) <= LARGEST:
            self.corpus.append(data)
            self.fresh.append(data)
        self.kinds[kind] += 1

    def report(self, seconds: float) -> str:
        rows = [f"{self.mode}: {self.tried} inputs in {seconds:.0f} s, {len(self.kinds)} outcomes, corpus {len(self.corpus)}"]
        rows += [f"{NOTE}{note}" for note in self.notes]
        rows += [f"  {count:>8}  {kind[:100]}" for kind, count in self.kinds.most_common(25)]
        return "\n".join(rows)


def seeds(mode: str) -> list[bytes]:
    """The corpus of one mode."""
    return [path.read_bytes() for path in sorted(CORPUS.glob(f"{mode}-*"))]


def loop(run: Run, one: One, until: Callable[[], bool]) -> None:
    """Try one input after the other."""
    for data in list(run.corpus):
        run.kinds[importlib.import_module(one.__module__).check(data, run.chance)] += 1
    while not until():
        run.count(*one(run.some(), run.chance))


async def batches(run: Run, until: Callable[[], bool]) -> None:
    """The same for inputs that go to a whole gateway, several at once."""
    clients = importlib.import_module(f"scripts.fuzzing.{run.mode}")
    async with clients.watched() as gateway:
        known = list(run.corpus)
        for at in range(0, len(known), clients.CLIENTS):
            for kind in await gateway.blame(known[at : at + clients.CLIENTS], run.chance):
                run.kinds[kind] += 1
        while not until():
            inputs = [
                clients.make(run.some() if run.chance.random() < 0.5 else b"", run.chance) for _ in range(clients.CLIENTS)
            ]
            for data, kind in zip(inputs, await gateway.blame(inputs, run.chance), strict=True):
                run.count(data, kind)
    run.notes = gateway.notes()  # includes measurements at the end of the run


def guided(module: str, mode: str, seconds: int) -> None:
    """libFuzzer chooses the inputs. It ends the process."""
    import atheris

    with atheris.instrument_imports(include=["gateway.upstream.http1", "gateway.dialects"]):
        check = importlib.import_module(module).check
    folder = CORPUS.parents[2] / "build" / f"fuzz-{mode}"
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(mode)):
        (folder / f"seed-{number}").write_bytes(data)
    options = [f"-max_total_time={seconds}", "-max_len=600", "-print_final_stats=1", f"-artifact_prefix={folder.parent}/"]
    atheris.Setup([sys.argv[0], str(folder), *options], lambda data: check(data, Random(len(data))))
    atheris.Fuzz()


def keep(run: Run) -> None:
    """Write the new ones into the corpus."""
    CORPUS.mkdir(parents=True, exist_ok=True)
    for data in run.fresh:
        (CORPUS / f"{run.mode}-{hashlib.sha256(data).hexdigest()[:10]}").write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*PLAIN, *WHOLE, "diff", "all"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.mode == "diff":
        from scripts.fuzzing import diff

        return diff.main(options.out, options.seconds, Random(seed))
    if options.mode == "all":
        from scripts.fuzzing import report

        return report.main(options.out, options.seconds, seed)
    if options.mode in PLAIN and not options.plain and importlib.util.find_spec("atheris"):
        guided(PLAIN[options.mode], options.mode, options.seconds)
    run = Run(options.mode, Random(seed), seeds(options.mode))
    begun = time.monotonic()

    def until() -> bool:
        return time.monotonic() - begun > options.seconds

    if options.mode in WHOLE:
        asyncio.run(batches(run, until))
    else:
        loop(run, importlib.import_module(PLAIN[options.mode]).one, until)
    print(run.report(time.monotonic() - begun))
    if options.keep:
        keep(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
