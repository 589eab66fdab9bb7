"""Permitted imports between rooms: one table per package, checked on the syntax tree, including imports for type checking.

A room is a folder below a package, or one of its modules. A room imports lower layers only, and no module that leads back to
it. The core imports no feature.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rules import name_of, nobody

LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gateway": (
        ("errors", "shares", "sockets", "tasks"),
        ("turns", "config", "telemetry"),
        ("dialects", "upstream", "admission", "database"),
        ("fleet", "accounting", "parser"),
        ("request", "cluster"),
        ("server",),
        ("core",),
        ("app",),
        ("commands",),
        ("__main__",),
    ),
    "router": (
        ("native",),
        ("residency",),
        ("types",),
        ("learning",),
        ("index",),
        ("load",),
        ("leading",),
        ("late",),
        ("pricing",),
        ("policies",),
        ("booking", "events"),
        ("replication_log",),
        ("router",),
        ("follower", "snapshot"),
        ("simulation",),
    ),
    "replica": (
        *(("cache",), ("engine",), ("output", "sim", "torch_engine"), ("api",)),
        *(("fit", "process", "flags", "progress"), ("cli",)),
    ),
}
ARROWS = {"gateway": 90, "router": 60, "replica": 30}  # fewer than these, between rooms that are folders or `app`
COMPOSES = ("gateway/app.py", "gateway/commands/")  # what of the core may import the table of features, by which it finds them
TABLE = ("gateway.features.table", "gateway.features.declaring")

# Which feature may use which other one, beside slots and topics.
USES: Mapping[str, set[str]] = {
    "adoption": {"runs"},
    "prompt_log": {"histories", "runs", "translation"},
    "responses": {"histories", "runs"},
    "runs": {"histories"},
    "sharing": {"snapshots"},
    "websocket": {"histories"},
    "workers": {"sharing", "snapshots"},
    "workflows": {"histories", "runs", "translation"},
}

# What a room must not import beside what its layer forbids. dialects, the queue of a pool, names of logs, and the
# language of workflows know no event loop and no clock.
NO_LOOP = {"asyncio", "time", "threading", "socket"}
FORBIDDEN: Mapping[str, set[str]] = {
    "gateway/dialects/": NO_LOOP,
    "gateway/admission/fair_queue.py": NO_LOOP,
    "gateway/features/prompt_log/naming/": {*NO_LOOP, "random", "os", "pathlib", "logging", "importlib"},
    "gateway/features/prompt_log/turns/": {*NO_LOOP, "random", "os", "pathlib", "logging", "importlib"},
    "gateway/features/workflows/language/": {*NO_LOOP, "random", "os", "pathlib", "logging", "importlib"},
    "router/": {*NO_LOOP, "datetime", "random", "logging", "os", "pathlib", "secrets", "io"},
    "replica/": {"gateway", "router"},
    "gateway/": {"torch", "transformers", "gguf", "safetensors", "accelerate"},
}
ONLY = {
    "aiohttp": "gateway/features/discovery/kubernetes/",
    "openai": "gateway/commands/demo/",
    "replica": "gateway/commands/cli.py",
}  # who alone in gateway/ may import these


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all three packages."""
    files = [path for package in LAYERS for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@cache
def imports(module: str) -> tuple[str, ...]:
    """All imports of a module, as dotted names of modules if they are ours."""
    return tuple(_imports(ast.parse(modules()[module].read_text("utf-8"))))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else str(node.module)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def feature(module: str) -> str:
    """The feature of a module; "": none."""
    parts = module.split(".")
    return parts[2] if module.startswith("gateway.features.") and module not in TABLE else ""


def ours(module: str) -> Iterator[str]:
    """Imported modules of the same package, except for the package itself."""
    return (
        name
        for name in imports(module)
        if name != module and name in modules() and name.split(".")[0] == module.split(".", maxsplit=1)[0]
    )


@pytest.mark.parametrize("package", LAYERS)
def test_a_room_imports_lower_layers_only(package: str) -> None:
    level = {name: number for number, names in enumerate(LAYERS[package]) for name in names}
    inside = [module for module in modules() if module.startswith(package + ".") and room(module) != "features"]
    assert {room(module) for module in inside} == level.keys(), "every room has a layer"
    nobody(
        f"{module} imports {other}"
        for module in inside
        for other in ours(module)
        if room(other) not in ("", "features", room(module)) and level[room(other)] >= level[room(module)]
    )
    arrows = {(room(module), room(other)) for module in inside for other in ours(module) if room(other) != "features"}
    folders = {(one, other) for one, other in arrows if one != other and {one, other} <= rooms(package)}
    assert len(folders) < ARROWS[package], sorted(folders)


def test_the_core_imports_no_feature() -> None:
    """Whatever composes a gateway knows the table of them."""
    nobody(
        f"{path} imports {other}"
        for module in modules()
        for path in [name_of(modules()[module])]
        if module.startswith("gateway.") and room(module) != "features"
        for other in ours(module)
        if feature(other) or (other in TABLE and not path.startswith(COMPOSES))
    )


def test_features_use_those_that_are_listed() -> None:
    found: dict[str, set[str]] = {}
    for module in modules():
        for other in ours(module) if feature(module) else ():
            if feature(other) and feature(other) != feature(module):
                found.setdefault(feature(module), set()).add(feature(other))
    assert found == USES


def test_the_architecture_has_the_same_layers() -> None:
    """Rows of rooms, the lower ones first; "then" is one layer above the other within a row."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("| layer |")[1].replace("`", "")
    rows: list[str] = re.findall(r"^\| \d+ \| ([^|]+) \|", text, re.MULTILINE)
    assert tuple(tuple(part.split(", ")) for row in rows for part in row.split("; then ")) == LAYERS["gateway"]


def rooms(package: str) -> set[str]:
    return {path.name for path in (ROOT / package).iterdir() if path.is_dir()} | {"app"}


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_leads_back(package: str) -> None:
    left = {module: set(ours(module)) for module in modules() if module.startswith(package + ".")}
    while left:
        free = {module for module, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {module: others for module, others in left.items() if module not in free}


def test_what_only_some_may_import() -> None:
    nobody(
        f"{path}: {fault}"
        for module in sorted(modules())
        for path in [name_of(modules()[module])]
        for fault in faults(module, path)
    )


def faults(module: str, path: str) -> Iterator[str]:
    """Forbidden imports of this module."""
    tops = {name.partition(".")[0] for name in imports(module)}
    yield from (
        f"below {place}: {sorted(tops & names)}"
        for place, names in FORBIDDEN.items()
        if path.startswith(place) and tops & names
    )
    if path.startswith("gateway/"):
        yield from (
            f"only {place} imports {name}" for name, place in ONLY.items() if name in tops and not path.startswith(place)
        )
    if path.startswith("router/"):
        compiler = {"mypy_extensions"} if path == "router/native.py" else set()  # and there it is not imported
        outside = {"msgspec"} if path in ("router/events.py", "router/snapshot/records.py") else set()
        yield from sorted(tops - set(sys.stdlib_module_names) - {"xxhash", "router"} - compiler - outside)


DIALECTS = re.compile(r"gateway\.dialects\.(anthropic|openai|responses|translation)\b")
ABOUT_ALL = [
    *(path for path in (ROOT / "gateway" / "dialects").glob("*.py") if path.stem not in ("table", "passthrough")),
    ROOT / "gateway" / "parser" / "wire.py",
    ROOT / "gateway" / "request" / "client.py",
]


def test_what_is_about_all_dialects_knows_none() -> None:
    """The table has them; what only one does is a method of `Dialect`."""
    trees = [(name_of(path), ast.parse(path.read_text("utf-8"))) for path in ABOUT_ALL]
    nobody(f"{path} imports {name}" for path, tree in trees for name in _imports(tree) if DIALECTS.match(name))
