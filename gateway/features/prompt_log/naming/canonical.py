"""Canonical JSON (RFC 8785): members sorted by UTF-16 code units, numbers as ECMAScript writes doubles, no other freedom.

orjson writes texts in this form, but sorts members by code points and writes doubles in another one: it writes values without
doubles whose members have names in ASCII, which are nearly all. Pure. O(size), and O(n log n) in the members of an object.
"""

from __future__ import annotations

from decimal import Decimal
from math import isfinite
from typing import Any, Final

import orjson

MAX_DEPTH: Final = 256  # of nested values; readers of JSON differ in their limits, so deeper values have no name
_PLAIN_DEPTH: Final = 64  # orjson writes 254 levels
_EXACT: Final = 1 << 53  # integers up to here are doubles
_PLAIN_DIGITS: Final = 21  # ECMAScript writes numbers with more digits before the point with an exponent
_SMALLEST_PLAIN: Final = -6  # likewise for zeros behind the point
HALF_A_PAIR: Final = "a text has half a surrogate pair"
_CONSTANTS: Final = {None: b"null", True: b"true", False: b"false"}


class NoNameError(ValueError):
    """The value has no name. reason: a clause for messages. param: the member of the body, "" if it is not known."""

    def __init__(self, reason: str, param: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.param = param


def canonical(value: Any) -> bytes:
    """The canonical form of a JSON value. Raises NoNameError."""
    if _is_plain(value, _PLAIN_DEPTH):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            raise NoNameError(HALF_A_PAIR) from None
    out = list[bytes]()
    _write(value, out, MAX_DEPTH)
    return b"".join(out)


def number(value: float) -> bytes:
    """The double nearest to a number, in ECMAScript's shortest form. Raises NoNameError for a number beyond all doubles."""
    try:
        double = float(value)
    except OverflowError:
        raise NoNameError("a number is beyond all doubles") from None
    if not isfinite(double):
        raise NoNameError("a number is beyond all doubles")
    text = repr(double)
    if "e" not in text:
        return text.removesuffix(".0").encode("ascii") if double else b"0"
    return _with_exponent(double)


def _is_plain(value: Any, depth: int) -> bool:
    """True if orjson writes the value in its canonical form, unless a text has half a surrogate pair."""
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return True
    if isinstance(value, int):
        return -_EXACT <= value <= _EXACT
    if kind is list and depth:
        return all(_is_plain(item, depth - 1) for item in value)
    return kind is dict and depth > 0 and all(key.isascii() and _is_plain(item, depth - 1) for key, item in value.items())


def _write(value: Any, out: list[bytes], depth: int) -> None:
    if isinstance(value, str):
        out.append(_text(value))
    elif value is None or value is True or value is False:
        out.append(_CONSTANTS[value])
    elif isinstance(value, int):
        out.append(b"%d" % value if -_EXACT <= value <= _EXACT else number(value))
    elif isinstance(value, float):
        out.append(number(value))
    elif not depth:
        raise NoNameError(f"a value is nested more than {MAX_DEPTH} deep")
    elif isinstance(value, list):
        separator = b"["
        for item in value:
            out.append(separator)
            _write(item, out, depth - 1)
            separator = b","
        out.append(b"]" if value else b"[]")
    else:
        separator = b"{"
        for key in _sorted(value):
            out += (separator, _text(key), b":")
            _write(value[key], out, depth - 1)
            separator = b","
        out.append(b"}" if value else b"{}")


def _text(text: str) -> bytes:
    try:
        return orjson.dumps(text)
    except orjson.JSONEncodeError:
        raise NoNameError(HALF_A_PAIR) from None


def _sorted(members: dict[str, Any]) -> list[str]:
    if all(map(str.isascii, members)):
        return sorted(members)
    return sorted(members, key=lambda key: key.encode("utf-16-be", "surrogatepass"))


def _with_exponent(double: float) -> bytes:
    """A number that Python writes with an exponent: from 1e16 on, or below 1e-4."""
    sign, figures, exponent = Decimal(repr(double)).normalize().as_tuple()
    assert isinstance(exponent, int)
    digits = "".join(map(str, figures))
    point = len(digits) + exponent  # digits before the decimal point
    if len(digits) <= point <= _PLAIN_DIGITS:
        text = digits + "0" * exponent
    elif _SMALLEST_PLAIN < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        fraction = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{fraction}e{point - 1:+d}"
    return f"{'-' * sign}{text}".encode("ascii")
