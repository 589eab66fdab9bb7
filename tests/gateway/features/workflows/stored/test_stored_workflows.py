"""Workflows that tenants store, through a whole gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.features.histories.lazy import LazyStore
from gateway.features.workflows.compiler import WorkflowCompiler
from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.json_schema import document_schema
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.stored.documents import HELD_S, StoredWorkflows
from tests.gateway.conftest import Running, running
from tests.gateway.features.histories.conftest import Clock
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.workflows.test_door import ANSWER, SUPPORT, chat, script
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, USER, document
from tests.support.scripted_engine import ScriptedEngine

PATH = "/v1/workflows"
INPUTS = {"inputs": {"messages": [USER]}}
ONE = document({"a": {**CHAT, "yield": "a"}}, name="mine", description="the first")
TWO = document(
    {"b": {**CHAT, "yield": "b"}},
    name="mine",
    inputs={"messages": {"type": "messages"}, "who": {"type": "string", "required": True}},
)


@asynccontextmanager
async def served(folder: Path, *, keys: bool = False, **config: Any) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    """With a store, and the workflow `support` of the operator."""
    (folder / "operator").mkdir(exist_ok=True)
    (folder / "operator" / "support.yaml").write_text(json.dumps(SUPPORT))
    config = {"state": {"url": f"sqlite:///{folder}/state.sqlite"}, **config}
    config["workflows"] = {"directory": str(folder / "operator"), **config.get("workflows", {})}
    scripted = ScriptedEngine(script)
    async with scripted.replica:
        gateway = keyed(folder, scripted.replica, **config) if keys else running(scripted.replica, **config)
        async with gateway as run:
            yield scripted, run


async def asked(run: Running, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    async with run.session.request(method, f"{run.url}{path}", data=data, **options) as answer:
        return answer.status, await answer.json()


async def put(run: Running, body: Any, name: str = "mine", **options: Any) -> tuple[int, Any]:
    return await asked(run, "PUT", f"{PATH}/{name}", body, **options)


def code(answer: tuple[int, Any]) -> tuple[int, str, str | None]:
    return answer[0], answer[1]["error"]["code"], answer[1]["error"].get("param")


async def test_a_stored_workflow_is_shown_listed_run_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        assert await put(run, ONE) == (200, {"name": "mine", "version": 1, "warnings": []})
        assert await put(run, ONE) == (200, {"name": "mine", "version": 1, "warnings": []}), "an equal one is no version"
        warnings = [("input_added_required", "inputs.who"), ("output_removed", "a")]
        status, answer = await put(run, TWO)
        assert (status, answer["version"]) == (200, 2)
        assert [(each["code"], each["path"]) for each in answer["warnings"]] == warnings
        status, answer = await put(run, ONE)
        assert (answer["version"], [each["path"] for each in answer["warnings"]]) == (3, ["b"]), "the way back"

        listed = (await asked(run, "GET", PATH))[1]["data"]
        assert [(each["name"], each["version"], each["source"]) for each in listed] == [
            ("support", None, "operator"),
            ("mine", 3, "tenant"),
        ]
        assert listed[1].keys() == listed[0].keys() == {"name", "version", "description", "inputs", "primary", "source"}
        assert listed[1]["inputs"] == {"messages": {"type": "messages", "required": False}}
        for reference, expected, version in (("mine", ONE, 3), ("mine@2", TWO, 2), ("mine%401", ONE, 1)):
            status, answer = await asked(run, "GET", f"{PATH}/{reference}")
            assert (status, answer["workflow"], answer["version"]) == (200, expected, version)

        for reference, outputs, version in (("mine", {"a": ANSWER}, 3), ("mine@2", {"b": ANSWER}, 2)):
            inputs = {"messages": [USER], **({"who": "me"} if version == 2 else {})}
            status, _, found = await run.post({"workflow": reference, "inputs": inputs}, RUNS)
            assert (status, found["outputs"], found["workflow"], found["version"]) == (200, outputs, "mine", version)
        assert (await run.post(chat("workflow:mine")))[2]["choices"][0]["message"]["content"] == ANSWER
        status, _, found = await run.post(chat("workflow:mine@2", workflow_inputs={"who": "me"}))
        assert (status, found["choices"][0]["message"]["content"]) == (200, ANSWER)
        metrics = await run.metrics()
        assert metrics['warmroute_workflow_runs_total{status="completed",workflow="tenant"}'] == 4

        assert await asked(run, "DELETE", f"{PATH}/mine") == (200, {"name": "mine", "object": "workflow", "deleted": True})
        gone = (404, "workflow_not_found", "workflow")
        assert code(await asked(run, "DELETE", f"{PATH}/mine")) == gone
        assert code(await asked(run, "GET", f"{PATH}/mine@1")) == gone
        status, _, answer = await run.post({"workflow": "mine", **INPUTS}, RUNS)
        assert code((status, answer)) == gone


async def test_the_schema_of_documents(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        status, found = await asked(run, "GET", f"{PATH}/schema")
        assert (status, found) == (200, document_schema())
        assert code(await asked(run, "PUT", f"{PATH}/schema", {**ONE, "name": "schema"})) == (405, "method_not_allowed", None)


async def test_versions_outlive_the_gateway_and_another_one_reads_them(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run), served(tmp_path) as (_, other):
        await put(run, ONE)
        assert (await other.post({"workflow": "mine", **INPUTS}, RUNS))[2]["version"] == 1
        versions = await asyncio.gather(
            *(put(each, {**ONE, "description": f"{at}"}) for at, each in enumerate([run, other] * 5))
        )
        assert sorted(answer["version"] for _, answer in versions) == list(range(2, 12))
    async with served(tmp_path) as (_, run):
        assert (await run.post({"workflow": "mine", **INPUTS}, RUNS))[2]["version"] == 11


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("support", SUPPORT, (409, "workflow_exists", "name")),
        ("other", ONE, (400, "workflow_invalid", "name")),
        ("mine@1", ONE, (400, "workflow_invalid", "name")),
        ("mine", {**ONE, "stepz": 1}, (400, "workflow_invalid", "stepz")),
        ("mine", b"{", (400, "workflow_invalid", None)),
        ("mine", b"\xff", (400, "workflow_invalid", "workflow")),
        ("mine", b"", (400, "workflow_invalid", None)),
        ("mine", b" " * (MAX_DOCUMENT_BYTES + 1), (413, "workflow_too_large", "workflow")),
        ("mine", {**ONE, "defaults": {"model": "m", "max_tokens": 9999}}, (400, "workflow_over_limits", None)),
        ("runs", {**ONE, "name": "runs"}, (405, "method_not_allowed", None)),
    ],
)
async def test_documents_that_are_not_stored(
    tmp_path: Path, name: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    async with served(tmp_path, workflows={"max_output_tokens": 5000}) as (_, run):
        assert code(await put(run, body, name)) == expected
        assert [each["name"] for each in (await asked(run, "GET", PATH))[1]["data"]] == ["support"]


@pytest.mark.parametrize("reference", ["mine@2", "mine@0", "mine@", "mine@x", "mine@" + "9" * 30, "", "support@1", "\0", "é"])
async def test_names_and_versions_that_do_not_exist(tmp_path: Path, reference: str) -> None:
    async with served(tmp_path) as (scripted, run):
        await put(run, ONE)
        status, _, answer = await run.post({"workflow": reference, **INPUTS}, RUNS)
        assert code((status, answer)) == (404, "workflow_not_found", "workflow")
        status, _, answer = await run.post(chat(f"workflow:{reference}"))
        assert code((status, answer)) == (404, "workflow_not_found", "model")
        assert scripted.cache.calls == 0


async def test_those_of_the_operator_are_not_deleted_and_have_no_versions(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        assert code(await asked(run, "DELETE", f"{PATH}/support")) == (409, "workflow_exists", "name")
        message = (await asked(run, "GET", f"{PATH}/support@1"))[1]["error"]["message"]
        assert message == "There is no workflow 'support@1'; 'support' is the operator's, and has no versions"
        assert [each["name"] for each in (await asked(run, "GET", PATH))[1]["data"]] == ["support"]


async def test_two_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async with served(tmp_path, keys=True) as (scripted, run):
        headers = [bearer((await made(run, tenant=tenant))[1]) for tenant in ("acme", "acme", "globex")]
        assert (await put(run, ONE, headers=headers[0]))[1]["version"] == 1
        assert (await asked(run, "GET", f"{PATH}/mine", headers=headers[1]))[1]["workflow"] == ONE, "another key of the tenant"
        other: dict[str, Any] = {"headers": headers[2]}
        assert [each["name"] for each in (await asked(run, "GET", PATH, **other))[1]["data"]] == ["support"]
        for method, name in (("GET", "{}"), ("GET", "{}@1"), ("DELETE", "{}")):
            foreign, unknown = [await asked(run, method, f"{PATH}/{name.format(each)}", **other) for each in ("mine", "nine")]
            assert foreign[0] == 404
            assert json.dumps(foreign).replace("mine", "nine") == json.dumps(unknown)
        status, _, found = await run.post({"workflow": "mine", **INPUTS}, RUNS, **other)
        assert code((status, found)) == (404, "workflow_not_found", "workflow")
        assert scripted.cache.calls == 0
        assert (await put(run, TWO, **other))[1] == {"name": "mine", "version": 1, "warnings": []}
        assert (await asked(run, "GET", f"{PATH}/mine", headers=headers[0]))[1]["workflow"] == ONE


async def test_a_stored_workflow_has_the_rights_of_its_caller(tmp_path: Path) -> None:
    """Not those of the operator: it needs its models, too."""
    async with served(tmp_path, keys=True) as (scripted, run):
        full, named, both, none = [
            bearer((await made(run, **rights))[1])
            for rights in ({}, {"models": ["workflow:*"]}, {"models": ["m", "workflow:mine"]}, {"models": ["m"]})
        ]
        await put(run, ONE, headers=full)
        body = {"workflow": "mine", **INPUTS}
        status, _, answer = await run.post(body, RUNS, headers=named)
        assert code((status, answer)) == (403, "model_not_allowed", "steps.a.chat.model")
        assert (await run.post({"workflow": "support", **INPUTS}, RUNS, headers=named))[2]["status"] == "completed"
        calls = scripted.cache.calls
        assert (await run.post(body, RUNS, headers=both))[2]["status"] == "completed"
        assert scripted.cache.calls == calls + 1
        for answer in (
            (await run.post(body, RUNS, headers=none))[::2],
            await asked(run, "GET", f"{PATH}/mine", headers=none),
            await put(run, ONE, headers=none),
            await asked(run, "DELETE", f"{PATH}/mine", headers=none),
        ):
            assert code(answer) == (403, "workflow_not_allowed", "workflow")
        assert (await asked(run, "GET", PATH, headers=none))[1]["data"] == []


async def test_without_documents_in_requests_stored_ones_run(tmp_path: Path) -> None:
    async with served(tmp_path, workflows={"inline": False}) as (_, run):
        await put(run, ONE)
        assert (await run.post({"workflow": "mine", **INPUTS}, RUNS))[0] == 200
        assert (await run.post({"workflow": ONE, **INPUTS}, RUNS))[0] == 403


async def test_without_a_store(tmp_path: Path) -> None:
    async with served(tmp_path, state={"url": "off"}) as (_, run):
        assert code(await put(run, ONE)) == (400, "state_off", None)
        assert code(await asked(run, "DELETE", f"{PATH}/mine")) == (400, "state_off", None)
        assert code(await asked(run, "GET", f"{PATH}/mine")) == (404, "workflow_not_found", "workflow")
        assert [each["name"] for each in (await asked(run, "GET", PATH))[1]["data"]] == ["support"]


async def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with served(tmp_path, state={"url": f"sqlite:///{tmp_path}/file/state.sqlite"}) as (_, run):
        status, _, answer = await run.post({"workflow": "mine", **INPUTS}, RUNS)
        assert code((status, answer)) == (503, "state_unavailable", None)
        assert answer["error"]["message"].startswith("Stored workflows cannot be read or written: ")
        for method, path in (("GET", PATH), ("GET", f"{PATH}/mine"), ("DELETE", f"{PATH}/mine"), ("PUT", f"{PATH}/mine")):
            assert code(await asked(run, method, path, ONE if method == "PUT" else None))[:2] == (503, "state_unavailable")
        assert (await run.post({"workflow": "support", **INPUTS}, RUNS))[0] == 200, "the operator's need no store"


async def test_a_found_document_is_held_for_a_moment(tmp_path: Path) -> None:
    """Changes by other processes are seen after it, own ones at once."""
    async with served(tmp_path) as (_, run):
        clock = Clock()
        own = StoredWorkflows(run.gateway[LazyStore], WorkflowCompiler(run.gateway), clock, clock)

        async def version(of: int | None = None) -> int | None:
            found = await own.find("", "mine", of)
            return found.version if found else None

        assert await version() is None
        await put(run, ONE)
        assert await version() == 1, "what is not found is not held"
        await put(run, {**ONE, "description": "by another process"})
        clock.now += HELD_S - 0.01
        assert await version() == 1
        assert await version(2) == 2
        clock.now += 0.01
        assert await version() == 2
        await own.put("", compile_document(ONE))
        assert (await version(), await version(1)) == (3, 1)
        await own.delete("", "mine")
        assert (await version(), await version(1)) == (None, None)


async def test_the_default_store_is_not_opened_for_workflows_of_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with served(tmp_path, state={"url": "sqlite"}) as (_, run):
        assert (await run.post({"workflow": "support", **INPUTS}, RUNS))[0] == 200
        await run.get("/v1/models")
        assert not run.gateway[LazyStore].is_open
        await put(run, ONE)
        assert run.gateway[LazyStore].is_open
