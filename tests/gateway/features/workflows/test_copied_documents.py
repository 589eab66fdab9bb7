"""The documents of `docs/workflows/`, which users copy: each runs, and decides as its first line says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.features.workflows.language.compiling import YAML, compile_text
from tests.gateway.conftest import running
from tests.gateway.features.workflows.test_runs import RUNS, USER
from tests.support.compiled import documented
from tests.support.fakes import FakeReplica, FakeRequest, http
from tests.support.paths import ROOT
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

pytestmark = documented
FOLDER = ROOT / "docs" / "workflows"
TALK = {"messages": [USER]}
BROKEN = ScriptedAnswer("down", status=400)
# By a piece of the last message, or the model: the first that fits.
CASES: list[tuple[str, dict[str, Any], Mapping[str, str | ScriptedAnswer], Any, int]] = [
    ("panel", TALK, {"Three answers": "best", "": "candidate"}, "best", 4),
    ("hedge", TALK, {"qwen3-8b": BROKEN, "qwen3-32b": "slow"}, "slow", 2),
    ("cascade", TALK, {"certainly": "yes", "qwen3-8b": "small", "qwen3-32b": "large"}, "small", 2),
    ("cascade", TALK, {"certainly": "no", "qwen3-8b": "small", "qwen3-32b": "large"}, "large", 3),
    ("map_reduce", {"question": "why", "parts": ["p1", "p2"]}, {"p2": BROKEN, "p1": "note", "why": "because"}, "because", 3),
    ("grounded", TALK, {"Answer from": "draft", "Is each": "yes"}, "draft", 2),
    ("grounded", TALK, {"Answer from": "draft", "Is each": "no", "query": "q", "Further passages": "more"}, "more", 4),
]


@pytest.mark.parametrize(("name", "inputs", "answers", "expected", "calls"), CASES)
async def test_a_document_to_copy_runs(
    name: str, inputs: dict[str, Any], answers: Mapping[str, str | ScriptedAnswer], expected: Any, calls: int
) -> None:
    asked = 0

    def script(body: dict[str, Any]) -> ScriptedAnswer:
        nonlocal asked
        asked += 1
        known = f"{body['model']} {body['messages'][-1]['content']}"
        found = next(answer for piece, answer in answers.items() if piece in known)
        return found if isinstance(found, ScriptedAnswer) else ScriptedAnswer(found)

    scripted = ScriptedEngine(script, "qwen3-8b", "qwen3-32b")
    passages = FakeReplica([_passages])
    source = compile_text((FOLDER / f"{name}.yaml").read_text(), YAML).source
    async with scripted.replica, passages, running(scripted.replica, workflows=_connected(passages)) as run:
        status, _, found = await run.post({"workflow": source, "inputs": inputs}, RUNS)
    assert (status, found["status"], found["error"]) == (200, "completed", None)
    assert found["outputs"] == {"answer": expected} | ({"draft": "draft"} if expected == "draft" else {})
    assert asked == calls


def test_each_document_to_copy_is_run_here_and_listed_in_the_docs() -> None:
    names = {path.stem for path in FOLDER.iterdir()}
    page = (ROOT / "docs" / "workflows.md").read_text()
    assert names == {case[0] for case in CASES}
    assert all(f"(workflows/{name}.yaml)" in page for name in names)


def _connected(passages: FakeReplica) -> dict[str, Any]:
    return {"connectors": {"kb": {"url": f"{passages.url}/search"}}}


async def _passages(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    assert isinstance(request.json["query"], str)
    writer.write(http(200, json.dumps({"passages": ["one", "two"]}).encode()))
