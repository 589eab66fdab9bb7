"""The ten acceptance programs on the scheduler: with 200 timings each, the events keep the stated order."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import yaml

from gateway.features.workflows.language.compiling import YAML, compile_text
from tests.gateway.features.workflows.language.test_programs import given
from tests.support.paths import WORKFLOWS
from tests.support.scripted_runs import ScriptedRun
from tests.support.workflows import prose

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.yaml") if not path.stem.endswith(".expected"))
SCENARIOS = [
    (name, each) for name in NAMES for each in yaml.safe_load((WORKFLOWS / f"{name}.expected.yaml").read_text())["scenarios"]
]
STREAMED = ("output.delta", "output.snapshot")


@pytest.mark.parametrize(("name", "scenario"), SCENARIOS, ids=lambda value: value if isinstance(value, str) else value["name"])
def test_events_keep_the_stated_order(name: str, scenario: dict[str, Any]) -> None:
    workflow = compile_text((WORKFLOWS / f"{name}.yaml").read_text(), YAML)
    inputs = {key: given(workflow.inputs[key].type, key, value, 0) for key, value in scenario["inputs"].items()}
    connectors = {
        use: {key: prose(size, key) for key, size in answer.items()} for use, answer in scenario.get("connectors", {}).items()
    }
    for seed in range(200):
        chance = random.Random(seed)
        run = ScriptedRun(
            workflow,
            inputs,
            scenario["answers"],
            connectors=connectors,
            seconds=scenario.get("seconds", {}),
            jitter=lambda chance=chance: chance.uniform(0.8, 1.2),  # type: ignore[misc]
            pieces=4,
        ).run()
        assert run.scheduler.status == "completed", run.scheduler.error
        said = [*(each for each in run.said if not each.startswith(STREAMED)), "run.completed"]
        assert sorted(said) == sorted(scenario["events"])
        for chain in scenario.get("order", ()):
            places = [said.index(each.strip()) for each in chain.split(" < ")]
            assert places == sorted(places), (chain, said)
        assert not set(scenario.get("never", ())) & set(said)
        for output, provisional in scenario.get("provisional", {}).items():
            assert run.told("output.done", output)["provisional"] is provisional


def test_snapshots_are_the_text_so_far() -> None:
    if not NAMES:
        pytest.skip("the acceptance programs are no part of the project")
    workflow = compile_text((WORKFLOWS / "streamed_field.yaml").read_text(), YAML)
    inputs = {"message_list": [{"role": "user", "content": "hi"}]}
    run = ScriptedRun(workflow, inputs, {"result": 200}, seconds={"result": 2}, pieces=40).run()
    contents = [data["value"] for kind, data in run.events if kind == "output.snapshot"]
    assert all(later["content"].startswith(each["content"]) for each, later in pairwise(contents))
    assert [each["is_end"] for each in contents] == [False] * (len(contents) - 1) + [True]
    assert contents[-1]["content"] == prose(200, "result") == run.scheduler.outputs["field1"]
    assert 8 <= len(contents) <= 12, "five a second"
    said = run.said
    assert max(at for at, each in enumerate(said) if each.startswith("output.snapshot")) < said.index("step.done result")
