"""Real coding agents in a loop of many calls, whole beside delta: each call prints a part of a file."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.prompt_log.clients import TURN_BYTES, text_of
from bench.prompt_log.run import Meter, Run, far_gateway, sidecar, warmed
from bench.prompt_log.tool_engine import agent_engine
from tests.clients.agent_engine import Script
from tests.clients.programs import AGENTS, claude_code, codex, opencode
from tests.clients.watching import Watched, watching

_COMMAND: Final = "cat part{call}.txt"
_LIMIT_S: Final = 3 * 3600.0  # against an agent that hangs; one without a free core needs more than an hour
Agent = Callable[[Path, str], Awaitable[str]]
"""(home, base URL) -> what it has printed."""

CODING_AGENTS: Final[Mapping[str, Agent]] = {
    "Codex, Responses": lambda home, url: codex(home, url, 1, limit_s=_LIMIT_S),
    "Claude Code, Messages": lambda home, url: claude_code(home, url, 1, limit_s=_LIMIT_S),
    "OpenCode, chat": lambda home, url: opencode(home, url, 1, "warm", limit_s=_LIMIT_S),
    "OpenCode, Messages": lambda home, url: opencode(home, url, 1, "anthropic", limit_s=_LIMIT_S),
}
installed = AGENTS.is_dir


async def measured_agent(agent: str, calls: int, bits_s: float, delay_s: float, *, delta: bool) -> Run:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        _write_parts(folder / "home" / "work", calls)
        sent, got = Watched(), Watched()
        engine = await stack.enter_async_context(agent_engine(Script(calls, _COMMAND), got))
        aliases: dict[str, Any] = {"model_aliases": {"claude-*": "m"}}
        far, link = await stack.enter_async_context(far_gateway(folder, engine, bits_s, delay_s, **aliases))
        url, near = link.url, None
        if delta:
            url, near = await stack.enter_async_context(sidecar(link.url))
        url = await stack.enter_async_context(watching(url, sent))
        await warmed(far.url)
        got.conversations.clear()
        got.answers.clear()
        meter = Meter(link, far.pid, near)
        said = await CODING_AGENTS[agent](folder / "home", url)
        faithful = "Done." in said and sent.conversations == got.conversations and sent.answers == got.answers
        return meter.run(len(sent.conversations), sent.conversations, faithful=faithful)


def _write_parts(folder: Path, parts: int) -> None:
    folder.mkdir(parents=True)
    chance = random.Random(parts)
    for part in range(parts):
        (folder / f"part{part}.txt").write_text(text_of(TURN_BYTES, chance), encoding="utf-8")
