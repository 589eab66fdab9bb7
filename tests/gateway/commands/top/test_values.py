"""Values of any kind as texts that a terminal does not obey."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.top import values
from gateway.commands.top.values import (
    MOST,
    MOST_CHARS,
    age,
    amount,
    clock,
    count,
    duration,
    inside,
    money,
    number,
    objects,
    percent,
    rate,
    share,
    short,
    size,
    text,
)
from tests.gateway.commands.top.strategies import ANYTHING

FORMATS: list[Callable[[Any], str]] = [count, short, percent, duration, age, money, clock, size]


@given(st.text(max_size=300))
def test_a_text_is_short_and_has_nothing_that_a_terminal_obeys(raw: str) -> None:
    found = text(raw)
    assert len(found) == min(len(raw), MOST_CHARS)
    assert all(unicodedata.category(char)[0] not in "CZ" or char in " \ufffd" for char in found)
    if len(raw) <= MOST_CHARS and raw.isprintable():
        assert found == raw


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ("a\x1b[31mb", "a\ufffd[31mb"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("a\nb\tc\u2028", "a\ufffdb\ufffdc\ufffd"),
        ("\ud800", "\ufffd"),
        ("[red]x[/]", "[red]x[/]"),
        (None, ""),
        (7, ""),
        (["a"], ""),
    ],
)
def test_texts(raw: object, found: str) -> None:
    assert text(raw) == found


@given(ANYTHING)
def test_any_value_is_read(value: object) -> None:
    found = number(value)
    assert found is None or abs(found) <= MOST
    assert isinstance(amount(value), int | float)
    assert all(isinstance(each, dict) for each in objects(value, 3))
    assert len(objects(value, 3)) <= 3
    assert isinstance(inside(value), dict)
    assert text(value) == text(text(value))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_is_short(value: float) -> None:
    for shape in FORMATS:
        assert 0 < len(shape(value)) <= 20, shape
    for shape in (short, duration, age, money, rate):
        assert len(shape(abs(value) % 1e15)) <= 12, shape


@pytest.mark.parametrize("shape", FORMATS)
def test_none_is_a_dash(shape: Callable[[Any], str]) -> None:
    assert shape(None) == values.NONE


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (short(999), "999"),
        (short(12_345), "12.3k"),
        (short(2_000_000), "2.0M"),
        (percent(0.943), "94%"),
        (percent(0.043), "4.3%"),
        (percent(share(1, 0)), "–"),
        (duration(0.0005), "500 µs"),
        (duration(0.08), "80 ms"),
        (duration(3.456), "3.46 s"),
        (duration(600), "10 min"),
        (age(0.2), "now"),
        (age(200_000), "2 d"),
        (money(0.0013), "$0.0013"),
        (money(12.345), "$12.35"),
        (money(4500), "$4,500"),
        (money(1e-9), "<$0.000001"),
        (size(65_536), "64.0 KiB"),
        (clock(1e300), "–"),
    ],
)
def test_units(made: str, wanted: str) -> None:
    assert made == wanted
