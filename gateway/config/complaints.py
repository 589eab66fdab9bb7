"""Error messages for single values that msgspec refuses: the expected and the given value.

Constraints without a text here get msgspec's own message.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import inspect

from gateway.config.addresses import shown
from gateway.config.hints import EXPECTED, MAX_NUMBER, NAME, UNSHOWN, bare, extra_of


def complaint(hint: Any, value: object, number: float | None, reason: str) -> str:
    """The message for a value that msgspec refuses. number: the value of a numeric text; reason: msgspec's message."""
    info, extra = inspect.type_info(hint), extra_of(hint)
    expected = extra.get(EXPECTED)
    if isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):  # X | None
        info = next(each for each in info.types if not isinstance(each, inspect.NoneType))
    match info:
        case inspect.LiteralType() if expected is None:
            return f"{shown(value)} is not one of {', '.join(_names(bare(hint)))}"
        case inspect.VarTupleType(max_length=int(most)) if isinstance(value, tuple) and len(value) > most:
            return f"at most {most} are possible, got {len(value)}"
        case inspect.DictType(max_length=int(most)) if isinstance(value, dict) and len(value) > most:
            return f"at most {most} are possible, got {len(value)}"
        case inspect.IntType() | inspect.FloatType():
            wrong = _number_complaint(info, value if number is None else number, expected) or reason
        case inspect.StrType() if isinstance(value, str):
            wrong = f"{expected} is expected" if expected else reason
        case _:
            wrong = f"{expected or _NAMES[type(info)]} is expected" if expected or type(info) in _NAMES else reason
    if UNSHOWN in extra:
        return f"{wrong}, got a {type(value).__name__}"
    quotes = ": put it in quotes if that is the name" if NAME in extra and isinstance(value, bool | int | float) else ""
    return f"{wrong}, got {'none' if value == () else shown(value)}{quotes}"


def _names(kind: Any) -> Sequence[str]:
    """The names of a Literal, or of an optional one, in their order."""
    return typing.get_args(kind if typing.get_origin(kind) is typing.Literal else typing.get_args(kind)[0])


def _number_complaint(info: inspect.IntType | inspect.FloatType, value: object, expected: str | None) -> str | None:
    whole = isinstance(info, inspect.IntType)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not _is_finite(value, whole):
        return f"{_NAMES[type(info)]} is expected"
    if abs(value) > MAX_NUMBER:
        return f"a number of at most {MAX_NUMBER:,} is expected"
    if expected:
        return f"{expected} is expected"
    if info.gt is not None and value <= info.gt:
        return f"must be greater than {info.gt:g}"
    if info.ge is None:
        return None
    return (
        f"must be at least {info.ge:g}" if info.le in (None, MAX_NUMBER) else f"{info.ge:,.12g} to {info.le:,.12g} are possible"
    )


def _is_finite(value: float, whole: bool) -> bool:
    """False for an int beyond the range of float, unless an int is expected."""
    try:
        return whole or math.isfinite(value)
    except OverflowError:
        return False


_NAMES: Mapping[type, str] = types.MappingProxyType(
    {
        inspect.BoolType: "true or false",
        inspect.IntType: "a whole number",
        inspect.FloatType: "a finite number",
        inspect.StrType: "a text",
    }
)
