"""Equality of constants in two rooms that must not import each other."""

from __future__ import annotations

from gateway import errors
from gateway.accounting import money
from gateway.features.keys import record
from router.simulation import recorded


def test_a_dollar_of_a_bill_is_one_of_a_budget() -> None:
    assert record.DOLLAR == money.DOLLAR


def test_a_recording_knows_the_requests_whose_clients_left() -> None:
    assert recorded.CLIENT_LEFT == errors.CLIENT_LEFT
