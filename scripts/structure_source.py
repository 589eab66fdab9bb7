"""Figures of a checkout's syntax trees: sizes, imports between the core and the features, fields, private names, messages."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("gateway", "router", "replica")
COMPOSES = ("app.py", "observing.", "commands/")
SAMPLES = ("doctor", "keys", "tracing")  # features
# Folders and modules of the layout before `features/`, so that both layouts can be compared.
BEFORE: Mapping[str, str] = {
    "accounting/counterfactual": "savings",
    "accounting/savings": "savings",
    "accounting/doctor/": "doctor",
    "accounting/ledger/": "ledger",
    "admission/limits/": "keys",
    "cluster/snapshots/": "snapshots",
    "cluster/store/": "sharing",
    "cluster/workers/limits/": "keys",
    "cluster/workers/": "workers",
    "commands/doctor/": "doctor",
    "commands/keys/": "keys",
    "commands/ledger/": "ledger",
    "commands/recording/": "recording",
    "dialects/adaptation/": "translation",
    "dialects/responses/background/": "responses",
    "dialects/translation/": "translation",
    "fleet/sources/": "discovery",
    "identity/": "keys",
    "parser/items": "responses",
    "request/adapting/": "translation",
    "request/background/": "responses",
    "request/fallback/": "fallback_pools",
    "request/kept/": "responses",
    "request/observers/doctor_watch": "doctor",
    "request/observers/ledger_entries": "ledger",
    "request/observers/live_requests": "live_page",
    "request/observers/other_policies": "savings",
    "request/observers/record_traffic": "recording",
    "request/observers/traces": "tracing",
    "request/phases/callers": "keys",
    "request/phases/keeping": "responses",
    "request/phases/limiting": "keys",
    "request/tracing/": "tracing",
    "server/identity/": "keys",
    "server/ui/": "live_page",
    "server/websocket/": "websocket",
    "state/": "responses",
    "telemetry/live/": "live_page",
    "telemetry/recording": "recording",
    "telemetry/tracing/": "tracing",
}
_PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # documented, in spite of their names


class Lines(NamedTuple):
    """core: without features and commands."""

    core: int
    all: int
    folders: list[str]


class Source:
    """The Python files of a checkout, by their path in it."""

    def __init__(self, checkout: Path) -> None:
        files = [path for package in PACKAGES for path in sorted((checkout / package).rglob("*.py"))]
        self.texts = {path.relative_to(checkout).as_posix(): path.read_text("utf-8") for path in files}
        self._new = (checkout / "gateway" / "features").is_dir()

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {file: ast.parse(text) for file, text in self.texts.items()}

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        for file, tree in self.trees.items():
            for node in ast.walk(tree):
                yield file, node

    # -- core and features

    def feature(self, file: str) -> str:
        """The feature that a file or dotted module belongs to; empty: the core."""
        path = file.replace(".py", "").replace(".", "/").removeprefix("gateway/")
        if self._new:
            name = path.split("/")[1] if path.startswith("features/") else ""
            is_folder = any(each.startswith(f"gateway/features/{name}/") for each in self.texts)
            return name if is_folder else ""  # the table of features is none
        return next((name for begin, name in BEFORE.items() if f"{path}/".startswith(begin)), "")

    def lines(self) -> Lines:
        core, folders = 0, dict[str, int]()
        for file, text in self._gateway():
            count, feature = text.count("\n"), self.feature(file)
            core += 0 if feature or file.startswith("gateway/commands/") else count
            folder = f"feature {feature}" if feature else "/".join(file.split("/")[1:-1][:1]) or "gateway/*.py"
            folders[folder] = folders.get(folder, 0) + count
        return Lines(core, sum(folders.values()), [f"{folder}: {count:,}" for folder, count in sorted(folders.items())])

    def imports_of_features(self, *, strict: bool) -> set[tuple[str, str]]:
        """Pairs of a core file and a module of a feature. strict: without the files that compose."""
        left = tuple(f"gateway/{each}" for each in COMPOSES) if strict else ("gateway/app.py",)
        found = set[tuple[str, str]]()
        for file, _ in self._gateway():
            if not self.feature(file) and not file.startswith(left):
                found |= {(file, module) for module in self.imported(file.removeprefix("gateway/")) if self.feature(module)}
        return found

    def mentions(self, feature: str) -> list[str]:
        """Files of the gateway that name the package of a feature, one of its modules, or a class that only it defines."""
        definers = dict[str, set[str]]()
        for file, node in self.nodes():
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    definers.setdefault(name, set()).add(self.feature(file) if file.startswith("gateway/") else "")
        of_it = {name for file, node in self.nodes() if isinstance(node, ast.ClassDef) for name in [node.name]}
        classes = {name for name in of_it if definers[name] == {feature}}
        path = re.compile(rf"features[./]{feature}\b")
        named = {file for file, text in self._gateway() if path.search(text) or self.feature(file) == feature}
        return sorted(named | {file for file, node in self.nodes() if file.startswith("gateway/") and _name(node) in classes})

    def package(self, file: str) -> str:
        """The top package of a file; of a feature, the feature's."""
        feature, parts = self.feature(file) if self._new else "", file.split("/")
        return f"features/{feature}" if feature else parts[1]

    def imported(self, file: str) -> list[str]:
        """Our modules that a file of the gateway imports."""
        found = set[str]()
        for node in ast.walk(self.trees.get(f"gateway/{file}", ast.Module([], []))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if f"{name.replace('.', '/')}.py" in self.texts else node.module for name in names}
        return sorted(found)

    def _gateway(self) -> Iterator[tuple[str, str]]:
        return ((file, text) for file, text in self.texts.items() if file.startswith("gateway/"))

    # -- classes

    def assigned(self, file: str, name: str) -> list[str]:
        """Fields of a class, and attributes that its methods set."""
        found = set[str]()
        for node in ast.walk(self.trees.get(f"gateway/{file}", ast.Module([], []))):
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= _fields(node)
        return sorted(found)

    def tagged(self) -> dict[str, list[str]]:
        """Tagged messages of the gateway, by file: the messages of commands, which are strings, travel inside one of them."""
        found = dict[str, list[str]]()
        for file, node in self.nodes():
            if isinstance(node, ast.ClassDef) and file.startswith("gateway/"):
                tags = [word.value for word in node.keywords if word.arg == "tag"]
                if any(isinstance(tag, ast.Constant) and isinstance(tag.value, int) for tag in tags):
                    found.setdefault(file, []).append(node.name)
        return found

    # -- other libraries

    def private_names(self) -> list[tuple[str, str]]:
        """Private names that are defined in no file of ours, and private names of other libraries that our subclasses
        override.
        """
        ours = {name for _, node in self.nodes() for name in _defined(node)}
        found = set[tuple[str, str]]()
        for file, node in self.nodes():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_private(node.attr):
                found |= {(file, node.attr)} - {(file, name) for name in ours}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES:
                found |= {(file, alias.name) for alias in node.names if _is_private(alias.name)}
        for file, tree in self.trees.items():
            found |= {(file, name) for name in _overridden(tree)}
        return sorted(found)


def _name(node: ast.AST) -> str:
    """A name that a node uses or defines."""
    match node:
        case ast.Name(id=name) | ast.ClassDef(name=name) | ast.alias(name=name):
            return name
    return ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _defined(node: ast.AST) -> Iterator[str]:
    """Private names that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.ClassDef():
            yield from _fields(node)


def _fields(node: ast.ClassDef) -> set[str]:
    found = set[str]()
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.FunctionDef(name="__init__"):
                found |= {
                    inner.attr
                    for inner in ast.walk(each)
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value)
                }
    return found - {"__slots__"}


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _overridden(tree: ast.Module) -> Iterator[str]:
    """Private names of other libraries' classes that are defined again or set in subclasses."""
    origins = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            theirs = {name for base in node.bases for name in dir(_base(base, origins, modules)) if _is_private(name)}
            ours = {name for inner in ast.walk(node) for name in _defined(inner)}
            yield from theirs & ours


def _base(node: ast.expr, origins: Mapping[str, tuple[str, str]], modules: Mapping[str, str]) -> Any:
    """A class of an installed library of others; None: of ours, of the standard library, or unknown."""
    match node:
        case ast.Name(id=name):
            module, name = origins.get(name, ("", name))
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            module = modules.get(owner) or ".".join(origins.get(owner, ("", "")))
        case _:
            return None
    top = module.split(".")[0]
    if not top or top in PACKAGES or top in sys.stdlib_module_names:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
