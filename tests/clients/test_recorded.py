"""What coding agents send, recorded, through a gateway over four replicas: each session stays, and nothing is an error."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.agent_engine import CALLS
from tests.clients.recordings import load
from tests.clients.test_agents import AGENTS_UNDER_TEST, SESSIONS, check, fleet
from tests.gateway.conftest import Running

NAMES = {agent: agent.replace(", ", "-") for agent in AGENTS_UNDER_TEST}


def of_session(recorded: list[dict[str, Any]], header: str) -> list[dict[str, Any]]:
    """The same in another session: another id, and another question."""
    old, new = recorded[-1]["headers"][header], str(uuid.uuid4())
    asked = next(row["body"] for row in recorded if "tools" in row["body"])
    said = [turn["content"] for turn in asked.get("messages") or asked["input"] if turn.get("role") == "user"][-1]
    question = said if isinstance(said, str) else said[-1]["text"]
    rows: list[dict[str, Any]] = json.loads(json.dumps(recorded).replace(old, new).replace(question, f"List the files, {new}."))
    return rows


async def send(run: Running, row: dict[str, Any]) -> None:
    """Codex leaves as soon as it has read `response.completed`."""
    async with run.session.post(run.url + row["path"], json=row["body"], headers=row["headers"]) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"event: response.completed"):
                await answer.content.readline()
                break


@pytest.mark.parametrize("speaks", [(), ("/v1/chat/completions",)], ids=["native", "translated"])
@pytest.mark.parametrize("agent", AGENTS_UNDER_TEST)
async def test_recorded_sessions_stay(
    agent: str, speaks: tuple[str, ...], request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    _, header, path = AGENTS_UNDER_TEST[agent]
    recorded = load(NAMES[agent])
    assert sum("tools" in row["body"] for row in recorded) >= CALLS + 1
    async with fleet(*speaks) as (run, engines):
        sessions = [of_session(copy.deepcopy(recorded), header) for _ in range(SESSIONS)]
        for turn in zip(*sessions, strict=True):  # a turn of each; at the same moment, nearly equal prompts may share a replica
            for row in turn:
                await send(run, row)
        check(engines, request_lines(), header, path)


def test_recordings_have_no_text_of_others() -> None:
    for name in NAMES.values():
        recorded = load(name)
        long = [text for text in texts(recorded) if not (len(text) <= 64 and " " not in text) and text[0] not in "{["]
        assert len(long) > 10
        assert not [text for text in long if text != (text[:17] * (len(text) // 17 + 1))[: len(text)]]


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inner for text in texts(one)]
