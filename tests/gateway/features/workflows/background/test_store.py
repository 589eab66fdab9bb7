"""The store of background runs, on SQLite and Postgres: conditions of each write, adoption, sizes, new tables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from gateway.database.database import Database
from gateway.features.histories.records import StoreFullError
from gateway.features.histories.sizes import OWNER_SHARE, StoredSizes
from gateway.features.histories.tables import TABLES, sizes
from gateway.features.workflows.background.store import ALIVE_S, KEY_S, IdempotencyMismatchError, WorkflowRunStore
from gateway.features.workflows.background.stored_run import (
    CALLED,
    CONNECTED,
    FAILED,
    IdempotentRequest,
    StepRow,
    StoredRun,
    order_of,
    row_of,
    step_of,
    stored_run,
)
from gateway.features.workflows.background.tables import workflow_keys, workflow_runs, workflow_steps
from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, StepFailure
from gateway.features.workflows.running.recorded import RecordedStep, RunProgress
from gateway.features.workflows.running.run_order import RunOrder
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response
from tests.support.workflows import workflow_of

NO_KEY = IdempotentRequest("", "")
KEY = ("o", "run_1")
STEP = StepRow("a", CONNECTED, b"1")


@contextlib.asynccontextmanager
async def store_at(url: str, clock: Clock, max_bytes: int = 0) -> AsyncIterator[WorkflowRunStore]:
    database = Database(url, TABLES)
    await database.open()
    try:
        yield WorkflowRunStore(database, StoredSizes(max_bytes), TTL_S, clock)
    finally:
        await database.close()


def new_run(id_: str = "run_1", owner: str = "o", size: int = 100) -> StoredRun:
    return StoredRun(
        owner=owner, id=id_, workflow="w", digest="d", tenant="t", key_id="k", created_at=1.0, document=b"x" * size, spec=b"{}"
    )


async def counted(store: WorkflowRunStore) -> tuple[int, int, int, int]:
    """Rows of the three tables, and the bytes of all owners."""

    def work(connection: Connection) -> Any:
        tables = (workflow_runs, workflow_steps, workflow_keys)
        counts = [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]
        return (*counts, int(connection.execute(select(func.coalesce(func.sum(sizes.c.size), 0))).scalar_one()))

    found: tuple[int, int, int, int] = await store._database.read(work)
    return found


async def test_only_the_runner_writes_and_only_until_the_end(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as store:
        await store.begin(new_run(), "one", NO_KEY)
        progress = RunProgress(7, {"calls": 1})
        assert not await store.record(KEY, "two", 0, STEP, progress)
        assert await store.record(KEY, "one", 0, STEP, progress)
        assert await store.record(KEY, "one", 0, STEP, progress), "a write whose commit was in doubt"
        found = await store.get(*KEY)
        assert found is not None
        assert (found.status, found.sequence, found.receipt) == ("running", 7, b'{"calls":1}')
        assert not await store.finish(KEY, "two", "completed", b"{}", 9)
        assert await store.finish(KEY, "one", "completed", b"{}", 9)
        before = await counted(store)
        assert await store.finish(KEY, "one", "completed", b"{}", 9), "a write whose commit was in doubt"
        assert await counted(store) == before
        assert not await store.record(KEY, "one", 1, StepRow("b", CONNECTED, b"1"), None)
        assert not await store.finish(KEY, "one", "failed", b"{}", 9)
        await store.ask_cancel(*KEY)
        assert [row.name for row in await store.steps(KEY)] == ["a"]
        assert await store.running_of("one") == {}
        assert await store.running_among([KEY]) == set()


async def test_an_abandoned_run_is_adopted_once_and_its_old_runner_writes_nothing_more(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as store:
        await store.begin(new_run(), "one", NO_KEY)
        await store.begin(new_run("run_2"), "one", NO_KEY)
        clock.now += ALIVE_S - 1
        assert await store.abandoned(10) == []
        await store.renew("one", [("o", "run_2")])
        clock.now += 1
        (found,) = await store.abandoned(10)
        assert found.id == "run_1"
        adopted = await asyncio.gather(*(store.adopt(found, f"runner {at}") for at in range(5)))
        assert sorted(adopted) == [False] * 4 + [True]
        again = await store.get(*KEY)
        assert again is not None
        assert (again.adoptions, again.runner) == (1, f"runner {adopted.index(True)}")
        assert not await store.record(KEY, "one", 0, STEP, None)
        assert not await store.finish(KEY, "one", "failed", b"{}", 1)
        assert await store.steps(KEY) == []


async def test_a_released_run_is_adopted_at_once_and_not_counted(url: str) -> None:
    async with store_at(url, Clock()) as store:
        await store.begin(new_run(), "one", NO_KEY)
        await store.renew("one", [KEY], released=True)
        (found,) = await store.abandoned(10)
        assert await store.adopt(found, "two")
        assert not await store.adopt(found, "three")
        again = await store.get(*KEY)
        assert again is not None
        assert (again.adoptions, again.runner) == (0, "two")


async def test_the_outcome_of_a_called_connector_replaces_its_mark(url: str) -> None:
    async with store_at(url, Clock()) as store:
        await store.begin(new_run(), "one", NO_KEY)
        for at, name in enumerate("ba"):
            await store.record(KEY, "one", at, StepRow(name, CALLED), None)
        await store.record(KEY, "one", 2, StepRow("b", CONNECTED, b"null"), None)
        rows = [(row.name, row.status, row.position) for row in await store.steps(KEY)]
        assert rows == [("a", CALLED, 1), ("b", CONNECTED, 2)]


async def test_every_byte_is_counted_for_its_owner_and_freed(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as store:
        for id_ in ("run_1", "run_2"):
            await store.begin(new_run(id_), "one", IdempotentRequest(f"key {id_}", "d"))
            await store.record(("o", id_), "one", 0, STEP, RunProgress(1, {}))
            assert await store.finish(("o", id_), "one", "completed", b"x" * 50, 9)
        before = await counted(store)
        assert before[:3] == (2, 2, 2)
        assert before[3] > 2 * (100 + 50)
        assert await store.delete(*KEY)
        assert await store.delete(*KEY), "idempotent"
        assert not await store.delete("other", "run_2")
        assert await counted(store) == (2, 1, 1, before[3] // 2)
        clock.now += max(TTL_S, KEY_S) + 1
        assert await store.purge() == 2
        assert await store.purge() == 0
        assert await counted(store) == (0, 0, 0, 0)


async def test_a_full_store_refuses_runs_and_records(url: str) -> None:
    async with store_at(url, Clock(), 40_000) as store:
        with pytest.raises(StoreFullError):
            await store.begin(new_run(size=20_000), "one", NO_KEY)
        await store.begin(new_run(), "one", NO_KEY)
        with pytest.raises(StoreFullError):
            await store.record(KEY, "one", 0, StepRow("a", CONNECTED, b"x" * (40_000 // OWNER_SHARE)), None)
        assert await store.steps(KEY) == []


async def test_a_key_of_idempotency_is_one_run_also_for_two_gateways_at_once(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as one, store_at(url, clock) as two:
        request = IdempotentRequest("k", "d")
        begun = [store.begin(new_run(f"run_{at}"), "r", request) for at, store in enumerate([one, two] * 4)]
        assert len(set(await asyncio.gather(*begun))) == 1
        assert (await counted(one))[0] == 1
        with pytest.raises(IdempotencyMismatchError):
            await two.begin(new_run("run_8"), "r", IdempotentRequest("k", "other"))
        assert await two.begin(new_run("run_9", owner="other"), "r", request) == "run_9"


async def test_the_tables_are_added_to_a_store_that_has_none(url: str) -> None:
    async with opened(url) as state:
        await state.put(response("r"))

        def drop(connection: Connection) -> None:
            for table in (workflow_runs, workflow_steps, workflow_keys):
                table.drop(connection)

        await state.database.write(drop)
    async with store_at(url, Clock()) as store:
        await store.begin(new_run(), "one", NO_KEY)
    async with opened(url) as state:
        assert (await state.get("o", "r")).id == "r"


def test_runs_and_steps_are_the_same_after_they_were_stored() -> None:
    workflow = workflow_of({"a": {"chat": {"from": "${inputs.messages}"}, "yield": "a"}})
    plan = plan_of(workflow, RunAllowance(256, 65_536, 1024))
    inputs = {"messages": [{"role": "user", "content": "é"}]}
    order = RunOrder(workflow, plan, inputs, 1024, 600.0, 0.5, 3, True, True, "", True, {"mine": 1})
    found = order_of(stored_run(KEY, order, 5, ("acme", "k1")))
    assert found.workflow.source == workflow.source
    assert (found.inputs, found.seconds, found.cost_usd, found.version) == (inputs, 600.0, 0.5, 3)
    assert (found.defined, found.see_replicas, found.metadata, found.plan) == (True, True, {"mine": 1}, plan)
    answer = ModelAnswer("t", {"role": "assistant", "content": "t"}, [{"id": "1"}], "length")
    for step in (
        RecordedStep("a", answer, CallUsage(1, 2, 3, 0.5, "r", False)),
        RecordedStep("b[1]", {"x": [None]}),
        RecordedStep("c", None),
    ):
        assert step_of(row_of(step)) == step
    failure = StepFailure("step_failed", "m", 503, repeat=True, waits=True, retry_after_s=2.0, cause="c")
    row = row_of(RecordedStep("d", failure))
    assert (row.status, step_of(row).outcome) == (FAILED, StepFailure("step_failed", "m", 503, retry_after_s=2.0, cause="c"))
