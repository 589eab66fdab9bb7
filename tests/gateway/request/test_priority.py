"""Priorities of requests go to engines that schedule by them, and to no others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.request.priority import is_priority_refusal
from tests.gateway.conftest import Running, running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, http, models, streams, writes

QUESTION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
VLLM_REFUSAL = {"error": {"message": "Got priority -5 but Priority scheduling is not enabled.", "code": 400}}
SGLANG_REFUSAL = {
    "error": {"message": "Using priority is disabled for this server. Please send a new request without a priority."}
}


def settings(**flags: bool) -> dict[str, Behaviour]:
    return {"/server_info": writes(http(200, json.dumps({"max_total_num_tokens": 4096, **flags}).encode()))}


def engine(owner: str, *script: Behaviour, **flags: bool) -> FakeReplica:
    return FakeReplica(list(script) or [answers()], listing=models("m", owner=owner), pages=settings(**flags))


async def sent(run: Running, replica: FakeReplica, priority: str | None, path: str = "/v1/chat/completions") -> FakeRequest:
    headers = {} if priority is None else {"X-Priority": priority}
    async with run.session.post(run.url + path, json={**QUESTION, "priority": 99}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    return replica.requests[-1]


@pytest.mark.parametrize(
    ("owner", "flags", "values"),
    [
        ("vllm", {}, [-5, 7, None, None]),
        ("sglang", {"enable_priority_scheduling": True}, [5, -7, 0, 0]),
        ("sglang", {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, [-5, 7, 0, 0]),
        ("sglang", {"enable_priority_scheduling": False}, [None] * 4),
        ("warmroute", {}, [None] * 4),
        ("someone", {"enable_priority_scheduling": True}, [None] * 4),
    ],
)
async def test_each_engine_gets_it_in_its_own_order(owner: str, flags: dict[str, bool], values: list[int | None]) -> None:
    async with engine(owner, **flags) as replica, running(replica) as run:
        requests = [await sent(run, replica, value) for value in ("5", "-7", "0", None)]
        assert [request.json.get("priority") for request in requests] == values


async def test_a_client_names_it_in_the_gateways_header_only() -> None:
    async with engine("vllm") as replica, running(replica) as run:
        for headers, expected in (({"X-Vllm-Priority": "-99"}, None), ({"X-Vllm-Priority": "-99", "X-Priority": "5"}, "-5")):
            async with run.session.post(run.url + "/v1/messages", json=QUESTION, headers=headers) as answer:
                await answer.read()
            assert replica.requests[-1].headers.get("x-vllm-priority") == expected


async def test_what_an_operator_lets_through_is_the_clients() -> None:
    flags = {"enable_priority_scheduling": True}
    async with engine("sglang", **flags) as replica, running(replica, routing={"client_fields": ["priority"]}) as run:
        assert [(await sent(run, replica, value)).json["priority"] for value in (None, "5")] == [99, 5]


def refuses(refusal: bytes, answer: Behaviour) -> Behaviour:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if "priority" in request.json:
            writer.write(refusal)
        else:
            await answer(request, writer)

    return behave


@pytest.mark.parametrize(
    ("owner", "refusal"),
    [
        ("vllm", http(400, json.dumps(VLLM_REFUSAL).encode())),
        ("vllm", http(200, b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(VLLM_REFUSAL).encode(), "text/event-stream")),
        ("sglang", http(503, json.dumps(SGLANG_REFUSAL).encode())),
    ],
)
async def test_an_engine_that_refuses_it_gets_none(owner: str, refusal: bytes) -> None:
    flags = {"enable_priority_scheduling": True}
    async with engine(owner, refuses(refusal, streams("a")), **flags) as replica, running(replica) as run:
        for _ in range(2):
            async with run.session.post(
                run.url + "/v1/chat/completions", json={**QUESTION, "stream": True}, headers={"X-Priority": "5"}
            ) as answer:
                assert (answer.status, b"error" in await answer.read()) == (200, False)
        assert ["priority" in each.json for each in replica.requests] == [True, False, False]


async def test_such_words_about_a_clients_own_error_teach_nothing() -> None:
    refusal = writes(http(400, json.dumps(VLLM_REFUSAL).encode()))
    async with engine("vllm", refusal, refusal, answers()) as replica, running(replica) as run:
        for expected in (400, 200):
            async with run.session.post(run.url + "/v1/chat/completions", json=QUESTION, headers={"X-Priority": "5"}) as answer:
                assert answer.status == expected
        assert ["priority" in each.json for each in replica.requests] == [True, False, True]


async def test_an_invalid_one_is_an_error() -> None:
    async with (
        engine("vllm") as replica,
        running(replica) as run,
        run.session.post(run.url + "/v1/chat/completions", json=QUESTION, headers={"X-Priority": "high"}) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_priority")


@pytest.mark.parametrize(
    "begin",
    [
        b'data: {"choices": [{"delta": {"content": "Priority scheduling is not enabled."}}]}\n\n',
        b'{"id": "r", "metadata": {"error": "Priority scheduling is not enabled."}}',
        b'data: {"type": "response.created", "response": {"metadata": {"error": "priority is disabled"}}}\n\n',
    ],
)
def test_an_answer_that_repeats_such_words_is_no_refusal(begin: bytes) -> None:
    assert not is_priority_refusal(begin)
