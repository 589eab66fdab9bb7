"""Fallback pools: what one pool cannot serve is answered by another one, and the client sees one good answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.admission.memory import MemoryLease
from gateway.config.schema import Config
from gateway.fleet.directory import MAX_TARGETS
from gateway.parser.parsing import INLINE_BYTES
from gateway.request.exchange import RewrittenRequest
from tests.gateway.conftest import Running, config_over, eventually, running
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_dialects import BEGUN, ENDS, SAYS, events, keeper
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_in_plain_body,
    dies_now,
    event,
    hangs,
    http,
    models,
    status,
    streams,
    writes,
)

CHAT, MESSAGES, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"
TEXT = "Some words, and more. " * 100
COUNTED = answers("small", prompt=len(TEXT) // 4)  # as an engine would count it
BODY = {"model": "large", "messages": [{"role": "user", "content": TEXT}]}
MIB = 1 << 20
Lines = Callable[[], list[dict[str, Any]]]


def replica(*script: Behaviour, model: str) -> FakeReplica:
    return FakeReplica(script or (answers(),), listing=models(model))


@dataclass(slots=True)
class Two:
    """A pool with one replica, and that of its fallback."""

    run: Running
    big: FakeReplica
    small: FakeReplica

    @property
    def names(self) -> list[str]:
        """The model's name in each request that the fallback got."""
        return [request.json["model"] for request in self.small.requests]

    async def fallbacks(self, reason: str) -> float:
        name = f'warmroute_fallbacks_total{{pool="big",reason="{reason}",to="small"}}'
        return (await self.run.metrics()).get(name, 0.0)

    def require_nothing_open(self) -> None:
        """Each permit and each booking was given back."""
        for pool in self.run.gateway.fleet.pools:
            assert (pool.admission.inflight, pool.admission.waiting) == (0, 0)
        assert self.run.gateway.router.ledger.open_leases == 0
        self.run.gateway.router.check()


@contextlib.asynccontextmanager
async def two(*script: Behaviour, small: Behaviour | None = None, pool: Any = None, **config: Any) -> AsyncIterator[Two]:
    """script: of the first pool's replica; small: of the fallback's. pool: further keys of the first pool."""
    async with replica(*script, model="large") as one, replica(small or answers("small"), model="little") as other:
        pools = [
            {"name": "big", "models": ["large"], "replicas": [one.url], "fallback": {"pool": "small", "model": "little"}},
            {"name": "small", "models": ["little"], "replicas": [other.url]},
        ]
        pools[0] |= pool or {}
        async with running(pools=pools, **config) as run:
            both = Two(run, one, other)
            yield both
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
            both.require_nothing_open()


# -- when a request goes on


@pytest.mark.parametrize(
    "behaviour",
    [
        dies,
        dies_in_plain_body,
        status(500),
        status(502),
        status(503),
        status(504),
        status(429),
        writes(http(200, b"", "text/event-stream")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_pool_fails_to_answer_another_one_does(behaviour: Behaviour, stream: bool, request_lines: Lines) -> None:
    good = streams("from ", "small", prompt=7) if stream else answers("from small", prompt=7)
    prices = {"large": {"input": 100.0, "output": 100.0}, "little": {"input": 1.0, "output": 1.0}}
    async with two(behaviour, small=good, prices=prices) as both:
        if stream:
            chunks = [each async for each in await both.run.client.chat.completions.create(**BODY, stream=True)]
            assert "".join(each.choices[0].delta.content or "" for each in chunks) == "from small"
            assert all(each.usage is None for each in chunks)  # the client did not ask for it, and still gets none
        else:
            code, _, answer = await both.run.post(BODY)
            assert (code, answer["choices"][0]["message"]["content"]) == (200, "from small")
        assert both.big.requests
        assert both.names == ["little"]
        assert {**both.small.requests[0].json, "model": "large"} == both.big.requests[0].json
        page = await both.run.metrics()
        assert await both.fallbacks("failed") == 1
        assert page[f'warmroute_prompt_tokens_total{{cache="miss",model="little",replica="{both.small.name}"}}'] == 7
        assert not any('model="large"' in name for name in page if name.startswith(("warmroute_prompt", "warmroute_cost")))
        (line,) = request_lines()
        assert (line["fallback"], line["model"], line["model_alias"]) == ("big -> small", "little", "large")
        assert (line["status"], line["replica"], line["cost_usd"]) == (200, both.small.name, pytest.approx(11e-6))
        assert [each["replica"] for each in line["failed_attempts"]] == [both.big.name]
        assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="little"}'] == 1


async def test_nobody_is_up(request_lines: Lines) -> None:
    async with two() as both:
        both.big.refuse()
        await both.run.gateway.fleet.probe_all(both.run.gateway.upstream)
        assert (await both.run.post(BODY))[0] == 200
        assert (both.names, await both.fallbacks("no_replica")) == (["little"], 1)
        assert "failed_attempts" not in request_lines()[0]


async def test_all_are_draining() -> None:
    async with two() as both:
        await both.run.post({"name": both.big.name}, "/warmroute/drain")
        assert (await both.run.post(BODY))[0] == 200
        assert (both.names, await both.fallbacks("no_replica"), both.big.requests) == (["little"], 1, [])
        await both.run.post({"name": both.big.name}, "/warmroute/undrain")
        assert (await both.run.post(BODY))[0] == 200
        assert len(both.big.requests) == 1


async def test_replicas_that_rest_are_left_alone_while_another_pool_is_well() -> None:
    async with two(status(503, "busy", "Retry-After: 60")) as both:
        for _ in range(3):
            assert (await both.run.post(BODY))[0] == 200
        assert (len(both.big.requests), len(both.small.requests)) == (1, 3)
        assert (await both.fallbacks("failed"), await both.fallbacks("no_replica")) == (1, 2)


async def test_open_circuits_are_left_alone_while_another_pool_is_well() -> None:
    async with two() as both:
        state = both.run.gateway.fleet.named(both.big.name)
        assert state is not None
        now = both.run.gateway.clock()
        while state.breaker.allows(now):
            state.breaker.begin(now).failure(now)
        both.run.gateway.fleet.suspect(state)
        assert (await both.run.post(BODY))[0] == 200
        assert (both.names, both.big.requests) == (["little"], [])


async def test_replicas_in_doubt_are_used_where_no_pool_is_better() -> None:
    """Both rest: the request goes where it would go without a fallback, and the client gets what the last one says."""
    async with two(status(503, "busy", "Retry-After: 60"), small=status(503, "too", "Retry-After: 60")) as both:
        assert [(await both.run.post(BODY))[0] for _ in range(2)] == [503, 503]
        assert len(both.big.requests) == 2


@contextlib.asynccontextmanager
async def occupied(both: Two) -> AsyncIterator[None]:
    """A request holds the only slot of the first pool."""
    begun = asyncio.create_task(both.run.post(BODY))
    await eventually(lambda: both.big.requests)
    try:
        yield
    finally:
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)


async def test_a_full_queue() -> None:
    hold = asyncio.Event()
    async with two(hangs(hold), pool={"max_inflight": 1, "max_queue": 0}) as both, occupied(both):
        assert (await both.run.post(BODY))[0] == 200
        assert (both.names, await both.fallbacks("queue_full")) == (["little"], 1)


async def test_a_wait_that_is_too_long() -> None:
    """The block keys were made before the wait, with the other model's name."""
    hold = asyncio.Event()
    async with (
        two(hangs(hold), small=COUNTED, pool={"max_inflight": 1, "max_queue": 1, "queue_s": 0.05}) as both,
        occupied(both),
    ):
        assert (await both.run.post(BODY))[0] == 200
        assert (both.names, await both.fallbacks("queue_timeout")) == (["little"], 1)
        await require_cached(both.run, {**BODY, "model": "little"})


async def dry_run(run: Running, body: Any) -> Any:
    code, _, decision = await run.post(io.BytesIO(body) if isinstance(body, bytes) else body, "/warmroute/route")
    assert code == 200
    return decision


async def require_cached(run: Running, body: Any) -> None:
    """A replica of the body's model is believed to hold its prompt: the keys are those of that model."""
    found = await dry_run(run, body)
    assert found["candidates"][0]["matched_tokens"] > 0.9 * found["estimated_prompt_tokens"] > 100


async def test_the_second_pool_knows_the_prompt_by_its_own_models_keys() -> None:
    async with two(status(503), small=COUNTED) as both:
        await both.run.post(BODY)
        await require_cached(both.run, {**BODY, "model": "little"})
        found = await dry_run(both.run, BODY)
        assert found["model"] == "large"
        assert found["candidates"][0]["matched_tokens"] == 0  # its booking was closed as failed


async def test_a_dry_run_of_a_form_is_about_the_pool_that_would_take_it() -> None:
    """The fallback has another model, whose name is not put into forms: so it is no way for them."""
    async with two() as both:
        for status_ in (200, 503):
            form = aiohttp.FormData({"model": "large"})
            form.add_field("file", b"R" * 1000, filename="a.wav")
            url = f"{both.run.admin_url}/warmroute/route?path=/v1/audio/transcriptions"
            async with both.run.session.post(url, data=form) as answer:
                found = await answer.json()
            assert answer.status == status_
            if status_ == 200:
                assert (found["model"], found["replica"], "fallback" in found) == ("large", both.big.name, False)
            await both.run.post({"name": both.big.name}, "/warmroute/drain")


# -- lists of models


async def listed(both: Two) -> list[str]:
    """In both forms, which have the same names."""
    openais = json.loads((await both.run.get("/v1/models"))[2])["data"]
    anthropics = json.loads((await both.run.get("/v1/models", headers={"anthropic-version": "2023-06-01"}))[2])["data"]
    assert [each["id"] for each in openais] == [each["id"] for each in anthropics]
    return [each["id"] for each in openais]


@pytest.mark.parametrize("ends", ["refuses", "drains"])
async def test_models_of_a_pool_without_replicas_are_listed_while_its_fallback_has_some(ends: str) -> None:
    aliases = {"claude-*": "large"}
    async with two(pool={"models": ["large"]}, model_aliases=aliases) as both:
        fleet, upstream = both.run.gateway.fleet, both.run.gateway.upstream
        everything = await listed(both)
        assert everything == ["large", "little", "claude-*"]
        if ends == "refuses":
            both.big.refuse()
            await fleet.probe_all(upstream)
        else:
            await both.run.post({"name": both.big.name}, "/warmroute/drain")
        assert (await both.run.post(BODY))[0] == 200
        assert await listed(both) == everything
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            for name in ("large", "claude-x"):
                code, _, one = await both.run.get(f"/v1/models/{name}", headers=headers)
                assert (code, json.loads(one)["id"]) == (200, name)
        both.small.refuse()
        await fleet.probe_all(upstream)
        assert await listed(both) == []
        assert (await both.run.get("/v1/models/large"))[0] == 503


async def test_models_of_a_pool_that_is_down_without_a_fallback_are_not_listed() -> None:
    async with two(pool={"fallback": None}) as both:
        both.big.refuse()
        await both.run.gateway.fleet.probe_all(both.run.gateway.upstream)
        assert await listed(both) == ["little"]


# -- when it does not


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 501])
async def test_what_a_client_has_done_wrong_is_answered_by_its_own_pool(code: int) -> None:
    async with two(status(code, "mine")) as both:
        got, _, answer = await both.run.post(BODY)
        assert (got, answer["error"]["message"], both.small.requests) == (code, "mine", [])


async def test_nothing_goes_on_after_the_first_byte() -> None:
    async with two(streams("one", "two", die=True)) as both:
        with pytest.raises(openai.APIError):
            async for _ in await both.run.client.chat.completions.create(**BODY, stream=True):
                pass
        assert both.small.requests == []


async def test_nothing_goes_on_without_its_client(request_lines: Lines) -> None:
    hold = asyncio.Event()
    async with two(hangs(hold)) as both:
        asking = asyncio.create_task(both.run.post(BODY))
        await eventually(lambda: both.big.requests)
        asking.cancel()
        await eventually(request_lines)
        hold.set()
        assert (request_lines()[0]["status"], both.small.requests) == (499, [])


async def test_a_request_without_a_fallback_gets_its_error() -> None:
    async with two(status(503, "mine"), pool={"fallback": None}) as both:
        got, _, answer = await both.run.post(BODY)
        assert (got, answer["error"]["message"], both.small.requests) == (503, "mine", [])


async def test_a_refusal_is_the_answer_where_no_fallback_is_up() -> None:
    async with two(status(503, "mine")) as both:
        both.small.refuse()
        await both.run.gateway.fleet.probe_all(both.run.gateway.upstream)
        got, _, answer = await both.run.post(BODY)
        assert (got, answer["error"]["message"]) == (503, "mine")


async def test_the_retry_budget_is_that_of_all_retries(request_lines: Lines) -> None:
    """A fifth of the requests and a reserve: then the client gets the refusal, as without a fallback."""
    async with two(status(500, "mine")) as both:
        budget = both.run.gateway.attempts.budget
        while budget.take():
            pass
        assert (await both.run.post(BODY))[0] == 500
        assert both.small.requests == []
        assert (await both.run.metrics())["warmroute_retry_budget_exhausted_total"] == 1
        assert "fallback" not in request_lines()[0]


async def test_a_lost_connection_needs_no_budget_and_what_goes_on_is_no_new_request() -> None:
    """Three requests add three fifths of a retry to the budget, although each of them was begun in two pools."""
    async with two(dies) as both:
        budget = both.run.gateway.attempts.budget
        while budget.take():
            pass
        assert [(await both.run.post(BODY))[0] for _ in range(3)] == [200] * 3
        assert not budget.take()


@pytest.mark.parametrize("behaviour", [dies, status(503)])
async def test_what_must_not_be_sent_twice_stays_once_it_may_have_arrived(behaviour: Behaviour) -> None:
    async with two(behaviour) as both:
        form = aiohttp.FormData({"model": "large", "purpose": "batch"})
        form.add_field("file", b"{}", filename="f.jsonl")
        async with both.run.session.post(f"{both.run.url}/v1/files", data=form) as answer:
            assert answer.status in (502, 503)
        assert (len(both.big.requests), both.small.requests) == (1, [])


async def test_what_has_not_arrived_anywhere_may_be_sent() -> None:
    async with two() as both:
        await both.run.post({"name": both.big.name}, "/warmroute/drain")
        assert (await both.run.post({"model": "large", "input": "hello"}, "/v1/audio/speech"))[0] == 200
        (got,) = both.small.requests
        assert got.json == {"model": "little", "input": "hello"}


async def test_a_form_and_a_query_stay_with_the_model_that_they_name() -> None:
    async with two() as both:
        await both.run.post({"name": both.big.name}, "/warmroute/drain")
        form = aiohttp.FormData({"model": "large"})
        form.add_field("file", b"RIFF", filename="a.wav")
        async with both.run.session.post(f"{both.run.url}/v1/audio/transcriptions", data=form) as answer:
            assert answer.status == 503
        async with both.run.session.get(f"{both.run.url}/v1/batches?limit=1&model=large&after=2") as answer:
            assert answer.status == 503
        assert both.small.requests == []


async def test_a_crash_is_not_handed_through_all_pools() -> None:
    """A prompt that kills its engine: what was sent before counts, and each further pool gets it once."""
    async with contextlib.AsyncExitStack() as stack:
        ones = [await stack.enter_async_context(replica(dies, model="large")) for _ in range(4)]
        others = [await stack.enter_async_context(replica(dies, model="little")) for _ in range(4)]
        pools = [
            {
                "name": "a",
                "models": ["large"],
                "replicas": [each.url for each in ones],
                "fallback": {"pool": "b", "model": "little"},
            },
            {"name": "b", "models": ["little"], "replicas": [each.url for each in others]},
        ]
        run = await stack.enter_async_context(running(pools=pools))
        code, _, answer = await run.post(BODY)
        assert (code, answer["error"]["code"]) == (502, "replica_failed")
        assert [sum(len(each.requests) for each in pool) for pool in (ones, others)] == [3, 1]


# -- chains


async def test_a_chain_is_followed_and_each_pool_is_asked_once(request_lines: Lines) -> None:
    async with (
        replica(status(500), model="m") as a,
        replica(status(502), model="m") as b,
        replica(answers("c"), model="m") as c,
    ):
        pools = [
            {"name": "a", "models": ["m"], "replicas": [a.url], "fallback": "b"},
            {"name": "b", "models": ["b"], "replicas": [b.url], "fallback": {"pool": "c", "model": "n"}},
            {"name": "c", "models": ["c"], "replicas": [c.url]},
        ]
        async with running(pools=pools) as run:
            code, _, answer = await run.post({**BODY, "model": "m"})
            assert (code, answer["choices"][0]["message"]["content"]) == (200, "c")
            assert [[request.json["model"] for request in each.requests] for each in (a, b, c)] == [["m"], ["m"], ["n"]]
            (line,) = request_lines()
            assert (line["fallback"], line["model"]) == ("a -> b -> c", "n")
            assert [each["replica"] for each in line["failed_attempts"]] == [a.name, b.name]
            page = await run.metrics()
            assert page['warmroute_fallbacks_total{pool="a",reason="failed",to="b"}'] == 1
            assert page['warmroute_fallbacks_total{pool="b",reason="failed",to="c"}'] == 1
            await run.post({"name": b.name}, "/warmroute/drain")
            assert (await run.post({**BODY, "model": "m"}))[0] == 200
            assert request_lines()[1]["fallback"] == "a -> c"


async def test_the_end_of_a_chain_is_its_last_error(request_lines: Lines) -> None:
    async with two(status(500, "mine"), small=status(502, "of the small one")) as both:
        code, _, answer = await both.run.post(BODY)
        assert (code, answer["error"]["message"]) == (502, "of the small one")
        (line,) = request_lines()
        assert (line["fallback"], line["status"], len(line["failed_attempts"])) == ("big -> small", 502, 2)


async def test_names_that_clients_make_up_are_bounded() -> None:
    """The first pool takes any name, and hands it on as it is."""
    async with replica(status(503), model="m") as one, replica(answers(), model="m") as other:
        pools = [
            {"name": "any", "models": ["*"], "replicas": [one.url], "fallback": "rest"},
            {"name": "rest", "models": ["rest"], "replicas": [other.url]},
        ]
        async with running(pools=pools) as run:
            await run.post({"name": one.name}, "/warmroute/drain")
            fleet = run.gateway.fleet
            for number in range(3 * MAX_TARGETS):
                made = fleet.target_in("rest", f"x{number}", "*")
                assert made is not None
                assert made.label == "*"
                assert len(fleet._named_targets) <= MAX_TARGETS
            assert (await run.post({**BODY, "model": "anything"}))[0] == 200
            page = await run.metrics()
            assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="*"}'] == 1


# -- other dialects, translation, kept responses, sizes


async def test_messages_fall_back_and_are_translated_where_the_second_pool_needs_that() -> None:
    unknown = writes(http(404, b'{"detail":"Not Found"}'))

    async def small(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (answers("hi", prompt=9) if request.path == CHAT else unknown)(request, writer)

    async with two(status(500), small=small) as both:
        claude = anthropic.AsyncAnthropic(base_url=both.run.url, api_key="secret", max_retries=0)
        billed = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc12;"},
            {"type": "text", "text": TEXT},
        ]
        answer = await claude.messages.create(
            model="large", max_tokens=5, system=billed, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.content[0].text == "hi"
        native, translated = both.small.requests
        assert (native.path, translated.path) == (MESSAGES, CHAT)
        assert both.names == ["little", "little"]
        assert b"billing-header" not in native.body + translated.body
        await claude.close()


async def test_a_response_that_is_kept_goes_on_in_either_pool(tmp_path: Any) -> None:
    """The history is written out before the first pool is asked; what the second one answers is kept."""
    state = {"url": f"sqlite:///{tmp_path}/kept.sqlite"}
    async with two(status(500), small=keeper("s"), state=state) as both:
        first = await both.run.client.responses.create(model="large", input="one")
        second = await both.run.client.responses.create(model="large", input="two", previous_response_id=first.id)
        assert second.id != first.id
        assert both.names == ["little", "little"]
        said = json.dumps(both.small.requests[1].json["input"])
        assert said.index("one") < said.index("two")
        assert (await both.run.client.responses.retrieve(second.id)).id == second.id


async def test_what_only_one_replica_has_stays_there() -> None:
    """Without a store, `previous_response_id` is an object of the replica that made it."""
    async with two(keeper("b"), status(500, "mine"), small=keeper("s")) as both:
        first = await both.run.client.responses.create(model="large", input="one")
        with pytest.raises(openai.InternalServerError, match="mine"):
            await both.run.client.responses.create(model="large", input="two", previous_response_id=first.id)
        assert both.small.requests == []


async def test_an_embedding_falls_back_too() -> None:
    async with two(status(500)) as both:
        assert (await both.run.post({"model": "large", "input": ["a", "b"]}, EMBEDDINGS))[0] == 200
        assert both.small.requests[0].body == both.big.requests[0].body.replace(b"large", b"little")


async def test_a_body_that_another_process_parses_falls_back_byte_by_byte() -> None:
    """Bytes are as they were but for the name, the keys those of the new one, and nothing stays charged."""
    long = json.dumps(
        {"n": {"model": "large"}, "messages": [{"role": "user", "content": TEXT * (2 * INLINE_BYTES // len(TEXT))}]}
    )
    raw = f'{{"model":"large",{long[1:]}'.encode()
    async with two(status(500), small=answers(prompt=len(raw) // 4), limits={"body_mb": 16, "inflight_mb": 128}) as both:
        assert (await both.run.post(io.BytesIO(raw)))[0] == 200
        assert both.small.requests[0].body == raw.replace(b'{"model":"large"', b'{"model":"little"', 1)
        await require_cached(both.run, raw.replace(b'{"model":"large"', b'{"model":"little"', 1))
        await eventually(lambda: both.run.gateway.served.memory.held < MIB)


async def test_what_the_first_pools_copies_were_charged_is_released_before_the_second_one_is_asked() -> None:
    held: list[int] = []
    unknown = writes(http(404, b'{"detail":"Not Found"}'))

    def looks(then: Behaviour) -> Behaviour:
        async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            if request.path != CHAT:
                return await unknown(request, writer)
            held.append(both.run.gateway.served.memory.held)
            return await then(request, writer)

        return behave

    text = TEXT * (MIB // 2 // len(TEXT))
    body = {"model": "large", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
    async with two(looks(status(500)), small=looks(answers())) as both:
        assert (await both.run.post(body, MESSAGES))[0] == 200
        first, second = held
        assert first > 2 * len(text)  # the body, and the translation of it
        assert abs(second - first) < 1000


# -- what operators see


async def test_a_dry_run_shows_the_pool_that_would_take_the_request() -> None:
    async with two() as both:
        assert "fallback" not in await dry_run(both.run, BODY)
        await both.run.post({"name": both.big.name}, "/warmroute/drain")
        found = await dry_run(both.run, BODY)
        assert (found["fallback"], found["model"], found["replica"]) == ("big -> small", "little", both.small.name)
        assert both.small.requests == []


async def test_a_dry_run_sees_a_full_queue() -> None:
    hold = asyncio.Event()
    async with two(hangs(hold), pool={"max_inflight": 1, "max_queue": 0}) as both, occupied(both):
        assert (await dry_run(both.run, BODY))["fallback"] == "big -> small"


async def test_a_pool_on_its_fallback_is_ready() -> None:
    async with two() as both:
        both.big.refuse()
        fleet = both.run.gateway.fleet
        await fleet.probe_all(both.run.gateway.upstream)
        code, _, body = await both.run.get("/ready")
        assert (code, json.loads(body)) == (200, {"ready": True, "draining": False, "pools_without_replica": ["big"]})
        both.small.refuse()
        await fleet.probe_all(both.run.gateway.upstream)
        code, _, body = await both.run.get("/ready")
        assert (code, json.loads(body)["pools_without_replica"]) == (503, ["big", "small"])


# -- while it runs


def configured(both: Two, fallback: Any, *, small: bool = True) -> Config:
    pools = [{"name": "big", "models": ["large"], "replicas": [both.big.url], "fallback": fallback}]
    if small:
        pools.append({"name": "small", "models": ["little"], "replicas": [both.small.url]})
    return config_over(pools=pools)


async def test_a_reload_gives_and_takes_a_fallback() -> None:
    async with two(status(500, "mine"), pool={"fallback": None}) as both:
        take = both.run.gateway.local.reload.take
        assert (await both.run.post(BODY))[0] == 500
        await take(configured(both, "small"))
        assert (await both.run.post(BODY))[0] == 200
        await take(configured(both, {"pool": "small", "model": "other"}))
        assert (await both.run.post(BODY))[0] == 200
        assert both.names == ["large", "other"]
        await take(configured(both, None))
        assert (await both.run.post(BODY))[0] == 500


async def test_a_reload_takes_the_pool_away_in_which_a_request_waits() -> None:
    """It waits in the queue of its second pool, which is then no more."""
    hold = asyncio.Event()
    async with replica(hangs(hold), model="little") as small, replica(status(500), model="large") as big:
        pools = [
            {"name": "big", "models": ["large"], "replicas": [big.url], "fallback": {"pool": "small", "model": "little"}},
            {"name": "small", "models": ["little"], "replicas": [small.url], "max_inflight": 1},
        ]
        async with running(pools=pools) as run:
            both = Two(run, big, small)
            first, second = [asyncio.create_task(run.post(BODY)) for _ in range(2)]
            admission = run.gateway.fleet.pools[1].admission
            await eventually(lambda: admission.waiting == 1)
            await run.gateway.local.reload.take(configured(both, None, small=False))
            hold.set()
            codes = sorted([(await first)[0], (await second)[0]])
            assert codes == [502, 503]
            assert (admission.inflight, admission.waiting) == (0, 0)
            both.require_nothing_open()


async def test_a_prewarm_that_asks_for_a_diagnosis_is_changed_for_the_other_pool_as_well() -> None:
    """Its edits are places in the body, which another model's name has moved."""
    body = {"model": "large", "max_tokens": 0, "messages": [{"role": "user", "content": TEXT}], "diagnostics": {}}
    async with two(dies, small=message_answer, pool={"models": ["large"]}) as both:
        status_, _, answer = await both.run.post(body, path=MESSAGES)
        assert (status_, answer["content"]) == (200, [])
        expected = {key: value for key, value in body.items() if key != "diagnostics"}
        assert both.small.requests[-1].json == {**expected, "model": "little", "max_tokens": 1}


async def message_answer(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    usage = {"input_tokens": 7, "output_tokens": 1}
    found = {"id": "msg_1", "type": "message", "role": "assistant", "model": "little", "stop_reason": "max_tokens"}
    found |= {"content": [{"type": "text", "text": "a"}], "usage": usage}
    await writes(http(200, json.dumps(found).encode()))(request, writer)


async def test_a_prompt_that_kills_engines_does_not_walk_through_all_pools() -> None:
    """Three sends in its own pool, and one more."""
    async with contextlib.AsyncExitStack() as stack:
        names, replicas = ["large", "b", "c", "d"], list[FakeReplica]()
        pools = list[dict[str, Any]]()
        for at, name in enumerate(names):
            both = [await stack.enter_async_context(replica(*[resets] * 9, model=name)) for _ in range(3)]
            replicas += both
            further = {"fallback": {"pool": names[at + 1], "model": names[at + 1]}} if at < 3 else {}
            pools.append({"name": name, "models": [name], "replicas": [each.url for each in both], **further})
        run = await stack.enter_async_context(running(pools=pools))
        status_, _, _ = await run.post(BODY)
        assert status_ == 502
        assert sum(len(each.requests) for each in replicas) == 4


async def resets(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


# -- a pool that cannot get the request after all


def fills_memory(leases: list[MemoryLease], both: Callable[[], Two], then: Behaviour) -> Behaviour:
    """Another client takes all memory before this answer: nothing large can be parsed again."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        lease = both().run.gateway.served.memory.lease("192.0.2.1")
        leases.append(lease)
        while lease.grow(1 << 16):
            pass
        await then(request, writer)

    return behave


async def test_the_refusal_is_the_answer_where_the_other_pool_cannot_get_the_request(request_lines: Lines) -> None:
    """Its body cannot be parsed again with the other model's name; no retry was made, and none is counted."""
    leases, found = list[MemoryLease](), list[Two]()
    raw = json.dumps({**BODY, "messages": [{"role": "user", "content": TEXT * (2 * INLINE_BYTES // len(TEXT))}]}).encode()
    first = fills_memory(leases, lambda: found[0], status(503, "mine"))
    async with two(first, limits={"body_mb": 8, "inflight_mb": 32}) as both:
        found.append(both)
        budget = both.run.gateway.attempts.budget
        while budget.take():
            pass
        budget.give_back()
        code, _, answer = await both.run.post(io.BytesIO(raw))
        assert (code, answer["error"]["message"], both.small.requests) == (503, "mine", [])
        (line,) = request_lines()
        assert (line["status"], line["replica"], len(line["failed_attempts"])) == (503, both.big.name, 1)
        assert "fallback" not in line
        assert budget.take()
        assert await both.fallbacks("failed") == 0
        for lease in leases:
            lease.close()
        await eventually(lambda: both.run.gateway.served.memory.held < MIB)


async def test_replicas_in_doubt_serve_what_the_other_pool_cannot_get() -> None:
    """It is a form, and the other pool has another model."""
    async with two(status(503, "busy", "Retry-After: 60"), answers("large"), limits={"body_mb": 1, "inflight_mb": 4}) as both:
        assert (await both.run.post(BODY))[0] == 200
        form = aiohttp.FormData({"model": "large"})
        form.add_field("file", b"R" * (MIB - 4096), filename="a.wav")
        async with both.run.session.post(f"{both.run.url}/v1/audio/transcriptions", data=form) as answer:
            assert answer.status == 200
        assert (len(both.big.requests), len(both.small.requests)) == (2, 1)
        assert await both.fallbacks("no_replica") == 0


def refuses_and_stops_the_parser(both: Callable[[], Two], stopped: asyncio.Event, *, whole: bool) -> Behaviour:
    """The other model's name cannot be put into a large body now."""
    body = b'{"error":{"message":"mine"}}'

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        pid = both().run.gateway.parsing.process.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        answer = http(503, body)
        writer.write(answer if whole else answer[:-5])
        await writer.drain()
        stopped.set()
        if not whole:
            await asyncio.Event().wait()

    return behave


@pytest.mark.parametrize(
    ("path", "translated", "whole"),
    [(CHAT, False, True), (CHAT, False, False), (MESSAGES, False, True), (MESSAGES, False, False), (MESSAGES, True, True)],
)
async def test_a_client_that_leaves_while_its_request_is_renamed_leaves_nothing(
    request_lines: Lines, path: str, translated: bool, whole: bool
) -> None:
    """Neither the refusal's connection, nor memory, nor a permit or booking, nor what the other pool's attempt would cost."""
    found, stopped = list[Two](), asyncio.Event()
    refuses = refuses_and_stops_the_parser(lambda: found[0], stopped, whole=whole)
    raw = json.dumps({**BODY, "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 2 * INLINE_BYTES}]}).encode()
    async with two(chat_only(refuses) if translated else refuses) as both:
        found.append(both)
        gateway = both.run.gateway
        budget, process = gateway.attempts.budget, gateway.parsing.process
        before = repr(budget)
        asked = asyncio.create_task(both.run.post(io.BytesIO(raw), path))
        await stopped.wait()
        await eventually(lambda: process._task)
        await eventually(lambda: all(pool.admission.inflight == 0 for pool in gateway.fleet.pools))
        assert request_lines() == []
        assert not any(type(each) is RewrittenRequest and len(each.body) > MIB for each in gc.get_objects())
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: request_lines() and gateway.served.memory.held == 0)
        await eventually(lambda: both.big.gone == (not whole))
        both.require_nothing_open()
        assert repr(budget) == before
        assert process.pid
        os.kill(process.pid, signal.SIGCONT)
        assert (await both.run.post(io.BytesIO(raw.replace(b"large", b"little")), path))[0] == 200
        line, _ = request_lines()
        assert (line["status"], line["replica"], len(line["failed_attempts"])) == (499, both.big.name, 1)
        assert "fallback" not in line
        assert "estimated" not in line, "no replica has computed its prompt"
        metrics = await both.run.metrics()
        assert metrics[f'warmroute_requests_total{{code="499",endpoint="{path}",model="large"}}'] == 1
        assert await both.fallbacks("failed") == 0
        assert len(both.small.requests) == 1


async def test_a_client_that_leaves_the_queue_of_the_other_pool_pays_nothing(request_lines: Lines) -> None:
    held = asyncio.Event()
    async with (
        replica(status(503), model="large") as one,
        replica(hangs(held), model="little") as other,
        running(
            pools=[
                {"name": "big", "models": ["large"], "replicas": [one.url], "fallback": {"pool": "small", "model": "little"}},
                {"name": "small", "models": ["little"], "replicas": [other.url], "max_inflight": 1},
            ],
            prices={"*": {"input": 1, "output": 1}},
        ) as run,
    ):
        body = {**BODY, "messages": [{"role": "user", "content": "hello"}]}
        first = asyncio.create_task(run.post({**body, "model": "little"}))
        await eventually(lambda: other.requests)
        waits = asyncio.create_task(run.post({**body, "model": "large"}))
        await eventually(lambda: [pool.admission.waiting for pool in run.gateway.fleet.pools] == [0, 1])
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await eventually(request_lines)
        (line,) = request_lines()
        assert (line["status"], line["fallback"], line["cost_usd"], "estimated" in line) == (499, "big -> small", None, False)
        held.set()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


# -- the retry budget


async def test_retries_that_were_not_made_cost_nothing() -> None:
    """Their clients leave in the pause before them."""
    asks = 40
    async with replica(status(429), model="m") as one, replica(status(429), model="m") as two_, running(one, two_) as run:
        budget = run.gateway.attempts.budget
        for _ in range(50):
            assert budget.take()
        for _ in range(asks):
            seen = len(one.requests + two_.requests)
            asked = asyncio.create_task(run.post({**BODY, "model": "m"}))
            await eventually(lambda seen=seen: len(one.requests + two_.requests) > seen)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        retries = (await run.metrics()).get('warmroute_retries_total{reason="status"}', 0.0)
        assert repr(budget) == f"<RetryBudget {50 + 0.2 * asks - retries:.3g} of 100>"


async def test_a_request_that_its_own_pool_did_not_attempt_adds_to_the_budget() -> None:
    async with two() as both:
        await both.run.post({"name": both.big.name}, "/warmroute/drain")
        budget = both.run.gateway.attempts.budget
        while budget.take():
            pass
        assert [(await both.run.post(BODY))[0] for _ in range(6)] == [200] * 6
        assert budget.take()
        assert not budget.take()


async def test_a_retry_without_budget_is_counted_once() -> None:
    """Neither the second replica nor the other pool gets it: that is one retry that was not made."""
    async with replica(status(500, "mine"), model="large") as second, two(status(500, "mine")) as both:
        pools = [
            {"name": "big", "models": ["large"], "replicas": [both.big.url, second.url], "fallback": "small"},
            {"name": "small", "models": ["little"], "replicas": [both.small.url]},
        ]
        async with running(pools=pools) as run:
            while run.gateway.attempts.budget.take():
                pass
            assert (await run.post(BODY))[0] == 500
            assert (await run.metrics())["warmroute_retry_budget_exhausted_total"] == 1
            assert both.small.requests == []


# -- streams that break off before their first token

PING = b": ping\n\n"
ROLE = event("").replace(b'"content": ""', b'"role": "assistant"')


def opens(*parts: bytes) -> Behaviour:
    """Begins a stream so, and dies before its first token."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for part in parts:
            writer.write(chunk(part))
        await writer.drain()
        dies_now(writer)

    return behave


@pytest.mark.parametrize("before", [(PING,), (PING, ROLE)], ids=["ping", "role"])
async def test_a_stream_moves_to_the_other_pool_until_its_first_token(before: tuple[bytes, ...], request_lines: Lines) -> None:
    """The client has one role, however many replicas have sent it one."""
    good = events(ROLE, event("small"), event("", "stop"), DONE)
    async with two(opens(*before), small=good) as both:
        async with both.run.session.post(both.run.url + CHAT, json={**BODY, "stream": True}) as answer:
            assert answer.status == 200
            text = await answer.read()
        assert text.startswith(PING)
        assert (text.count(b'"small"'), text.count(b'"role"'), text.count(b"[DONE]")) == (1, 1, 1)
        assert await both.fallbacks("failed") == 1
        await eventually(lambda: both.run.gateway.router.ledger.open_leases == 0)
        both.require_nothing_open()
    (line,) = request_lines()
    assert (line["status"], line["fallback"]) == (200, "big -> small")
    assert "error" not in line


@pytest.mark.parametrize(("small", "code"), [(status(500), 500), (dies, 502)])
async def test_a_stream_that_no_pool_begins_ends_with_an_error_event(small: Behaviour, code: int, request_lines: Lines) -> None:
    async with two(opens(PING), small=small) as both:
        async with both.run.session.post(both.run.url + CHAT, json={**BODY, "stream": True}) as answer:
            assert answer.status == 200
            text = await answer.read()
        assert text.startswith(PING)
        assert text.endswith(b"data: [DONE]\n\n")
        assert b'"error"' in text
    (line,) = request_lines()
    assert (line["status"], line["completion_tokens"], line["cost_usd"]) == (code, None, None)


async def test_messages_of_another_pool_have_one_beginning() -> None:
    async with two(opens(BEGUN), small=events(BEGUN, SAYS, ENDS)) as both:
        body = {"model": "large", "max_tokens": 9, "messages": [{"role": "user", "content": TEXT}], "stream": True}
        async with both.run.session.post(both.run.url + MESSAGES, json=body) as answer:
            assert await answer.read() == BEGUN + SAYS + ENDS
