"""Codex, OpenCode and Claude Code themselves through nginx, as docs/proxies.md configures it, over two gateways.

Over TLS, by the header that each sends without being asked: `make test-clients`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.clients.agent_engine import CALLS, AgentEngine
from tests.clients.programs import AGENTS, AUTHORITIES
from tests.clients.test_agents import ALL_AGENTS, CONFIG
from tests.deploy.fronts.stage import front, gateways_of

SESSIONS = 6

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not AGENTS.is_dir(), reason="needs scripts/clients.sh")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", ALL_AGENTS)
async def test_every_session_of_an_agent_reaches_one_gateway(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, header, path = ALL_AGENTS[agent]
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(AgentEngine()) for _ in range(2)]
        gateways = await stack.enter_async_context(gateways_of(tmp_path, [one.url for one in engines], 2, **CONFIG))
        named, tls = await stack.enter_async_context(front("nginx", gateways.ports, tmp_path))
        url = named.replace("localhost", "127.0.0.1")  # the address that Claude Code is to reach without its proxy
        for name in AUTHORITIES:
            monkeypatch.setenv(name, str(tls.chain))
        for first in range(0, SESSIONS, 2):  # two at a time
            await asyncio.gather(*(begin(tmp_path / str(number), url, number) for number in (first, first + 1)))
        asked = [one for engine in engines for one in engine.requests if one.path.partition("?")[0] == path]
        lines = await asyncio.to_thread(gateways.where, [one.headers["x-request-id"] for one in asked])
    places = defaultdict[str, list[int]](list)
    for one in asked:
        places[one.headers[header]].append(lines[one.headers["x-request-id"]][0])
    assert len(places) == SESSIONS
    for session, where in places.items():
        assert len(where) > CALLS
        assert len(set(where)) == 1, (session, where)
