"""Converts parsed YAML to the Structs of `schema.py`, and reports all problems at once.

msgspec checks each single value: type, bounds, choices. It stops at the first problem, so sections, lists and mappings are
traversed here, and every value in them is converted separately:

    section (Struct)   unknown and missing keys are problems; then each key
    list, mapping      each item; then its length
    any other value    `msgspec.convert`

Beyond msgspec, this module handles numbers in scientific notation, which YAML 1.1 reads as text, dates, which it does not,
suggestions for unknown keys, and the forms of values listed in `hints.py`. If a Struct has a class variable SHORT, a plain text
stands for the value of that key.

`checks.py` checks for problems between values (two replicas with one name), among all values that are valid on their own
(`ParsedConfig.good`): one invalid value does not hide the problems of others.
"""

from __future__ import annotations

import datetime
import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.structs import FieldInfo

from gateway.config.addresses import shown
from gateway.config.complaints import complaint
from gateway.config.hints import (
    ALONE,
    EXPECTED,
    FALSE,
    READ,
    SECRET,
    UNSHOWN,
    bare,
    default_of,
    extra_of,
    fields_of,
    section_of,
    takes_bool,
)

MAX_PROBLEMS: Final = 100  # shown per file, each with its line

_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
_A_MAPPING: Final = "a mapping"
_OFF: Final = "off"
_BAD: Final = object()  # marks an invalid value

T = TypeVar("T", bound=msgspec.Struct)

Key = tuple[str | int, ...]
"""Path of a value: ("pools", 0, "replicas", 1, "url")."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning. key: path in the configuration; file, line: location in a file."""

    key: Key
    text: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}: " if self.file else ""
        name = key_name(self.key)
        return f"{at}{name}: {self.text}" if name else f"{at}{self.text}"


class ConfigError(ValueError):
    """The configuration is invalid. problems: all errors, in order."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem((), each) if isinstance(each, str) else each for each in problems)
        super().__init__("; ".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, self.problems


class NotReadable(ConfigError):
    """The file cannot be read for lack of file descriptors or memory. A later attempt may succeed."""


def key_name(key: Key) -> str:
    """The key as text: `pools[0].replicas[1].url`."""
    return "".join(f".{part}" if isinstance(part, str) and part else f"[{part!r}]" for part in key).removeprefix(".")


@dataclass(frozen=True, slots=True)
class ParsedConfig(Generic[T]):
    """value: None if there are problems. good: all valid single values, defaults included, by key."""

    value: T | None
    good: Mapping[Key, Any]
    problems: Sequence[Problem]


def parse(kind: type[T], raw: object, further: Sequence[str] = ()) -> ParsedConfig[T]:
    """raw: parsed YAML or JSON. further: keys that the caller has removed from it, for the suggestions."""
    reader = _Reader(further)
    made = reader.read(kind, raw, ())
    return ParsedConfig(None if made is _BAD else made, reader.good, reader.problems)


def convert(kind: type[T], raw: object, further: Sequence[str] = ()) -> T:
    """`parse` without checks between values. Raises ConfigError."""
    parsed = parse(kind, raw, further)
    if parsed.value is None:
        raise ConfigError(*parsed.problems)
    return parsed.value


def values_of(value: Any, key: Key = ()) -> Iterable[tuple[Key, Any]]:
    """(key, value) of a Struct and of all values in it: its `ParsedConfig.good`."""
    yield key, value
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, msgspec.Struct):
        parts = msgspec.structs.asdict(value).items()
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    for name, part in parts:
        yield from values_of(part, (*key, name))


class _Reader:
    """Converts values; collects the valid ones and the problems. further: known top-level keys besides the fields."""

    def __init__(self, further: Sequence[str]) -> None:
        self.good: dict[Key, Any] = {}
        self.problems: list[Problem] = []
        self._further = further

    def read(self, hint: Any, value: Any, key: Key) -> Any:
        """The value converted to this type hint, or _BAD."""
        alone = value is None or (isinstance(value, bool) and takes_bool(hint))
        kind, extra = bare(hint) if alone else section_of(hint), extra_of(hint)
        if FALSE in extra and (value is False or value == _OFF):
            value = extra[FALSE]
        if _is_struct(kind):
            made = self._struct(kind, value, key, extra)
        elif typing.get_origin(kind) is tuple:
            made = self._list(hint, kind, value, key)
        elif typing.get_origin(kind) is Mapping:
            made = self._mapping(hint, value, key)
        else:
            made = self._single(hint, value, key)
        if made is not _BAD:
            self.good[key] = made
        return made

    def _bad(self, key: Key, text: str) -> Any:
        self.problems.append(Problem(key, text))
        return _BAD

    def _single(self, hint: Any, value: Any, key: Key) -> Any:
        """Convert by msgspec; for a list or mapping of valid items, check its length."""
        if isinstance(value, datetime.date):  # YAML reads one without quotes so
            value = value.isoformat()
        number, reason = _number(value), ""
        for form in (value,) if number is None else (value, number):
            try:
                made = msgspec.convert(form, hint)
            except msgspec.ValidationError as error:
                reason = str(error)
                continue
            try:
                return extra_of(hint).get(READ, _unchanged)(made)
            except ValueError as wrong:
                return self._bad(key, str(wrong))
        # Messages beyond the limit are never shown.
        return self._bad(key, complaint(hint, value, number, reason) if len(self.problems) < MAX_PROBLEMS else "wrong")

    def _list(self, hint: Any, kind: Any, value: Any, key: Key) -> Any:
        (item, *_) = typing.get_args(kind)
        if ALONE in extra_of(hint) and not isinstance(value, list | tuple):
            made = (self.read(item, value, key),)
            return _BAD if _BAD in made else made
        if not isinstance(value, list | tuple):  # a tuple is of a section that a flag has changed
            return self._bad(key, f"a list is expected, got {shown(value)}")
        made = tuple(self.read(item, each, (*key, index)) for index, each in enumerate(value))
        return _BAD if any(each is _BAD for each in made) else self._single(hint, made, key)

    def _mapping(self, hint: Any, value: Any, key: Key) -> Any:
        if not isinstance(value, dict):
            return self._bad(key, f"{extra_of(hint).get(EXPECTED, _A_MAPPING)} is expected, got {shown(value)}")
        name, item = typing.get_args(bare(hint))
        names = [self._single(name, each, (*key, str(each))) for each in value]
        items = [self.read(item, each, (*key, str(at))) for at, each in value.items()]
        bad = any(each is _BAD for each in (*names, *items))
        return _BAD if bad else self._single(hint, dict(zip(names, items, strict=True)), key)

    def _struct(self, kind: type[msgspec.Struct], value: Any, key: Key, extra: Mapping[str, Any]) -> Any:
        if isinstance(value, str) and hasattr(kind, "SHORT"):
            value = {kind.SHORT: value}
        fields = fields_of(kind)
        if not isinstance(value, dict):
            got = value.partition("://")[0] if isinstance(value, str) else value  # the rest of a URL may be a password
            given = f"got a {type(value).__name__}" if UNSHOWN in extra else f"got {shown(got)}"
            keys = "" if EXPECTED in extra or not key else f"; its keys: {', '.join(_shown_keys(fields))}"
            text = f"{extra.get(EXPECTED, _A_MAPPING)} is expected, {given}{keys}"
            return self._bad(key, text if key else f"configuration: {text}")
        parts: dict[str, Any] = {}
        for name, item in value.items():
            known = fields.get(name)
            parts[str(name)] = self.read(known.type, item, (*key, name)) if known else self._unknown(name, fields, key)
        for name, field in fields.items():
            if name in value:
                continue
            if field.required:
                parts[name] = self._bad((*key, name), "missing")
            else:
                self.good[(*key, name)] = default_of(field)
        return _BAD if any(part is _BAD for part in parts.values()) else kind(**parts)

    def _unknown(self, name: object, fields: Mapping[str, FieldInfo], key: Key) -> Any:
        hint = ""
        if len(self.problems) < MAX_PROBLEMS:
            known = [*_shown_keys(fields), *(() if key else self._further)]
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
        return self._bad((*key, str(name)), f"unknown key{hint}")


def _shown_keys(fields: Mapping[str, FieldInfo]) -> list[str]:
    return [each.name for each in fields.values() if SECRET not in extra_of(each.type)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _unchanged(value: Any) -> Any:
    return value


def _number(value: object) -> float | None:
    """The number of a text in scientific notation: YAML 1.1 reads 1e-05, Helm's form of small numbers, as text."""
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else None
