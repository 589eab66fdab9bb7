"""Checks the statements of ARCHITECTURE.md and the pages in docs/ about the code."""

from __future__ import annotations

import ast
import collections.abc
import json
import re
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from gateway.config.hints import SECRET, bare, extra_of, takes_bool
from gateway.features.table import WholeConfig, new_metrics
from hatch_build import modules
from router import POLICIES
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica
from tests.support.paths import ROOT
from tests.support.rules import name_of, nobody, nodes_of, tree_of

pytestmark = pytest.mark.usefixtures("trees")

PACKAGES = ("router", "gateway", "replica")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def all_of(
    kind: type[ast.AST] | tuple[type[ast.AST], ...], paths: Iterable[Path] = SOURCES
) -> Iterator[tuple[str, typing.Any]]:
    """(the file's name, node) of every node of these kinds."""
    return ((name_of(path), node) for path in paths for node in nodes_of(path) if isinstance(node, kind))


def test_functions_stay_small() -> None:
    found = list(all_of(FUNCTION))
    nobody(f"{name}: {node.name} is too long" for name, node in found if node.end_lineno - node.lineno >= 50)
    nobody(f"{name}: {node.name} takes {count} parameters" for name, node in found if (count := parameters(node.args)) > 7)


def parameters(arguments: ast.arguments) -> int:
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in OWN for argument in given)


def test_module_names_describe_their_content() -> None:
    vague = {"utils", "util", "common", "helpers", "manager", "base", "misc"}
    nobody(name_of(path) for path in SOURCES if path.stem in vague)


def test_no_error_is_swallowed() -> None:
    nobody(f"{name}:{node.lineno}" for name, node in all_of(ast.ExceptHandler) if swallows(node))


def swallows(node: ast.ExceptHandler) -> bool:
    broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
    return broad and all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)


def test_what_is_compiled_names_each_caught_error_anew() -> None:
    """mypyc gives both of two equal names in one function the type of the first."""
    wrong = []
    for name, node in all_of(FUNCTION, [ROOT / name for name in modules()]):
        names = [handler.name for handler in ast.walk(node) if isinstance(handler, ast.ExceptHandler) and handler.name]
        if len(set(names)) < len(names):
            wrong.append(f"{name}: {node.name}")
    nobody(wrong)


def test_modules_hold_no_mutable_state() -> None:
    nobody(f"{name_of(path)}:{node.lineno}" for path in SOURCES for node in tree_of(path).body if is_mutable(node))


def is_mutable(node: ast.stmt) -> bool:
    """True if a module's statement makes a container that is neither a constant nor typed as immutable."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
    if not isinstance(value, ast.List | ast.Dict | ast.Set) or names == ["__all__"]:
        return False
    annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    frozen = annotation.startswith(("Mapping", "Sequence", "dict[str, Sequence"))
    return not frozen and not all(part.isupper() or part.strip("_").isupper() for part in names)


def test_every_module_has_a_docstring() -> None:
    nobody(name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path)))


# -- tests against the code

PATCHES = ("setattr", "delattr")
OWN = ("self", "cls")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def patched(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each part of the product that a test replaces, or private name that it uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in PATCHES:
                yield node.lineno, ast.unparse(node)
            case ast.Import(names=names) if any(alias.name.startswith("unittest") for alias in names):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=module, names=names) if module:
                package = module.partition(".")[0]
                if package == "unittest" or (package in (*PACKAGES, "bench") and any(private(alias.name) for alias in names)):
                    yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=whose, attr=name, ctx=ast.Store() | ast.Del()) if private(name):
                if not (isinstance(whose, ast.Name) and whose.id in OWN):
                    yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(peers, 'WAIT_S', 0)",
        "setattr(gateway, 'name', 0)",
        "import unittest.mock",
        "from unittest import mock",
        "from gateway.app import _sweep",
        "connection._timer = None",
        "del run.gateway._parts",
    ],
)
def test_a_patch_is_found(line: str) -> None:
    assert list(patched(ast.parse(line)))


def test_tests_patch_nothing() -> None:
    """Fakes and limits enter by the constructor. The environment and the working directory may be changed."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    nobody(f"{name_of(path)}:{line}: {what}" for path in paths for line, what in patched(tree_of(path)))


# -- documents against code


def test_the_layout_in_the_architecture_is_the_tree() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    listed, top = set[str](), ""
    for line in text.split("```layout\n")[1].split("```")[0].splitlines():
        path = line.split()[0]
        if not line.startswith(" "):
            top = path
        listed.add(top + path if line.startswith(" ") else path)
    for path in listed:
        assert (ROOT / path).exists(), f"ARCHITECTURE.md names {path}, which does not exist"
    folders = {name_of(path.parent) + "/" for path in SOURCES}
    assert folders <= listed, f"ARCHITECTURE.md does not name {sorted(folders - listed)}"
    tops = {path.name + "/" if path.is_dir() else path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    ignored = {"__pycache__/", "build/", "dist/", "mutants/"}
    assert tops - ignored <= listed | {"LICENSE"}, sorted(tops - ignored - listed)


def config_keys(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, default) of every key that a configuration file can have."""
    for field in msgspec.structs.fields(kind):
        key = prefix + field.name
        if inner := struct_in(field.type):
            named = ".MODEL." if key == "prices" else ".NAME."
            joint = {tuple: "[].", collections.abc.Mapping: named}.get(typing.get_origin(bare(field.type)), ".")
            yield from config_keys(inner, key + joint)
            if takes_bool(field.type):
                yield key, field.default
        elif SECRET not in extra_of(field.type):
            yield key, field.default


def struct_in(hint: object) -> type[msgspec.Struct] | None:
    """The Struct that a type hint is, or holds many of."""
    kind = bare(hint)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(struct_in, typing.get_args(kind))), None)


def test_the_configuration_page_lists_every_key_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    listed: list[tuple[str, str]] = re.findall(r"^\| `([\w.\[\]]+)` \| *([^|]*?) *\|", text, re.MULTILINE)
    rows = dict(listed)
    assert len(rows) == len(listed), "a key is listed twice"
    for key, default in config_keys(WholeConfig):
        assert key in rows, f"docs/configuration.md does not list the key {key}"
        if isinstance(default, int | float | str) and default != "":
            shown = str(default).lower() if isinstance(default, str | bool) else f"{default:g}"
            assert shown in rows[key], f"docs/configuration.md: {key} has the default {shown}"
    assert set(rows) == {key for key, _ in config_keys(WholeConfig)}


def test_the_metrics_page_lists_every_metric() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `((?:warmroute|process)_\w+)", text, re.MULTILINE)
    exposed = set()
    for family in new_metrics().registry.collect():
        exposed.add(family.name + "_total" if family.type == "counter" else family.name)
    assert set(rows) == exposed
    assert len(rows) == len(exposed), "a metric is listed twice"


async def test_the_api_page_lists_what_operators_read() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    state, route = text.split("A row of `GET /warmroute/replicas`")[1].split("`POST /warmroute/route` answers")
    route = route.split("\n## ")[0]
    async with FakeReplica() as one, running(one) as run:
        row = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"][0]
        _, _, decision = await run.post(path="/warmroute/route")
    assert listed_keys(state) == set(row)
    assert set(decision) - {"candidates"} <= set(re.findall(r"`(\w+)`", route.split("|")[0]))
    candidate = decision["candidates"][0]
    assert listed_keys(route) == set(candidate) | {f"cost.{part}" for part in candidate["cost"]} - {"cost.total_s"}
    assert "`total_s`" in route


def listed_keys(table: str) -> set[str]:
    """The names in the first column."""
    rows: list[str] = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def markdown() -> list[Path]:
    return [path for folder in ("", "docs", "helm", "bench", "bench/reports") for path in (ROOT / folder).glob("*.md")]


@cache
def anchors(path: Path) -> set[str]:
    """The fragments of links into a Markdown file: its headings in lower case, without punctuation, "-" for spaces."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    headings: list[str] = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documents_lead_somewhere() -> None:
    nobody(f"{name_of(path)}: {link}" for path in markdown() for link in dead_links(path))


def dead_links(path: Path) -> Iterator[str]:
    for target, fragment in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text_of(path)):
        if not target.startswith(("http:", "https:", "mailto:")):
            page = path.parent / target if target else path
            if not page.exists() or (fragment and page.suffix == ".md" and fragment not in anchors(page)):
                yield f"{target}#{fragment}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \|", index.read_text("utf-8"), re.MULTILINE))
    assert listed == {page.name for page in index.parent.glob("*.md")} - {index.name}


WRITTEN = [
    *SOURCES,
    *(ROOT / "bench").rglob("*.py"),
    *(ROOT / "scripts").rglob("*.py"),
    *ROOT.glob("*.md"),
    *ROOT.glob("*/*.md"),
    *(ROOT / "bench" / "reports").glob("*.md"),
]


def named(pattern: str) -> Iterator[tuple[str, str]]:
    """(the file's name, the mentioned name) for all mentions of files."""
    return ((name_of(path), name) for path in sorted(WRITTEN) for name in set(re.findall(pattern, text_of(path))))


def test_names_in_the_architecture_are_of_the_code() -> None:
    code = "\n".join(map(text_of, [*SOURCES, *(ROOT / "tests").rglob("*.py"), ROOT / "hatch_build.py"]))
    words = set(re.findall(r"\w+", code))
    quoted = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\w*\))?`", text_of(ROOT / "ARCHITECTURE.md"))
    assert not {name for name in quoted if not words.issuperset(name.split("."))}


def test_files_that_are_named_exist() -> None:
    """In comments, docstrings and documents: by a name, or by the end of a path."""
    folders = ("gateway", "router", "replica", "bench", "tests", "scripts", "docs")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")] + [ROOT / "hatch_build.py"]
    known = {"/".join(parts[start:]) for file in files for parts in [name_of(file).split("/")] for start in range(len(parts))}
    pairs = named(r"(?<![\w/.])(?:\.\./)*([\w/]+\.py)\b")
    nobody(f"{path} names {name}" for path, name in pairs if name not in known)


def test_programs_that_are_named_exist() -> None:
    """`python -m` of a module of ours, or of a package that can be run."""
    places = [
        (*pair, ROOT.joinpath(*pair[1].split(".")))
        for pair in named(r"python -m ((?:bench|scripts|gateway|replica)(?:\.\w+)*)")
    ]
    nobody(
        f"{path} names {name}"
        for path, name, at in places
        if not (at.with_suffix(".py").exists() or (at / "__main__.py").exists())
    )


def test_the_pages_name_every_policy() -> None:
    rows = (ROOT / "docs" / "configuration.md").read_text("utf-8").splitlines()
    (row,) = [row for row in rows if row.startswith("| `routing.policy` |")]
    for policy in POLICIES:
        assert re.search(rf"\b{policy}\b", row.split("|")[3]), f"docs/configuration.md does not name {policy}"
        for page, text in ({"routing.md": f"\n| {policy} |", "simulate.md": f"`{policy}`"}).items():
            assert text in (ROOT / "docs" / page).read_text("utf-8"), f"docs/{page} does not name {policy}"
