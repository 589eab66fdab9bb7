"""Runs of a program on real processes that simulate replicas: what they compute, with and without slots and the gate."""

from __future__ import annotations

import pytest

from bench.workflows.__main__ import arguments, line, measured, report
from bench.workflows.programs import Program
from gateway.features.workflows.language.compiling import compile_document
from tests.support.tiers import nightly

PANEL = {
    "workflow": 1,
    "name": "panel",
    "inputs": {"messages": {"type": "messages", "required": True}},
    "defaults": {"model": "m", "max_tokens": 400},
    "steps": {
        "candidates": {
            "each": {
                "in": [1, 2, 3],
                "as": "number",
                "steps": {"candidate": {"chat": {"from": "${inputs.messages}", "seed": "${number}"}}},
                "value": "${candidate.text}",
            }
        },
        "judge": {
            "chat": {
                "from": "${inputs.messages}",
                "append": [{"role": "system", "content": "Write the best answer from these:\n${join(candidates.values)}"}],
            },
            "yield": "answer",
        },
    },
}


SIZES = {"messages": [["system", 1021], ["user", 7165]]}
THREE = Program("panel", "three", PANEL, compile_document(PANEL), {"candidate": 150, "judge": 50}, SIZES)


@pytest.mark.parametrize(
    "flags",
    [[], ["--slots", "--gate", "on"], ["--slots", "--gate", "off"]],
    ids=["in flight", "slots with the gate", "slots without, where the router knows them"],
)
async def test_a_panel_computes_its_conversation_once(flags: list[str]) -> None:
    options = arguments().parse_args([".", "--runs", "1", "--speed", "20", *([] if not flags else ["--alone"]), *flags])
    found = await measured(options, THREE)
    (usage,) = found.usages
    assert usage["calls"] == 4
    assert usage["computed_tokens"] / usage["least_tokens"] == pytest.approx(1, abs=0.01)
    assert [run.prompt - run.cached for run in found.client] == ([8665] if not flags else [])
    assert line(found).startswith("| panel: three | 4.0 |")


@nightly("four prompts of four megabytes; tests/gateway/features/workflows has prompts of three")
async def test_a_conversation_of_a_million_tokens_is_computed_once() -> None:
    options = arguments().parse_args([".", "--runs", "1", "--speed", "1000", "--history", "1000000", "--alone"])
    found = await measured(options, THREE)
    (usage,) = found.usages
    assert usage["prompt_tokens"] > 4 * 999_000
    assert 999_000 < usage["computed_tokens"] == found.counters.computed < 1_001_000
    assert usage["computed_tokens"] / usage["least_tokens"] <= 1.05


async def test_a_run_that_fails_is_counted_and_left_out() -> None:
    steps = {"a": {"chat": {"from": "${inputs.messages}", "choices": ["Yes", "No"]}, "yield": "a"}}
    document = {**PANEL, "steps": steps}
    options = arguments().parse_args([".", "--runs", "2", "--speed", "100", "--history", "64"])
    program = Program("panel", "no choice", document, compile_document(document), {"candidate": "Perhaps"}, SIZES)
    found = await measured(options, program)
    assert found.failures == {"step a, constraint_unsatisfied": 2}
    assert line(found) == f"| panel: no choice |{' - |' * 9}"
    assert "panel: no choice: 2 failed (step a, constraint_unsatisfied)" in report(options, [found])
