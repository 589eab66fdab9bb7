"""What ARCHITECTURE.md and the README promise about the code, held by a machine."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import Config
from gateway.metrics import Metrics
from hatch_build import modules

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "gateway", "replica")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

FORBIDDEN_IN_ROUTER = {
    "asyncio",
    "threading",
    "time",
    "datetime",
    "random",
    "logging",
    "os",
    "pathlib",
    "socket",
    "secrets",
    "io",
}
HEAVY = {"torch", "transformers", "gguf", "safetensors", "accelerate"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, *, module_level_only: bool = False) -> Iterator[str]:
    """Dotted names of the imported modules."""
    nodes = ast.iter_child_nodes(tree) if module_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def tops(tree: ast.AST, *, module_level_only: bool = False) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree, module_level_only=module_level_only)}


@pytest.fixture(params=SOURCES, ids=name_of)
def source(request: pytest.FixtureRequest) -> tuple[str, ast.Module]:
    path: Path = request.param
    return name_of(path), ast.parse(path.read_text("utf-8"))


def test_imports_point_one_way(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    package = name.partition("/")[0]
    if package == "router":
        compiler = {"mypy_extensions"} if name == "router/native.py" else set()  # and there it is not imported
        outside = tops(tree) - set(sys.stdlib_module_names) - {"xxhash", "router"} - compiler
        assert not outside, "router imports the standard library and xxhash only"
        assert not tops(tree) & FORBIDDEN_IN_ROUTER, "router does no I/O and has no clock and no chance of its own"
    elif package == "gateway":
        assert not tops(tree, module_level_only=True) & (HEAVY | {"replica", "openai"})
        assert "replica" not in tops(tree) or name == "gateway/cli.py", "the two share a wire format, not code"
    else:
        assert not tops(tree) & {"gateway", "router"}, "the two share a wire format, not code"


def test_only_the_composition_root_knows_most_parts() -> None:
    for path in SOURCES:
        known = {name for name in imports(ast.parse(path.read_text("utf-8"))) if name.startswith("gateway")}
        assert len(known) <= 12 or path.name == "app.py", name_of(path)


def test_files_and_functions_stay_small(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    assert (ROOT / name).read_text("utf-8").count("\n") <= 400
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            most = 70 if node.name == "compose" else 50  # the composition root is one list of parts
            assert (node.end_lineno or 0) - node.lineno < most, f"{name}: {node.name} is too long"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            assert count <= 7, f"{name}: {node.name} takes {count} parameters"


def test_names_say_what_is_inside() -> None:
    for path in SOURCES:
        assert path.stem not in {"utils", "util", "common", "helpers", "manager", "base", "misc"}, name_of(path)


def test_no_error_is_swallowed(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            empty = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
            assert not (broad and empty), f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", list(modules()))
def test_what_is_compiled_names_each_caught_error_anew(name: str) -> None:
    """mypyc gives both of two equal names in one function the type of the first."""
    for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
        if isinstance(node, FUNCTION):
            names = [handler.name for handler in ast.walk(node) if isinstance(handler, ast.ExceptHandler) and handler.name]
            assert len(set(names)) == len(names), node.name


def test_modules_hold_no_mutable_state(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        if isinstance(value, ast.List | ast.Dict | ast.Set) and names != ["__all__"]:
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            frozen = annotation.startswith(("Mapping", "Sequence", "dict[str, Sequence"))
            assert frozen or all(part.isupper() or part.strip("_").isupper() for part in names), f"{name}:{node.lineno}"


def test_every_module_says_what_it_is_for(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    assert ast.get_docstring(tree), name


# -- documents against code


def test_the_layout_in_the_architecture_is_the_tree() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    block = text.split("```layout\n")[1].split("```")[0]
    listed, folder = set[str](), ""
    for line in block.splitlines():
        path = line.split()[0] if line.strip() else ""
        if line.startswith("  "):
            listed.add(folder + path)
        elif path:
            folder = path if path.endswith("/") else ""
            listed.add(path)
    for path in listed:
        assert (ROOT / path).exists(), f"ARCHITECTURE.md names {path}, which does not exist"
    modules = {name_of(path) for path in SOURCES if path.name != "__init__.py"}
    covered = {path for path in modules if path in listed or any(path.startswith(top) for top in listed if top.count("/") > 1)}
    assert modules == covered, f"ARCHITECTURE.md does not name {sorted(modules - covered)}"
    tops = {path.name + "/" if path.is_dir() else path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    ignored = {"__pycache__/", "build/", "dist/"}
    assert tops - ignored <= listed | {"LICENSE"}, sorted(tops - ignored - listed)


def config_keys(kind: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, default) of every key that a configuration file can have."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint, key = hints[item.name], prefix + item.name
        if inner := next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None):
            joint = {None: ".", tuple: "[]."}.get(typing.get_origin(hint), ".MODEL.")
            yield from config_keys(typing.cast("type", inner), key + joint)
        elif "env" not in item.metadata:
            yield key, item.default


def test_the_readme_lists_every_configuration_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([\w.\[\]]+)` \| *([^|]*?) *\|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    for key, default in config_keys(Config):
        assert key in rows, f"README.md does not list the key {key}"
        if isinstance(default, int | float | str) and default != "":
            shown = str(default).lower() if isinstance(default, str | bool) else f"{default:g}"
            assert shown in rows[key], f"README.md: {key} has the default {shown}"
    known = {key for key, _ in config_keys(Config)}
    assert {key for key in rows if not key.startswith("warmroute_")} <= known


def test_the_readme_lists_every_metric() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `(warmroute_\w+)", text, re.MULTILINE))
    exposed = set()
    for family in Metrics().registry.collect():
        exposed.add(family.name + "_total" if family.type == "counter" else family.name)
    assert rows == exposed


def markdown() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "helm").glob("*.md"), *(ROOT / "bench").glob("*.md")]


@pytest.mark.parametrize("path", markdown(), ids=name_of)
def test_links_in_the_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (path.parent / target).exists(), target
