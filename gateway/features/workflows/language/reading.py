"""Texts of documents as plain values, with the line of each: JSON of clients, YAML of operators.

YAML is read by its events, so that nothing of it is built before it is checked: no anchors, aliases or tags, texts as keys, and
the plain scalars of YAML 1.2 (`Yes` and `no` are texts). Keys that are given twice are errors in both.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import yaml

from gateway.features.workflows.language.faults import TOO_LARGE, DocumentError, DocumentFault, DocumentFaults, refused
from gateway.features.workflows.language.values import EvaluationError, bytes_of

MAX_DOCUMENT_BYTES: Final = 256 << 10
MAX_DOCUMENT_DEPTH: Final = 32
MAX_VALUES: Final = 8192
_KEY_TWICE: Final = "the key is given twice"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WORDS: Final[Mapping[str, bool | None]] = {"null": None, "true": True, "false": False}
_FORMS: Final = (str.lower, str.upper, str.capitalize)
_PLAIN: Final = {"": None, "~": None} | {form(word): value for word, value in _WORDS.items() for form in _FORMS}
_LOADER: Final = yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader


@dataclass(frozen=True, slots=True)
class SourceValue:
    """A document as plain values. lines: by path; empty if they are not known. faults: keys that are given twice, whose last
    value is in `value`.
    """

    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    faults: Sequence[DocumentFault] = ()


def read_json(text: str) -> SourceValue:
    """Raises DocumentError."""
    _bound(text)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise refused("", f"not valid JSON: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # NaN, a number of thousands of digits
        raise refused("", f"not valid JSON: {error}") from None
    check_plain(value)
    faults = DocumentFaults()
    plain = _plain(value, "", faults)
    return SourceValue(plain, faults=faults.found)


class _AmbiguousObject(dict[str, Any]):
    """An object with keys that are given twice."""

    twice: Sequence[str] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    ambiguous = _AmbiguousObject(made)
    ambiguous.twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    return ambiguous


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _plain(value: Any, path: str, faults: DocumentFaults) -> Any:
    """The value with plain dicts; repeated keys are errors."""
    if isinstance(value, dict):
        for key in value.twice if isinstance(value, _AmbiguousObject) else ():
            faults.add(member(path, key), _KEY_TWICE)
        return {key: _plain(each, member(path, key), faults) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, f"{path}[{at}]", faults) for at, each in enumerate(value)]
    return value


def member(path: str, key: str) -> str:
    """The path of an object's member."""
    key = key[:100]
    return f"{path}.{key}" if path else key


def check_plain(value: Any) -> None:
    """Bounds on a document: an object of JSON values, not too many. Raises DocumentError."""
    if not isinstance(value, dict):
        raise refused("", "a document is an object with the keys workflow, name, inputs, steps")
    count, level, finite = 0, 0, True
    waiting: list[Any] = [value]
    while waiting:
        level += 1
        if level > MAX_DOCUMENT_DEPTH:
            raise _too_deep()
        waiting = [each for outer in waiting for each in (outer.values() if isinstance(outer, dict) else outer)]
        count += len(waiting)
        if count > MAX_VALUES:
            raise refused("", f"a document has at most {MAX_VALUES:,} values", TOO_LARGE)
        finite = finite and all(math.isfinite(each) for each in waiting if isinstance(each, float))
        waiting = [each for each in waiting if isinstance(each, dict | list)]
    try:
        bytes_of(value)
    except EvaluationError as error:
        raise _unfit(value, str(error)) from None
    if not finite:
        raise _unfit(value, "a number is too large")


def _unfit(value: Any, text: str) -> DocumentError:
    """The error of the first key or plain value that is no JSON; text: the error of all together."""
    for path, each in _leaves(value, ""):
        try:
            bytes_of(each)
        except EvaluationError as error:
            return refused(path, str(error))
    return refused("", text)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Keys and plain values with their paths. A key has the path of its object."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield path, key
            yield from _leaves(each, member(path, key))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{path}[{at}]")
    else:
        yield path, value


def read_yaml(text: str) -> SourceValue:
    """Raises DocumentError."""
    _bound(text)
    try:
        return _YamlReader(text).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why, line = " ".join(filter(None, (error.context, error.problem))), mark.line + 1 if mark else 0
        raise refused("", f"not valid YAML: {why}{_remedy(text, line)}", line=line) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a character that is not allowed
        raise refused("", f"not valid YAML: {' '.join(str(error).split())}") from None


def _remedy(text: str, line: int) -> str:
    """The usual cause of unreadable YAML in this line; "": another one."""
    found = text.splitlines()[line - 1] if 0 < line <= len(text.splitlines()) else ""
    if "\t" in found[: len(found) - len(found.lstrip())]:
        return "; a line begins with spaces, not with a tab"
    return '; a text with "${", ": " or "#" must be in quotes' if "${" in found or found.count(": ") > 1 else ""


class _YamlReader:
    """Builds values from the events of one document."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))
        self._faults = DocumentFaults()
        self._lines: dict[str, int] = {}

    def read(self) -> SourceValue:
        value: Any = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                value = self._value(next(self._events), "", 0)
            elif isinstance(event, yaml.DocumentEndEvent) and not isinstance(next(self._events), yaml.StreamEndEvent):
                raise refused("", "a file has one document; there is a second one after ---")
        return SourceValue(value, self._lines, self._faults.found)

    def _value(self, event: Any, path: str, depth: int) -> Any:
        line = event.start_mark.line + 1
        self._lines.setdefault(path, line)
        if len(self._lines) > MAX_VALUES:
            raise refused("", f"a document has at most {MAX_VALUES:,} values", TOO_LARGE, line)
        if depth > MAX_DOCUMENT_DEPTH:
            raise _too_deep(path, line)
        if isinstance(event, yaml.AliasEvent) or event.anchor or (event.tag and event.tag != "!"):
            text = "anchors (&), aliases (*) and tags (!) are not allowed; a text that begins so must be in quotes"
            raise refused(path, text, line=line)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style in ("'", '"', "|", ">") else plain_scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(inner := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(inner, f"{path}[{len(items)}]", depth + 1))
            return items
        return self._mapping(path, depth)

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarEvent):
                raise refused(path, "a key is a text", line=line)
            place = member(path, key.value)
            if key.value in made:
                self._faults.add(place, f"{_KEY_TWICE}, first in line {self._lines[place]}", line=line)
            self._lines.setdefault(place, line)
            made[key.value] = self._value(next(self._events), place, depth + 1)
        return made


def plain_scalar(text: str) -> Any:
    """The value of a plain scalar."""
    if text in _PLAIN:
        return _PLAIN[text]
    if _NUMBER.fullmatch(text) and len(text) < 100:
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    return text


def _bound(text: str) -> None:
    if len(text) > MAX_DOCUMENT_BYTES or len(text.encode(errors="replace")) > MAX_DOCUMENT_BYTES:
        raise refused("", f"a document has at most {MAX_DOCUMENT_BYTES >> 10} KiB", TOO_LARGE)


def _too_deep(path: str = "", line: int = 0) -> DocumentError:
    return DocumentError([DocumentFault(path[:200], f"more than {MAX_DOCUMENT_DEPTH} levels of lists and objects", line=line)])
