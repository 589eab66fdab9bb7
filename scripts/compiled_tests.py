"""Prints the test files that `make test-compiled` runs: tests that mirror a compiled module, or use a compiled module of the
folder that they mirror; and files with tests marked `processes`.

    python -m scripts.compiled_tests
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import hatch_build
from hatch_build import ROOT

PROCESSES = "pytest.mark.processes"


def main() -> int:
    print(*chosen())
    return 0


def chosen() -> Iterator[str]:
    """Paths below ROOT."""
    compiled = {name.removesuffix(".py").replace("/", ".") for name in hatch_build.modules()}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        here = ".".join(path.parent.relative_to(ROOT / "tests").parts)
        used = {name for name in imported(text) if name.rpartition(".")[0] == here}
        if PROCESSES in text or compiled & {f"{here}.{path.stem.removeprefix('test_')}", *used}:
            yield path.relative_to(ROOT).as_posix()


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


if __name__ == "__main__":
    sys.exit(main())
