"""What the log says of a request: its sender, its failed attempts as they happen, and a level that tells whose fault it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gateway.request.record import MAX_CHARS, bounded
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import BODY, eventually, running
from tests.gateway.request.test_pulses import once
from tests.support.fakes import FakeReplica, answers, dies, status, streams

Lines = Callable[[], list[dict[str, Any]]]
SESSION = "0d6b6a52-4f0e-4c1f-8d4d-1d2b3c4d5e6f"
CLAUDE = {"User-Agent": "claude-cli/2.1.331 (external, cli)", "X-Claude-Code-Session-Id": SESSION}


def who(line: dict[str, Any]) -> tuple[Any, ...]:
    return line.get("session"), line.get("client"), line.get("user_agent")


async def test_a_line_has_the_session_the_address_and_the_user_agent(request_lines: Lines) -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await run.post(headers=CLAUDE)
        await run.post({**BODY, "prompt_cache_key": "by the body"}, headers={"User-Agent": "x"})
        await run.post(b"{", headers=CLAUDE)
    assert who(request_lines()[0]) == (SESSION, "127.0.0.1", CLAUDE["User-Agent"])
    assert who(request_lines()[1]) == ("by the body", "127.0.0.1", "x")
    assert who(request_lines()[2]) == (None, "127.0.0.1", CLAUDE["User-Agent"]), "its body was never read as one"


async def test_a_line_has_the_agent_and_its_parent(request_lines: Lines) -> None:
    agent = {"X-Claude-Code-Agent-Id": "a-2", "X-Claude-Code-Parent-Agent-Id": "a-1"}
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await run.post(headers={**CLAUDE, **agent})
        await run.post(headers=CLAUDE)
    assert [(line.get("agent"), line.get("parent")) for line in request_lines()] == [("a-2", "a-1"), (None, None)]


async def test_one_key_leaves_clients_out_from_the_next_request_on(request_lines: Lines) -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await run.post(headers=CLAUDE)
        await reload(run, replica, log_clients=False)
        await run.post(headers=CLAUDE)
    assert who(request_lines()[0]) == (SESSION, "127.0.0.1", CLAUDE["User-Agent"])
    assert who(request_lines()[1]) == (SESSION, None, None)


@pytest.mark.parametrize(
    ("sent", "logged"),
    [
        ("a" * 8000, "a" * MAX_CHARS),
        ("caf\u00e9 \u202e evil", "caf? ? evil"),
        ("\x1b[31mred\x07", "?[31mred?"),
        ("two\nlines\x00", "two?lines?"),
        ("\ud800", "?"),
        ("plain", "plain"),
    ],
)
def test_texts_of_clients_are_bounded_and_harmless(sent: str, logged: str) -> None:
    assert bounded(sent) == logged


async def test_a_session_in_a_body_may_have_any_character(request_lines: Lines) -> None:
    """A header cannot have control characters, the JSON of a body can."""
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await run.post({**BODY, "prompt_cache_key": "\x1b]0;owned\x07" + "x" * 5000}, headers={"User-Agent": "y" * 8000})
    (line,) = request_lines()
    assert line["session"] == "?]0;owned?" + "x" * (MAX_CHARS - 10)
    assert line["user_agent"] == "y" * MAX_CHARS


async def test_a_failed_attempt_is_logged_before_the_request_has_ended(
    request_lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    script, asked = [dies, dies, once(go, streams("hello"))], list[Any]()  # a used connection is replaced once
    async with FakeReplica(script, requests=asked) as one, FakeReplica(script, requests=asked) as two, running(one, two) as run:
        task = asyncio.create_task(
            run.session.post(
                run.url + "/v1/chat/completions", json={**BODY, "stream": True}, headers={"X-Request-Id": "r-1"}
            ).__aenter__()
        )
        await eventually(lambda: len(asked) == 3)
        assert not request_lines()
        (record,) = [record for record in caplog.records if record.getMessage() == "an attempt failed"]
        about = vars(record)
        assert (record.levelno, about["id"], about["attempt"], about["reason"]) == (logging.WARNING, "r-1", 1, "reset")
        assert about["replica"] in (one.name, two.name)
        assert about["error"]
        go.set()
        await (await task).read()
    (line,) = request_lines()
    assert (line["status"], line["level"], len(line["failed_attempts"])) == (200, "info", 1)


async def test_a_refusal_by_a_replica_is_an_attempt_too(request_lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica([status(503)]) as one, FakeReplica([status(503)]) as two, running(one, two) as run:
        assert (await run.post())[0] == 503
    found = [vars(record) for record in caplog.records if record.getMessage() == "an attempt failed"]
    assert [(each["attempt"], each["reason"]) for each in found] == [(1, "status"), (2, "status")]
    assert request_lines()[0]["level"] == "warning"


async def test_the_level_of_a_line_tells_whose_fault_it_is(request_lines: Lines) -> None:
    """A client's error is info; what an operator can change, a queue that is full or too slow, is a warning."""
    held = asyncio.Event()
    async with FakeReplica([once(held, answers())]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "max_queue": 1, "queue_s": 60}]
        async with running(replica, pools=pools, limits={"keepalive_s": 0, "drain_timeout_s": 1}) as run:
            pool = run.gateway.fleet.target("m").admission
            assert (await run.post({**BODY, "model": "unknown"}))[0] == 404
            assert (await run.post(b"{"))[0] == 400
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            pool.resize(max_inflight=1, max_queue=1, queue_s=0)
            assert (await run.post())[0] == 429
            pool.resize(max_inflight=1, max_queue=0, queue_s=60)
            assert (await run.post())[0] == 429
            held.set()
            await first
    found = [(line["status"], line.get("code"), line["level"]) for line in request_lines()]
    assert found == [
        (404, "model_not_found", "info"),
        (400, "invalid_json", "info"),
        (429, "queue_timeout", "warning"),
        (429, "overloaded", "warning"),
        (200, None, "info"),
    ]


async def test_the_code_of_an_answer_that_broke_off(request_lines: Lines) -> None:
    body = {**BODY, "stream": True}
    async with (
        FakeReplica([streams("hello", die=True)]) as replica,
        running(replica) as run,
        run.session.post(run.url + "/v1/chat/completions", json=body) as answer,
    ):
        await answer.read()
    (line,) = request_lines()
    assert (line["status"], line["code"], line["level"]) == (200, "replica_failed", "warning")
