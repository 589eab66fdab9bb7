"""Coding agents over our own replicas, four simulated ones: they call the tools that a message asks for, and report what their
caches really have. The agents themselves in `make test-clients`; what they send, recorded, in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agent_engine import CALLS
from tests.clients.programs import AGENTS, claude_code, codex, opencode
from tests.clients.recordings import load
from tests.clients.sdk.engines import Seen, simulated
from tests.clients.test_agents import (
    AGENTS_UNDER_TEST,
    ALL_AGENTS,
    CONFIG,
    SESSIONS,
    continued,
    continuing,
)
from tests.clients.test_recorded import NAMES, of_session, send
from tests.gateway.conftest import Running, eventually, running

KV_TOKENS = 200_000
Lines = Callable[[], list[dict[str, Any]]]


@contextlib.asynccontextmanager
async def fleet(*, chat_only: bool) -> AsyncIterator[tuple[Running, list[list[Seen]]]]:
    """A gateway over four simulated replicas, and what each of them is asked."""
    async with contextlib.AsyncExitStack() as stack:
        seen: list[list[Seen]] = [[] for _ in range(4)]
        replicas = [simulated(chat_only=chat_only, kv_tokens=KV_TOKENS, seen=one) for one in seen]
        urls = [await stack.enter_async_context(replica) for replica in replicas]
        yield await stack.enter_async_context(running(*urls, **CONFIG)), seen


def check(seen: list[list[Seen]], lines: list[dict[str, Any]], header: str, path: str) -> None:
    """Every session stayed, nothing was an error, and what was cached was metered and priced."""
    asked = [line for line in lines if line["path"].startswith(path)]
    assert len(asked) >= SESSIONS * (CALLS + 1)
    assert {line["status"] for line in asked} == {200}, [line for line in asked if line["status"] != 200]
    assert not [line for line in asked if "error" in line]
    places = defaultdict[str, Counter[int]](Counter)
    for place, requests in enumerate(seen):
        for one in requests:
            if "tools" in one.body:  # the one for a title is another prompt
                places[one.headers[header]][place] += 1
    assert len(places) == SESSIONS
    assert all(len(where) == 1 for where in places.values()), places
    later = [line for line in asked if line["cached_tokens_reported"] >= 0.9 * line["prompt_tokens"]]
    assert len(later) >= SESSIONS * CALLS, "all later turns were cached"
    assert all(line["cost_usd"] > 0 and line["saved_usd"] > 0 for line in later)


def step(shell: str, number: int) -> str:
    """A line that has the simulated engine run a command."""
    command = f"echo step{number}; ls"
    given = {"cmd": command} if shell == "exec_command" else {"command": command, "description": "list"}
    return f"\n<|call|>{shell} {json.dumps(given)}"


Begin = Callable[[Path, str, int], Awaitable[str]]
AGENTS_THEMSELVES: dict[str, Begin] = {
    "codex, responses": lambda home, url, number: codex(home, url, number, calls=steps("exec_command")),
    "codex, websocket": lambda home, url, number: codex(
        home, url, number, "supports_websockets = true", calls=steps("exec_command")
    ),
    "claude code, messages": lambda home, url, number: claude_code(home, url, number, steps("Bash")),
    "opencode, chat": lambda home, url, number: opencode(home, url, number, "warm", steps("bash")),
    "opencode, messages": lambda home, url, number: opencode(home, url, number, "anthropic", steps("bash")),
}


def steps(shell: str) -> str:
    return "".join(step(shell, number) for number in range(CALLS))


@pytest.mark.clients
@pytest.mark.skipif(not AGENTS.is_dir(), reason="needs scripts/clients.sh")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chat_only", [False, True], ids=["native", "translated"])
@pytest.mark.parametrize("agent", AGENTS_THEMSELVES)
async def test_whole_agent_loops(agent: str, chat_only: bool, tmp_path: Path, request_lines: Lines) -> None:
    _, header, path = ALL_AGENTS[agent]
    async with fleet(chat_only=chat_only) as (gateway, seen):
        for first in range(0, SESSIONS, 2):  # two at a time
            begin = AGENTS_THEMSELVES[agent]
            await asyncio.gather(*(begin(tmp_path / str(number), gateway.url, number) for number in (first, first + 1)))
        await eventually(lambda: gateway.gateway.router.ledger.open_leases == 0)
        check(seen, request_lines(), header, path)
        assert await continued(gateway) == continuing(agent)
        ran = [text for one in seen for request in one for text in ("step0", "step1") if ran_in(request.body, text)]
        assert Counter(ran)["step1"] >= SESSIONS, "the agents have run what they were asked to run"


def ran_in(body: Any, text: str) -> bool:
    """Whether a tool's result of this request has the line that the command prints."""
    turns = body.get("messages") or body.get("input")
    results = [one for one in turns if one.get("role") == "tool" or one.get("type") == "function_call_output"]
    for turn in turns:
        content = turn.get("content")
        results += [one for one in content if one.get("type") == "tool_result"] if isinstance(content, list) else []
    return any(text in json.dumps(one) for one in results)


@pytest.mark.parametrize("chat_only", [False, True], ids=["native", "translated"])
@pytest.mark.parametrize("agent", AGENTS_UNDER_TEST)
async def test_recorded_sessions_stay(agent: str, chat_only: bool, request_lines: Lines) -> None:
    _, header, path = AGENTS_UNDER_TEST[agent]
    recorded = load(NAMES[agent])
    async with fleet(chat_only=chat_only) as (run, seen):
        sessions = [of_session(copy.deepcopy(recorded), header) for _ in range(SESSIONS)]
        for turn in zip(*sessions, strict=True):
            for row in turn:
                await send(run, row)
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        check(seen, request_lines(), header, path)
