"""Plans: what is shared, what of it is warm, what the caller's key allows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.features.workflows.plan_answers import MAX_ASKED
from tests.gateway.conftest import Running
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, TEXT, USER, document, engine
from tests.support.scripted_engine import ScriptedEngine
from tests.support.workflows import prose

PLAN = "/v1/workflows/plan"
HISTORY = [{"role": "user", "content": prose(2000, "h")}]


def asked(*texts: str) -> dict[str, Any]:
    """Steps that share the messages, and have a last message of their own."""
    append = "${inputs.messages}"
    return {text: {"chat": {"from": append, "append": [{"role": "user", "content": text}]}, "yield": text} for text in texts}


async def prefixes(run: Running, steps: dict[str, Any], given: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    body = io.BytesIO(json.dumps({"workflow": document(steps, **more), "inputs": given}).encode())
    async with run.session.post(run.url + PLAN, data=body, headers={"Content-Type": "application/json"}) as answer:
        plan = await answer.json()
        assert answer.status == 200, plan
    return plan["prefixes"]  # type: ignore[no-any-return]


async def warm_up(run: Running, prompt: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    async with run.session.post(run.url + path, json={"model": "m", "stream": True, **prompt}) as answer:
        await answer.read()
        assert answer.status == 200


async def test_a_prefix_has_its_tokens_and_is_warm_after_a_run() -> None:
    steps, inputs = asked("a", "b"), {"messages": HISTORY}
    async with engine() as (scripted, run):
        (cold,) = await prefixes(run, steps, inputs)
        assert (cold["steps"], cold["warm"]) == (["a", "b"], None)
        assert (await run.post({"workflow": document(steps), "inputs": inputs}, RUNS))[2]["status"] == "completed"
        calls = scripted.cache.calls
        (warm,) = await prefixes(run, steps, inputs)
        # The learned size of a token changes the estimate.
        assert 0.9 * warm["tokens"] < warm["warm"]["tokens"] <= warm["tokens"]
        assert scripted.cache.calls == calls
        assert run.gateway.router.ledger.open_leases == 0
        other = [{"role": "user", "content": prose(2000, "other")}]
        assert [each["warm"] for each in await prefixes(run, steps, {"messages": other})] == [None]


@pytest.mark.parametrize(("exposed", "seen"), [("operators", False), ("all", True)])
async def test_only_those_see_what_is_warm_who_see_predictions(exposed: str, seen: bool) -> None:
    async with engine(admin_key="k", routing={"expose_headers": exposed}) as (_, run):
        await warm_up(run, {"messages": HISTORY})
        (found,) = await prefixes(run, asked("a", "b"), {"messages": HISTORY})
        assert (found["warm"] is not None) == seen


@pytest.mark.parametrize("inputs", [{}, {"messages": "text"}, {"messages": [1]}, {"messages": []}])
async def test_without_messages_nothing_is_known_to_be_warm(inputs: dict[str, Any]) -> None:
    async with engine() as (_, run):
        assert [each["warm"] for each in await prefixes(run, asked("a", "b"), inputs)] == [None]


async def test_the_beginning_of_a_prefix_that_goes_on_with_an_answer_is_warm() -> None:
    steps = {
        "first": {**CHAT, "yield": "first"},
        **{name: {"chat": {"from": "first", "append": [{"role": "user", "content": name}]}, "yield": name} for name in "ab"},
    }
    async with engine() as (_, run):
        await warm_up(run, {"messages": HISTORY})
        found = await prefixes(run, steps, {"messages": HISTORY})
        assert [each["steps"] for each in found] == [["first", "a", "b"], ["a", "b"]]
        assert found[0]["warm"] == found[1]["warm"] is not None
        assert found[1]["tokens"] == found[0]["tokens"] + 1024, "the answer of `first`, at most"


async def test_raw_text_is_warm_too_and_tools_are_a_part_of_the_prompt() -> None:
    text = {name: {"text": {"prompt": "${inputs.text}" + name}, "yield": name} for name in ("a", "b")}
    tool = {"type": "function", "function": {"name": "f", "description": prose(300, "f")}}
    tools = {name: {**step, "chat": {**step["chat"], "tools": [tool]}} for name, step in asked("a", "b").items()}
    words = prose(2000, "words")
    async with engine() as (_, run):
        await warm_up(run, {"prompt": words})
        await warm_up(run, {"messages": HISTORY})
        (found,) = await prefixes(run, text, {"text": words}, inputs={"text": {"type": "string"}})
        assert found["warm"]["tokens"] > 0
        assert [each["warm"] for each in await prefixes(run, tools, {"messages": HISTORY})] == [None]


async def test_the_router_is_asked_for_a_bounded_number_of_bytes() -> None:
    size, names = 900_000, "abcdef"
    texts = {name: name * size for name in names}
    steps = {
        f"{name}{at}": {"text": {"prompt": f"${{inputs.{name}}}{at}", "max_tokens": 1}, "yield": f"{name}{at}"}
        for name in names
        for at in "12"
    }
    assert size * (len(names) - 1) > MAX_ASKED
    async with engine() as (_, run):
        for text in texts.values():
            await warm_up(run, {"prompt": text})
        found = await prefixes(run, steps, texts, inputs={name: {"type": "string"} for name in names})
    assert [each["warm"] is not None for each in found] == [True] * 4 + [False] * 2


async def test_more_requests_than_the_key_has_a_minute_are_a_warning(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    async with scripted.replica, keyed(tmp_path, scripted.replica) as run:
        for most, codes in ((2, ["over_rate"]), (3, []), (None, [])):
            _, key = await made(run, **({"requests_per_minute": most} if most else {}))
            body = {"workflow": document(asked("a", "b", "c")), "inputs": {"messages": [USER]}}
            plan = (await run.post(body, PLAN, headers=bearer(key)))[2]
            assert [each["code"] for each in plan["warnings"]] == codes
