"""Parsed YAML -> frozen dataclasses. All that is wrong is told at once, in a `ConfigError`: each problem names its key (and its
file and line, where the value comes from a file) and says what is right.

A dataclass may have a method `problems`, which gives what is wrong with its values, each as a `Problem` or as "field: text";
its `__post_init__` hands them to `refuse`. So that one bad value does not hide what else is wrong, `problems` is also asked of
an instance whose bad values are replaced by their defaults, or are missing where there is no default: it reads required fields
with `getattr`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.addresses import shown

_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")

Key = tuple[str | int, ...]
"""Where a value stands: ("pools", 0, "replicas", 1, "url")."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or that cannot be meant. key: where in the configuration; file, line: where in a file."""

    key: Key
    text: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}: " if self.file else ""
        name = key_name(self.key)
        return f"{at}{name}: {self.text}" if name else f"{at}{self.text}"


class ConfigError(ValueError):
    """The configuration cannot be used. problems: all that is wrong with it, in order."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem((), each) if isinstance(each, str) else each for each in problems)
        super().__init__("; ".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, self.problems


def key_name(key: Key) -> str:
    """As messages write it: `pools[0].replicas[1].url`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def refuse(found: Iterable[Problem | str]) -> None:
    """Raise a ConfigError with these problems of one dataclass; nothing if there are none."""
    if problems := tuple(map(_problem, found)):
        raise ConfigError(*problems)


def _problem(found: Problem | str) -> Problem:
    """found: a problem, or "field: what is wrong with it"."""
    if isinstance(found, Problem):
        return found
    name, _, text = found.partition(": ")
    return Problem((name,), text)


def convert(kind: Any, value: Any) -> Any:
    """`value` (parsed YAML) as `kind`, a type hint of dataclasses, tuples, mappings and scalars. Raises ConfigError."""
    reader = _Reader()
    made = reader.read(kind, value, ())
    if reader.problems:
        raise ConfigError(*reader.problems)
    return made


_BAD: Final = object()


class _Reader:
    """Reads values, and collects what is wrong with them. `_BAD` stands for a value with a problem."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def read(self, kind: Any, value: Any, key: Key) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, value, key)
        if origin is tuple:
            if not isinstance(value, list):
                return self._bad(key, f"a list is expected, got {shown(value)}")
            return self._whole(tuple(self.read(args[0], item, (*key, index)) for index, item in enumerate(value)))
        if origin is Mapping:
            if not isinstance(value, dict):
                return self._bad(key, f"a mapping is expected, got {shown(value)}")
            names = self._whole(tuple(self.read(str, name, (*key, str(name))) for name in value))
            items = self._whole(tuple(self.read(args[1], item, (*key, str(name))) for name, item in value.items()))
            return _BAD if names is _BAD or items is _BAD else dict(zip(names, items, strict=True))
        if origin is types.UnionType:
            return None if value is None else self.read(args[0], value, key)
        return self._scalar(kind, value, key)

    def _bad(self, key: Key, text: str) -> Any:
        self.problems.append(Problem(key, text))
        return _BAD

    def _whole(self, parts: tuple[Any, ...]) -> Any:
        return _BAD if any(part is _BAD for part in parts) else parts

    def _scalar(self, kind: Any, value: Any, key: Key) -> Any:
        # YAML 1.1 takes 1e-05, which is how Helm writes small numbers, for a text.
        scientific = isinstance(value, str) and _SCIENTIFIC.fullmatch(value)
        if kind is float and not isinstance(value, bool) and (isinstance(value, int) or scientific):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        wrong = isinstance(value, bool) is not (kind is bool)  # True is no number
        if wrong or not isinstance(value, kind) or (kind is float and not math.isfinite(value)):
            return self._bad(key, f"{_NAMES[kind]} is expected, got {shown(value)}")
        return value

    def _dataclass(self, kind: Any, value: Any, key: Key) -> Any:
        if isinstance(value, str) and hasattr(kind, "SHORT"):
            value = {kind.SHORT: value}
        if not isinstance(value, dict):
            return self._bad(key, f"{'' if key else 'configuration: '}a mapping is expected, got {shown(value)}")
        before = len(self.problems)
        hints = typing.get_type_hints(kind)
        for name in value:
            if name not in hints:
                self._bad((*key, str(name)), f"unknown key{_suggestion(kind, str(name))}")
        parts = {name: self.read(hints[name], item, (*key, name)) for name, item in value.items() if name in hints}
        for item in dataclasses.fields(kind):
            if item.name not in value and _required(item):
                self._bad((*key, item.name), "missing")
        good = {name: part for name, part in parts.items() if part is not _BAD}
        try:
            if len(self.problems) == before:
                return kind(**good)
            refuse(_problems_of(kind, good, bad=parts.keys() - good.keys()))
        except ConfigError as error:
            self.problems += [replace(problem, key=(*key, *problem.key)) for problem in error.problems]
        return _BAD


_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
)


def _suggestion(kind: Any, name: str) -> str:
    known = [item.name for item in dataclasses.fields(kind) if "env" not in item.metadata]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _problems_of(kind: Any, good: Mapping[str, Any], *, bad: Collection[str]) -> Iterator[Problem]:
    """What `kind.problems` says of these values, less what it says of the bad ones."""
    if not hasattr(kind, "problems"):
        return
    partial = object.__new__(kind)
    for item in dataclasses.fields(kind):
        if item.name in good:
            object.__setattr__(partial, item.name, good[item.name])
        elif not _required(item):
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            object.__setattr__(partial, item.name, default)
    yield from (problem for problem in map(_problem, partial.problems()) if problem.key[0] not in bad)
