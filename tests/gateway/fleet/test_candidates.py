"""Which replicas may be sent a request: whatever their states are, somebody is left."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.breaker import Breaker
from gateway.fleet.candidates import eligible, spared
from gateway.fleet.membership import Member
from gateway.fleet.state import ReplicaState
from tests.gateway.fleet.test_breaker import Always, opened

NOW = 100.0
OPEN, LESS, RESTS = "open", "less", "rests"


def replica(number: int, *traits: str) -> ReplicaState:
    """One that is well but for these traits."""
    member = Member(f"r{number}", f"http://127.0.0.1:{9000 + number}", "p", weight=10 if LESS in traits else 100)
    state = ReplicaState(member, Breaker(Always(1.0)), up=True)
    if OPEN in traits:
        opened(state.breaker, NOW)
    if RESTS in traits:
        state.rests_until = NOW + 1
    return state


def choice(*fleet: ReplicaState, tried: tuple[str, ...] = (), chance: float = 0.5, resting: bool = True) -> set[str]:
    troubled = {state for state in fleet if state.restricted(NOW)}
    replicas = {state.name: state for state in fleet}
    found = eligible(replicas, troubled, NOW, Always(chance), tried, resting=resting)
    assert len(set(found)) == len(found)
    return set(found)


def test_those_that_are_well_are_taken_and_those_of_less_weight_at_times() -> None:
    fleet = [replica(0), replica(1, OPEN), replica(2, LESS), replica(3, RESTS)]
    assert choice(*fleet) == {"r0"}
    assert choice(*fleet, chance=0.05) == {"r0", "r2"}
    assert choice(*fleet, tried=("r0",)) == {"r2"}, "a weight leaves no request without a replica"
    assert choice(*fleet, tried=("r0", "r2")) == {"r1"}, "nor does an open breaker"
    assert choice(*fleet, tried=("r0", "r1", "r2")) == {"r3"}, "nor a rest"
    assert choice(*fleet, tried=("r0", "r1", "r2"), resting=False) == set()
    assert choice(*fleet, tried=("r0", "r1", "r2", "r3")) == set()


@pytest.mark.parametrize("others", [1, 9])
def test_a_weight_is_a_share_of_new_work(others: int) -> None:
    fleet = {state.name: state for state in (replica(0, LESS), *(replica(number + 1) for number in range(others)))}
    chance = Random(1)
    found = [eligible(fleet, {fleet["r0"]}, NOW, chance) for _ in range(4000)]
    assert sum("r0" in names for names in found) / 4000 == pytest.approx(0.1 / (others + 0.1), rel=0.25)
    assert all(len(names) - ("r0" in names) == others for names in found)


def test_equal_weights_are_full_ones() -> None:
    assert choice(replica(0, LESS), replica(1, LESS), chance=0.99) == {"r0", "r1"}


def test_those_that_chance_has_left_out() -> None:
    fleet = {state.name: state for state in (replica(0), replica(1, LESS), replica(2, LESS, OPEN), replica(3, LESS, RESTS))}
    suspects = set(fleet.values()) - {fleet["r0"]}
    assert spared(fleet, suspects, NOW, ["r0"]) == ["r1"]
    assert spared(fleet, suspects, NOW, ["r0", "r1"]) == []
    assert spared({"r0": fleet["r0"]}, suspects, NOW, ["r0"]) == [], "of another model"


def test_breakers_cut_off_half_of_the_replicas_at_most() -> None:
    def fleet(cut_off: int) -> list[ReplicaState]:
        return [replica(number, *([OPEN] if number < cut_off else [])) for number in range(6)]

    assert [len(choice(*fleet(cut_off))) for cut_off in range(7)] == [6, 5, 4, 3, 6, 6, 6]
    assert choice(*fleet(4), tried=("r0",)) == {"r4", "r5"}, "a retry goes to those that are well"
    assert choice(replica(0, OPEN)) == {"r0"}
    assert choice(replica(0, OPEN), replica(1)) == {"r1"}


def test_a_half_open_breaker_lets_one_request_through() -> None:
    fleet = [replica(0), replica(1, OPEN)]
    breaker = fleet[1].breaker
    now = breaker.retry_at
    assert set(eligible({state.name: state for state in fleet}, {fleet[1]}, now, Random(0))) == {"r0", "r1"}
    breaker.begin(now)
    assert set(eligible({state.name: state for state in fleet}, {fleet[1]}, now, Random(0))) == {"r0"}


@given(
    st.lists(st.frozensets(st.sampled_from([OPEN, LESS, RESTS])), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.floats(0, 1, exclude_max=True),
)
def test_nobody_is_left_only_where_all_were_tried(traits: list[frozenset[str]], tried: set[int], chance: float) -> None:
    fleet = [replica(number, *those) for number, those in enumerate(traits)]
    names = tuple(f"r{number}" for number in tried)
    found = choice(*fleet, tried=names, chance=chance)
    left = {state.name: those for state, those in zip(fleet, traits, strict=True) if state.name not in names}
    assert found <= set(left)
    assert bool(found) is bool(left)
    well = {name for name, those in left.items() if not those}
    assert well <= found, "whoever is well is always among them"
    awake = {name for name, those in left.items() if RESTS not in those}
    assert found <= awake or not awake
    closed = {name for name in awake if OPEN not in left[name]}
    half = 2 * sum(OPEN in those for those in traits) <= len(traits)
    if closed and (names or half):
        assert found <= closed
    elif awake and not any(LESS in left[name] for name in awake):
        assert found == awake
