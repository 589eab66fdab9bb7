"""Whole programs: both forms are one document, bounds and least tokens are those stated. The examples of the documentation, and
the ten acceptance programs where they are.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import yaml

from gateway.features.workflows.language import keys
from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.language.prefixes import PrefixUnion
from gateway.features.workflows.language.python_form import compile_program
from gateway.features.workflows.language.reading import read_yaml
from gateway.features.workflows.language.results import MEMBERS
from gateway.features.workflows.language.workflow import Workflow
from tests.support.canonical_document import canonical_document
from tests.support.paths import ROOT, WORKFLOWS
from tests.support.workflows import TinyRun, prose

PAGE = (ROOT / "docs" / "workflow-language.md").read_text("utf-8")
EXAMPLES = list(
    zip(
        re.findall(r"```yaml\n(workflow: 1\n.*?)```", PAGE, re.S),
        re.findall(r"```python\n(@workflow.*?)```", PAGE, re.S),
        strict=True,
    )
)
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.yaml") if not path.stem.endswith(".expected"))
BOUNDS = {
    "answer_critic_copilot": (3, 1536),
    "linear": (3, 768),
    "linear_chat": (3, 768),
    "streamed_field": (1, 256),
    "two_features": (3, 544),
    "speculative": (4, 1056),
    "outline": (7, 2100),
    "paper_qa": (2, 400),
    "panel": (4, 1600),
    "hedge": (2, 800),
}


def compiled(document: str) -> Workflow:
    return compile_document(read_yaml(document).value)


@pytest.mark.parametrize(("document", "program"), EXAMPLES)
def test_both_forms_of_an_example_are_one_document(document: str, program: str) -> None:
    same_document(compiled(document), compile_document(compile_program(program).value))


def same_document(one: Workflow, other: Workflow) -> None:
    first, second = canonical_document(one), canonical_document(other)
    assert first == second
    assert list(first["steps"]) == list(second["steps"]), "their order breaks ties"
    assert canonical_document(compile_document(first)) == first


@pytest.mark.skipif(not NAMES, reason="the acceptance programs are no part of the project")
def test_there_is_a_bound_for_each_program() -> None:
    assert set(NAMES) == set(BOUNDS)


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_an_acceptance_program_are_one_document(name: str) -> None:
    workflow = compiled((WORKFLOWS / f"{name}.yaml").read_text())
    same_document(workflow, compile_document(compile_program((WORKFLOWS / f"{name}.py").read_text()).value))
    plan = plan_of(workflow, RunAllowance())
    assert (plan.calls, plan.output_tokens) == BOUNDS[name]
    assert not plan.warnings


SCENARIOS = [
    (name, each) for name in NAMES for each in yaml.safe_load((WORKFLOWS / f"{name}.expected.yaml").read_text())["scenarios"]
]


@pytest.mark.parametrize(("name", "scenario"), SCENARIOS, ids=lambda value: value if isinstance(value, str) else value["name"])
def test_an_acceptance_program_computes_the_least_tokens(name: str, scenario: dict[str, Any]) -> None:
    workflow = compiled((WORKFLOWS / f"{name}.yaml").read_text())
    models = {step: each.work.model for step, each in workflow.graph.steps.items() if isinstance(each.work, ModelCall)}
    union, calls, sent = PrefixUnion(), 0, 0
    for number in range(scenario.get("runs", 1)):
        inputs = {key: given(workflow.inputs[key].type, key, value, number) for key, value in scenario["inputs"].items()}
        connectors = {
            use: {key: prose(size, key) for key, size in answer.items()}
            for use, answer in scenario.get("connectors", {}).items()
        }
        run = TinyRun(workflow, inputs, scenario["answers"], connectors, scenario.get("seconds", {})).run()
        run.least_tokens(models, union)
        calls += len(run.prompts)
        sent += sum(map(len, run.prompts.values()))
        for output, provisional in scenario.get("provisional", {}).items():
            assert run.provisional[output] == provisional, output
    stated = scenario["tokens"]
    assert (calls, sent, union.least_tokens) == (stated["calls"], stated["without_sharing"], stated["least"])


def given(kind: str, name: str, value: Any, number: int) -> Any:
    if kind == "messages":
        return [{"role": role, "content": prose(size, f"{name}{at}")} for at, (role, size) in enumerate(value)]
    size = value[number] if isinstance(value, list) else value
    return prose(size, f"{name}{number}") if isinstance(size, int) else size


LIMITS = re.findall(r"^\| .+ \| ([\d,]+)( KiB| MiB|) \| `(\w+)\.(\w+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("number", "unit", "module", "constant"), LIMITS)
def test_the_limits_of_the_page_are_those_of_the_code(number: str, unit: str, module: str, constant: str) -> None:
    value = getattr(import_module(f"gateway.features.workflows.language.{module}"), constant)
    assert int(number.replace(",", "")) << {"": 0, " KiB": 10, " MiB": 20}[unit] == value


def test_the_page_names_every_function_and_every_key() -> None:
    words = set(re.findall(r"\w+", PAGE))
    assert set(FUNCTIONS) | {member for members in MEMBERS.values() for member in members} <= words
    assert set(keys.STEP_KEYS) | set(keys.CHAT_KEYS) | set(keys.TEXT_KEYS) <= words
