"""AI SDK (npm `ai`) with pulses between all events of a stream: it reads what it reads without them. `make test-clients`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.agent_engine import WRITERS, Script
from tests.clients.programs import AGENTS
from tests.gateway.conftest import Running, running
from tests.gateway.features.workflows.test_clients import ALIAS, ANSWER, NAME, served
from tests.gateway.features.workflows.test_runs import CHAT as STEP
from tests.gateway.features.workflows.test_runs import document
from tests.gateway.request.test_pulses import OFTEN, RARELY
from tests.support.fakes import STREAM_HEAD, Behaviour, FakeReplica, FakeRequest, chunk, dies_now, status

NODE_MODULES: Final = AGENTS.parent
SCRIPT: Final = Path(__file__).with_name("ai_sdk.cjs")
KINDS: Final = ("chat", "compatible", "messages", "responses")
REPEATED: Final = (("chat", 429), ("responses", 429), ("chat", 503), ("responses", 503), ("messages", 503))
PAUSE_S: Final = 0.2  # ten times the time between two pulses

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not (NODE_MODULES / "ai").is_dir(), reason="needs scripts/clients.sh")]


def slow_answer(*, dies: bool = False) -> Behaviour:
    """Pauses before the head, and after each event. dies: breaks off in place of the last ones."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        _, events = WRITERS[request.path.partition("?")[0]](request.json, 100, 10, Script(0))
        await asyncio.sleep(PAUSE_S)
        writer.write(STREAM_HEAD)
        for event in events[: len(events) // 2] if dies else events:
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
        if dies:
            return dies_now(writer)
        writer.write(b"0\r\n\r\n")
        return None

    return behave


def late(behaviour: Behaviour) -> Behaviour:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(PAUSE_S)
        await behaviour(request, writer)

    return behave


@contextlib.asynccontextmanager
async def two(replica: FakeReplica, folder: Path) -> AsyncIterator[tuple[Running, Running]]:
    """Gateways with pulses, and without."""
    (folder / "support.yaml").write_text(json.dumps(document({"answer": {**STEP, "yield": "answer"}}, name="support")))
    workflows = {"directory": str(folder)}
    async with (
        replica,
        running(replica, workflows=workflows, **OFTEN) as one,
        running(replica, workflows=workflows, **RARELY) as two,
    ):
        yield one, two


async def read(run: Running, kind: str, model: str = "m") -> list[dict[str, Any]]:
    """The events that AI SDK gives to its caller."""
    command = ["node", str(SCRIPT), str(NODE_MODULES.parent), run.url, kind, model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    events: list[dict[str, Any]] = json.loads(out)
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["m", "workflow:support"])
@pytest.mark.parametrize("kind", KINDS)
async def test_events_are_the_same_with_pulses_and_without(kind: str, model: str, tmp_path: Path, request_lines: Any) -> None:
    async with two(FakeReplica([slow_answer()]), tmp_path) as (pulsed, silent):
        found = await read(pulsed, kind, model)
        assert found == await read(silent, kind, model)
    assert [event["text"] for event in found if event["type"] == "text-delta"] == ["Done."]
    assert types(found)[-1] == "finish"
    assert "error" not in types(found)
    counts = [line.get("pulses", 0) for line in request_lines() if line.get("model") == model]
    assert counts[0] > 0
    assert not any(counts[1:])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["m", "workflow:support"])
@pytest.mark.parametrize("kind", ["chat", "compatible", "messages"])
async def test_an_error_after_the_first_byte_is_the_same(kind: str, model: str, tmp_path: Path) -> None:
    async with two(FakeReplica([slow_answer(dies=True)]), tmp_path) as (pulsed, silent):
        found = await read(pulsed, kind, model)
        assert found == await read(silent, kind, model)
    assert "error" in types(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "code"), REPEATED)
async def test_an_error_after_a_pulse_is_repeated_as_without(kind: str, code: int, tmp_path: Path) -> None:
    replica = FakeReplica([late(status(code)), slow_answer()])
    async with two(replica, tmp_path) as (pulsed, _):
        found = await read(pulsed, kind)
    assert types(found)[-1] == "finish"
    assert len(replica.requests) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [NAME, ALIAS])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_of_three_calls_is_streamed(kind: str, model: str, tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, run):
        found = await read(run, kind, model)
    assert "".join(event["text"] for event in found if event["type"] == "text-delta") == ANSWER
    assert types(found)[-1] == "finish"
    assert "error" not in types(found)
    assert engine.cache.calls == 3
