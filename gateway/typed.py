"""Parsed YAML -> frozen dataclasses. All that is wrong is told at once, in a `ConfigError`: each problem names its key (and its
file and line, where the value comes from a file) and says what is right.

A dataclass may have a method `problems`, which gives what is wrong with its values, each as a `Problem` or as "field: text";
its `__post_init__` hands them to `refuse`. So that one bad value does not hide what else is wrong, `problems` is also asked of
an instance whose bad values are replaced by their defaults, or are missing where there is no default, and in whose lists bad
items are None: it reads required fields with `getattr`, and skips None.

A text field may have metadata: FALSE, the text that `false` stands for (YAML reads `off` and `no` without quotes as false);
EXPECTED, what an error calls the right kind of value instead of "a text".
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.addresses import shown

# Of anything that is configured: tokens, seconds, MiB, USD. Products of a few such numbers do not overflow.
MAX_NUMBER = 10_000_000_000
_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")

FALSE, EXPECTED = "false", "expected"
MAX_PROBLEMS = 100  # of a file that are told, each with its line

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


class NotReadable(ConfigError):
    """The file cannot be read for lack of file descriptors or memory. A later attempt may succeed."""


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


def convert(kind: Any, value: Any, further: Sequence[str] = ()) -> Any:
    """`value` (parsed YAML) as `kind`, a type hint of dataclasses, tuples, mappings and scalars. Raises ConfigError.

    further: keys that the caller has taken out of the value, to be named where an error lists the known keys.
    """
    reader = _Reader(further)
    made = reader.read(kind, value, ())
    if reader.problems:
        raise ConfigError(*reader.problems)
    return made


class _Bad:
    """In the place of a value with a problem. partial: what is good in it, to go on checking with; None: nothing.

    A list's partial has None for each bad item that has none itself, a dataclass's lacks bad fields without default.
    """

    __slots__ = ("partial",)

    def __init__(self, partial: Any = None) -> None:
        self.partial = partial


class _Reader:
    """Reads values, and collects what is wrong with them. further: known keys of the whole, besides its fields."""

    def __init__(self, further: Sequence[str]) -> None:
        self.problems: list[Problem] = []
        self._further = further

    def read(self, kind: Any, value: Any, key: Key) -> Any:
        """The value, or a _Bad."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, value, key)
        if origin is tuple:
            if not isinstance(value, list):
                return self._bad(key, f"a list is expected, got {shown(value)}")
            return _whole([self.read(args[0], item, (*key, index)) for index, item in enumerate(value)])
        if origin is Mapping:
            if not isinstance(value, dict):
                return self._bad(key, f"a mapping is expected, got {shown(value)}")
            names = _whole([self.read(str, name, (*key, str(name))) for name in value])
            items = _whole([self.read(args[1], item, (*key, str(name))) for name, item in value.items()])
            good = isinstance(names, tuple) and isinstance(items, tuple)
            return dict(zip(names, items, strict=True)) if good else _Bad()
        if origin is types.UnionType:
            return None if value is None else self.read(args[0], value, key)
        return self._scalar(kind, value, key)

    def _bad(self, key: Key, text: str) -> _Bad:
        self.problems.append(Problem(key, text))
        return _Bad()

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
        if kind in (int, float) and abs(value) > MAX_NUMBER:
            return self._bad(key, f"a number of at most {MAX_NUMBER:,} is expected, got {shown(value)}")
        return value

    def _dataclass(self, kind: Any, value: Any, key: Key) -> Any:
        if isinstance(value, str) and hasattr(kind, "SHORT"):
            value = {kind.SHORT: value}
        if not isinstance(value, dict):
            return self._bad(key, f"{'' if key else 'configuration: '}a mapping is expected, got {shown(value)}")
        before = len(self.problems)
        hints, fields = typing.get_type_hints(kind), {item.name: item for item in dataclasses.fields(kind)}
        for name in value:
            if name not in hints:
                hint = _suggestion(kind, str(name), () if key else self._further) if len(self.problems) < MAX_PROBLEMS else ""
                self._bad((*key, str(name)), f"unknown key{hint}")
        parts = {
            name: self._field(fields[name], hints[name], item, (*key, name)) for name, item in value.items() if name in hints
        }
        for name, item in fields.items():
            if name not in value and _required(item):
                self._bad((*key, name), "missing")
        try:
            if len(self.problems) == before:
                return kind(**parts)
            hidden = {name for name, part in parts.items() if isinstance(part, _Bad) and part.partial is None}
            refuse(problem for problem in _problems_of(_partial(kind, parts)) if problem.key[0] not in hidden)
        except ConfigError as error:
            self.problems += [replace(problem, key=(*key, *problem.key)) for problem in error.problems]
        return _Bad(_partial(kind, parts))

    def _field(self, field: dataclasses.Field[Any], kind: Any, value: Any, key: Key) -> Any:
        """A dataclass field's value, by its metadata (see the top of this file)."""
        if value is False and FALSE in field.metadata:
            return field.metadata[FALSE]
        if EXPECTED in field.metadata and not isinstance(value, str):
            return self._bad(key, f"{field.metadata[EXPECTED]} is expected, got {shown(value)}")
        return self.read(kind, value, key)


def _whole(parts: list[Any]) -> Any:
    """A list's items as a tuple; with a bad one, a _Bad."""
    if not any(isinstance(part, _Bad) for part in parts):
        return tuple(parts)
    return _Bad(tuple(part.partial if isinstance(part, _Bad) else part for part in parts))


_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
)


def _suggestion(kind: Any, name: str, further: Sequence[str]) -> str:
    known = [*(item.name for item in dataclasses.fields(kind) if "env" not in item.metadata), *further]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _partial(kind: Any, parts: Mapping[str, Any]) -> Any:
    """An instance that is not checked: bad parts are partial, else their fields' defaults, else missing."""
    made = object.__new__(kind)
    for item in dataclasses.fields(kind):
        part = parts.get(item.name)
        part = part.partial if isinstance(part, _Bad) else part
        if part is None and not _required(item):
            part = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if part is not None or not _required(item):
            object.__setattr__(made, item.name, part)
    return made


def _problems_of(instance: Any) -> Iterator[Problem]:
    if hasattr(instance, "problems"):
        yield from map(_problem, instance.problems())


# -- for `problems` to use


def not_positive(obj: Any, *names: str) -> Iterator[str]:
    """Fields that must be greater than 0 and are not."""
    for name in names:
        if getattr(obj, name) <= 0:
            yield f"{name}: must be greater than 0, got {getattr(obj, name)}"


def not_among(obj: Any, name: str, choices: Collection[str]) -> Iterator[str]:
    """A field that is none of its choices."""
    if getattr(obj, name) not in choices:
        yield f"{name}: {getattr(obj, name)!r} is not one of {', '.join(choices)}"


def repeated(values: Iterable[tuple[Key, str]]) -> Iterator[tuple[Key, str, Key]]:
    """(key, value, the value's first key) of each value that came before."""
    first: dict[str, Key] = {}
    for key, value in values:
        if first.setdefault(value, key) != key:
            yield key, value, first[value]
