"""The 20 functions of expressions. Each is linear in its arguments; a wrong type raises EvaluationError.

A text that is no number, or no JSON, gives null: the texts come from models, and `coalesce` has the alternative.

The work of a function is counted in units of about one nanosecond, at their slowest arguments. Sizes of arguments are counted
for all functions (`WorkBudget.charge`); `extra_work` is what a function needs beyond that.
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
    same,
    text_of,
    type_name,
)

MAX_PARTS: Final = 1000
_MAX_DIGITS: Final = 15
_MAX_NUMBER_CHARS: Final = 1000
_NUMBER = re.compile(r"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,4})?")
_WHOLE = re.compile(r"[-+]?\d{1,18}")
# CPython searches a text of 30,000 characters that is three times as long as the piece in linear time: both with a reserve.
_PAD: Final = 32_000  # characters
_PIECE_FACTOR: Final = 4
_SMALL_SEARCH: Final = 1 << 14  # comparisons at most
ITEM_WORK: Final = 200
CHAR_WORK: Final = 3  # of a search, of the words of a text
BRACKET_WORK: Final = 250  # a list or an object is made
COLON_WORK: Final = 150  # a member of an object is made


class ExpressionFunction(NamedTuple):
    """call: gets evaluated arguments. least, most: number of arguments. extra_work: of these arguments, in units."""

    call: Callable[..., Any]
    least: int = 1
    most: int = 1
    extra_work: Callable[..., int] = lambda *arguments: 0


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
        piece = _text(item, "a search in a text")
        return piece in _padded(container, piece)
    if isinstance(container, list):
        return any(same(item, each) for each in container)
    if isinstance(container, dict):
        return _text(item, "a search in an object") in container
    raise EvaluationError(f"a search needs a text, a list or an object, got {type_name(container)}")


def search_work(container: object, item: object = "\n") -> int:
    """Units of a search in a text or a list. O(1)."""
    if isinstance(container, list):
        return ITEM_WORK * len(container)
    if not (isinstance(container, str) and isinstance(item, str)):
        return 0
    pad = 0 if _is_small(container, item) else _PAD + _PIECE_FACTOR * len(item)
    return CHAR_WORK * (len(container) + len(item)) + pad


def _padded(text: str, piece: str) -> str:
    """A text in which a search for `piece` has the same result as in `text`, and takes linear time.

    CPython searches short texts, and texts that are little longer than the piece, in O(characters of both multiplied): so other
    characters follow here, which do not occur in the piece.
    """
    if _is_small(text, piece):
        return text
    used = set(piece)
    other = next(char for char in map(chr, range(len(used) + 1)) if char not in used)
    return text + other * (_PAD + _PIECE_FACTOR * len(piece))


def _is_small(text: str, piece: str) -> bool:
    return len(piece) <= 1 or len(text) * len(piece) <= _SMALL_SEARCH


def _split(text: object, separator: object = "\n") -> list[str]:
    by = _text(separator, "split")
    if not by:
        raise EvaluationError("split needs a separator that is not empty")
    whole = _text(text, "split")
    padded = _padded(whole, by)
    parts = padded.split(by, MAX_PARTS)
    parts[-1] = parts[-1][: len(parts[-1]) - (len(padded) - len(whole))]
    return parts[:MAX_PARTS]


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
        written = value.strip()
        if len(written) > _MAX_NUMBER_CHARS:
            return None
        if _WHOLE.fullmatch(written):
            return int(written)
        found = float(written) if _NUMBER.fullmatch(written) else math.inf
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


def _items_work(*arguments: object) -> int:
    """Units of a loop over the items of a list, or over the arguments."""
    items = arguments[0] if isinstance(arguments[0], list) else arguments
    return ITEM_WORK * len(items)


def parse_work(text: object) -> int:
    """Units of the values that a JSON text may have. O(characters)."""
    if not isinstance(text, str):
        return 0
    return BRACKET_WORK * (text.count("[") + text.count("{")) + COLON_WORK * text.count(":") + CHAR_WORK * len(text)


def _words_work(text: object) -> int:
    return CHAR_WORK * len(text) if isinstance(text, str) else 0


FUNCTIONS: Final[Mapping[str, ExpressionFunction]] = {
    "contains": ExpressionFunction(has, 2, 2, search_work),
    "startswith": ExpressionFunction(lambda a, b: _text(a, "startswith").startswith(_text(b, "startswith")), 2, 2),
    "endswith": ExpressionFunction(lambda a, b: _text(a, "endswith").endswith(_text(b, "endswith")), 2, 2),
    "lower": ExpressionFunction(lambda a: _text(a, "lower").lower()),
    "upper": ExpressionFunction(lambda a: _text(a, "upper").upper()),
    "strip": ExpressionFunction(lambda a: _text(a, "strip").strip()),
    "split": ExpressionFunction(_split, 1, 2, search_work),
    "join": ExpressionFunction(_join, 1, 2, _items_work),
    "words": ExpressionFunction(lambda a: len(_text(a, "words").split()), 1, 1, _words_work),
    "len": ExpressionFunction(_len),
    "sum": ExpressionFunction(_sum, 1, 1, _items_work),
    "min": ExpressionFunction(_least_of, 1, 100, _items_work),
    "max": ExpressionFunction(_greatest_of, 1, 100, _items_work),
    "round": ExpressionFunction(_round, 1, 2),
    "number": ExpressionFunction(_number),
    "string": ExpressionFunction(text_of),
    "json": ExpressionFunction(json_of),
    "parse": ExpressionFunction(lambda a: parsed_json(_text(a, "parse")), 1, 1, parse_work),
    "coalesce": ExpressionFunction(_coalesce, 1, 100),
    "last_text": ExpressionFunction(_last_text, 1, 1, _items_work),
}
