"""hatch_build.py by itself. (test_dockerfile.py builds the whole wheel.)"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from tests.support.paths import ROOT
from tests.support.rules import nodes_of, tree_of
from tests.support.tiers import nightly

compiles = pytest.mark.skipif(
    not shutil.which(os.environ.get("CC", "cc")) or not importlib.util.find_spec("mypyc"), reason="no C compiler, or no mypyc"
)


def test_the_list_of_compiled_modules_names_files_once() -> None:
    assert hatch_build.modules() == sorted(set(hatch_build.HOT), key=hatch_build.HOT.index) == list(hatch_build.HOT)


@pytest.mark.usefixtures("trees")
def test_bases_and_subclasses_of_compiled_classes_are_compiled() -> None:
    """A class of mypyc has no subclass in plain Python, and one with slots no base."""
    trees = {
        path.relative_to(ROOT).as_posix(): tree_of(path)
        for package in hatch_build.PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    modules = {file.removesuffix(".py").replace("/", "."): file for file in trees}
    hot = set(hatch_build.modules())
    closed = {
        (file.removesuffix(".py").replace("/", "."), node.name)
        for file in hot
        for node in trees[file].body
        if isinstance(node, ast.ClassDef) and not any(map(_is_interpreted, node.bases)) and not _is_open(node)
    }
    for file in trees:
        nodes = nodes_of(ROOT / file)
        origins = {alias.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        for node in nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {(origins[base.id], base.id) for base in node.bases if isinstance(base, ast.Name) and base.id in origins}
            if file not in hot:
                assert not bases & closed, (file, node.name)
            elif any(ast.unparse(line).startswith("__slots__") for line in node.body):
                assert all(modules.get(module or "", file) in hot for module, _ in bases), (file, node.name)


def _name(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0]


def _is_open(node: ast.ClassDef) -> bool:
    """Marked for subclasses in plain Python."""
    return any("allow_interpreted_subclasses" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_interpreted(base: ast.expr) -> bool:
    """Of an exception, an enumeration or a named tuple, which mypyc leaves as it is."""
    return ast.unparse(base).endswith(("Error", "Exception", "Enum", "NamedTuple", "TypedDict"))


@nightly(".ci/run compiles while it checks the types")
@compiles
def test_a_compilation_needs_no_cache_that_a_mypy_beside_it_may_lock(tmp_path: Path) -> None:
    """`.ci/run` checks the types while it compiles. Where the cache would be is a file: whoever opens one there fails."""
    shutil.copy(Path(hatch_build.__file__), tmp_path)
    for package in hatch_build.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "router" / "types.py").write_text("def twice(number: int) -> int:\n    return 2 * number\n", "utf-8")
    (tmp_path / "router" / "load.py").write_text("LOAD = 1\n", "utf-8")  # a file per module: mypyc cannot do so for one only
    (tmp_path / ".mypy_cache").touch()

    environment = {**os.environ, "WARMROUTE_OPT_LEVEL": "0"}
    command = [sys.executable, str(tmp_path / "hatch_build.py"), str(tmp_path / "made")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    imported = subprocess.run(
        [sys.executable, "-c", "from router import types; print(types.__file__, types.twice(21))"],
        cwd=tmp_path / "made",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    file, number = imported.stdout.split()
    assert file.endswith(".so")
    assert number == "42"
