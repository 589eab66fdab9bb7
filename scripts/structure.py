"""The structure of a checkout in figures, as a Markdown table: sizes, imports, the way of a request, names and phrases.

    python -m scripts.structure [CHECKOUT] [--details] [--imports]

The figures of the source come from its syntax trees (`structure_source.py`, `structure_words.py`), the figures of a request
from a profiler (`structure_probe.py`). --details adds the names behind the figures, --imports the slowest imports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import structure_source, structure_words
from scripts.structure_source import Source

ROOT = Path(__file__).parents[1]
PROBE = Path(__file__).with_name("structure_probe.py")
STARTS = 7
SLOWEST = 25
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|( *)(\S+)")


class Figure(NamedTuple):
    """A row of the table. names: behind the figure, one per line in the details."""

    title: str
    value: str
    names: Sequence[str] = ()


def of_source(source: Source) -> Iterator[Figure]:
    lines = source.lines()
    yield Figure("lines of the core / of `gateway/`", f"{lines.core:,} / {lines.all:,}", lines.folders)
    for strict, what in ((False, "from the core into features"), (True, "of them not in app.py, commands/")):
        found = source.imports_of_features(strict=strict)
        importers = {importer for importer, _ in found}
        yield Figure(f"imports {what}, files", f"{len(found)}, {len(importers)}", [f"{a} -> {b}" for a, b in sorted(found)])
    for feature in structure_source.SAMPLES:
        files = source.mentions(feature)
        packages = sorted({source.package(file) for file in files})
        yield Figure(f"files that mention {feature}, packages", f"{len(files)}, {len(packages)}", packages)
    fields = source.assigned("request/lifecycle.py", "Lifecycle")
    attributes = source.assigned("request/record.py", "SettledRequest") or source.assigned("request/record.py", "Record")
    app = source.imported("app.py")
    counts = f"{len(fields)}, {len(attributes)}, {len(app)}"
    yield Figure("fields of `Lifecycle`, attributes of the record, imports of `app.py`", counts, [*fields, *attributes, *app])
    private = source.private_names()
    per_package = [sum(file.startswith(f"{package}/") for file, _ in private) for package in structure_source.PACKAGES]
    yield Figure("private names of other libraries in each package", ", ".join(map(str, per_package)), _pairs(private))
    kinds = source.tagged()
    yield Figure("kinds of messages between processes", " + ".join(str(len(each)) for each in kinds.values()), _listed(kinds))


def of_words(source: Source) -> Iterator[Figure]:
    classes = structure_words.classes(source)
    twice = {name: files for name, files in classes.items() if len(files) > 1 and not name.startswith("_")}
    yield Figure("classes; public names used twice or more", f"{sum(map(len, classes.values()))}; {len(twice)}", _listed(twice))
    bare = sorted(name for name in classes if structure_words.is_bare(name))
    yield Figure("class names that are no nouns", str(sum(len(classes[name]) for name in bare)), bare)
    begins = structure_words.docstrings_that_begin_badly(source)
    yield Figure("docstrings that begin with What, Whether, Of, Those", str(len(begins)), _pairs(begins))
    clauses = structure_words.clauses(source)
    files = {file for each in clauses.values() for file in each}
    total = sum(map(len, clauses.values()))
    counts = [f"{phrase}: {len(found)}" for phrase, found in clauses.items()]
    per_file = [f"{file}: {sum(each.count(file) for each in clauses.values())}" for file in sorted(files)]
    yield Figure("relative clauses in place of a noun, files", f"{total}, {len(files)}", [*counts, *per_file])


def of_request(checkout: Path) -> Iterator[Figure]:
    done = subprocess.run([sys.executable, str(PROBE)], env=_environment(checkout), capture_output=True, text=True, check=False)
    if done.returncode:
        yield Figure("streamed chat", f"no figures: {done.stderr.strip().splitlines()[-1]}")
        return
    ends: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    titles = {
        "upstream": "before the replica's first byte",
        "client": "until the client's first byte",
        "complete": "until the end of the answer",
    }
    for end, found in ends.items():
        value = f"{len(found['files'])}, {found['functions']}, {found['moves']}"
        yield Figure(f"streamed chat {titles[end]}: files outside `router/`, functions, moves", value, found["files"])


def of_build(checkout: Path) -> Figure:
    code = "import hatch_build; print(len(list(hatch_build.modules())))"
    return Figure("modules compiled by mypyc", _python(checkout, "-c", code).strip())


def of_start(checkout: Path) -> Figure:
    """With bytecode that is written already, as an installed gateway has it. Processor time depends less on other programs."""
    code = "import time; b, c = time.perf_counter(), time.process_time(); import gateway.app; " + (
        "print(time.perf_counter() - b, time.process_time() - c)"
    )
    with tempfile.TemporaryDirectory() as folder:
        flags = ("-X", f"pycache_prefix={folder}", "-c", code)
        seconds = [tuple(map(float, _python(checkout, *flags).split())) for _ in range(STARTS + 1)][1:]
    wall, cpu = (statistics.median(each) for each in zip(*seconds, strict=True))
    return Figure("import of `gateway.app`, s (processor time)", f"{wall:.2f} ({cpu:.2f})")


def slowest_imports(checkout: Path) -> Figure:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import gateway.app"],
        env=_environment(checkout),
        capture_output=True,
        text=True,
        check=True,
    )
    own: dict[str, int] = {}
    for line in done.stderr.splitlines():
        if found := _IMPORT.match(line):
            package = found[4] if found[4].startswith("gateway.") else found[4].partition(".")[0]
            own[package] = own.get(package, 0) + int(found[1])
    ranked = sorted(own.items(), key=lambda item: -item[1])[:SLOWEST]
    names = [f"{microseconds / 1000:.1f} ms {name}" for name, microseconds in ranked]
    return Figure("slowest imports (own time, packages of others as one)", f"{len(own)} packages and modules", names)


def _python(checkout: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=_environment(checkout), cwd=checkout, capture_output=True, text=True, check=True).stdout


def _environment(checkout: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**others, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}


def _pairs(found: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{file}: {name}" for file, name in sorted(found)]


def _listed(found: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(sorted(each))}" for name, each in sorted(found.items())]


def table(figures: Sequence[Figure]) -> Iterator[str]:
    yield "| | |"
    yield "|---|--:|"
    yield from (f"| {figure.title} | {figure.value} |" for figure in figures)


def details(figures: Sequence[Figure]) -> Iterator[str]:
    for figure in figures:
        if figure.names:
            yield f"\n## {figure.title}: {figure.value}\n"
            yield from (f"- {name}" for name in figure.names)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.structure", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, metavar="CHECKOUT", help="default: this one")
    parser.add_argument("--details", action="store_true", help="the names behind the figures")
    parser.add_argument("--imports", action="store_true", help="the slowest imports")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    begun, source = time.monotonic(), Source(checkout)
    figures = [*of_source(source), *of_words(source), *of_request(checkout), of_build(checkout), of_start(checkout)]
    print("\n".join(table(figures)))
    if options.imports:
        print("\n".join(details([slowest_imports(checkout)])))
    if options.details:
        print("\n".join(details(figures)))
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
