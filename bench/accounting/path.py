"""What metering, keys, the ledger and metrics cost a request, each alone and all together, beside a gateway without them.

    python -m bench.accounting.path [--tree FOLDER] [--count 5000] [--rounds 15] [--instructions] [--out bench/reports]

Writes path.md. tree: a folder with `gateway` and `router` in it, once for each: the checkout (default), or what
`python hatch_build.py FOLDER` has compiled. The parts (`parts.py`) run in a process of each tree, in turns; the least of the
rounds counts, less that of an empty loop. instructions: counted by valgrind's callgrind as well, which no other load on the
machine disturbs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.measure.machine import REPORTS, ROOT, command, versions

TARGET_US: Final = 6.0
PARTS: Final = Path(__file__).parent / "parts.py"
_PARTS: Final = {
    "metrics": "counted and timed (always)",
    "tokens": "tokens counted, without prices (always)",
    "metering": "the same with prices: bill, cost, savings",
    "keys": "a key found, its limits and budgets reserved and settled",
    "ledger": "the ledger's entry",
    "off": "without prices, keys and ledger",
    "on": "with all of them",
}
_TOTAL: Final = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of each part, for a request. us: CPU. instructions: nothing if they were not counted."""

    us: Mapping[str, float]
    instructions: Mapping[str, float] = field(default_factory=dict)


class Child:
    """A process that runs parts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process
        self._read()  # it has begun

    def prepare(self, part: str, count: int) -> None:
        self._write(f"{part} {count}")
        self._read()

    def run(self) -> int:
        """What was prepared; nanoseconds."""
        self._write("")
        return int(self._read())

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the process has ended with {self._process.wait()}")
        return line


@contextmanager
def child(tree: Path, *before: str) -> Iterator[Child]:
    """With the modules of the tree. before: what runs Python."""
    process = subprocess.Popen(
        [*before, sys.executable, str(PARTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if before else None,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"},
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.communicate(timeout=_END_S)


def cpu_us(trees: Sequence[Path], count: int, rounds: int) -> list[Mapping[str, float]]:
    """The trees take turns."""
    least: list[dict[str, int]] = [{} for _ in trees]
    for _ in range(rounds):
        for tree, found in zip(trees, least, strict=True):
            with child(tree) as each:
                for part in ("nothing", *_PARTS):
                    for _again in range(3):
                        each.prepare(part, count)
                        found[part] = min(found.get(part, sys.maxsize), each.run())
    return [{part: (found[part] - found["nothing"]) / count / 1000 for part in _PARTS} for found in least]


def instructions(tree: Path, count: int) -> Mapping[str, float]:
    found = dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        callgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out")
        with child(tree, *callgrind) as each:
            _control(each.pid, "--instr=on")
            for part in ("nothing", *_PARTS):
                each.prepare(part, count)  # the first time is to warm up
                each.run()
                each.prepare(part, count)
                _control(each.pid, "--zero")
                each.run()
                _control(each.pid, f"--dump=part-{part}")
                found[part] = _counted(Path(folder), part)
    return {part: (found[part] - found["nothing"]) / count for part in _PARTS}


def _control(pid: int, what: str) -> None:
    command = ["callgrind_control", what, str(pid)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=300)


def _counted(folder: Path, part: str) -> int:
    for file in folder.glob("out.*"):
        text = file.read_text("utf-8")
        if f"part-{part}\n" in text and (total := _TOTAL.search(text)):
            return int(total[1])
    raise RuntimeError("callgrind wrote no total")


def report(found: Mapping[str, Cost], how: str) -> str:
    lines = ["# What metering, keys, the ledger and metrics cost a request", "", f"`{how}`: {versions()}.", ""]
    lines += [
        "In the event loop's thread, on the way of a streamed chat; what writes the ledger's rows is in",
        "[ledger.md](ledger.md).",
        "",
    ]
    counted = any(cost.instructions for cost in found.values())
    heads = [head for name in found for head in (f"{name}, us", *([f"{name}, instructions"] if counted else []))]
    lines += [f"| | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for part, text in _PARTS.items():
        lines.append(_row(text, [(cost.us[part], cost.instructions.get(part)) for cost in found.values()], counted=counted))
    both = [
        (cost.us["on"] - cost.us["off"], cost.instructions["on"] - cost.instructions["off"] if counted else None)
        for cost in found.values()
    ]
    lines += [_row("**on less off**", both, counted=counted), ""]
    lines.append(f"The target: all of them at most {TARGET_US:g} us, compiled.")
    return "\n".join(lines) + "\n"


def _row(text: str, cells: Sequence[tuple[float, float | None]], *, counted: bool) -> str:
    written = [cell for us, count in cells for cell in (f"{us:.2f}", *([f"{count:,.0f}"] if counted else []))]
    return f"| {text} | {' | '.join(written)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accounting.path", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", metavar="FOLDER", help="once for each; default: the checkout")
    parser.add_argument("--count", type=int, default=5_000, metavar="N", help="requests in a round; default: 5000")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: 15")
    parser.add_argument("--instructions", action="store_true", help="count them with valgrind, too")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    trees = options.tree or [ROOT]
    times = cpu_us(trees, options.count, options.rounds)
    counts = [instructions(tree, 500) if options.instructions else {} for tree in trees]
    found = {_name(tree): Cost(*each) for tree, *each in zip(trees, times, counts, strict=True)}
    text = report(found, command("bench.accounting.path", arguments))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "path.md").write_text(text)
    print(text, file=sys.stderr)


def _name(tree: Path) -> str:
    compiled = any((tree / "router" / "index").glob("trie*.so"))
    return "compiled" if compiled else "not compiled"


if __name__ == "__main__":
    main()
