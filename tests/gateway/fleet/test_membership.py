"""Merging the sources of members, and what changes from one set of members to the next."""

from __future__ import annotations

import asyncio
from dataclasses import replace as replaced

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.app import compose
from gateway.config.schema import MAX_REPLICAS
from gateway.core import Surroundings
from gateway.fleet.membership import CONFIGURATION, MAX_DEPARTED, SHOWN_S, DepartedNames, Member, Members, merge, reconcile
from gateway.telemetry.metrics import Metrics
from tests.gateway.conftest import LOGGED
from tests.support.configs import load
from tests.support.in_memory import MemoryDials, framed, replica
from tests.support.snapshots import snapshot_of

POOLS = ("a", "b")
named = st.builds(
    Member,
    name=st.sampled_from("nmop"),
    url=st.sampled_from(["http://x:1", "http://y:2/base"]),
    pool=st.sampled_from(POOLS),
    capacity_tokens=st.none() | st.just(5),
    draining=st.booleans(),
)
sources = st.dictionaries(st.sampled_from(["one", "two", "three"]), st.lists(named, max_size=4), max_size=3)
members = st.lists(named, max_size=5).map(lambda found: {member.name: member for member in found})


def applied(now: Members, wanted: Members) -> dict[str, Member]:
    """The fleet after the changes that `reconcile` returns."""
    changes, fleet = reconcile(now, wanted), dict(now)
    for member in changes.left:
        assert fleet.pop(member.name) == member
    for member in changes.joined:
        assert member.name not in fleet
        fleet[member.name] = member
    for member in changes.changed:
        assert fleet[member.name] != member
        assert fleet[member.name].url == member.url
        fleet[member.name] = member
    return fleet


@given(members, members)
def test_the_changes_lead_from_one_set_to_the_other(now: Members, wanted: Members) -> None:
    assert applied(now, wanted) == wanted
    changes = reconcile(wanted, wanted)
    assert (changes.joined, changes.left, changes.changed) == ([], [], [])


@given(sources)
def test_a_name_belongs_to_the_first_source_that_names_it(found: dict[str, list[Member]]) -> None:
    merged = merge(found, POOLS)
    first: dict[str, tuple[str, Member]] = {}
    for source, each in found.items():
        for member in each:
            known = [other for _, other in first.values() if other.name == member.name or other.url == member.url]
            if not known:
                first[member.name] = source, member
            for place, other in list(first.values()):
                if other.url == member.url and member.draining:
                    first[other.name] = place, replaced(other, draining=True)
    assert {name: (merged.sources[name], member) for name, member in merged.members.items()} == first
    assert list(merged.members) == list(first)
    assert len(merged.members) + len(merged.rejected) == sum(map(len, found.values())), "nothing is lost without a reason"
    assert all("already" in each.why for each in merged.rejected)


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (Member("", "http://x:1", "a"), "name is not"),
        (Member("x" * 101, "http://x:1", "a"), "name is not"),
        (Member("x\r\nInjected: 1", "http://x:1", "a"), "name is not"),
        (Member("x", "ftp://x", "a"), "not a base URL"),
        (Member("x", "http://x:1/v1", "a"), "not a base URL such as http://x:1"),
        (Member("x", "http://u:p@x:1", "a"), "credentials do not belong"),
        (Member("x", "http://x:1", "c" * 1000), "there is no pool"),
        (Member("x", "http://x:1", "a", capacity_tokens=0), "capacity is not positive"),
        (Member("x", "http://x:1", "a", weight=0), "weight is not from 1 to 100"),
        (Member("x", "http://x:1", "a", weight=101), "weight is not from 1 to 100"),
    ],
)
def test_what_a_source_may_name_is_bounded(member: Member, why: str) -> None:
    merged = merge({"dns": [member, Member("good", "http://good:1", "b")]}, POOLS)
    assert list(merged.members) == ["good"]
    assert why in merged.rejected[0].why
    assert len(merged.rejected[0].why) < 250


def test_the_number_of_members_is_bounded_whatever_the_sources_find() -> None:
    def flood(source: str) -> list[Member]:
        return [Member(f"{source}-{number}", f"http://x:1/{number}", "a") for number in range(MAX_REPLICAS)]

    merged = merge({source: flood(source) for source in ("one", "two", "three")}, POOLS)
    assert len(merged.members) == MAX_REPLICAS
    assert set(merged.sources.values()) == {"one"}, "the first source goes first"
    assert len(merged.rejected) == 2 * MAX_REPLICAS


def test_where_there_are_too_many_those_that_drain_are_left_out_first() -> None:
    def many(source: str, number: int, *, draining: bool) -> list[Member]:
        return [Member(f"{source}-{each}", f"http://{source}:1/{each}", "a", draining=draining) for each in range(number)]

    found = {"one": many("one", 5, draining=True), "two": many("two", MAX_REPLICAS - 2, draining=False)}
    merged = merge({CONFIGURATION: [Member("own", "http://own:1", "a", draining=True)], **found}, POOLS)
    assert len(merged.members) == len(merged.sources) == MAX_REPLICAS
    assert {"own", "one-0", f"two-{MAX_REPLICAS - 3}"} <= merged.members.keys()
    assert [each.member.name for each in merged.rejected] == [f"one-{number}" for number in range(1, 5)]
    more = merge({"one": found["one"], "two": many("two", MAX_REPLICAS + 1, draining=False)}, POOLS)
    assert set(more.sources.values()) == {"two"}
    assert f"two-{MAX_REPLICAS}" not in more.members


def test_any_source_may_say_that_a_replica_drains() -> None:
    """DNS, whose name goes first, does not know it."""
    by_address = Member("10.0.0.1:8000", "http://10.0.0.1:8000", "a")
    pod = Member("vllm-0", "http://10.0.0.1:8000", "a", instance="uid-1")
    for first in (by_address, pod, replaced(by_address, instance="uid-1")):
        for source in ("dns a.test", CONFIGURATION):
            merged = merge({source: [first], "kubernetes": [replaced(pod, draining=True)]}, POOLS)
            assert merged.members == {first.name: replaced(first, draining=True)}
    other = replaced(by_address, instance="uid-2")
    assert merge({"a": [other], "b": [replaced(pod, draining=True)]}, POOLS).members == {other.name: other}


# -- counters of what has left


class Clock:
    """Settable."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from("nmo"), st.booleans(), st.floats(0, SHOWN_S)), max_size=30))
def test_a_name_is_shown_for_a_while_and_then_forgotten_once(steps: list[tuple[str, bool, float]]) -> None:
    departed, left, now = DepartedNames(2 * SHOWN_S), dict[str, float](), 0.0
    for name, leaves, passed_s in steps:
        now += passed_s
        due = {each for each, since in left.items() if now - since >= 2 * SHOWN_S}
        assert departed.pop_expired(now) == due
        for each in due:
            del left[each]
        if leaves:
            departed.leave(name, now)
            left[name] = now
        else:
            departed.back(name)
            left.pop(name, None)
        assert departed.hidden(now) == {each for each, since in left.items() if now - since >= SHOWN_S}


def test_names_that_come_and_go_are_bounded() -> None:
    departed, due = DepartedNames(2 * SHOWN_S), 0
    for number in range(3 * MAX_DEPARTED):
        departed.leave(f"pod-{number}", float(number) / 1000)
        due += len(departed.pop_expired(float(number) / 1000))
    assert due == 2 * MAX_DEPARTED
    assert len(departed.hidden(1e9)) == MAX_DEPARTED


async def test_counters_of_a_replica_and_a_pool_that_have_left_are_forgotten_after_a_while() -> None:
    clock = Clock()
    raw = {
        "pools": [{"replicas": ["http://a:1"], "models": ["m"]}, {"replicas": ["http://b:1"], "models": ["n"]}],
        "workers": 2,
    }
    config = load(None, raw, env={})
    gateway = compose(config, LOGGED, Surroundings(clock=clock, dials=lambda address: MemoryDials(address, replica(framed))))
    metrics, membership, fleet = gateway.metrics, gateway.local.membership, gateway.fleet
    both = {("m", "a:1"), ("m", "b:1")}
    for model, name in both:
        metrics.broken_responses.add((model, name))
    for pool in ("m", "n"):
        metrics.admission_rejected.add((pool, "queue_full"))
    smaller = replace(config, pools=config.pools[:1])
    async with asyncio.timeout(10):
        await membership.reconfigure(smaller, lambda: None)
        assert fleet.forget_departed() == ["http://b:1"]
        clock.now += 2 * SHOWN_S - 1
        fleet.forget_departed()
        assert metrics.broken_responses.values.keys() == both
        await membership.reconfigure(config, lambda: None)
        await membership.reconfigure(smaller, lambda: None)
        fleet.forget_departed()
        clock.now += SHOWN_S
        fleet.forget_departed()
        assert metrics.broken_responses.values.keys() == both, "it was back in between"
        instruments = Metrics().instruments
        instruments.merge(snapshot_of(metrics.instruments))
        fleet.hide_departed(instruments)
        assert (instruments.values_of("replica"), instruments.values_of("pool")) == ({"a:1"}, {"m"}), "no longer shown"
        clock.now += SHOWN_S
        fleet.forget_departed()
    assert metrics.broken_responses.values.keys() == {("m", "a:1")}
    assert metrics.admission_rejected.values.keys() == {("m", "queue_full")}
    assert metrics.instruments.values_of("replica") == {"a:1"}
