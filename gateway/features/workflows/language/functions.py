"""The 20 functions of expressions. Each is linear in its arguments; a wrong type raises EvaluationError.

A text that is no number, or no JSON, gives null: the texts come from models, and `coalesce` has the alternative.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gateway.features.workflows.language.values import (
    MAX_VALUE_BYTES,
    EvaluationError,
    ValueTooLargeError,
    json_of,
    parsed_json,
    text_of,
    type_name,
)

MAX_PARTS: Final = 1000
_MAX_DIGITS: Final = 15
_NUMBER = re.compile(r"\s*[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,4})?\s*")
_WHOLE = re.compile(r"\s*[-+]?\d{1,18}\s*")


class ExpressionFunction(NamedTuple):
    """call: gets evaluated arguments. least, most: number of arguments."""

    call: Callable[..., Any]
    least: int = 1
    most: int = 1


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise EvaluationError(f"{what} needs a text, got {type_name(value)}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise EvaluationError(f"{what} needs a list, got {type_name(value)}")
    return value


def has(container: object, item: object) -> bool:
    """`item in container`: a piece of a text, an item of a list, a key of an object."""
    if isinstance(container, str):
        return _text(item, "a search in a text") in container
    if isinstance(container, list):
        return item in container
    if isinstance(container, dict):
        return _text(item, "a search in an object") in container
    raise EvaluationError(f"a search needs a text, a list or an object, got {type_name(container)}")


def _split(text: object, separator: object = "\n") -> list[str]:
    by = _text(separator, "split")
    if not by:
        raise EvaluationError("split needs a separator that is not empty")
    return _text(text, "split").split(by, MAX_PARTS)[:MAX_PARTS]


def _join(items: object, separator: object = "\n") -> str:
    between, texts = _text(separator, "join"), [text_of(each) for each in _list(items, "join") if each is not None]
    if len(between) * len(texts) > MAX_VALUE_BYTES:
        raise ValueTooLargeError("the result of join is too large")
    return between.join(texts)


def _len(value: object) -> int:
    if not isinstance(value, str | list | dict):
        raise EvaluationError(f"len needs a text, a list or an object, got {type_name(value)}")
    return len(value)


def _sum(items: object) -> Any:
    numbers = _list(items, "sum")
    if not all(map(is_number, numbers)):
        raise EvaluationError("sum needs a list of numbers")
    return sum(numbers)


def _least_of(*values: Any) -> Any:
    return min(_comparable(values, "min"), default=None)


def _greatest_of(*values: Any) -> Any:
    return max(_comparable(values, "max"), default=None)


def _comparable(values: tuple[Any, ...], what: str) -> list[Any]:
    items = _list(values[0], what) if len(values) == 1 else list(values)
    if all(map(is_number, items)) or all(isinstance(each, str) for each in items):
        return items
    raise EvaluationError(f"{what} compares numbers with numbers, or texts with texts")


def _round(value: Any, digits: Any = 0) -> Any:
    if not is_number(value):
        raise EvaluationError(f"round needs a number, got {type_name(value)}")
    if not isinstance(digits, int) or not 0 <= digits <= _MAX_DIGITS:
        raise EvaluationError(f"round needs 0 to {_MAX_DIGITS} digits")
    return round(value, digits) if digits else round(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        if _WHOLE.fullmatch(value):
            return int(value)
        found = float(value) if _NUMBER.fullmatch(value) else math.inf
        return found if math.isfinite(found) else None
    if value is None or is_number(value):
        return value
    raise EvaluationError(f"number needs a text or a number, got {type_name(value)}")


def _coalesce(*values: Any) -> Any:
    return next((each for each in values if each is not None), None)


def _last_text(messages: object) -> str | None:
    for message in reversed(_list(messages, "last_text")):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            return "".join(str(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
    return None


FUNCTIONS: Final[Mapping[str, ExpressionFunction]] = {
    "contains": ExpressionFunction(has, 2, 2),
    "startswith": ExpressionFunction(lambda a, b: _text(a, "startswith").startswith(_text(b, "startswith")), 2, 2),
    "endswith": ExpressionFunction(lambda a, b: _text(a, "endswith").endswith(_text(b, "endswith")), 2, 2),
    "lower": ExpressionFunction(lambda a: _text(a, "lower").lower()),
    "upper": ExpressionFunction(lambda a: _text(a, "upper").upper()),
    "strip": ExpressionFunction(lambda a: _text(a, "strip").strip()),
    "split": ExpressionFunction(_split, 1, 2),
    "join": ExpressionFunction(_join, 1, 2),
    "words": ExpressionFunction(lambda a: len(_text(a, "words").split())),
    "len": ExpressionFunction(_len),
    "sum": ExpressionFunction(_sum),
    "min": ExpressionFunction(_least_of, 1, 100),
    "max": ExpressionFunction(_greatest_of, 1, 100),
    "round": ExpressionFunction(_round, 1, 2),
    "number": ExpressionFunction(_number),
    "string": ExpressionFunction(text_of),
    "json": ExpressionFunction(json_of),
    "parse": ExpressionFunction(lambda a: parsed_json(_text(a, "parse"))),
    "coalesce": ExpressionFunction(_coalesce, 1, 100),
    "last_text": ExpressionFunction(_last_text),
}
