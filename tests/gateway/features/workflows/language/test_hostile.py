"""Random and hostile documents, programs and expressions: refused or total, and no error but the language's own.

Nothing here has a time limit of its own: every bound is on sizes, so that the work is bounded (`docs/workflow-language.md`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.features.workflows.language import keys
from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.expressions import parse_expression
from gateway.features.workflows.language.faults import MAX_FAULTS, DocumentError, DocumentFault
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.operations import ExpressionError
from gateway.features.workflows.language.plan import MAX_AT_ONCE, RunAllowance, plan_of
from gateway.features.workflows.language.python_form import compile_program
from gateway.features.workflows.language.reading import read_json, read_yaml
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.values import EvaluationError, bytes_of
from gateway.features.workflows.language.workflow import Workflow
from tests.gateway.features.workflows.language.test_documents import DOCUMENT
from tests.support.canonical_document import canonical_document
from tests.support.paths import ROOT
from tests.support.workflows import TinyRun

PAGE = (ROOT / "docs" / "workflow-language.md").read_text("utf-8")
DOCUMENTS = [DOCUMENT, *(read_yaml(text).value for text in re.findall(r"```yaml\n(workflow: 1\n.*?)```", PAGE, re.DOTALL))]
PROGRAMS = re.findall(r"```python\n(@workflow.*?)```", PAGE, re.DOTALL)
MANY = settings(max_examples=4 * settings().max_examples, suppress_health_check=list(HealthCheck))
"""In `make test-nightly`, three tests with 12,000 examples together."""

# -- expressions

ATOMS = st.sampled_from(
    [
        *("inputs.a", "inputs.t", "inputs.l", "s.value", "s.text", "n.text", "1", "2.5", "'x'", "''", "None", "True", "1e308"),
        "inputs.l[0]",
        "s.value.k",
        "s.value['k'][1:]",
        "[1, 2]",
        "[]",
        "9007199254740993",
        "x",
        "s",
        "lambda: 1",
        "_x",
        "f'{x}'",
    ]
)
_OPERATORS = "+|-|*|/|//|%|==|!=|<|<=|>|>=|in|not in|and|or|**|@|is"
BINARY = st.sampled_from(tuple(each for each in _OPERATORS.split("|")))
SCOPE = {
    "inputs": {"a": 1, "t": "hello ${x}", "l": [1, 2, "x", None, {"k": [1]}]},
    "s": StepResult("done", value={"k": [1, 2, 3], "text": "t"}, text="long " * 100),
    "n": StepResult(),
}


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, BINARY, inner),
        st.builds("{}{}".format, st.sampled_from(["-", "not ", "~"]), inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}[{}:{}]".format, inner, inner, inner),
        st.builds("{}.{}".format, inner, st.sampled_from(["k", "text", "value", "__class__", "_x"])),
        st.builds(
            lambda name, each: f"{name}({', '.join(each)})", st.sampled_from([*FUNCTIONS, "eval"]), st.lists(inner, max_size=3)
        ),
        st.builds(lambda each: f"[{', '.join(each)}]", st.lists(inner, max_size=3)),
    )


@MANY
@given(
    st.one_of(st.recursive(ATOMS, larger, max_leaves=30), st.text(max_size=60), st.text("()[].'\"\\+-lambda1 ", max_size=60))
)
def test_expressions(text: str) -> None:
    with contextlib.suppress(ExpressionError, EvaluationError):
        expression = parse_expression(text)
        assert parse_expression(expression.canonical).canonical == expression.canonical
        bytes_of(expression.evaluate(SCOPE))


# -- documents

KEYS = st.sampled_from(
    [
        *keys.STEP_KEYS,
        *keys.CHAT_KEYS,
        *keys.TEXT_KEYS,
        *DOCUMENT,
        *(
            "in",
            "as",
            "value",
            "steps",
            "when",
            "else",
            "emit",
            "outputs",
            "limits",
            "primary",
            "x",
            "_y",
            "a.b",
            "repeat",
            "run",
        ),
    ]
)
TEXTS = st.sampled_from(
    [
        "",
        "${",
        "${}",
        "${a}",
        "$${x}",
        "${a.text}",
        "${inputs}",
        "${c.value[:3]}",
        "${x.y.z[0][1:2]}",
        "${'}'}",
        "\ud800",
        "skip",
        *("a", "b", "c", "d", "c1", "d1", "reply", "hints", "delta", "list", "${len(b.value)}", "x" * 300),
    ]
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.text(max_size=8))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, TEXTS), inner, max_size=4))
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all values in it."""
    found: list[tuple[Any, Any]] = []
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key), *places(each)]
    return found


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """A valid document with some changes: values replaced, removed, moved from elsewhere, keys added."""
    made = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(0, 4))):
        all_places = places(made)
        if not all_places:
            break
        container, key = draw(st.sampled_from(all_places))
        change = draw(st.integers(0, 3))
        if change == 0:
            container[key] = draw(VALUES)
        elif change == 1:
            del container[key]
        elif change == 2:
            other, name = draw(st.sampled_from(all_places))
            with contextlib.suppress(LookupError):
                container[key] = copy.deepcopy(other[name])
        elif isinstance(container, dict):
            container[draw(KEYS)] = draw(VALUES)
    return made


def attempted(compiler: Callable[[Any], Any], source: Any) -> tuple[Any, DocumentError]:
    """(the result, no error) or (None, the error)."""
    none = DocumentError([DocumentFault("", "none")])
    try:
        return compiler(source), none
    except DocumentError as error:
        none = error
    assert 0 < len(none.faults) <= MAX_FAULTS
    return None, none


def outcome(document: Any) -> Workflow | None:
    """The workflow; None: it is refused."""
    workflow, error = attempted(compile_document, document)
    if workflow is None:
        assert all(fault.text for fault in error.faults)
        assert error.answer().status in (400, 413)
        return None
    canonical = canonical_document(workflow)
    assert canonical_document(compile_document(canonical)) == canonical
    return workflow


@MANY
@given(st.one_of(documents(), VALUES))
def test_documents(document: Any) -> None:
    """A document that is accepted has a plan, and a run ends within its bounds."""
    workflow = outcome(document)
    with contextlib.suppress(ValueError, DocumentError):
        read_json(json.dumps(document))
    if workflow is None:
        return
    plan, error = attempted(lambda each: plan_of(each, RunAllowance()), workflow)
    if plan is None:
        assert {fault.code for fault in error.faults} == {"workflow_over_limits"}
        return
    names = workflow.graph.steps
    with contextlib.suppress(EvaluationError, DocumentError):
        messages = [{"role": "user", "content": "x"}]
        inputs = {name: messages if each.type == "messages" else each.default for name, each in workflow.inputs.items()}
        seconds = {name: 1 + at % 3 for at, name in enumerate(names)}
        run = TinyRun(workflow, inputs, dict.fromkeys(names, '["Yes"]'), AnyConnector(), seconds).run()
        assert len(run.prompts) <= plan.calls
        assert run.peak <= plan.widest or plan.widest == MAX_AT_ONCE


class AnyConnector(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return {"text": key}


# -- programs

PIECES = st.sampled_from(
    [
        "if",
        "else:",
        "for",
        "=",
        "chat(",
        "text(",
        "call(",
        ")",
        "[",
        "]",
        "yield",
        "{",
        "}",
        ".kill()",
        "wait(",
        "lambda",
        "import os",
        "\n",
        "\n    ",
        "    ",
        "'",
        '"',
        'f"{x}"',
        "+",
        "${",
        "$",
        "await",
        "1",
        "**",
        "*",
        "print(1)",
        "while True: pass",
        "@x",
        ":=",
        "return {'a': reply.value}",
        "[y for y in x]",
        "\x00",
        "\ud800",
        "conversation",
        "()",
        ".value",
        "['a']",
        "and",
        "in",
        "\t",
    ]
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A valid program with some changes: pieces inserted, cut out; lines repeated, moved, removed."""
    made = draw(st.sampled_from(PROGRAMS))
    for _ in range(draw(st.integers(0, 4))):
        change, at = draw(st.integers(0, 3)), draw(st.integers(0, len(made)))
        lines = made.split("\n")
        line = at % len(lines)
        if change == 0:
            made = made[:at] + draw(PIECES) + made[at:]
        elif change == 1:
            made = made[:at] + made[at + draw(st.integers(1, 30)) :]
        elif change == 2:
            made = "\n".join([*lines[:line], lines[draw(st.integers(0, len(lines) - 1))], *lines[line:]])
        else:
            made = "\n".join(lines[:line] + lines[line + 1 :])
    return made


@MANY
@given(st.one_of(programs(), st.text(max_size=100)))
def test_programs(text: str) -> None:
    source, _ = attempted(compile_program, text)
    if source is not None:
        outcome(source.value)


@given(st.one_of(st.text(max_size=100), st.text("-:[]{}&*!|>'\"# \nab1?,", max_size=100)))
def test_yaml(text: str) -> None:
    with contextlib.suppress(DocumentError):
        source = read_yaml(text)
        assert isinstance(source.lines, dict)


# -- sizes at their bounds


def dense(count: int) -> dict[str, Any]:
    """Steps that all need, kill and continue each other."""
    names = [f"s{at}" for at in range(count)]
    chat = {"append": [{"role": "user", "content": "x"}] * 5}
    return {
        name: {"chat": {**chat, **({"from": names[at - 1]} if at else {})}, "needs": names[:at], "kill": names[:at]}
        for at, name in enumerate(names)
    }


@pytest.mark.parametrize(
    "large",
    [
        dense(64),
        {"a": {"let": ["${inputs.m}"] * 1000}},
        {
            f"e{at}": {
                "each": {"in": [1] * 7, "as": f"v{at}", "steps": {f"c{at}": {"chat": {"from": "${inputs.m}"}}}, "value": 1}
            }
            for at in range(32)
        },
        {f"s{at}": {"let": f"${{s{at + 1}.value}}" if at < 63 else 1} for at in range(64)},
    ],
)
def test_the_largest_documents_have_a_plan(large: dict[str, Any]) -> None:
    workflow = outcome({**DOCUMENT, "steps": large})
    assert workflow is not None
    assert plan_of(workflow, RunAllowance(1 << 20, 1 << 30)).widest <= 16


@pytest.mark.parametrize(
    "text",
    [
        "(" * 2000,
        "[" * 2000,
        "-" * 1999 + "1",
        "not " * 499 + "1",
        "a" + ".b" * 900,
        "f(" * 600,
        "1 if 1 else " * 150 + "1",
        "9" * 1999,
    ],
)
def test_the_largest_expressions_are_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{a: " * 60_000,
        "- " * 130_000,
        "? " * 130_000,
        "a: &a [x]\n" + "b: [*a, *a]\n" * 1000,
        "- 0\n" * 60_000,
        "a: 1\n" * 50_000,
    ],
)
def test_the_largest_texts_of_yaml_are_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        read_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        piece * ((64 << 10) // len(piece))
        for piece in ("(", "{", "a+", "a<", "x=", "a.b.", "()", "@a\n", "a;", "lambda:", "f'{", "1**", "''")
    ],
)
def test_the_largest_programs_are_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        compile_program(text)
