from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.accounting.meter import Meter
from gateway.config.live import Live
from gateway.config.schema import PriceConfig
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage
from gateway.telemetry.metrics import TENANTS, Metrics
from tests.gateway.conftest import BODY, running
from tests.gateway.servers import live_of
from tests.support.fakes import FakeReplica, answers, streams


def priced(prices: dict[str, PriceConfig]) -> Live:
    """A configuration in force that has these prices."""
    live = live_of()
    live.take(replace(live.config, prices=prices))
    return live


PRICES = {"m": PriceConfig(input=2.0, output=10.0, cached_input=0.5), "m-large": PriceConfig(input=20.0, output=1.0)}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 2}, Usage(10, 2, None)),
        ({"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(10, 2, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(10, 0, 0)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0}}, Usage(10, 0, 8)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 99}}, Usage(10, 0, 10)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": -1}}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": "8"}}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_cache_hit_tokens": 4}, Usage(10, 0, 4)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5}}, Usage(10, 0, 4, 5)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 99}}, Usage(10, 0, 4, 6)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cache_write_tokens": -1}}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 5}}, Usage(10, 0, 4, 5)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": None}}, Usage(10, 0, 4)),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": -5}, None),
        ({"input_tokens": 5}, None),
        ([], None),
        (None, None),
    ],
)
def test_usage_is_read_with_doubt(usage: Any, expected: Usage | None) -> None:
    assert parse_usage({"usage": usage}) == expected


@pytest.mark.parametrize("tokens", [10**9 + 1, 2**64 - 1, 10**400])
def test_counts_that_cannot_be_are_not_believed(tokens: int) -> None:
    good = {"prompt_tokens": 100, "completion_tokens": 4}
    assert parse_usage({"usage": {**good, "prompt_tokens": tokens}}) is None
    assert parse_usage({"usage": {**good, "completion_tokens": tokens}}) is None
    assert parse_usage({"usage": {**good, "prompt_tokens_details": {"cached_tokens": tokens}}}) == Usage(100, 4, None)
    assert parse_usage({"usage": {"prompt_tokens": 10**9, "completion_tokens": 10**9}}) == Usage(10**9, 10**9)


async def test_an_answer_with_counts_that_cannot_be_is_unmetered() -> None:
    absurd = 2**64 - 1
    price = {"m": {"input": 1, "output": 1}}
    script = [answers(prompt=absurd), answers(completion=absurd), streams("a", "b", prompt=absurd)]
    async with FakeReplica(script) as one, running(one, prices=price) as run:
        for stream in (False, False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            async with run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, **options}) as answer:
                assert answer.status == 200
                assert str(absurd).encode() in await answer.read(), "the client gets what the replica sent"
        page = await run.metrics()
        assert page['warmroute_unmetered_requests_total{endpoint="/v1/chat/completions",model="m"}'] == 3
        counted = [value for name, value in page.items() if name.startswith(("warmroute_prompt_tokens", "warmroute_cost_usd"))]
        assert sum(counted) == 0


def test_missing_is_not_zero_and_claims_no_savings() -> None:
    meter = Meter(priced(PRICES), Metrics())
    bill = meter.bill("m", Usage(1000, 0, None))
    assert bill is not None
    assert (bill.total, bill.saved) == (pytest.approx(2e-3), 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5))
def test_cost_and_savings_add_up_to_the_uncached_price(prompt: int, cached: int, completion: int) -> None:
    bill = Meter(priced(PRICES), Metrics()).bill("m", Usage(prompt, completion, min(cached, prompt)))
    assert bill is not None
    assert bill.total + bill.saved == pytest.approx((prompt * 2.0 + completion * 10.0) / 1e6)


def test_what_is_written_to_the_cache_has_prices_of_its_own() -> None:
    price = PriceConfig(input=3.0, output=15.0, cached_input=0.3, cache_write=3.75, cache_write_1h=6.0)
    metrics = Metrics()
    meter = Meter(priced({"m": price}), metrics)
    usage = Usage(10_000, 100, 6_000, 3_000, 1_000)
    bill = meter.bill("m", usage)
    assert bill is not None
    assert bill == pytest.approx((0.003, 0.0018, 0.0015, 0.0162, 0.0135))  # 1,000 fresh, 2,000 for 5 minutes, 1,000 for an hour
    assert bill.total == pytest.approx(0.0198)
    meter.count(usage, bill, model="m", replica="r", tenant="t")
    costs = {sample.labels["kind"]: sample.value for sample in metrics.cost_usd.family().samples}
    assert costs == pytest.approx({"input": 0.003, "cached_input": 0.0018, "output": 0.0015, "cache_write": 0.0135})
    assert [sample.value for sample in metrics.cache_writes.family().samples] == [3_000]


def test_without_prices_of_its_own_it_costs_what_input_costs() -> None:
    meter = Meter(priced(PRICES), Metrics())
    written, fresh = meter.bill("m", Usage(1000, 5, 0, 800, 300)), meter.bill("m", Usage(1000, 5, 0))
    assert written is not None
    assert fresh is not None
    assert written.total == pytest.approx(fresh.total)
    assert PriceConfig(input=1.0, output=1.0, cache_write=2.0).cache_write_1h == 2.0


def test_prices_go_by_the_longest_prefix() -> None:
    meter = Meter(priced(PRICES), Metrics())
    assert [
        meter.bill(model, Usage(10**6, 0)) and meter.bill(model, Usage(10**6, 0)).total for model in ("m", "m-7b", "m-large-2")
    ] == [2, 2, 20]  # type: ignore[union-attr]
    assert meter.bill("other", Usage(1, 1)) is None
    assert meter.bill("", Usage(1, 1)) is None


def test_any_model_has_the_price_of_the_star() -> None:
    bill = Meter(priced({"*": PRICES["m"]}), Metrics()).bill("whatever", Usage(10**6, 0))
    assert bill is not None
    assert bill.total == 2.0


def test_tenants_are_bounded() -> None:
    metrics = Metrics()
    meter = Meter(priced(PRICES), metrics)
    usage = Usage(100, 10, 50)
    for index in range(TENANTS + 50):
        meter.count(usage, meter.bill("m", usage), model="m", replica="r", tenant=f"t{index}")
    samples = {sample.labels["tenant"]: sample.value for sample in metrics.savings_usd.family().samples}
    assert len(samples) == TENANTS + 1
    assert samples["other"] == pytest.approx(50 * samples["t0"])
