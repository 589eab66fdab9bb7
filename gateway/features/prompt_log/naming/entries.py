"""Entries: the turns of a log, in a form that is the same in all dialects. Pure.

    {role, name?, of?, content?: [part], reasoning?, calls?: [{name, arguments}], sealed?: [{label, sha256, bytes}], more?}

Empty members are left out. Ids are left out: a result says by `of` which of the open calls it answers.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NoReturn

import orjson

from gateway.dialects.json_structure import exceeds
from gateway.features.prompt_log.naming.canonical import HALF_A_PAIR, NoNameError

Entry = dict[str, Any]
MAX_ENTRIES: Final = 100_000
MARKERS: Final = frozenset(["cache_control", "prompt_cache_breakpoint"])  # of a provider's cache
UNPRINTED: Final = MARKERS | {"citations", "annotations", "logprobs"}


@dataclass(frozen=True, slots=True)
class Log:
    """A body as a log: its frame, and its entries. leading: elements of the body's list of turns that are in the frame."""

    frame: dict[str, Any]
    entries: list[Entry]
    leading: int = 0


def entry_of(role: str, content: list[dict[str, Any]] | None = None, **members: Any) -> Entry:
    """An entry. members: the others, of which empty ones are left out."""
    members["content"] = content
    return {"role": "system" if role == "developer" else role, **{name: value for name, value in members.items() if value}}


class OpenCalls:
    """The calls without a result. All operations are O(log n), and a move of memory of O(n). ids: of the first ones."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids = list[str]()  # of all calls
        self._open = list[int]()  # numbers of the open calls, the oldest first
        self._numbers = dict[str, deque[int]]()  # of the open calls, by id
        for id_ in ids:
            self.add(id_)

    @property
    def ids(self) -> list[str]:
        """The ids of the open calls, the oldest first."""
        return [self._ids[number] for number in self._open]

    def is_open(self, id_: str) -> bool:
        """True if a call with this id has no result yet."""
        return bool(self._numbers.get(id_))

    def add(self, id_: Any) -> None:
        """A call. Engines may repeat ids."""
        id_ = id_ if isinstance(id_, str) else ""
        self._numbers.setdefault(id_, deque()).append(len(self._ids))
        self._open.append(len(self._ids))
        self._ids.append(id_)

    def answer(self, id_: Any) -> int:
        """A result of the call with this id, else of the oldest open call. Returns the index of the call among the open
        calls.
        """
        if not self._open:
            return 0
        numbers = self._numbers.get(id_ if isinstance(id_, str) else "")
        at = bisect_left(self._open, numbers[0]) if numbers else 0
        number = self._open.pop(at)
        self._numbers[self._ids[number]].popleft()  # the oldest call with its id
        return at


def call_of(name: Any, arguments: Any) -> dict[str, Any]:
    """A call. arguments: the value, or a text of JSON; a text that is no JSON stays a text. Raises NoNameError."""
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {"name": text_in(name, "the name of a call"), "arguments": arguments}


def _parsed(arguments: str) -> Any:
    try:
        raw = arguments.encode()
    except UnicodeEncodeError:
        raise NoNameError(HALF_A_PAIR) from None
    if exceeds(raw):
        raise NoNameError("the arguments of a call have too many values")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _parsed_slowly(arguments)


def _parsed_slowly(arguments: str) -> Any:
    """Arguments that orjson does not read: no JSON, or JSON without a name."""
    try:
        return json.loads(arguments, parse_constant=_refuse)
    except json.JSONDecodeError:
        return arguments
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        raise NoNameError("the arguments of a call are nested too deeply, or have a number beyond all doubles") from None


def _refuse(text: str) -> NoReturn:
    """NaN and the like are no JSON."""
    raise json.JSONDecodeError("no JSON", text, 0)


def sealed_of(label: str, text: Any) -> dict[str, Any]:
    """Bytes that only their issuer can read. Raises NoNameError."""
    try:
        raw = text_in(text, label).encode()
    except UnicodeEncodeError:
        raise NoNameError(HALF_A_PAIR) from None
    return {"label": label, "sha256": sha256(raw).hexdigest(), "bytes": len(raw)}


def without(value: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The members except these and nulls."""
    return {name: member for name, member in value.items() if member is not None and name not in names}


def text_in(value: Any, subject: str) -> str:
    """Raises NoNameError if a value is no text."""
    if not isinstance(value, str):
        raise NoNameError(f"{subject} is not a text")
    return value


def object_in(value: Any, subject: str) -> dict[str, Any]:
    """Raises NoNameError if a value is no object."""
    if not isinstance(value, dict):
        raise NoNameError(f"{subject} is not an object")
    return value


def list_in(value: Any, subject: str) -> Sequence[Any]:
    """A list; null is an empty one. Raises NoNameError."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise NoNameError(f"{subject} is not a list")
    return value
