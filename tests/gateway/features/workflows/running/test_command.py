"""`warmroute workflow run` against a gateway in this process."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.features.workflows.running.command import InputError, inputs_of
from tests.gateway.commands.test_operate import said
from tests.gateway.conftest import eventually, running
from tests.gateway.features.keys.conftest import made
from tests.gateway.features.workflows.test_keys import TWO, served
from tests.gateway.features.workflows.test_runs import CHAT, USER, document
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

Capture = pytest.CaptureFixture[str]
STEPS = {
    "answer": {**CHAT, "yield": {"as": "answer", "stream": "delta"}},
    "score": {"chat": {"from": "answer", "append": [USER], "output": "integer"}, "yield": "score"},
    "slow": {**CHAT, "yield": "slow"},
    "end": {"let": "${score.value}", "kill": ["slow"]},
}


def script(body: dict[str, object]) -> ScriptedAnswer:
    messages = body["messages"]
    assert isinstance(messages, list)
    if "response_format" in body:
        return ScriptedAnswer("7")
    return ScriptedAnswer("one\ntwo \x1b[31m", None if messages[0]["content"] == "never" else 0.0)


def without_times(text: str) -> list[str]:
    return [re.sub(r"^ +[0-9.]+ s  ", "", line) for line in text.splitlines()]


async def test_a_file_is_run_and_its_events_are_shown(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "d.json").write_text(json.dumps(document({name: STEPS[name] for name in ("answer", "score")})))
    scripted = ScriptedEngine(script)
    async with scripted.replica, running(scripted.replica) as run:
        asked = ("workflow", "run", str(tmp_path / "d.json"), "--url", run.url, "--input", "messages=hello")
        code, out, err = await said(capsys, *asked)
        assert (code, err) == (0, "")
        lines = without_times(out)
        assert lines[0].endswith(": at most 2 calls, 1 at once, 2,048 output tokens")
        assert lines[1:3] == ["answer: started", "  answer | one"]
        assert {"  answer | two ?[31m", "score: started"} <= set(lines)
        assert "  score | 7" in lines
        assert lines[-2] == "completed"
        assert lines[-1].startswith("2 calls, ")
        code, out, _ = await said(capsys, *asked, "--json")
        events = [json.loads(line) for line in out.splitlines()]
        assert (code, events[0]["event"], events[-1]["event"]) == (0, "run.created", "run.completed")
        assert events[-1]["outputs"] == {"answer": "one\ntwo \x1b[31m", "score": 7}


async def test_a_name_is_run_with_the_key_of_the_environment(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.json").write_text(json.dumps([USER]))
    async with served(tmp_path) as (_, run):
        asked = ("workflow", "run", "two", "--url", run.url, "--input", f"messages=@{tmp_path / 'm.json'}")
        code, out, err = await said(capsys, *asked)
        assert (code, out) == (1, "")
        assert "set WARMROUTE_API_KEY to yours" in err
        monkeypatch.setenv("WARMROUTE_API_KEY", (await made(run, models=["workflow:two"]))[1])
        code, out, _ = await said(capsys, *asked)
        assert (code, without_times(out)[-2]) == (0, "completed")
        code, _, err = await said(capsys, "workflow", "run", "three", "--url", run.url)
        assert (code, "three" in err) == (1, True)


async def test_a_failed_run_is_an_exit_status(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "d.json").write_text(json.dumps(TWO))
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("no", status=400))
    async with scripted.replica, running(scripted.replica) as run:
        code, out, _ = await said(
            capsys, "workflow", "run", str(tmp_path / "d.json"), "--url", run.url, "--input", "messages=hello"
        )
        assert code == 1
        assert "failed: step_failed: no" in without_times(out)[-2]
        code, _, err = await said(capsys, "workflow", "run", str(tmp_path / "d.json"), "--url", run.url, "--input", "x=1")
        assert (code, "x" in err) == (1, True)


@pytest.mark.parametrize(
    ("on_error", "line", "status", "told"),
    [
        ("skip", "a: skipped: step_failed: too long", 1, "the run has no output"),
        ({"value": "-"}, "a: done: step_failed: too long", 0, ""),
    ],
)
async def test_an_error_that_does_not_end_the_run_is_shown(
    tmp_path: Path, capsys: Capture, on_error: object, line: str, status: int, told: str
) -> None:
    (tmp_path / "d.json").write_text(json.dumps(document({"a": {**CHAT, "on_error": on_error, "yield": "a"}})))
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("too long", status=400))
    async with scripted.replica, running(scripted.replica) as run:
        code, out, err = await said(
            capsys, "workflow", "run", str(tmp_path / "d.json"), "--url", run.url, "--input", "messages=hello"
        )
    lines = without_times(out)
    assert (code, line in lines, "completed" in lines, told in err) == (status, True, True, True), out
    assert lines[0].endswith(": at most 1 call, 1 at once, 1,024 output tokens")


async def test_ctrl_c_cancels_the_run(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps(document({"a": {**CHAT, "yield": "a"}})))
    scripted = ScriptedEngine(script, holds=True)
    async with scripted.replica, running(scripted.replica) as run:
        command = ("-m", "gateway", "workflow", "run", str(tmp_path / "d.json"), "--url", run.url, "--input", "messages=never")
        child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        await eventually(lambda: scripted.held)
        child.send_signal(signal.SIGINT)
        await child.communicate()
        assert child.returncode not in (0, None)
        await eventually(lambda: scripted.cut)
        await eventually(lambda: run.gateway.metrics.of(WorkflowsMetrics).runs.values.get(("inline", "cancelled")) == 1)


def test_inputs_are_read_by_the_types_that_the_workflow_declares(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [1]}')
    types = {"text": "string", "list": "list", "messages": "messages", "file": "object", "number": "number"}
    given = ["text=1=2", "list=[1, 2]", "messages=hi", f"file=@{tmp_path / 'a.json'}", "number=1.5", "other=x"]
    assert inputs_of(given, types) == {
        "text": "1=2",
        "list": [1, 2],
        "messages": [{"role": "user", "content": "hi"}],
        "file": {"x": [1]},
        "number": 1.5,
        "other": "x",
    }
    for wrong in ("text", "file=@/none"):
        with pytest.raises(InputError, match=wrong.partition("=")[0]):
            inputs_of([wrong], types)
