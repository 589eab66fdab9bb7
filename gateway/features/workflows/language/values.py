"""Values of documents and runs: JSON, bounded in size and depth, so that every operation on them is bounded.

null, booleans, numbers (finite, whole ones of 64 bits), texts that UTF-8 can encode, lists, objects with texts as keys.
"""

from __future__ import annotations

import math
from typing import Any, Final

import orjson

from gateway.features.workflows.language.results import StepResult

MAX_VALUE_BYTES: Final = 1 << 20
MAX_MESSAGES_BYTES: Final = 4 << 20  # of all inputs, and of the messages of a step: a million tokens
_AROUND: Final = 16  # levels of lists and objects around a value, such as of a run; orjson writes 254 in all
_STRICT: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_OF_NUMBERS: Final = b"0123456789+-.eE"


class EvaluationError(Exception):
    """A step fails: an expression met a value of the wrong type, or its result is too large."""


class ValueTooLargeError(EvaluationError):
    """A value with too many bytes, or nested too deeply."""


def bytes_of(value: object, most: int = MAX_VALUE_BYTES) -> int:
    """About the size of a value as JSON: quotes of plain texts do not count, null and booleans count 1. O(size). Raises
    EvaluationError if it is no JSON, or larger than `most`.
    """
    if isinstance(value, str) and value.isascii():
        size = len(value)
    elif value is None or isinstance(value, bool):
        return 1
    elif isinstance(value, list | dict):
        inner: object = value
        for _ in range(_AROUND):
            inner = [inner]
        size = len(_dumped(inner)) - 2 * _AROUND
    else:
        size = len(_dumped(value))
    return require_bytes(size, most)


def require_bytes(size: int, most: int) -> int:
    """The size. Raises ValueTooLargeError if it is larger than `most`."""
    if size > most:
        raise ValueTooLargeError(f"a value has {size:,} bytes, more than {most:,}")
    return size


def _dumped(value: object, more: int = 0) -> bytes:
    if isinstance(value, float) and not math.isfinite(value):
        raise EvaluationError("a number is too large, or no number")
    if isinstance(value, StepResult):
        raise EvaluationError("the result of a step needs a member, such as .value")
    try:
        return orjson.dumps(value, option=_STRICT | more)
    except TypeError as error:  # more than 64 bits, half of a surrogate pair, too deep, no JSON
        raise EvaluationError(f"it is no JSON: {error}") from None


def same(left: object, right: object) -> bool:
    """True if two values are equal. A boolean is not a number: `True == 1` and `[True] == [1]` are false. O(size), and
    O(n log n) of the members of objects in another order.
    """
    if isinstance(left, bool) != isinstance(right, bool) or left != right:
        return False
    return not isinstance(left, list | dict) or _dumped(left) == _dumped(right) or _unnumbered(left) == _unnumbered(right)


def _unnumbered(value: object) -> bytes:
    """The JSON of a value without its numbers: of values that Python takes for equal, it differs where one has a boolean."""
    return _dumped(value, orjson.OPT_SORT_KEYS).translate(None, _OF_NUMBERS)


def text_of(value: object) -> str:
    """The value within a longer text: texts as they are, all others as JSON."""
    return value if isinstance(value, str) else json_of(value)


def json_of(value: object) -> str:
    return _dumped(value).decode()


def parsed_json(text: str) -> Any:
    """The value of a JSON text; null if it is not JSON. Raises ValueTooLargeError."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    bytes_of(value)
    return value


def type_name(value: object) -> str:
    """The type of a value in messages."""
    if value is None:
        return "null"
    for kinds, name in (
        (bool, "a boolean"),
        ((int, float), "a number"),
        (str, "a text"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, kinds):
            return name
    return f"a {type(value).__name__}"
