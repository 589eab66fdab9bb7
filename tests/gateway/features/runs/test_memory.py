"""What clients ask of the store and of runs is charged to the memory budget; without room it is refused, and given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.admission.memory import SHARE, Budget
from gateway.features.runs.runs import Runs
from tests.gateway.conftest import eventually, running
from tests.gateway.features.responses.test_recall import answer_of, ask, kept_in, replica
from tests.gateway.features.responses.test_references import reference
from tests.gateway.features.runs.test_runs import Slow, begin, ended
from tests.support.fakes import FakeReplica, FakeRequest, http, models

FREE = 1 << 20
FULL = "as many bytes of requests as it may"


@contextlib.contextmanager
def crowded(budget: Budget, free: int = FREE) -> Iterator[None]:
    """Others hold all of it but so many bytes."""
    leases = []
    while (left := budget.limit - budget.held) > free:
        leases.append(lease := budget.lease(f"other {len(leases)}"))
        assert lease.grow(min(left - free, left * SHARE // (1 + SHARE)))
    try:
        yield
    finally:
        for each in leases:
            each.close()


async def test_a_list_of_a_long_history(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = await ask(run, "x" * (FREE // 4))
        with crowded(run.gateway.served.memory), pytest.raises(openai.InternalServerError, match=FULL):
            await run.client.responses.input_items.list(made.id)
        assert len((await run.client.responses.input_items.list(made.id)).data) == 1
        await eventually(lambda: run.gateway.served.memory.held == 0)


async def test_references_to_items_of_large_responses(tmp_path: Path) -> None:
    """All of the response is read for them, however short the item is."""
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = await ask(run, [{"role": "user", "content": text} for text in ("short", "x" * FREE)])
        items = (await run.client.responses.input_items.list(made.id, order="asc")).data
        asked: Any = [reference(items[0].id or "")]
        with crowded(run.gateway.served.memory), pytest.raises(openai.InternalServerError, match=FULL):
            await ask(run, asked)
        await ask(run, asked)
        await eventually(lambda: run.gateway.served.memory.held == 0)


async def test_a_replay_of_a_large_response(tmp_path: Path) -> None:
    async def long(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        answer = answer_of(request.json, "resp_x")
        answer["output"][0]["content"][0]["text"] = "x" * (FREE // 4)
        writer.write(http(200, json.dumps(answer).encode()))

    async with FakeReplica([long], listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        made = await ended(run, (await begin(run)).id)
        run.gateway[Runs].logs.forget(run.gateway[Runs].logs.keys()[0])
        with crowded(run.gateway.served.memory), pytest.raises(openai.APIError, match=FULL):
            async for _ in await run.client.responses.retrieve(made.id, stream=True):
                pass
        seen = [event async for event in await run.client.responses.retrieve(made.id, stream=True)]
        assert seen[-1].type == "response.completed"
        await eventually(lambda: run.gateway.served.memory.held == 0)


async def test_a_follower_whose_runs_events_cannot_be_held(tmp_path: Path) -> None:
    """The run is not held back; its stream says what is missing, and the response is there."""
    slow = Slow(text="x" * (64 << 10))
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        stream = await begin(run, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        logs = run.gateway[Runs].logs
        [key] = logs.keys()
        with crowded(run.gateway.served.memory, 100):
            slow.go.set()
            with pytest.raises(openai.APIError, match="its next events have been dropped"):
                async for _ in stream:
                    pass
        await eventually(lambda: (log := logs.find(key)) is None or log.ended)  # its stream cannot be asked for until then
        done = await run.client.responses.retrieve(key[1])
        assert (done.status, done.output_text) == ("completed", "to a")
        logs.check()
