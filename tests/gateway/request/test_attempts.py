"""Whose fault a failure is, who is tried next, and what may be sent twice: through a real gateway on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import orjson
import pytest
from msgspec.structs import replace

from bench.measure.ports import free_port
from gateway.app import compose
from gateway.core import Surroundings
from gateway.dialects.events.first_event import MAX_FIRST
from gateway.dialects.openai.stream import first_event
from gateway.request.attempts import require_good_begin
from gateway.request.retries import RetryBudget
from gateway.upstream.resolver import Resolver
from tests.gateway.composed import CHAT
from tests.gateway.conftest import BODY, LOGGED, Running, config_over, eventually, running
from tests.support.compiled import uncompiled
from tests.support.configs import load
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_now,
    event,
    hangs,
    http,
    status,
    streams,
    writes,
)
from tests.support.in_memory import BytesReply, BytesRequest
from tests.support.tiers import gate

TURNS = {"routing": {"policy": "round_robin"}}


def if_(condition: Callable[[FakeRequest], bool], one: Behaviour, other: Behaviour | None = None) -> Behaviour:
    """One behaviour for some requests, another one for the rest."""
    other = other or answers()

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (one if condition(request) else other)(request, writer)

    return behave


def from_noisy(request: FakeRequest) -> bool:
    return "noisy" in request.headers.get("authorization", "")


def poisoned(request: FakeRequest) -> bool:
    return b"POISON" in request.body


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def cut_off(run: Running) -> int:
    return int(sum(value for name, value in (await run.metrics()).items() if name.startswith("warmroute_replica_circuit_open")))


# -- 429 and rest


LIMITED = status(429, "rate limit of this key", "Retry-After: 60")


async def test_a_429_is_about_its_client() -> None:
    fleet = [FakeReplica([if_(from_noisy, LIMITED)]) for _ in range(3)]
    async with fleet[0], fleet[1], fleet[2], running(*fleet, **TURNS) as run:
        for _ in range(10):
            code, headers, body = await run.post(headers=key("noisy"))
            assert (code, headers["Retry-After"]) == (429, "60")
            assert body["error"]["message"] == "rate limit of this key"
        assert {(await run.post(headers=key("good")))[0] for _ in range(10)} == {200}
        assert await cut_off(run) == 0


async def test_several_clients_who_are_refused_mean_that_the_replica_is_overloaded() -> None:
    async with FakeReplica([LIMITED]) as full, FakeReplica() as good, running(full, good, **TURNS) as run:
        for number in range(1, 21):
            connector = aiohttp.TCPConnector(local_addr=(f"127.0.0.{number}", 0))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.post(run.url + "/v1/chat/completions", json=BODY) as answer,
            ):
                assert answer.status == 200
        assert (len(full.requests), await cut_off(run)) == (3, 1)


async def test_one_address_is_one_client_whatever_names_it_gives() -> None:
    """Keys and tenants are free to choose where nobody checks them."""
    async with FakeReplica([LIMITED]) as full, FakeReplica() as good, running(full, good, **TURNS) as run:
        for number in range(20):
            assert (await run.post(headers={**key(f"{number}"), "X-Tenant-Id": f"tenant {number}"}))[0] == 200
        assert len(full.requests) >= 10
        assert await cut_off(run) == 0


@pytest.mark.parametrize("seconds", ["30", "999999999", "1000000000", "9" * 5000])
async def test_a_503_with_retry_after_is_a_rest_of_a_minute_at_most(seconds: str) -> None:
    full = FakeReplica([status(503, "full", f"Retry-After: {seconds}"), answers()])
    async with full, FakeReplica() as good, running(full, good, **TURNS) as run:
        assert {(await run.post())[0] for _ in range(10)} == {200}
        assert len(full.requests) == 1
        state = run.gateway.fleet.named(full.name)
        assert state
        assert 29 < state.rests_until - run.gateway.clock() <= (30 if seconds == "30" else 60)
        assert state.breaker.state(run.gateway.clock()) == "closed"


async def test_a_fleet_that_rests_is_used_all_the_same() -> None:
    """Each replica asked for a minute of rest; the requests' own answers show when it is over."""
    rest = status(503, "starting", "Retry-After: 60")
    fleet = [FakeReplica([rest, answers()]) for _ in range(2)]
    async with fleet[0], fleet[1], running(*fleet, **TURNS) as run:
        code, headers, body = await run.post()
        assert (code, headers["Retry-After"], body["error"]["message"]) == (503, "60", "starting")
        assert {(await run.post())[0] for _ in range(5)} == {200}


async def test_a_refused_request_is_not_retried_at_a_replica_that_rests() -> None:
    rest = status(503, "full", "Retry-After: 60")
    fleet = [FakeReplica([rest]) for _ in range(3)]
    async with fleet[0], fleet[1], fleet[2], running(*fleet, **TURNS) as run:
        assert [(await run.post())[0] for _ in range(5)] == [503] * 5
        assert sum(len(replica.requests) for replica in fleet) == 3 + 4


# -- whose fault


async def test_a_500_of_several_replicas_is_the_requests_fault() -> None:
    fleet = [FakeReplica([if_(poisoned, status(500))]) for _ in range(4)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], running(*fleet, **TURNS) as run:
        for number in range(12):
            assert (await run.post(chat(f"POISON {number}")))[0] == 500
        assert sum(len(replica.requests) for replica in fleet) == 36
        assert await cut_off(run) == 0
        served = Counter([(await run.post())[1]["X-Warmroute-Replica"] for _ in range(8)])
        assert set(served.values()) == {2}, "and all have their share"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
async def test_an_endpoint_that_the_engine_does_not_have_is_no_failure_of_its_replica(path: str) -> None:
    """501, as llama.cpp answers /v1/embeddings: tried once, passed on, and no breaker counts it."""
    missing = status(501, "not supported")
    async with FakeReplica([missing]) as one, FakeReplica([missing]) as two, running(one, two, **TURNS) as run:
        for _ in range(12):
            code, _, body = await run.post(BODY, path)
            assert (code, body["error"]["message"]) == (501, "not supported")
        assert (len(one.requests) + len(two.requests), await cut_off(run)) == (12, 0)
    async with FakeReplica([missing]) as one, running(one) as run:
        for _ in range(8):
            assert (await run.post(BODY, path))[0] == 501
        assert await cut_off(run) == 0


async def test_the_log_has_the_engines_words_of_an_error(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    script = [status(400, "too\nlong " + "x" * 300), status(500, "CUDA\x1b error"), writes(http(404, b"<p>nothing"))]
    async with FakeReplica(script) as one, running(one) as run:
        for code in (400, 500, 404):
            async with run.session.post(f"{run.url}/v1/chat/completions", json=BODY) as answer:
                assert answer.status == code
        await eventually(lambda: len(request_lines()) == 3)
        bad, failed, unknown = request_lines()
        assert (bad["error"][:25], len(bad["error"]), bad["level"]) == ("answered 400: too long xx", 214, "info")
        assert failed["error"] == failed["failed_attempts"][0]["error"] == "answered 500: CUDA error"
        assert unknown["error"] == "answered 404: <p>nothing"


async def test_an_error_that_another_replica_made_good_is_not_the_requests(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    async with (
        FakeReplica([status(500, "CUDA error"), answers()]) as one,
        FakeReplica() as two,
        running(one, two, **TURNS) as run,
    ):
        for _ in range(2):
            assert (await run.post())[0] == 200
        await eventually(lambda: len(request_lines()) == 2)
        assert [attempt for line in request_lines() for attempt in line.get("failed_attempts", ())] == [
            {"replica": one.name, "reason": "status", "error": "answered 500: CUDA error"}
        ]
        assert not any("error" in line for line in request_lines())
        assert {line["level"] for line in request_lines()} == {"info"}


@pytest.mark.parametrize("bad", [status(500), dies, writes(http(200, b"[]"))])
async def test_a_failure_that_only_one_replica_has_is_its_own(bad: Behaviour) -> None:
    async with FakeReplica([bad]) as broken, FakeReplica() as good, running(broken, good, **TURNS) as run:
        for _ in range(12):
            assert (await run.post())[0] == 200
        assert await cut_off(run) == 1
        assert len({request.headers["x-request-id"] for request in broken.requests}) == 5


async def test_the_only_replica_is_taken_for_broken_and_used() -> None:
    async with FakeReplica([status(500)]) as one, running(one) as run:
        for _ in range(7):
            assert (await run.post())[0] == 500
        assert (len(one.requests), await cut_off(run)) == (7, 1)


async def test_a_failure_that_was_not_compared_for_lack_of_budget_counts_for_nothing() -> None:
    fleet = [FakeReplica([status(500)]) for _ in range(2)]
    async with fleet[0], fleet[1], running(*fleet, **TURNS) as run:
        run.gateway.attempts.budget = RetryBudget(0.0, 0)
        for _ in range(20):
            assert (await run.post())[0] == 500
        assert sum(len(replica.requests) for replica in fleet) == 20
        assert await cut_off(run) == 0


async def test_a_client_that_leaves_between_two_attempts_leaves_no_doubt_behind() -> None:
    never = asyncio.Event()
    one, two = FakeReplica([status(500)]), FakeReplica([hangs(never)])
    async with one, two, running(one, two, **TURNS) as run:
        for number in range(10):
            asking = asyncio.create_task(run.post({**BODY, "user": str(number)}))
            await eventually(lambda number=number: len(two.requests) > number)  # type: ignore[misc]
            asking.cancel()
            await asyncio.wait([asking])
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert await cut_off(run) == 1, "each failed attempt was the only one with a verdict"


STREAM = {**BODY, "stream": True, "max_tokens": 9}
BREAKS_OFF = streams("a", die=True)


def pool(*replicas: FakeReplica, resume: bool) -> dict[str, Any]:
    return {"pools": [{"replicas": [replica.url for replica in replicas], "resume_streams": resume}], **TURNS}


async def streamed(run: Running) -> bytes:
    async with run.session.post(f"{run.url}/v1/chat/completions", json=STREAM) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("resume", [False, True])
async def test_a_replica_that_breaks_its_streams_off_is_cut_off(resume: bool) -> None:
    """It begins each of them well."""
    broken, good = FakeReplica([BREAKS_OFF]), FakeReplica([streams("a", "b")])
    async with broken, good, running(**pool(broken, good, resume=resume)) as run:
        got: list[bytes] = []
        while len(got) < 100 and not await cut_off(run):
            got.append(await streamed(run))
        assert len(broken.requests) == 20
        assert sum(b"replica_failed" in answer for answer in got) == (0 if resume else 20)


async def test_a_stream_that_several_replicas_break_off_is_the_requests_fault() -> None:
    fleet = [FakeReplica([BREAKS_OFF]) for _ in range(2)]
    async with fleet[0], fleet[1], running(**pool(*fleet, resume=True)) as run:
        for _ in range(50):
            assert b"replica_failed" in await streamed(run)
        assert [len(replica.requests) for replica in fleet] == [50, 50]
        assert await cut_off(run) == 0


async def test_a_stream_that_nobody_can_go_on_with_is_the_requests_fault() -> None:
    goes_on = if_(lambda request: b"continue_final_message" in request.body, status(500), streams("a", "b"))
    one, two = FakeReplica([BREAKS_OFF]), FakeReplica([goes_on])
    async with one, two, running(**pool(one, two, resume=True)) as run:
        for _ in range(60):
            await streamed(run)
        assert await cut_off(run) == 0


@pytest.mark.parametrize("resume", [False, True])
async def test_the_end_of_a_connection_after_done_is_no_failure(resume: bool) -> None:
    async def ends(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")) + chunk(DONE))
        await writer.drain()
        writer.close()

    async with FakeReplica([ends]) as one, FakeReplica([ends]) as two, running(**pool(one, two, resume=resume)) as run:
        for _ in range(60):
            assert (await streamed(run)).endswith(DONE)
        assert len(one.requests) == len(two.requests) == 30
        assert await cut_off(run) == 0


async def test_an_answer_that_takes_too_long_for_us_does_not_cut_its_replica_off() -> None:
    never = asyncio.Event()
    one, two = FakeReplica([streams("a", hold=never)]), FakeReplica([streams("a")])
    async with one, two, running(one, two, timeouts={"total_s": 2}, **TURNS) as run:
        got = await asyncio.gather(*(streamed(run) for _ in range(60)))
        assert sum(b"timeouts.total_s" in answer for answer in got) == 30
        assert await cut_off(run) == 0


async def test_a_limit_of_ours_before_the_first_byte_does_not_cut_its_replica_off() -> None:
    one, two = FakeReplica([hangs(asyncio.Event())]), FakeReplica()
    async with one, two, running(one, two, timeouts={"total_s": 3}, **TURNS) as run:
        codes = await asyncio.gather(*(run.post() for _ in range(20)))
        assert sorted(code for code, _, _ in codes) == [200] * 10 + [504] * 10
        assert len(one.requests) == 10
        assert await cut_off(run) == 0


@pytest.mark.parametrize("working", [True, False])
async def test_a_replica_that_is_silent_while_it_answers_others_is_not_cut_off(working: bool) -> None:
    over = asyncio.Event()

    async def works(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while not over.is_set():
            writer.write(chunk(event("a")))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    one = FakeReplica([if_(poisoned, hangs(asyncio.Event()), works)])
    async with one, running(one, timeouts={"first_byte_s": 0.3}) as run:
        stream = asyncio.create_task(streamed(run)) if working else None
        codes = await asyncio.gather(*(run.post(chat("POISON")) for _ in range(20)))
        assert {code for code, _, _ in codes} == {504}
        assert await cut_off(run) == (0 if working else 1)
        over.set()
        if stream:
            await stream


async def test_what_failed_after_a_limit_of_ours_has_nobody_to_be_compared_with() -> None:
    one, two = FakeReplica([hangs(asyncio.Event())]), FakeReplica([status(500)])
    async with one, two, running(one, two, timeouts={"total_s": 1}, **TURNS) as run:
        codes = await asyncio.gather(*(run.post() for _ in range(12)))
        assert {code for code, _, _ in codes} == {504}, "the limit is for all attempts together"
        assert (len(one.requests), len(two.requests)) == (12, 6)
        assert await cut_off(run) == 0


@uncompiled
async def test_the_second_attempt_has_the_rest_of_the_first_ones_time() -> None:
    """The first one takes all of it, by the gateway's clock; the second one would wait for ever."""
    ahead, late = 0.0, list[str]()

    async def late_then_silent(name: str, _request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal ahead
        if late and name not in late:
            await asyncio.Event().wait()
        late.append(name)
        ahead = 400.0
        dies_now(writer)

    async with FakeReplica([partial(late_then_silent, "one")]) as one, FakeReplica([partial(late_then_silent, "two")]) as two:
        around = Surroundings(clock=lambda: time.monotonic() + ahead)
        gateway = compose(config_over(one, two, timeouts={"total_s": 300}, **TURNS), LOGGED, around)
        async with gateway.background(), asyncio.timeout(40):
            reply = await gateway.lifecycle.serve(BytesRequest(orjson.dumps(BODY), CHAT))
        assert isinstance(reply, BytesReply)
        assert reply.status == 504
        assert b"timeouts.total_s" in reply.body


@uncompiled
@pytest.mark.parametrize(("took_s", "sent"), [(60.0, 1), (0.0, 2)])
async def test_the_late_504_of_a_proxy_is_not_computed_again(took_s: float, sent: int) -> None:
    """An early one means that it cannot reach its replica. took_s: by the gateway's clock."""
    ahead, asked = 0.0, 0

    async def answer(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal ahead, asked
        asked += 1
        ahead += took_s
        writer.write(http(504, b"upstream request timeout"))

    async with FakeReplica([answer]) as one, FakeReplica([answer]) as two:
        around = Surroundings(clock=lambda: time.monotonic() + ahead)
        gateway = compose(config_over(one, two, **TURNS), LOGGED, around)
        async with gateway.background(), asyncio.timeout(40):
            reply = await gateway.lifecycle.serve(BytesRequest(orjson.dumps(BODY), CHAT))
        assert isinstance(reply, BytesReply)
        assert (reply.status, asked) == (504, sent)


async def test_a_call_that_is_repeated_on_a_fresh_connection_has_the_rest_of_its_time() -> None:
    async def late(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        dies_now(writer)

    async with (
        FakeReplica([answers(), late, hangs(asyncio.Event())]) as replica,
        running(replica, timeouts={"total_s": 600}) as run,
    ):
        assert (await run.post())[0] == 200
        second = asyncio.create_task(run.post())
        await eventually(lambda: len(replica.requests) == 3)
        (connection,) = run.gateway.upstream._upstreams[replica.url].pool.running
        assert connection._limits.left_s < 600 - 0.1
        second.cancel()
        await asyncio.wait([second])


# -- what nobody else was asked


@pytest.mark.parametrize("good", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/files"])
@gate("/v1/responses-False", "/v1/files-True", reason="each path, each kind")
async def test_a_client_whose_requests_fail_everywhere_cuts_off_one_replica_at_most(path: str, good: bool) -> None:
    """They may be sent once only, so that no second replica is asked."""
    fleet = [FakeReplica([if_(poisoned, status(500))]) for _ in range(4)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], running(*fleet, **TURNS) as run:
        for number in range(80):
            assert (await run.post({"model": "m", "input": "POISON"}, path))[0] == 500
            if good and number % 5 == 0:
                assert (await run.post({"model": "m", "input": "fine"}, path))[0] == 200
            assert await cut_off(run) <= 1
        assert min(len(replica.requests) for replica in fleet) >= 20


async def test_a_client_whose_streams_break_off_everywhere_is_recognised_by_it() -> None:
    """Each begins well, which shows nothing: at each replica the next one has begun before another replica breaks off."""
    holds: deque[asyncio.Event] = deque()

    async def breaks_off(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        holds.append(asyncio.Event())
        await streams("a", hold=holds[-1], die=True)(request, writer)

    async with FakeReplica([breaks_off]) as one, FakeReplica([breaks_off]) as two, running(one, two, **TURNS) as run:
        begun: deque[aiohttp.ClientResponse] = deque()
        for number in range(60):
            begun.append(await run.session.post(run.url + "/v1/chat/completions", json=STREAM))
            if number:
                holds.popleft().set()
                assert b"replica_failed" in await begun.popleft().read()
        holds.popleft().set()
        await begun.popleft().read()
        breakers = sorted(repr(state.breaker) for state in run.gateway.fleet.replicas)
        assert breakers == ["<Breaker closed, 0 of 30 failed>", "<Breaker closed, 1 of 30 failed>"], "only the very first"


@pytest.mark.parametrize("bad", [status(500), dies])
async def test_a_replica_that_fails_with_what_is_sent_once_is_cut_off(bad: Behaviour) -> None:
    """All requests come from one address, and some would fail at any replica."""
    well = if_(poisoned, status(500))
    fleet = [FakeReplica([bad]), FakeReplica([well]), FakeReplica([well])]
    async with fleet[0], fleet[1], fleet[2], running(*fleet, **TURNS) as run:
        asked = 0
        while asked < 200 and not await cut_off(run):
            asked += 1
            await run.post({"model": "m", "input": "POISON" if asked % 10 == 5 else "fine"}, "/v1/responses")
        state = run.gateway.fleet.named(fleet[0].name)
        assert state
        assert state.breaker.state(run.gateway.clock()) != "closed"


async def test_a_request_that_waited_in_line_counts_from_when_it_was_sent() -> None:
    hold = asyncio.Event()
    one = FakeReplica([streams("a", hold=hold), BREAKS_OFF])
    async with one, running(pools=[{"replicas": [one.url], "max_inflight": 1}]) as run:
        state = run.gateway.fleet.named(one.name)
        assert state
        first = asyncio.create_task(streamed(run))
        await eventually(lambda: len(one.requests) == 1)
        second = asyncio.create_task(streamed(run))
        await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
        state.up_since = run.gateway.clock()  # it came up while one waited
        hold.set()
        assert b"replica_failed" in (await asyncio.gather(first, second))[1]
        assert repr(state.breaker) == "<Breaker closed, 1 of 2 failed>"


# -- who is not there any more


@pytest.mark.parametrize("begun", [False, True])
async def test_a_replica_that_has_come_back_is_not_blamed_for_what_it_broke_off_before(begun: bool) -> None:
    """begun: after the first bytes of its answers, which the clients had."""
    hold = asyncio.Event()
    one = FakeReplica([streams("a", hold=hold, die=True) if begun else hangs(hold)])
    async with one, FakeReplica([streams("a")]) as two, running(one, two, **TURNS) as run:
        state = run.gateway.fleet.named(one.name)
        assert state
        got: list[bytes] = []

        async def ask() -> None:
            async with run.session.post(f"{run.url}/v1/chat/completions", json=STREAM) as answer:
                got.append(await answer.content.readany())
                await answer.read()

        asked = [asyncio.create_task(ask()) for _ in range(60)]
        await eventually(lambda: len(one.requests) == 30 and len(got) == (60 if begun else 30))
        state.up_since = run.gateway.clock()
        hold.set()
        await asyncio.gather(*asked)
        assert [
            repr(each.breaker) for each in run.gateway.fleet.replicas if each.breaker.state(run.gateway.clock()) != "closed"
        ] == []


@pytest.mark.parametrize("rests", [False, True])
async def test_a_replica_that_has_left_is_nobodys_trouble(rests: bool) -> None:
    """Its name goes to another address while requests run there; then it breaks them off, or wants to rest."""
    hold = asyncio.Event()

    async def refuses(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await status(503, "busy", "Retry-After: 1")(request, writer)

    former = FakeReplica([refuses if rests else streams("a", hold=hold, die=True)])
    async with former, FakeReplica([streams("a")]) as new, FakeReplica([streams("a")]) as other:

        def at(url: str) -> list[dict[str, Any]]:
            return [{"replicas": [{"name": "a", "url": url}, {"name": "b", "url": other.url}]}]

        async with running(pools=at(former.url), **TURNS) as run:
            fleet, reload = run.gateway.fleet, run.gateway.local.reload
            state = fleet.named("a")
            assert state
            asked = [asyncio.create_task(streamed(run)) for _ in range(50)]
            await eventually(lambda: len(former.requests) == 25)
            if rests:  # its breaker is open already, and nobody will close it
                for _ in range(5):
                    state.breaker.begin(run.gateway.clock()).failure(run.gateway.clock())
            raw = {"listen": "127.0.0.1:0", "health": {"interval_s": 60}, "limits": {"drain_timeout_s": 1}}
            await reload.take(load(None, {"pools": at(new.url), **raw, **TURNS}, env={}))
            assert fleet.named("a") is not state
            hold.set()
            await asyncio.gather(*asked)
            assert state.breaker.state(run.gateway.clock()) != "closed"
            assert state not in fleet._suspects
            assert await cut_off(run) == 0


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_replica_that_hangs_up_at_once_is_passed_over(scheme: str) -> None:
    """As a load balancer does that has nobody behind it. A name's connection is made by a task of its own."""

    async def hangs_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    resolver = Resolver(lambda _host: ["127.0.0.1"])
    async with await asyncio.start_server(hangs_up, "127.0.0.1", 0) as server, FakeReplica() as good:
        bad = f"{scheme}://replica.test:{server.sockets[0].getsockname()[1]}"
        async with running(bad, good, resolver=resolver, **TURNS) as run:
            for _ in range(20):
                assert (await run.post())[0] == 200
        assert len(good.requests) == 20


async def test_a_large_answer_that_breaks_off_counts() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3000000\r\n\r\n{"

    async def breaks_off(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b" " * 2_000_000)
        await writer.drain()
        writer.close()

    async with FakeReplica([breaks_off]) as broken, FakeReplica() as good, running(broken, good, **TURNS) as run:
        asked = 0
        while asked < 100 and not await cut_off(run):
            asked += 1
            with contextlib.suppress(aiohttp.ClientError):
                await run.post()
        assert len(broken.requests) == 20


# -- who is tried


async def test_a_replica_that_has_just_come_up_is_tried_before_a_request_is_given_up() -> None:
    script = [dies, dies, answers()] * 20  # it dies on a kept connection, on a fresh one, and is well again
    one, port = FakeReplica(script), free_port()
    async with one, running(one, f"http://127.0.0.1:{port}", health={"interval_s": 0.02}) as run:
        late = run.gateway.fleet.named(f"127.0.0.1:{port}")
        assert late
        async with FakeReplica(port=port) as back:
            await eventually(lambda: late.up)
            late.up_since = run.gateway.clock()
            codes = [(await run.post(chat(f"{number}")))[0] for number in range(15)]
            assert codes == [200] * 15
            assert back.requests


async def test_a_half_open_breaker_is_not_held_by_one_silent_answer() -> None:
    silent = asyncio.Event()
    bad = [status(500)] * 5
    sick = FakeReplica([*bad, hangs(silent), answers()])
    async with sick, FakeReplica() as good, running(sick, good, **TURNS) as run:
        state = run.gateway.fleet.named(sick.name)
        assert state
        for _ in range(10):
            await run.post()
        assert state.breaker.state(run.gateway.clock()) == "open"
        await eventually(lambda: state.breaker.state(run.gateway.clock()) == "half_open")
        waiting = [asyncio.create_task(run.post()) for _ in range(2)]  # one of them is the probe, and waits
        await eventually(lambda: len(sick.requests) == 6)
        await eventually(lambda: state.breaker.allows(run.gateway.clock()))
        assert {(await run.post())[0] for _ in range(4)} == {200}
        assert state.breaker.state(run.gateway.clock()) == "closed"
        silent.set()
        assert {(await task)[0] for task in waiting} == {200}


# -- what may be sent twice


@pytest.mark.parametrize(
    ("method", "path", "body", "twice"),
    [
        ("PATCH", "/v1/things/1", {}, False),
        ("PUT", "/v1/things/1", {}, True),
        ("DELETE", "/v1/things/1", {}, True),
        ("POST", "/v1/things", {}, False),
        ("POST", "/v1/embeddings", {"input": "x"}, True),
        ("POST", "/v1/responses", {"input": "x"}, True),
        ("POST", "/v1/responses", {"input": "x", "store": True}, True),
        ("POST", "/v1/responses", {"input": "x", "store": False, "background": True}, False),
        ("POST", "/v1/responses?x=1", {"input": "x", "background": True}, False),
        ("POST", "/v1/responses/compact", {"input": "x"}, True),
        ("POST", "/v1/responses/input_tokens", {"input": "x"}, True),
        ("POST", "/v1/responses/resp_1/cancel", {}, False),
        ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("POST", "/v1/other", {"input": "x", "store": True}, False),
        ("POST", "/v1/chat/completions", {**BODY, "store": True}, True),
    ],
)
async def test_what_stores_or_changes_something_is_sent_once(method: str, path: str, body: Any, twice: bool) -> None:
    fleet = [FakeReplica([dies]) for _ in range(3)]
    async with fleet[0], fleet[1], fleet[2], running(*fleet) as run:
        async with run.session.request(method, run.url + path, json={"model": "m", **body}) as answer:
            assert answer.status == 502
        assert sum(len(replica.requests) for replica in fleet) == (3 if twice else 1)


async def test_what_may_be_sent_once_goes_on_where_it_was_not_sent() -> None:
    listing = writes(http(200, b'{"data": [{"id": "m"}]}', "application/json", "Connection: close"))
    gone = FakeReplica(listing=listing, pages={"/metrics": status(404, "no", "Connection: close")})
    async with gone, FakeReplica() as good, running(gone, good, **TURNS) as run:
        await gone.stop()
        codes = [(await run.post({"model": "m", "input": "x", "background": True}, "/v1/responses"))[0] for _ in range(2)]
        assert (codes, len(good.requests)) == ([200, 200], 2)


# -- stale answers


LATE = status(408, "idle for too long", "Connection: close")


async def test_a_408_on_a_kept_connection_is_its_end_and_no_answer() -> None:
    async with FakeReplica([answers("first"), LATE, answers("second")]) as replica, running(replica) as run:
        assert (await run.post())[0] == 200
        code, _, body = await run.post()
        assert (code, body["choices"][0]["message"]["content"]) == (200, "second")
        assert await cut_off(run) == 0


async def test_a_408_on_a_kept_connection_is_no_reason_to_send_again_what_may_be_sent_once() -> None:
    async with FakeReplica([answers(), LATE, answers()]) as replica, running(replica) as run:
        assert (await run.post())[0] == 200
        code, _, body = await run.post({"model": "m", "input": "x", "background": True}, path="/v1/responses")
        assert (code, body["error"]["code"], len(replica.requests)) == (502, "replica_failed", 2)


@pytest.mark.parametrize("more", [[], ["Connection: close"]])
async def test_a_408_that_is_an_answer_goes_to_its_client(more: list[str]) -> None:
    script = [status(408, "too slow", "Connection: close"), answers(), status(408, "too slow")]
    listing = writes(http(200, b'{"data": [{"id": "m"}]}', "application/json", "Connection: close"))
    replica = FakeReplica(script if more else script[1:], listing=listing)
    replica.pages["/metrics"] = status(404, "no", "Connection: close")
    async with replica, running(replica) as run:
        codes = [(await run.post())[0] for _ in range(1 if more else 2)]
        assert codes[-1] == 408


# -- headers of answers


async def test_a_replicas_own_ids_and_ours_are_not_doubled() -> None:
    own = ["X-Request-Id: engine", "X-Warmroute-Replica: spoofed", "x-warmroute-cached-tokens: 9999", "X-WARMROUTE-Else: 1"]
    answer = writes(
        http(200, b'{"choices": [], "usage": null}', "application/json", *own, "X-Vendor: 1", "Server: e", "Date: d")
    )
    async with FakeReplica([answer]) as replica, running(replica) as run:
        _, headers, _ = await run.post(headers={"X-Request-Id": "mine"})
        assert headers.getall("X-Request-Id") == ["mine"]
        assert headers.getall("X-Warmroute-Replica") == [replica.name]
        assert headers.getall("X-Warmroute-Cached-Tokens") == ["0"]
        assert headers.getall("Server") == ["warmroute"]
        assert len(headers.getall("Date")) == 1
        assert headers["X-Vendor"] == "1"
        assert "X-Warmroute-Else" not in headers


# -- a place in line


async def test_a_model_that_goes_while_a_request_waits_keeps_no_place() -> None:
    held = asyncio.Event()
    async with FakeReplica([hangs(held)]) as one:
        pool = {"replicas": [one.url], "models": ["m"], "max_inflight": 1}
        async with running(pools=[pool]) as run:
            admission = run.gateway.fleet.pools[0].admission
            first = asyncio.create_task(run.post())
            await eventually(lambda: one.requests)
            waiting = asyncio.create_task(run.post())
            await eventually(lambda: admission.waiting == 1)
            config = run.gateway.config
            await run.gateway.local.reload.take(replace(config, pools=(replace(config.pools[0], models=("another",)),)))
            held.set()
            assert sorted([(await first)[0], (await waiting)[0]]) == [404, 502]
            assert (admission.inflight, admission.waiting) == (0, 0)


class Dripping:
    """An answer that begins with `start` and goes on byte by byte. looked: bytes that were read of it in all."""

    def __init__(self, start: bytes, size: int) -> None:
        self._data = start
        self._end = len(start) + size
        self.looked = 0

    @property
    def complete(self) -> bool:
        return len(self._data) >= self._end

    def peek(self, start: int = 0) -> bytes:
        data = self._data[start:]
        self.looked += len(data)
        return data

    async def more(self) -> None:
        self._data += b"a"


async def test_each_byte_of_a_dripping_error_is_read_once() -> None:
    start = b'data: {"error":{"message":"'
    attempt, first = Dripping(start, 100_000), first_event(start)
    assert first
    await require_good_begin(attempt, first, attempt.peek())
    assert MAX_FIRST < attempt.looked < MAX_FIRST + 100


@uncompiled
async def test_a_retry_counts_only_if_it_is_made() -> None:
    """The last other replica is drained during the pause before it."""
    bug = status(500, "bug")
    async with FakeReplica([bug]) as one, FakeReplica([bug]) as two, running(one, two, **TURNS) as run:

        class Draining(RetryBudget):
            def take(self) -> bool:
                for replica in (one, two):
                    state = run.gateway.fleet.named(replica.name)
                    assert state
                    if not replica.requests:
                        asyncio.get_running_loop().call_soon(partial(run.gateway.fleet.drain, state, on=True))
                return super().take()

        run.gateway.attempts.budget = Draining()
        assert (await run.post())[0] == 500
        assert len(one.requests) + len(two.requests) == 1
        assert not any("retries_total" in name and value for name, value in (await run.metrics()).items())
