from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.accounting.consumed import CACHED, OUTPUT, TOKENS, Consumption
from gateway.accounting.meter import MAX_WARNED, Bill, Meter
from gateway.accounting.money import DOLLAR, MOST
from gateway.config.live import Live
from gateway.config.schema import PriceConfig
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage, bounded
from gateway.telemetry.metrics import TENANTS, Metrics
from tests.gateway.conftest import BODY, running
from tests.gateway.servers import live_of
from tests.support.fakes import FakeReplica, answers, http, streams, writes


def priced(prices: dict[str, PriceConfig]) -> Live:
    """A configuration in force that has these prices."""
    live = live_of()
    live.take(replace(live.config, prices={model: (price,) for model, price in prices.items()}))
    return live


def metering(prices: dict[str, PriceConfig], metrics: Metrics | None = None) -> Meter:
    return Meter(priced(prices), metrics or Metrics(), lambda: 0.0)


def billed(prices: dict[str, PriceConfig], usage: Usage, model: str = "m", images: int = 0) -> Bill:
    bill = metering(prices).bill(model, Consumption(usage, images))
    assert bill is not None
    return bill


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


async def test_counts_that_cannot_be_are_replaced_by_estimates() -> None:
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
        assert page['warmroute_estimated_answers_total{model="m",what="tokens"}'] == 3
        kinds = ("warmroute_prompt_tokens", "warmroute_completion")
        counted = [value for name, value in page.items() if name.startswith(kinds)]
        assert 0 < sum(counted) < 3 * len(json.dumps(BODY))


@pytest.mark.parametrize(
    ("usage", "context", "answers", "output", "turns", "completion"),
    [
        (Usage(2_000_000, 100), None, 1, 0, False, 100),
        (Usage(10**9, 100), None, 1, 0, False, None),
        (Usage(100, 10**9), None, 1, 0, False, 0),
        (Usage(8_000, 8_000), 8_192, 1, 0, False, 8_000),
        (Usage(100_000, 10), 8_192, 1, 0, False, None),
        (Usage(100_000, 10), 8_192, 1, 0, True, 10),
        (Usage(100_000, 10), 8_192, 8, 0, False, 10),
        (Usage(100, 101), None, 1, 100, False, 101),
        (Usage(100, 500), None, 1, 100, False, 0),
        (Usage(100, 500), None, 3, 100, False, 500),
    ],
    ids=repr,
)
def test_what_a_request_can_use(
    usage: Usage, context: int | None, answers: int, output: int, turns: bool, completion: int | None
) -> None:
    expected = None if completion is None else Usage(usage.prompt, completion)
    assert bounded(usage, context, answers, output, turns=turns) == expected


@pytest.mark.parametrize(
    ("prompt", "completion", "what"), [(10**8, 4, "tokens"), (100, 10**8, "output"), (100, 3000, "output")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_counts_beyond_the_context_or_the_requests_limit_are_estimated(
    prompt: int, completion: int, what: str, stream: bool
) -> None:
    price = {"m": {"input": 1, "output": 1}}
    counts = {"prompt": prompt, "completion": completion, "cached": 0}
    behaviour = streams("hello", **counts) if stream else answers(**counts)
    async with FakeReplica([behaviour]) as one, running(one, prices=price) as run:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        async with run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, "max_tokens": 1000, **options}) as answer:
            assert answer.status == 200
            await answer.read()
        page = await run.metrics()
        assert page[f'warmroute_estimated_answers_total{{model="m",what="{what}"}}'] == 1
        cost = sum(value for name, value in page.items() if name.startswith("warmroute_cost_usd_total"))
        assert 0 < cost < 1000 / 1e6
        counted = sum(value for name, value in page.items() if name.startswith("warmroute_prompt_tokens_total"))
        assert (counted == prompt) is (what == "output"), "a possible count of the prompt stays"


@pytest.mark.parametrize(("context", "estimated"), [(8192, True), (131_072, False), (None, False)])
async def test_the_context_is_that_of_the_models_list(context: int | None, estimated: bool) -> None:
    entry = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": context}
    listing = writes(http(200, json.dumps({"object": "list", "data": [entry]}).encode()))
    price = {"m": {"input": 1, "output": 1}}
    film = {"type": "video_url", "video_url": {"url": "https://films.example/1"}}
    async with FakeReplica([answers(prompt=100_000, cached=0)], listing) as one, running(one, prices=price) as run:
        await run.post({**BODY, "messages": [{"role": "user", "content": [film]}]})
        page = await run.metrics()
        assert ('warmroute_estimated_answers_total{model="m",what="tokens"}' in page) == estimated


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5))
def test_cost_and_savings_add_up_to_the_uncached_price(prompt: int, cached: int, completion: int) -> None:
    bill = billed(PRICES, Usage(prompt, completion, min(cached, prompt)))
    assert bill.total + bill.saved == prompt * 2_000_000 + completion * 10_000_000, "picodollars, exactly"


def test_a_price_with_six_decimals_is_exact() -> None:
    bill = billed({"m": PriceConfig(input=0.000001, cached_input=0.003, output=0.1)}, Usage(10, 7, 3))
    assert (bill.input, bill.cached_input, bill.output) == (7, 9_000, 700_000)


def test_what_is_written_to_the_cache_has_prices_of_its_own() -> None:
    price = PriceConfig(input=3.0, output=15.0, cached_input=0.3, cache_write=3.75, cache_write_1h=6.0)
    metrics = Metrics()
    meter = metering({"m": price}, metrics)
    used = Consumption(Usage(10_000, 100, 6_000, 3_000, 1_000))  # 1,000 fresh, 2,000 for 5 minutes, 1,000 for an hour
    bill = meter.bill("m", used)
    assert bill is not None
    parts = [bill.input, bill.cached_input, bill.output, bill.saved, bill.cache_write]
    assert [part / DOLLAR for part in parts] == [0.003, 0.0018, 0.0015, 0.0162, 0.0135]
    assert bill.total == 19_800_000_000
    meter.count(used, bill, model="m", replica="r", tenant="t")
    costs = {sample.labels["kind"]: sample.value for sample in metrics.cost_usd.family().samples}
    assert costs == {"input": 0.003, "cached_input": 0.0018, "output": 0.0015, "cache_write": 0.0135}
    assert [sample.value for sample in metrics.cache_writes.family().samples] == [3_000]


def test_without_prices_of_its_own_it_costs_what_input_costs() -> None:
    assert billed(PRICES, Usage(1000, 5, 0, 800, 300)).total == billed(PRICES, Usage(1000, 5, 0)).total
    assert PriceConfig(input=1.0, output=1.0, cache_write=2.0).cache_write_1h == 2.0


def test_images_cost_beside_their_tokens() -> None:
    metrics = Metrics()
    meter = metering({"m": PriceConfig(input=1.0, output=1.0, image=0.0025)}, metrics)
    used = Consumption(Usage(1000, 0, 0), images=3)
    bill = meter.bill("m", used)
    assert bill is not None
    assert (bill.image, bill.total) == (7_500_000_000, 8_500_000_000)
    meter.count(used, bill, model="m", replica="r", tenant="t")
    costs = {sample.labels["kind"]: sample.value for sample in metrics.cost_usd.family().samples}
    assert costs["image"] == 0.0075


def test_prices_go_by_the_longest_prefix() -> None:
    meter, million = metering(PRICES), Consumption(Usage(10**6, 0, 0))
    bills = [meter.bill(model, million) for model in ("m", "m-7b", "m-large-2", "other", "")]
    assert [bill and bill.total // DOLLAR for bill in bills] == [2, 2, 20, None, None]


def test_any_model_has_the_price_of_the_star() -> None:
    assert billed({"*": PRICES["m"]}, Usage(10**6, 0), "whatever").total == 2 * DOLLAR


def test_new_prices_hold_at_once() -> None:
    live = priced(PRICES)
    meter, used = Meter(live, Metrics(), lambda: 0.0), Consumption(Usage(10**6, 0, 0))
    first = meter.bill("m", used)
    live.take(replace(live.config, prices={"m": (PRICES["m-large"],)}))
    second = meter.bill("m", used)
    assert first
    assert second
    assert (first.total // DOLLAR, second.total // DOLLAR) == (2, 20)


def test_an_absurd_bill_is_bounded() -> None:
    dear = {"m": PriceConfig(input=1e6, output=1e6, cached_input=1e6, image=1e6)}
    bill = billed(dear, Usage(10**9, 10**9, 0, 10**9), images=10**9)
    assert max(bill.input, bill.output, bill.cache_write, bill.image) == MOST
    upside_down = {"m": PriceConfig(input=0, output=0, cached_input=1e6)}
    assert billed(upside_down, Usage(10**9, 0, 10**9)).saved == 0


def test_a_model_without_a_price_is_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    meter, used = metering(PRICES, metrics), Consumption(Usage(100, 10, 50))
    for _ in range(3):
        assert meter.bill("other", used) is None
        meter.count(used, None, model="other", replica="r", tenant="t")
    assert [(sample.labels, sample.value) for sample in metrics.unpriced.family().samples] == [({"model": "other"}, 3)]
    assert [record.__dict__["model"] for record in caplog.records] == ["other"]
    for number in range(2 * MAX_WARNED):
        meter.count(used, None, model=f"flood-{number}", replica="r", tenant="t")
    assert len(caplog.records) == MAX_WARNED


def test_with_new_prices_models_without_one_are_named_again(caplog: pytest.LogCaptureFixture) -> None:
    live = priced(PRICES)
    meter, used = Meter(live, Metrics(), lambda: 0.0), Consumption(Usage(100, 10, 50))
    for prices in ({}, {"n": (PRICES["m"],)}):
        if prices:
            live.take(replace(live.config, prices=prices))
        for _ in range(2):
            meter.count(used, meter.bill("other", used), model="other", replica="r", tenant="t")
    assert [record.__dict__["model"] for record in caplog.records] == ["other", "other"]


def test_a_price_list_upside_down_saves_nothing() -> None:
    meter = metering({"m": PriceConfig(input=1.0, output=1.0, cached_input=3.0), "n": PRICES["m"]})
    assert [meter.token_savings(model, 10) for model in ("m", "n", "other")] == [0, 1_500_000, 0]


def test_without_any_prices_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metering({}, metrics).count(Consumption(Usage(100, 10, 50)), None, model="m", replica="r", tenant="t")
    assert not metrics.unpriced.family().samples
    assert not caplog.records


def test_estimates_are_counted_as_such() -> None:
    metrics = Metrics()
    meter = metering(PRICES, metrics)
    for used in (
        Consumption(Usage(100, 10, 50)),
        Consumption(Usage(1000, 10, 500), 0, CACHED),
        Consumption(Usage(200, 10, 80), 0, TOKENS),
        Consumption(Usage(200, 10, 7), 0, OUTPUT),
    ):
        meter.count(used, meter.bill("m", used), model="m", replica="r", tenant="t")
    tokens = {sample.labels["cache"]: sample.value for sample in metrics.prompt_tokens.family().samples}
    assert tokens == {"miss": 863, "hit": 57, "estimated": 580}, "of an answer that broke off, the prompt was reported"
    counted = {sample.labels["what"]: sample.value for sample in metrics.estimated.family().samples}
    assert counted == {CACHED: 1, TOKENS: 1, OUTPUT: 1}
    estimated = [sample.value for sample in metrics.estimated_cost_usd.family().samples]
    assert estimated == pytest.approx([(813 * 2 + 587 * 0.5 + 30 * 10) / 1e6])


def test_tenants_are_bounded() -> None:
    metrics = Metrics()
    meter, used = metering(PRICES, metrics), Consumption(Usage(100, 10, 50))
    for index in range(TENANTS + 50):
        meter.count(used, meter.bill("m", used), model="m", replica="r", tenant=f"t{index}")
    samples = {sample.labels["tenant"]: sample.value for sample in metrics.savings_usd.family().samples}
    assert len(samples) == TENANTS + 1
    assert samples["other"] == pytest.approx(50 * samples["t0"])
