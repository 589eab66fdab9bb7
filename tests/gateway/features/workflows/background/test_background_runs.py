"""Background runs through a whole gateway: begun, followed, cancelled, deleted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.core import Surroundings
from gateway.database.failures import StoreFailed
from gateway.features.runs.beginning import MAX_OWNED
from gateway.features.runs.event_log import MAX_LOG
from gateway.features.runs.runs import Runs
from gateway.features.workflows.feature import WorkflowEndpoint
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, running, serving_runner
from tests.gateway.features.responses.test_recall import kept_in
from tests.gateway.features.workflows.test_runs import CHAT, ONE, RUNS, TEXT, USER, document
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

BODY = {"workflow": ONE, "inputs": {"messages": [USER]}, "background": True}
TWO = document({"a": {**CHAT, "yield": "a"}, "b": {"chat": {"from": "a", "append": [USER]}, "yield": "b"}})


@asynccontextmanager
async def stored_runs(
    folder: Path, answer: ScriptedAnswer = TEXT, *, holds: bool = False, **config: Any
) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    scripted = ScriptedEngine(lambda _body: answer, holds=holds)
    async with scripted.replica, running(scripted.replica, state=kept_in(folder), **config) as run:
        yield scripted, run


async def asked(run: Running, method: str, path: str = "", **headers: str) -> tuple[int, Any]:
    async with run.session.request(method, f"{run.url}{RUNS}/{path}", headers=headers) as answer:
        return answer.status, await answer.json()


async def events(run: Running, id_: str, after: int | None = None, first: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """All events of its stream after a number, until the stream ends; numbers grow without gaps from `first`."""
    query = "" if after is None else f"&starting_after={after}"
    async with run.session.get(f"{run.url}{RUNS}/{id_}?stream=true{query}") as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
    found = read_events(raw)
    assert [data["seq"] for _, data in found] == [*range(first, first + len(found))]
    return found


def read_events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in raw.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in event.split("\n") if not line.startswith(":"))
        if lines.get("event"):
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def begun(run: Running, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> str:
    got, _, found = await run.post(body or BODY, RUNS, headers=headers)
    assert (got, found["object"], found["status"]) == (202, "workflow.run", "queued"), found
    return str(found["id"])


async def test_it_is_answered_at_once_and_completed_later(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, holds=True) as (scripted, run):
        id_ = await begun(run, {**BODY, "metadata": {"mine": 1}})
        await eventually(lambda: scripted.held)
        got, found = await asked(run, "GET", id_)
        assert (got, found["status"], found["metadata"]) == (200, "running", {"mine": 1})
        following = asyncio.create_task(events(run, id_))
        scripted.release()
        told = await following
        assert [kind for kind, _ in told][0::5] == ["run.created", "run.completed"]
        got, found = await asked(run, "GET", id_)
        last = told[-1][1]
        assert found["outputs"] == last["outputs"] == {"a": "some text"}
        assert [step["request"] for step in found["steps"]] == [f"{id_}.a"]
        assert "steps" not in last
        assert await events(run, id_, 3, first=4) == told[4:]
        assert len(run.gateway[WorkflowEndpoint].api.background) == run.gateway[Runs].places.taken == 0
        metrics = await run.metrics()
    assert metrics['warmroute_workflow_runs_total{status="completed",workflow="inline"}'] == 1


async def test_its_events_are_streamed_from_the_start_if_it_asks_for_both(tmp_path: Path) -> None:
    async with stored_runs(tmp_path) as (_, run), run.session.post(run.url + RUNS, json={**BODY, "stream": True}) as answer:
        told = read_events(await answer.read())
        assert (answer.status, told[0][0], told[-1][0]) == (200, "run.created", "run.completed")
        assert (await asked(run, "GET", told[0][1]["run"]))[1]["status"] == "completed"


async def test_it_goes_on_when_its_client_leaves_and_a_later_gateway_has_it(tmp_path: Path) -> None:
    async with stored_runs(tmp_path) as (scripted, run):
        id_ = await begun(run)
        await events(run, id_)
    async with running(scripted.replica, state=kept_in(tmp_path)) as run:
        found = (await asked(run, "GET", id_))[1]
        assert (found["status"], found["outputs"]) == ("completed", {"a": "some text"})
        ((kind, last),) = await events(run, id_, first=5)
        assert (kind, last["id"], last["outputs"]) == ("run.completed", id_, {"a": "some text"})
        assert "steps" not in last
    assert scripted.cache.calls == 1


async def test_a_running_one_is_cancelled_and_its_replica_left(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True) as (scripted, run):
        id_ = await begun(run)
        await eventually(lambda: scripted.held)
        following = asyncio.create_task(events(run, id_))
        for _ in range(2):
            got, found = await asked(run, "POST", f"{id_}/cancel")
            assert (got, found["status"], found["id"]) == (200, "cancelled", id_)
        assert (await following)[-1][0] == "run.cancelled"
        await eventually(lambda: scripted.cut)
        assert (await asked(run, "GET", id_))[1] == found
        assert run.gateway[Runs].places.taken == 0


async def test_one_that_has_ended_cannot_be_cancelled_any_more(tmp_path: Path) -> None:
    async with stored_runs(tmp_path) as (_, run):
        id_ = await begun(run)
        await events(run, id_)
        got, found = await asked(run, "POST", f"{id_}/cancel")
        assert (got, found["status"]) == (200, "completed")


async def test_a_deleted_one_is_gone_and_deleting_is_idempotent(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True) as (scripted, run):
        id_ = await begun(run)
        await eventually(lambda: scripted.held)
        following = asyncio.create_task(events(run, id_))
        await eventually(lambda: run.gateway[Runs].logs.find(("", id_)).followers)  # type: ignore[union-attr]
        for _ in range(2):
            assert await asked(run, "DELETE", id_) == (200, {"id": id_, "object": "workflow.run", "deleted": True})
        kind, data = (await following)[-1]
        assert (kind, data["error"]["code"]) == ("error", "events_gone")
        await eventually(lambda: scripted.cut)
        await eventually(lambda: run.gateway[Runs].places.taken == 0)
        assert run.gateway.metrics.of(WorkflowsMetrics).runs.values == {("inline", "cancelled"): 1}
        for method, path in (("GET", id_), ("GET", f"{id_}?stream=true"), ("POST", f"{id_}/cancel")):
            got, found = await asked(run, method, path)
            assert (got, found["error"]["code"]) == (404, "run_not_found")
        await eventually(lambda: run.gateway.memory.held == 0)


async def test_one_that_is_deleted_while_it_ends_leaves_the_process(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True) as (scripted, run):
        id_ = await begun(run)
        await eventually(lambda: scripted.held)
        background = run.gateway[WorkflowEndpoint].api.background
        one = background.find(("", id_))
        assert one is not None
        assert await (await background.open()).delete("", id_)
        one.run.cancel()
        await eventually(lambda: run.gateway[Runs].places.taken == len(background) == 0)


async def test_a_deleted_one_is_counted_when_the_store_answers_again(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True) as (scripted, run):
        id_ = await begun(run)
        await eventually(lambda: scripted.held)
        background = run.gateway[WorkflowEndpoint].api.background
        one, store = background.find(("", id_)), await background.open()
        assert one is not None
        assert await store.delete("", id_)
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite", isolation_level=None)) as database:
            database.execute("ALTER TABLE warmroute_workflow_runs RENAME TO away")
            one.release()
            await eventually(lambda: not scripted.held)
            with pytest.raises(StoreFailed):
                await store.get("", id_)
            database.execute("ALTER TABLE away RENAME TO warmroute_workflow_runs")
        await eventually(lambda: run.gateway.metrics.of(WorkflowsMetrics).runs.values == {("inline", "cancelled"): 1})
        await eventually(lambda: run.gateway[Runs].places.taken == len(background) == 0)


async def test_one_that_runs_here_is_shown_while_the_store_does_not_answer(tmp_path: Path) -> None:
    async with stored_runs(tmp_path, holds=True) as (scripted, run):
        id_ = await begun(run)
        await eventually(lambda: scripted.held)
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite", isolation_level=None)) as database:
            database.execute("ALTER TABLE warmroute_workflow_runs RENAME TO away")
            assert (await asked(run, "GET", id_))[1]["status"] == "running"
            assert (await asked(run, "GET", "run_other"))[0] == 503
            database.execute("ALTER TABLE away RENAME TO warmroute_workflow_runs")
        scripted.release()
        assert (await events(run, id_))[-1][0] == "run.completed"


async def test_one_that_no_client_knows_is_deleted_when_the_store_answers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = "BEFORE UPDATE ON warmroute_workflow_runs WHEN NEW.status = 'deleted' BEGIN SELECT RAISE(ABORT, 'no'); END"
    async with stored_runs(tmp_path) as (scripted, run):
        await events(run, await begun(run))
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite", isolation_level=None)) as database:

            def statuses() -> list[str]:
                return [status for (status,) in database.execute("SELECT status FROM warmroute_workflow_runs ORDER BY 1")]

            database.execute(f"CREATE TRIGGER refused {refuse}")
            database.execute("BEGIN IMMEDIATE")  # its row is being written until this ends
            asking = asyncio.create_task(run.post(BODY, RUNS))
            await eventually(lambda: run.gateway[Runs].places.taken == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: run.gateway[Runs].places.taken == 0)
            database.execute("ROLLBACK")
            await eventually(lambda: "cannot be compared with the store" in caplog.text)
            assert statuses() == ["completed", "queued"]
            database.execute("DROP TRIGGER refused")
            await eventually(lambda: statuses() == ["completed", "deleted"])
        assert len(scripted.replica.requests) == 1


async def test_a_request_that_is_repeated_after_a_lost_answer_finds_its_run(tmp_path: Path) -> None:
    scripted, headers, state = ScriptedEngine(lambda _body: TEXT), {"Idempotency-Key": "k"}, kept_in(tmp_path)
    async with scripted.replica:
        async with running(scripted.replica, state=state) as run:
            await events(run, await begun(run))
            with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite", isolation_level=None)) as database:
                database.execute("BEGIN IMMEDIATE")  # its row is being written until this ends
                asking = asyncio.create_task(run.post(BODY, RUNS, headers=headers))
                await eventually(lambda: run.gateway[Runs].places.taken == 1)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await eventually(lambda: run.gateway[Runs].places.taken == 0)
                database.execute("ROLLBACK")
            id_ = (await run.post(BODY, RUNS, headers=headers))[2]["id"]
        async with running(scripted.replica, state=state) as run:  # looks for such runs at once
            background = run.gateway[WorkflowEndpoint].api.background
            await eventually(lambda: scripted.cache.calls == 2 and not len(background))
            found = (await asked(run, "GET", id_))[1]
    assert (found["status"], found["outputs"]) == ("completed", {"a": "some text"})


async def test_runs_of_others_are_not_found(tmp_path: Path) -> None:
    async with stored_runs(tmp_path) as (_, run):
        id_ = await begun(run, headers={"X-Tenant-Id": "acme"})
        for method, path in (("GET", id_), ("GET", f"{id_}?stream=true"), ("POST", f"{id_}/cancel"), ("DELETE", id_)):
            texts = []
            for name in (path, path.replace(id_, "run_unknown")):
                got, found = await asked(run, method, name, **{"X-Tenant-Id": "other"})
                assert (got, found["error"]["code"]) == (404, "run_not_found")
                texts.append(found["error"]["message"])
            assert texts[0] == texts[1]
        assert (await asked(run, "GET", id_, **{"X-Tenant-Id": "acme"}))[0] == 200
        await asked(run, "DELETE", id_, **{"X-Tenant-Id": "acme"})


async def test_a_repeated_request_with_its_key_is_the_same_run_for_a_day(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    now = [1e9]
    async with scripted.replica:
        config = config_over(scripted.replica, state=kept_in(tmp_path))
        one, two = (compose(config, LOGGED, Surroundings(wall_clock=lambda: now[0])) for _ in range(2))
        async with (
            serving_runner(one, clients_runner(one.served)) as run,
            serving_runner(two, clients_runner(two.served)) as other,
        ):
            headers = {"Idempotency-Key": "k"}
            answers = await asyncio.gather(*(each.post(BODY, RUNS, headers=headers) for each in (run, other, run, other)))
            (id_,) = {found["id"] for _, _, found in answers}
            await eventually(lambda: scripted.cache.calls)
            got, _, found = await other.post({**BODY, "metadata": {"other": 1}}, RUNS, headers=headers)
            assert (got, found["error"]["code"]) == (409, "idempotency_mismatch")
            assert await begun(run, headers={"Idempotency-Key": "k2"}) != id_
            now[0] += 86_400
            assert await begun(run, headers=headers) != id_
            await eventually(lambda: not len(run.gateway[WorkflowEndpoint].api.background))
    assert scripted.cache.calls == 3


@pytest.mark.parametrize(
    ("url", "status", "code"), [("off", 400, "state_off"), ("sqlite:////proc/none/x.sqlite", 503, "state_unavailable")]
)
async def test_without_a_store_there_are_none(url: str, status: int, code: str) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    async with scripted.replica, running(scripted.replica, state={"url": url}) as run:
        got, _, found = await run.post(BODY, RUNS)
        assert (got, found["error"]["code"]) == (status, code)
        got, found = await asked(run, "GET", "run_1")
        assert (got, found["error"]["code"]) == ((404, "run_not_found") if url == "off" else (status, code))
        assert run.gateway[Runs].places.taken == scripted.cache.calls == 0


async def test_places_are_shared_with_background_responses(tmp_path: Path) -> None:
    async with stored_runs(tmp_path) as (scripted, run):
        places = run.gateway[Runs].places
        assert all(places.admit("", "other") for _ in range(MAX_OWNED))
        got, _, found = await run.post(BODY, RUNS)
        assert (got, found["error"]["code"]) == (429, "too_many_background_responses")
        places.release("", "other")
        await events(run, await begun(run))
        assert scripted.cache.calls == 1
        assert places.taken == MAX_OWNED - 1


async def test_dropped_events_are_gone_until_the_run_has_ended(tmp_path: Path) -> None:
    steps: dict[str, Any] = {f"s{at}": {"let": "${inputs.text}", "yield": f"s{at}"} for at in range(9)}
    steps["slow"] = {**CHAT, "needs": [*steps]}
    inputs = {"messages": {"type": "messages"}, "text": {"type": "string"}}
    body = {"workflow": document(steps, inputs=inputs), "inputs": {"messages": [USER], "text": "x" * 1_000_000}}
    async with stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True) as (scripted, run):
        id_ = await begun(run, {**body, "background": True})
        await eventually(lambda: scripted.held)
        log = run.gateway[Runs].logs.find(("", id_))
        assert log is not None
        assert log.first > 0
        assert log.size <= MAX_LOG
        got, found = await asked(run, "GET", f"{id_}?stream=true")
        assert (got, found["error"]["code"]) == (410, "events_gone")
        got, found = await asked(run, "GET", f"{id_}?stream=true&starting_after=999")
        assert (got, found["error"]["param"]) == (400, "starting_after")
        await asked(run, "POST", f"{id_}/cancel")
        ((kind, last),) = await events(run, id_, first=log.next - 1)
        assert (kind, len(last["outputs"])) == ("run.cancelled", 9)


async def test_it_is_purged_with_the_rest_after_its_time(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    now = [1e9]
    async with scripted.replica:
        config = config_over(scripted.replica, state=kept_in(tmp_path, ttl_s=100))
        gateway = compose(config, LOGGED, Surroundings(wall_clock=lambda: now[0]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            id_ = await begun(run)
            await events(run, id_)
            await eventually(lambda: not len(gateway[WorkflowEndpoint].api.background))
            store = await gateway[WorkflowEndpoint].api.background.open()
            assert await store.purge() == 0
            now[0] += 101
            assert (await asked(run, "GET", id_))[0] == 404
            assert [await store.purge(), await store.purge()] == [1, 0]


async def test_another_gateway_on_the_store_follows_and_cancels_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as gateways:
        scripted, run = await gateways.enter_async_context(stored_runs(tmp_path, ScriptedAnswer("x", None), holds=True))
        other = await gateways.enter_async_context(running(scripted.replica, state=kept_in(tmp_path)))
        ids = [await begun(run) for _ in range(2)]
        await eventually(lambda: len(scripted.held) == 2)
        assert (await asked(other, "GET", ids[0]))[1]["status"] in ("queued", "running")
        following = asyncio.create_task(other.session.get(f"{other.url}{RUNS}/{ids[0]}?stream=true"))
        watched = other.gateway[WorkflowEndpoint].api.background.watched
        await eventually(lambda: len(watched))
        got, found = await asked(other, "POST", f"{ids[0]}/cancel")
        assert (got, found["status"]) == (200, "cancelled")
        async with await following as answer:
            ((kind, last),) = read_events(await answer.read())
        assert (kind, last["id"], "steps" in last) == ("run.cancelled", ids[0], False)
        assert (await asked(other, "DELETE", ids[1]))[0] == 200
        assert (await asked(run, "GET", ids[1]))[0] == 404, "at once, also where it still runs"
        await eventually(lambda: len(scripted.cut) == 2)
        await eventually(lambda: run.gateway[Runs].places.taken == 0)
