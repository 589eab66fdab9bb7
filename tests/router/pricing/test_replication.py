from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.replication import MAX_PREFIXES, Rents


def test_rent_adds_up_by_prefix_until_a_copy_is_bought() -> None:
    rents = Rents()
    assert rents.paid(b"hot") == 0.0
    for seconds in (1.0, 0.5):
        rents.pay(b"hot", seconds)
    rents.pay(b"other", 9.0)
    assert (rents.paid(b"hot"), rents.paid(b"other")) == (1.5, 9.0)
    rents.bought(b"hot")
    assert (rents.paid(b"hot"), rents.paid(b"other")) == (0.0, 9.0)
    rents.bought(b"unknown")
    assert repr(rents) == "<Rents for 1 prefixes, 9 s>"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_prefix_that_pays_nothing_takes_no_room(seconds: float) -> None:
    rents = Rents()
    rents.pay(b"hot", seconds)
    assert len(rents) == 0


def test_a_prefix_that_has_just_paid_again_is_not_the_next_to_be_forgotten() -> None:
    rents = Rents()
    for number in (*range(MAX_PREFIXES), 0, MAX_PREFIXES):
        rents.pay(number.to_bytes(8, "little"), 1.0)
    assert [rents.paid(number.to_bytes(8, "little")) for number in (0, 1, 2)] == [2.0, 0.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, MAX_PREFIXES + 50), st.sampled_from([0.25, 1.0, None])), max_size=100))
def test_only_those_that_paid_last_are_remembered(story: list[tuple[int, float | None]]) -> None:
    rents, oracle = Rents(), OrderedDict[bytes, float]()
    first = [(number, 1.0) for number in range(MAX_PREFIXES)]
    for number, seconds in (*first, *story):
        prefix = number.to_bytes(8, "little")
        if seconds is None:
            rents.bought(prefix)
            oracle.pop(prefix, None)
            continue
        rents.pay(prefix, seconds)
        oracle[prefix] = oracle.get(prefix, 0.0) + seconds
        oracle.move_to_end(prefix)
        while len(oracle) > MAX_PREFIXES:
            oracle.popitem(last=False)
    assert len(rents) == len(oracle)
    for number in range(MAX_PREFIXES + 51):
        prefix = number.to_bytes(8, "little")
        assert rents.paid(prefix) == oracle.get(prefix, 0.0)


def test_to_settle_is_to_pay_or_to_buy() -> None:
    rents = Rents()
    rents.record(b"a", 2.0)
    rents.record(b"b", 1.0)
    assert (rents.paid(b"a"), rents.paid(b"b")) == (2.0, 1.0)
    rents.record(b"a", None)
    assert (rents.paid(b"a"), rents.paid(b"b")) == (0.0, 1.0)
