"""GET /warmroute/doctor: a running gateway, asked by an operator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.agents.kinds import KINDS, Kind
from gateway.commands.cli import main
from gateway.features.doctor import causes
from gateway.parser.parsing import OUTLINED_INLINE_BYTES
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, answers
from tests.support.streams import CHATS, stream


async def asked(run: Running) -> dict[str, Any]:
    status, _, raw = await run.get("/warmroute/doctor")
    assert status == 200
    found: dict[str, Any] = json.loads(raw)
    return found


async def send(run: Running, kind: Kind, cause: str = "") -> None:
    for line in stream(kind, cause, conversations=2):
        body = line["body"] | {"stream": False}
        body.pop("stream_options", None)
        status, _, answer = await run.post(body, line["path"], headers=line["headers"])
        assert status == 200, answer


async def test_nothing_is_remembered_until_it_is_asked() -> None:
    async with FakeReplica() as one, running(one) as run:
        await send(run, KINDS[0])
        first = await asked(run)
        assert (first["requests"], first["causes"], first["watches_for_s"]) == (0, [], 600.0)
        await send(run, KINDS[0])
        assert (await asked(run))["requests"] == 12


@pytest.mark.parametrize("kind", CHATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("cause", ["", causes.TIMESTAMP, causes.TOOLS_REORDERED, causes.SALT])
async def test_a_planted_cause_is_found(kind: Kind, cause: str) -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run)
        await send(run, kind, cause)
        found = await asked(run)
        breaks = [each["cause"] for each in found["causes"] if not each["delivery"]]
        assert breaks == ([cause] if cause else [])
        assert found["requests"] == 12
        assert all(not each["text"] for each in found["findings"])


async def test_agents_of_one_session_are_told_apart_by_their_ids() -> None:
    """Twenty at once, each with a history that is a part of their parent's."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"Turn {number}. " + "word " * 500} for number in range(11)]
    claude = {"X-Claude-Code-Session-Id": "s"}
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        await asked(run)
        assert (await run.post({"model": "m", "messages": turns}, headers=claude))[0] == 200
        firsts = [{"role": "user", "content": f"Agent {number}."} for number in range(21)]
        parts = [{"model": "m", "messages": [first, *turns[9:]]} for first in firsts]
        headers = [claude | {"X-Claude-Code-Agent-Id": f"a{number}"} for number in range(20)]
        sent = await asyncio.gather(*(run.post(part, headers=each) for part, each in zip(parts, headers, strict=False)))
        assert {status for status, _, _ in sent} == {200}
        assert (await asked(run))["causes"] == []
        assert (await run.post(parts[20], headers=claude))[0] == 200
        assert [each["cause"] for each in (await asked(run))["causes"]], "without an id it is the session's own history"


async def test_a_conversation_that_a_drained_replica_had_is_not_said_to_be_evicted() -> None:
    text = " ".join(str(number) for number in range(4000))
    script = [answers(prompt=9000, cached=0)]
    async with FakeReplica(script) as one, FakeReplica(script) as two, running(one, two) as run:
        await asked(run)
        for _ in range(2):
            _, headers, _ = await run.post({"model": "m", "messages": [{"role": "user", "content": text}]})
            name = headers["X-Warmroute-Replica"]
            await run.post({"name": name}, "/warmroute/drain")
        found = await asked(run)
        assert [each["cause"] for each in found["causes"]] == [causes.REPLICA_LOST]


async def test_large_bodies_are_outlined_in_the_parser_process() -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run)
        text = "word " * (OUTLINED_INLINE_BYTES // 4)
        for second in range(3):
            system = f"Time: 2026-11-27 04:45:0{second}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            assert (await run.post({"model": "m", "messages": messages}))[0] == 200
        found = await asked(run)
        assert [(each["cause"], each["requests"]) for each in found["causes"] if not each["delivery"]] == [("timestamp", 2)]


async def test_only_operators_may_ask() -> None:
    async with FakeReplica() as one, running(one) as run, run.session.get(run.url + "/warmroute/doctor") as answer:
        assert answer.status == 403


async def test_the_command_asks_a_running_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run)
        await send(run, KINDS[2], causes.NONCE)
        status = await asyncio.to_thread(main, ["doctor", "--live", "--seconds", "0", "--admin", run.admin_url])
        out = capsys.readouterr().out
        assert status == 1
        assert "nonce" in out
        assert "What to change" in out
    assert main(["doctor", "--live", "--admin", "http://127.0.0.1:9"]) == 2


async def test_who_asks_meanwhile_shares_one_examination() -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run)
        await send(run, KINDS[0])
        answers = await asyncio.gather(*(asked(run) for _ in range(5)))
        assert answers[0]["requests"] == 12
        assert all(each == answers[0] for each in answers), "watched_s, too"
