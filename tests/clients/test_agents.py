"""Codex, OpenCode and Claude Code themselves, in whole agent loops through a gateway over four replicas: `make test-clients`.

They run without a network, each in a home and a folder of its own, and really run the commands that they are asked to run
(echo, ls). Skipped where they are not installed (`scripts/clients.sh`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.agent_engine import CALLS, AgentEngine
from tests.gateway.conftest import Running, running
from tests.support.paths import ROOT

AGENTS = Path(os.environ.get("WARMROUTE_CLIENTS", ROOT / ".clients")) / "node_modules" / ".bin"
AUTHORITIES = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # variables with a file of certificates that the agents trust
SESSIONS = 4
LIMIT_S = 240
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


async def run(home: Path, *command: str, said: str = "", **env: str) -> str:
    """Run an agent in a home of its own; returns what it has printed. said: on its standard input."""
    folder = home / "work"
    folder.mkdir(parents=True, exist_ok=True)  # it is there when a session goes on
    (folder / "a-file.txt").write_text("x", encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", *AUTHORITIES) if name in os.environ}
    place = {**kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), **env}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=place,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(said.encode()), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = out.decode("utf-8", "replace")
    assert process.returncode == 0, text
    return text


async def codex(home: Path, url: str, number: int, *more: str, calls: str = "") -> str:
    """more: lines of its provider's configuration. calls: what its message asks for, for a simulated replica."""
    config = home / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    lines = ['model = "m"', 'model_provider = "warm"', "[model_providers.warm]", 'name = "warm"', f'base_url = "{url}/v1"']
    config.write_text("\n".join([*lines, *more, 'wire_api = "responses"', 'env_key = "X_KEY"\n']), encoding="utf-8")
    options = "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"
    return await run(home, str(AGENTS / "codex"), "exec", *options, f"list the files, number {number}{calls}", X_KEY="k")


async def opencode(home: Path, url: str, number: int, provider: str, calls: str = "") -> str:
    """calls: as above; on its standard input, for it puts what is on its command line between quotes."""
    config = home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    options = {"options": {"baseURL": f"{url}/v1", "apiKey": "k"}, "models": {"m": {"name": "m"}}}
    providers = {"warm": {"npm": "@ai-sdk/openai-compatible", **options}, "anthropic": options}
    model = f"{provider}/m"
    quiet = {"autoupdate": False, "share": "disabled", "model": model, "small_model": model}
    config.write_text(json.dumps({**quiet, "provider": providers}), encoding="utf-8")
    return await run(home, str(AGENTS / "opencode"), "run", "-m", model, f"list the files, number {number}", said=calls)


async def claude_code(home: Path, url: str, number: int, calls: str = "", *more: str) -> str:
    """Asks for models of its own, which are aliases; it is told of no other address, and of a proxy that is not there.

    more: options.
    """
    here = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k", "NO_PROXY": "127.0.0.1"}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    message = f"list the files, number {number}{calls}"
    return await run(home, str(AGENTS / "claude"), "-p", message, "--allowedTools", "Bash", *more, **here, **quiet)


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


@pytest.mark.timeout(900)
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


FULL: Final = {
    "vllm": "This model's maximum context length is 9000 tokens. However, your prompt contains at least 9001 input tokens",
    "ollama": "prompt too long; exceeded max context length by 904 tokens",  # no agent knows these words
}


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(300)
async def test_claude_code_gives_a_wrong_key_up_at_once(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """It repeats a plain 401 ten times, over minutes."""
    async with AgentEngine() as engine, running(engine, keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"}, **CONFIG) as gateway:
        with pytest.raises(AssertionError):  # its status is not 0
            await claude_code(tmp_path, gateway.url, 1)
        assert [line["status"] for line in request_lines()] == [401]
