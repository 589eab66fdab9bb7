"""Codex, OpenCode and Claude Code themselves, in whole agent loops through a gateway over four replicas: `make test-clients`.

They really run the commands that they are asked to run (echo, ls). Skipped where they are not installed (`scripts/clients.sh`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.agent_engine import CALLS, AgentEngine
from tests.clients.programs import AGENTS, claude_code, codex, opencode
from tests.gateway.conftest import Running, running

SESSIONS = 4
CONFIG: Final[Mapping[str, Any]] = {"prices": {"m": {"input": 1.0, "output": 2.0}}, "model_aliases": {"claude-*": "m"}}

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not AGENTS.is_dir(), reason="needs scripts/clients.sh")]


@contextlib.asynccontextmanager
async def fleet(*paths: str) -> AsyncIterator[tuple[Running, list[AgentEngine]]]:
    """paths: the APIs that the replicas speak; none: all."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [AgentEngine(*paths) for _ in range(4)]
        for engine in engines:
            await stack.enter_async_context(engine)
        yield await stack.enter_async_context(running(*engines, **CONFIG)), engines


def check(engines: list[AgentEngine], lines: list[dict[str, Any]], session_header: str, path: str) -> None:
    """Every session stayed, nothing was an error, and what was cached was metered and paid for."""
    asked = [line for line in lines if line["path"].startswith(path)]
    assert len(asked) >= SESSIONS * (CALLS + 1)
    assert {line["status"] for line in asked} == {200}, Counter(line["status"] for line in asked)
    assert not [line for line in asked if "error" in line]
    places = defaultdict[str, Counter[str]](Counter)
    for engine in engines:
        for request in engine.requests:
            if (
                "tools" in request.json and request.path.partition("?")[0] in engine.paths
            ):  # the one for a title is another prompt
                places[request.headers[session_header]][engine.name] += 1
    assert len(places) == SESSIONS
    assert all(len(where) == 1 for where in places.values()), places
    cached = sum(sum(engine.cached) for engine in engines)
    assert sum(line["cached_tokens_reported"] for line in asked) == cached > 0
    later = [line for line in asked if line["cached_tokens_reported"]]
    assert len(later) >= SESSIONS * CALLS, "all but the first turn of a session at most were computed anew"
    assert all(line["cost_usd"] > 0 and line["saved_usd"] > 0 for line in later)


async def continued(gateway: Running) -> float:
    """How many requests went on with the newest response of their WebSocket: only what is new was sent."""
    return (await gateway.metrics()).get('warmroute_histories_total{result="connection"}', 0.0)


def continuing(agent: str) -> int:
    """Over a WebSocket Codex begins with a response that generates nothing, and every turn goes on with the one before."""
    return SESSIONS * (CALLS + 1) if "websocket" in agent else 0


AGENTS_UNDER_TEST: Mapping[str, tuple[Callable[[Path, str, int], Any], str, str]] = {
    "codex, responses": (codex, "session-id", "/v1/responses"),
    "opencode, chat": (lambda home, url, number: opencode(home, url, number, "warm"), "x-session-id", "/v1/chat/completions"),
    "opencode, messages": (lambda home, url, number: opencode(home, url, number, "anthropic"), "x-session-id", "/v1/messages"),
}


# What is sent over a WebSocket depends on what has come back over it; and Claude Code's prompt is not ours to publish.
NOT_RECORDED: Final = {
    "codex, websocket": (
        lambda home, url, number: codex(home, url, number, "supports_websockets = true"),
        "session-id",
        "/v1/responses",
    ),
    "claude code, messages": (claude_code, "x-claude-code-session-id", "/v1/messages"),
}
ALL_AGENTS: Final = {**AGENTS_UNDER_TEST, **NOT_RECORDED}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("speaks", [(), ("/v1/chat/completions",)], ids=["native", "translated"])
@pytest.mark.parametrize("agent", ALL_AGENTS)
async def test_whole_agent_loops(
    agent: str, speaks: tuple[str, ...], tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    begin, header, path = ALL_AGENTS[agent]
    async with fleet(*speaks) as (gateway, engines):
        for first in range(0, SESSIONS, 2):  # two at a time
            await asyncio.gather(*(begin(tmp_path / str(number), gateway.url, number) for number in (first, first + 1)))
        check(engines, request_lines(), header, path)
        assert await continued(gateway) == continuing(agent)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("agent", ["codex, responses", "opencode, chat", "claude code, messages"])
async def test_turns_whose_streams_have_no_done_are_computed_once(
    agent: str, tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """An agent repeats what it takes for broken."""
    begin, _, _ = ALL_AGENTS[agent]
    async with AgentEngine("/v1/chat/completions") as engine, running(engine, **CONFIG) as gateway:
        engine.done = False
        await begin(tmp_path, gateway.url, 1)
        turns = [one for one in engine.requests if one.path.endswith("completions") and one.json.get("tools")]
        assert len(turns) == CALLS + 1
        assert not [line for line in request_lines() if line["status"] != 200 or "error" in line]


FULL: Final = {
    "vllm": "This model's maximum context length is 9000 tokens. However, your prompt contains at least 9001 input tokens",
    "ollama": "prompt too long; exceeded max context length by 904 tokens",  # no agent knows these words
}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("speaks", [(), ("/v1/chat/completions",)], ids=["native", "translated"])
@pytest.mark.parametrize("words", FULL)
async def test_claude_code_compacts_a_full_context_and_answers_the_turn(
    words: str, speaks: tuple[str, ...], tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with AgentEngine(*speaks) as engine, running(engine, **CONFIG) as gateway:
        await claude_code(tmp_path, gateway.url, 1)
        engine.full = FULL[words]
        said = await claude_code(tmp_path, gateway.url, 2, "", "--continue")
        assert "Done." in said
        statuses = [line["status"] for line in request_lines()]
        assert statuses.count(400) == 1
        assert len(statuses[statuses.index(400) :]) > 2, "the summary, and the turn again"


@pytest.mark.timeout(1300)
async def test_claude_code_gives_a_wrong_key_up_at_once(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """It repeats a plain 401 ten times, over minutes."""
    async with AgentEngine() as engine, running(engine, keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"}, **CONFIG) as gateway:
        with pytest.raises(AssertionError):  # its status is not 0
            await claude_code(tmp_path, gateway.url, 1)
        assert [line["status"] for line in request_lines()] == [401]
