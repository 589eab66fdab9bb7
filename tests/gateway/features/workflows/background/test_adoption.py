"""Background runs continue at another gateway: after a shutdown, after SIGKILL, with the caller's present rights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.commands.demo.processes import listening_url
from gateway.core import Surroundings
from gateway.features.runs.process_runs import ALIVE_S
from gateway.features.runs.runs import Runs
from gateway.features.workflows.background.runs import MAX_ADOPTIONS
from gateway.features.workflows.feature import WorkflowEndpoint
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.server.endpoints import clients_runner
from tests.chaos.stage import Child
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, running, serving_runner
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.responses.test_recall import kept_in
from tests.gateway.features.workflows.background.test_background_runs import BODY, TWO, asked, begun, events, read_events
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, TEXT, USER, document
from tests.support.fakes import FakeReplica, http, writes
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tiers import gate

JUMP = 1 << 20
TWO_BODY = {**BODY, "workflow": TWO}


async def first_step_done(scripted: ScriptedEngine) -> None:
    """The first step is answered, the second one is held."""
    await eventually(lambda: scripted.held)
    scripted.release()
    await eventually(lambda: scripted.cache.calls == 2 and scripted.held)


async def shut_down(run: Running) -> None:
    """As a gateway does after its last request."""
    for finish in run.gateway.work.finishes:
        await finish()


async def ended(run: Running, id_: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    async with run.session.get(f"{run.url}{RUNS}/{id_}?stream=true", headers=headers) as answer:
        read_events(await answer.read())
    async with run.session.get(f"{run.url}{RUNS}/{id_}", headers=headers) as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def test_a_shutdown_hands_a_run_over_and_its_first_step_is_not_run_again(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT, holds=True)
    async with scripted.replica:
        async with running(scripted.replica, state=kept_in(tmp_path)) as run:
            id_ = await begun(run, TWO_BODY)
            await first_step_done(scripted)
            before = run.gateway[Runs].logs.find(("", id_))
            assert before is not None
            last = before.next - 1
            await shut_down(run)
        await eventually(lambda: not scripted.held)
        async with running(scripted.replica, state=kept_in(tmp_path)) as run:
            await eventually(lambda: scripted.held)
            following = asyncio.create_task(events(run, id_, last, first=JUMP))
            await eventually(lambda: run.gateway[Runs].logs.find(("", id_)).followers)  # type: ignore[union-attr]
            scripted.release()
            told = await following
            found = (await asked(run, "GET", id_))[1]
            assert run.gateway[Runs].places.taken == 0
            assert run.gateway.metrics.of(WorkflowsMetrics).adoptions.values == {("handed_over",): 1}
    kinds = [f"{kind} {data.get('step') or data.get('name') or ''}".strip() for kind, data in told]
    assert kinds == ["run.resumed", "step.started b", "step.done b", "output.done b", "run.completed"]
    assert (told[0][1]["recorded"], told[0][1]["outputs"]) == (["a"], {"a": "some text"})
    assert (found["status"], found["outputs"]) == ("completed", {"a": "some text", "b": "some text"})
    assert scripted.cache.calls == 3


@pytest.mark.parametrize("revoked", [False, True])
async def test_the_key_of_a_run_is_looked_up_anew_by_its_id(tmp_path: Path, revoked: bool, request_lines: Any) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT, holds=True)
    async with scripted.replica:
        async with keyed(tmp_path, scripted.replica, state=kept_in(tmp_path)) as run:
            key_id, key = await made(run)
            other = bearer((await made(run))[1])  # of the same tenant
            id_ = await begun(run, TWO_BODY, bearer(key))
            await first_step_done(scripted)
            if revoked:
                async with run.session.delete(f"{run.admin_url}/warmroute/keys/{key_id}") as answer:
                    assert answer.status == 200
            await shut_down(run)
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite")) as file:
            assert key not in str(file.execute("select * from warmroute_workflow_runs").fetchall()), "no secret is stored"
        async with keyed(tmp_path, scripted.replica, state=kept_in(tmp_path)) as run:
            if not revoked:
                await eventually(lambda: scripted.cache.calls == 3 and scripted.held)
                scripted.release()
            found = await ended(run, id_, other)
    if revoked:
        assert (found["status"], found["error"]["code"], found["error"]["step"]) == ("failed", "grant_revoked", "b")
        assert found["outputs"] == {"a": "some text"}
        assert scripted.cache.calls == 2
    else:
        assert (found["status"], scripted.cache.calls) == ("completed", 3)
        line = [line for line in request_lines() if line.get("id") == f"{id_}.b"][-1]
        assert (line["tenant"], line["key"], line["status"]) == ("acme", key_id, 200)


async def test_a_run_that_stops_its_gateways_again_and_again_fails(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT, holds=True)
    now = [1e9]
    async with scripted.replica:
        config = config_over(scripted.replica, state=kept_in(tmp_path))
        gateway = compose(config, LOGGED, Surroundings(wall_clock=lambda: now[0]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            id_ = await begun(run)
            await eventually(lambda: scripted.held)
            store = await gateway[WorkflowEndpoint].api.background.open()
            for at in range(MAX_ADOPTIONS):  # other gateways, each of which stops
                now[0] += ALIVE_S
                (found,) = await store.abandoned(1)
                assert await store.adopt(found, f"other {at}")
            await eventually(lambda: not len(gateway[WorkflowEndpoint].api.background))
            now[0] += ALIVE_S
            failed = await ended(run, id_)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "run_interrupted")
    assert gateway.metrics.of(WorkflowsMetrics).adoptions.values == {("silent",): 1}
    assert scripted.cache.calls == 1


# -- SIGKILL

RACE = document(
    {
        "a": {**CHAT, "yield": {"as": "a", "stream": "delta"}},
        "found": {"call": {"use": "rag", "with": {"q": "${a.text}"}}, "yield": "found"},
        "b": {"chat": {"from": "a", "append": [{"role": "user", "content": "step b"}]}, "yield": "b"},
        "c": {"chat": {"from": "a", "append": [{"role": "user", "content": "step c ${found.value.x}"}]}, "yield": "c"},
        "d": {"chat": {"from": "b", "append": [{"role": "user", "content": "step d ${c.text}"}]}, "yield": "d"},
    }
)
AT_ONCE = 6


def called_step(body: dict[str, Any]) -> tuple[str, str]:
    """(text of the run's message, step)."""
    messages = body["messages"]
    return messages[0]["content"], messages[-1]["content"].split()[1] if len(messages) > 1 else "a"


async def killed_at_a_random_moment(folder: Path, chance: random.Random) -> None:
    calls: list[tuple[str, str]] = []

    def script(body: dict[str, Any]) -> ScriptedAnswer:
        calls.append(called_step(body))
        return TEXT

    scripted, rag = ScriptedEngine(script), FakeReplica([writes(http(200, b'{"x": 1}'))] * 99)
    async with scripted.replica, rag:
        connectors = {"rag": {"url": f"{rag.url}/", "retries": True}}
        config = {
            "listen": "127.0.0.1:0",
            "admin_listen": "off",
            "pools": [{"replicas": [scripted.replica.url]}],
            "state": kept_in(folder),
            "workflows": {"connectors": connectors},
        }
        (folder / "c.yaml").write_text(json.dumps(config))
        later = [0.0]
        settings = config_over(scripted.replica, state=kept_in(folder), workflows={"connectors": connectors})
        gateway = compose(settings, LOGGED, Surroundings(wall_clock=lambda: time.time() + later[0]))
        with contextlib.ExitStack() as ends:
            child = Child(folder / "log", ends, "-m", "gateway", "serve", "--config", str(folder / "c.yaml"))
            url = await child.wait_for_line(listening_url)
            async with serving_runner(gateway, clients_runner(gateway.served)) as run:
                await asked(run, "GET", "run_none")  # opens its store
                ids = {}
                for at in range(AT_ONCE):
                    body = {"workflow": RACE, "inputs": {"messages": [{**USER, "content": f"run {at}"}]}, "background": True}
                    async with run.session.post(url + RUNS, json=body) as answer:
                        ids[f"run {at}"] = (await answer.json())["id"]
                moment = chance.randint(0, 4 * AT_ONCE)
                await eventually(lambda: len(calls) >= moment)
                await asyncio.sleep(chance.random() * 0.02)  # between two calls, writes to the store, or answers
                child.signal(signal.SIGKILL)
                await child.exit_status()
                before, recorded = len(calls), recorded_steps(folder)
                later[0] = ALIVE_S + 1
                for tag, id_ in ids.items():
                    async with run.session.get(f"{run.url}{RUNS}/{id_}?stream=true") as answer:
                        told = read_events(await answer.read())
                    numbers = [data["seq"] for _, data in told]
                    assert numbers == sorted(set(numbers))
                    assert numbers[0] >= JUMP or len(told) == 1, "only the end of a run that had ended"
                    last = told[-1][1]
                    assert last["status"] == "completed", last
                    assert last["outputs"] == {**dict.fromkeys("abcd", "some text"), "found": {"x": 1}}
                    again = {step for text, step in calls[before:] if text == tag}
                    assert not again & recorded[id_], "a recorded step has run again"


def recorded_steps(folder: Path) -> dict[str, set[str]]:
    with contextlib.closing(sqlite3.connect(folder / "kept.sqlite")) as file:
        found: dict[str, set[str]] = {id_: set() for (id_,) in file.execute("select id from warmroute_workflow_runs")}
        for id_, step in file.execute("select run, step from warmroute_workflow_steps where status != 'called'"):
            found[id_].add(step)
    return found


@pytest.mark.processes
@gate("0", reason="two kills of six runs each; all fifty seeds are a hundred kills of 600 runs")
@pytest.mark.parametrize("seed", range(50))
async def test_killed_gateways_lose_no_run_and_no_recorded_step_runs_twice(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for at in range(2):
        folder = tmp_path / f"{at}"
        os.mkdir(folder)
        await killed_at_a_random_moment(folder, chance)
