"""What other policies would have found, against caches that are plain dictionaries, and against what is really sent so."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.savings.counterfactual import ACTUAL, LEAST_LOADED, POLICIES, ROUND_ROBIN, SESSION, Counterfactual
from gateway.features.savings.metrics import SavingsMetrics
from gateway.features.savings.savings import DELIVERED, Savings
from gateway.features.table import new_metrics
from router import Prompt, text_keys
from tests.gateway.conftest import BODY, running
from tests.support.fakes import STREAM_HEAD, FakeReplica, FakeRequest, answers, chunk, dies_now, event, usage

BLOCK = 100
NAMES = ("a", "b", "c")


def shadows(capacity: int | None = None) -> Counterfactual:
    return Counterfactual(random.Random(1), lambda _name: capacity, 1e9, 1 << 26)


def prompt(text: str, session: str = "") -> Prompt:
    """A token for each byte."""
    raw = text.encode()
    return Prompt(text_keys(raw, BLOCK, 0), len(raw), BLOCK, "m", session)


def cached(placed: tuple[float, ...], policy: str) -> float:
    return placed[POLICIES.index(policy)]


def test_each_policy_sends_it_where_it_would() -> None:
    other = shadows()
    placed = [other.choose(prompt("x" * 300, "s"), NAMES, "b", 300, float(now)) for now in range(9)]
    by_policy = {policy: [each.replicas[place] for each in placed] for place, policy in enumerate(POLICIES)}
    assert set(by_policy[ACTUAL]) == {"b"}
    assert len(set(by_policy[SESSION])) == 1
    for policy in (ROUND_ROBIN, LEAST_LOADED):
        assert Counter(by_policy[policy]) == {"a": 3, "b": 3, "c": 3}, "none of them has ended"
    for each in placed:
        other.end(each)
    busy = [other.choose(prompt("y" * 300), NAMES, "a", 300, 20.0) for _ in range(2)]
    idle = set(NAMES) - {each.replicas[1] for each in busy}
    assert {other.choose(prompt("z"), NAMES, "a", 1, 21.0).replicas[1]} == idle


def test_the_first_time_nothing_is_cached_and_then_all_of_what_was_there() -> None:
    other = shadows()
    found = [other.choose(prompt("x" * 350), NAMES, "a", 350, float(now)).cached for now in range(5)]
    assert [cached(each, ACTUAL) for each in found] == [0, 350, 350, 350, 350]
    assert [cached(each, ROUND_ROBIN) for each in found] == [0, 0, 0, 350, 350]
    longer = other.choose(prompt("x" * 350 + "y" * 1000), NAMES, "a", 1350, 9.0)
    assert cached(longer.cached, ACTUAL) == 350, "three blocks, and half of the one in which they part"


texts = st.text(alphabet="ab", min_size=1, max_size=6).map(lambda text: "".join(each * BLOCK for each in text))


@given(st.lists(st.tuples(texts, st.sampled_from(NAMES)), max_size=30))
def test_the_shadow_of_what_was_chosen_holds_what_was_sent_there(requests: list[tuple[str, str]]) -> None:
    """Without bounds; the oracle compares texts."""
    other, sent = shadows(), dict[str, list[str]]()
    for now, (text, name) in enumerate(requests):
        found = other.choose(prompt(text), NAMES, name, len(text), float(now))
        common = max((_common(text, before) for before in sent.get(name, ())), default=0)
        blocks = common // BLOCK
        assert cached(found.cached, ACTUAL) == (min(len(text), (blocks + 0.5) * BLOCK) if blocks else 0)
        sent.setdefault(name, []).append(text)
        other.check()


def _common(one: str, two: str) -> int:
    return next((place for place, (a, b) in enumerate(itertools.zip_longest(one, two)) if a != b), len(one))


def test_a_shadow_has_the_capacity_of_its_replica() -> None:
    other = shadows(capacity=500)
    for now, letter in enumerate("pqrstuvw"):
        other.choose(prompt(letter * 400), ("a",), "a", 400, float(now))
    assert other.choose(prompt("w" * 400), ("a",), "a", 400, 20.0).cached[-1] == 400
    assert other.choose(prompt("p" * 400), ("a",), "a", 400, 21.0).cached[-1] == 0
    other.check()


def test_what_was_thought_of_tokens_before_the_first_answer_does_not_last() -> None:
    """The first prompt is taken for a quarter of its tokens; all others continue its head, and keep its weight in the index."""
    other, head = shadows(capacity=5000), "h" * BLOCK

    def found(letter: str, tokens: int, now: float) -> float:
        return cached(other.choose(prompt(head + letter * BLOCK * 9), ("a",), "a", tokens, now).cached, ACTUAL)

    found("a", 250, 0.0)
    for now, letter in enumerate("bcdefghijklmn", 1):
        found(letter, 1000, float(now))
    assert found("b", 1000, 20.0) == 1.5 * BLOCK, "its head only: there is room for five"
    assert found("n", 1000, 21.0) == 1000
    other.check()


def test_decisions_of_other_processes_fill_the_same_shadows() -> None:
    other = shadows()
    for now in range(3):
        other.follow(prompt("x" * 300), NAMES, "c", 300, float(now))
    found = other.choose(prompt("x" * 300), NAMES, "c", 300, 5.0)
    assert [cached(found.cached, policy) for policy in (ROUND_ROBIN, SESSION, ACTUAL)] == [300, 300, 300]
    other.end(found)
    for now in range(3):
        other.follow(prompt("z"), ("a",), "a", 1, 6.0 + now)
    assert {other.choose(prompt("y"), NAMES, "c", 1, 9.0).replicas[1] for _ in range(3)} == set(NAMES), "they have ended"


def test_replicas_that_come_and_go_are_bounded() -> None:
    other = Counterfactual(random.Random(1), lambda _name: None, 1e9, 1 << 26, max_replicas=64)
    for number in range(1000):
        other.choose(prompt("x" * 100), (f"r{number}",), f"r{number}", 100, float(number))
    other.check()
    many = [f"n{number}" for number in range(64)]
    assert other.choose(prompt("x" * 100), many, "n7", 100, 1e6).replicas == ("n7",) * 4, "too many to compare"


def test_replicas_that_come_and_go_do_not_take_the_place_of_those_that_stay() -> None:
    other = Counterfactual(random.Random(1), lambda _name: None, 1e9, 1 << 26, max_replicas=16)
    for number in range(200):
        other.choose(prompt("x" * 300), NAMES, NAMES[number % 3], 300, 2.0 * number)
        other.choose(prompt("y" * 300), (f"s{number}",), f"s{number}", 300, 2.0 * number + 1)
    assert other.choose(prompt("x" * 300), NAMES, NAMES[0], 300, 500.0).cached == (300,) * 4
    other.check()


def test_those_that_may_be_chosen_now_stay_and_so_do_new_ones() -> None:
    other, new = (
        Counterfactual(random.Random(1), lambda _name: None, 1e9, 1 << 26, max_replicas=16),
        [f"n{at}" for at in range(8)],
    )
    for number in range(6):
        other.choose(prompt("x" * 300), NAMES, NAMES[number % 3], 300, number)
    for number in range(13):
        other.choose(prompt("y" * 300), (f"s{number}",), f"s{number}", 300, 10.0 + number)
    found = other.choose(prompt("x" * 300), (*NAMES, "new"), NAMES[0], 300, 30.0)
    assert cached(found.cached, ACTUAL) == 300, "the oldest of all, but it may be chosen"
    turn = other.choose(prompt("z" * 300), new, "n0", 300, 40.0).replicas[0]
    assert turn != "n0", "it had no turn yet, but it is new"
    for number in range(2):
        other.choose(prompt("y" * 300), [f"t{number}{at}" for at in range(2)], f"t{number}0", 300, 60.0 + number)
    assert cached(other.choose(prompt("z" * 300), new, "n0", 300, 70.0).cached, ACTUAL) == 300
    other.check()


@pytest.mark.parametrize("text", ["", "x"])
def test_a_prompt_without_a_block_is_placed_too(text: str) -> None:
    other = shadows()
    assert other.choose(prompt(text), NAMES, "a", len(text), 0.0).cached == (0, 0, 0, 0)
    assert other.choose(prompt(text), (), "a", len(text), 1.0).replicas == ("a",) * 4


def test_a_day_s_savings_begin_anew_at_midnight() -> None:
    metrics, now = new_metrics().of(SavingsMetrics), [86400.0 * 20000 + 5]
    savings = Savings(metrics, lambda: now[0])
    savings.add(1000, 800, [200.0, 100.0, 700.0, 900.0], 0.001, 3_000_000)
    savings.set_gauges()

    def gauges() -> dict[str, float]:
        found = (metrics.saved_tokens_today, metrics.saved_seconds_today, metrics.saved_usd_today)
        return {
            sample.name: sample.value
            for each in found
            for sample in each.family().samples
            if sample.labels["policy"] == ROUND_ROBIN
        }

    assert gauges() == pytest.approx(
        {
            "warmroute_routing_saved_tokens_today": 700,
            "warmroute_routing_saved_gpu_seconds_today": 0.7,
            "warmroute_routing_saved_usd_today": 700 * 3e-6,
        }
    )
    assert [sample.value for sample in metrics.saved_error_today.family().samples] == [-100]
    now[0] += 86400
    savings.set_gauges()
    assert set(gauges().values()) == {0}
    savings.add(1000, 800, [200.0, 100.0, 700.0, 900.0], 0.001, 3_000_000)
    now[0] -= 86400
    savings.set_gauges()
    assert set(gauges().values()) == {0}, "a clock that was put back"
    totals = {sample.labels["policy"]: sample.value / 2 for sample in metrics.policy_cached_tokens.family().samples}
    assert totals == {ROUND_ROBIN: 200, LEAST_LOADED: 100, SESSION: 700, ACTUAL: 900, DELIVERED: 800}


async def test_a_gateway_says_what_it_saves() -> None:
    """Two replicas of which one gets all: of round robin every second request would have found nothing the first time."""
    routing = {"compare": True}
    prices = {"m": {"input": 2, "cached_input": 1, "output": 1}}
    script = [answers(prompt=300, completion=1, cached=0), answers(prompt=300, completion=1, cached=300)]
    async with FakeReplica(script) as one, FakeReplica(script) as two, running(one, two, routing=routing, prices=prices) as run:
        for _ in range(3):
            assert (await run.post(BODY))[0] == 200
        page = await run.metrics()
        assert page["warmroute_compared_prompt_tokens_total"] == 900
        assert page['warmroute_policy_cached_tokens_total{policy="delivered"}'] == 600
        assert page['warmroute_policy_cached_tokens_total{policy="actual"}'] == pytest.approx(600, rel=0.1)
        assert page['warmroute_policy_cached_tokens_total{policy="round_robin"}'] == pytest.approx(300, rel=0.1)
        assert page['warmroute_routing_saved_usd_today{policy="round_robin"}'] == pytest.approx(300e-6, rel=0.1)
        assert page['warmroute_routing_saved_gpu_seconds_today{policy="round_robin"}'] > 0


async def test_what_failed_is_not_compared_and_the_engines_count_is_the_measure() -> None:
    """The second answer has twice the tokens that the router believes in; the third breaks off behind its usage."""
    script = [answers(prompt=300, completion=1, cached=0), answers(prompt=600, completion=1, cached=600), _breaks_off]
    async with FakeReplica(script) as one, running(one, routing={"compare": True}) as run:
        for _ in range(2):
            assert (await run.post(BODY))[0] == 200
        async with run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, "stream": True}) as broken:
            await broken.read()
        page = await run.metrics()
        hits = 'warmroute_prompt_tokens_total{cache="hit",model="m",replica="%s"}'
        assert page[hits % one.name] == 900, "the usage of the third one was read"
        assert page["warmroute_compared_prompt_tokens_total"] == 900
        assert page['warmroute_policy_cached_tokens_total{policy="actual"}'] == pytest.approx(600, rel=0.1)


async def _breaks_off(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(event("a", usage=usage(300, 1, 300))))
    await writer.drain()
    dies_now(writer)


async def test_without_it_nothing_is_followed() -> None:
    async with FakeReplica() as one, running(one) as run:
        await run.post(BODY)
        page = await run.metrics()
        assert not [name for name in page if name.startswith(("warmroute_policy_cached", "warmroute_routing_saved"))]
        assert not [each for each in run.gateway.router.followers if "savings" in repr(each)]
