from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounting.money import DOLLAR, decimal, dollars


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1, "0.000000000001"), (DOLLAR, "1"), (100 * DOLLAR, "100"), (-DOLLAR // 4, "-0.25"), (123_000_000, "0.000123")],
)
def test_an_amount_as_text(amount: int, text: str) -> None:
    assert decimal(amount) == text


@given(st.integers(-(10**20), 10**20))
def test_the_text_is_exact(amount: int) -> None:
    assert Decimal(decimal(amount)) * DOLLAR == amount
    assert "e" not in decimal(amount).lower()
    assert dollars(amount) == pytest.approx(float(decimal(amount)))
