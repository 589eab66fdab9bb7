"""Workflows in the list of models, and the directory after a reload."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.workflows.test_door import ANSWER, GUESS, SUPPORT, chat, script, served
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, USER, document
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

MUTE = document({"a": {**CHAT, "yield": "a"}, "b": {**CHAT, "yield": "b"}}, name="mute")  # no primary output
ALIASES = {"gpt-5-support": "workflow:support"}


async def listed(run: Running, **options: Any) -> list[str]:
    return [each["id"] for each in json.loads((await run.get("/v1/models", **options))[2])["data"]]


async def test_the_openai_client_lists_workflows_behind_models_and_their_aliases_last(tmp_path: Path) -> None:
    async with served(tmp_path, SUPPORT, GUESS, MUTE, model_aliases=ALIASES) as (_, run):
        models = [each async for each in run.client.models.list()]
        assert [each.id for each in models] == ["m", "workflow:guess", "workflow:support", "gpt-5-support"]
        assert {each.owned_by for each in models[1:]} == {"warmroute"}
        assert models[2].created == int((tmp_path / "support.yaml").stat().st_mtime) == models[3].created
        assert (await run.client.models.retrieve("workflow:support")).id == "workflow:support"
        extra: Any = (await run.client.models.retrieve("gpt-5-support")).model_extra
        assert extra == {"root": "workflow:support"}
        with pytest.raises(openai.NotFoundError):
            await run.client.models.retrieve("workflow:unknown")


async def test_the_anthropic_client_lists_them(tmp_path: Path) -> None:
    async with served(tmp_path, SUPPORT, GUESS) as (_, run):
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0, http_client=http) as client:
            pages = [each.id async for each in await client.models.list(limit=1)]
            assert pages == ["m", "workflow:guess", "workflow:support"]
            assert (await client.models.retrieve("workflow:support")).display_name == "workflow:support"


async def test_without_documents_the_list_is_that_of_the_replicas(tmp_path: Path) -> None:
    lists = []
    async with ScriptedEngine(script).replica as replica:
        for workflows in ({}, {"directory": str(tmp_path)}, {"enabled": False}):
            async with running(replica, workflows=workflows) as run:
                lists.append((await run.get("/v1/models"))[2])
    assert lists[0] == lists[1] == lists[2]


async def test_a_key_lists_the_workflows_that_it_may_use(tmp_path: Path) -> None:
    for each in (SUPPORT, GUESS):
        (tmp_path / f"{each['name']}.yaml").write_text(json.dumps(each))
    async with (
        ScriptedEngine(script).replica as replica,
        keyed(tmp_path, replica, workflows={"directory": str(tmp_path)}, model_aliases=ALIASES) as run,
    ):
        (pool,) = [each.name for each in run.gateway.fleet.pools]
        for rights, expected in (
            ({"models": ["workflow:support"]}, ["workflow:support", "gpt-5-support"]),
            ({"models": ["m"]}, ["m"]),
            ({"models": ["m", "workflow:*"], "pools": [pool]}, ["m", "workflow:guess", "workflow:support", "gpt-5-support"]),
            ({}, ["m", "workflow:guess", "workflow:support", "gpt-5-support"]),
        ):
            _, key = await made(run, **rights)
            assert await listed(run, headers=bearer(key)) == expected
            for name in ("workflow:support", "gpt-5-support"):
                status, _, _ = await run.get(f"/v1/models/{name}", headers=bearer(key))
                assert status == (200 if name in expected else 403), (rights, name)


async def test_the_requests_of_open_webui(tmp_path: Path) -> None:
    """The list of models, a chat that streams, and then a title by a second chat without a stream."""
    async with served(tmp_path) as (_, run):
        headers = {"Authorization": "Bearer k"}
        assert "workflow:support" in await listed(run, headers=headers)
        body = {"stream": True, "model": "workflow:support", "messages": [USER], "stream_options": {"include_usage": True}}
        async with run.session.post(f"{run.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = [line async for line in answer.content if line.startswith(b"data: ")]
        assert lines.pop() == b"data: [DONE]\n"
        chunks = [json.loads(line[6:]) for line in lines]
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"]) == ANSWER
        title = {"model": "workflow:support", "messages": [USER], "stream": False, "max_completion_tokens": 50}
        _, _, found = await run.post(title, headers=headers)
        assert found["choices"][0]["message"]["content"] == ANSWER


# -- reloads


async def test_a_reload_reads_the_directory_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path, SUPPORT, GUESS, model_aliases={}) as (scripted, run):
        workflows = {"directory": str(tmp_path)}

        async def read_again() -> list[str]:
            await reload(run, scripted.replica, workflows=workflows, model_aliases={})
            return await listed(run)

        (tmp_path / "guess.yaml").unlink()
        (tmp_path / "new.py").write_text(
            '@workflow(model="m")\ndef fresh(messages: Messages):\n    answer = chat(messages)\n    yield {"answer": answer}\n'
        )
        assert await read_again() == ["m", "workflow:fresh", "workflow:support"], "one is removed, one is new"
        assert (await run.post(chat("workflow:guess")))[2]["error"]["code"] == "workflow_not_found"
        assert (await run.post(chat("workflow:fresh")))[0] == 200

        (tmp_path / "support.yaml").write_text("workflow: 1\nname: support\nstepz: {}\n")
        assert await read_again() == ["m", "workflow:fresh", "workflow:support"]
        (notice,) = [each for each in caplog.records if "stepz" in str(vars(each).get("problem"))]
        assert notice.message.startswith("workflow not read from the directory")
        assert (await run.post(chat()))[0] == 200, "the former document"

        (tmp_path / "fresh.yaml").write_text(json.dumps({**SUPPORT, "name": "fresh"}))
        assert await read_again() == ["m", "workflow:fresh", "workflow:support"]
        assert any("in another file" in str(vars(each).get("problem")) for each in caplog.records)

        (tmp_path / "support.yaml").write_text(json.dumps({**SUPPORT, "description": "another one"}))
        (tmp_path / "new.py").unlink()
        await read_again()
        got = json.loads((await run.get("/v1/workflows/support"))[2])
        assert got["description"] == "another one"


async def test_a_directory_that_is_gone_keeps_its_workflows(tmp_path: Path) -> None:
    folder = tmp_path / "workflows"
    folder.mkdir()
    async with served(folder) as (scripted, run):
        folder.rename(tmp_path / "away")
        await reload(run, scripted.replica, workflows={"directory": str(folder)})
        assert await listed(run) == ["m", "workflow:support"]


async def test_a_run_keeps_the_document_that_it_began_with(tmp_path: Path) -> None:
    steps = {"a": {**CHAT, "yield": "a"}, "b": {"chat": {"from": "a", "append": [USER]}, "yield": "b"}}
    two = document(steps, name="two", primary="b")
    engine = ScriptedEngine(lambda _body: ScriptedAnswer("some text"), holds=True)
    async with served(tmp_path, two, engine=engine) as (_, run):
        begun = asyncio.create_task(run.post({"workflow": "two", "inputs": {"messages": [USER]}}, RUNS))
        await eventually(lambda: engine.held)
        (tmp_path / "two.yaml").write_text(json.dumps(document({"c": {**CHAT, "yield": "c"}}, name="two")))
        await reload(run, engine.replica, workflows={"directory": str(tmp_path)})
        engine.release()
        await eventually(engine.release)
        found = (await begun)[2]
    assert found["outputs"] == {"a": "some text", "b": "some text"}
