"""Everything that a runtime asks of the language: readiness, kills, requests, answers, bounds, shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.features.workflows.language.constraints import (
    AnswerConstraint,
    ConstraintUnsatisfiedError,
    choice_constraint,
    mismatch,
)
from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.faults import OVER_LIMITS, DocumentError
from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.language.prefixes import PrefixUnion, PromptPiece
from gateway.features.workflows.language.prompts import messages_of, prompt_of, request_body
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.scheduling import (
    DONE,
    FAILED,
    KILLED,
    PENDING,
    RUNNING,
    SKIPPED,
    StepReadiness,
    copy_name,
    readiness,
)
from gateway.features.workflows.language.values import EvaluationError, ValueTooLargeError
from gateway.features.workflows.language.workflow import Workflow
from tests.support.workflows import TinyRun, workflow_of

CHAT = {"chat": {"from": "${inputs.messages}"}}
USER = {"role": "user", "content": "hello"}


def call_of(workflow: Workflow, name: str) -> ModelCall:
    work = workflow.graph.steps[name].work
    assert isinstance(work, ModelCall)
    return work


# -- readiness, kills


@pytest.mark.parametrize(
    ("need", "one", "other", "expected"),
    [
        (DONE, DONE, PENDING, StepReadiness.READY),
        (DONE, KILLED, DONE, StepReadiness.READY),
        (RUNNING, DONE, DONE, StepReadiness.WAITS),
        (DONE, RUNNING, FAILED, StepReadiness.WAITS),
        (SKIPPED, RUNNING, RUNNING, StepReadiness.UNREACHABLE),
        (DONE, KILLED, FAILED, StepReadiness.UNREACHABLE),
    ],
)
def test_a_step_is_ready_by_its_needs(need: str, one: str, other: str, expected: StepReadiness) -> None:
    steps = {"a": CHAT, "b": CHAT, "c": CHAT, "d": {"let": "${coalesce(a.text, b.text, c.text)}", "needs_any": ["b", "c"]}}
    workflow = workflow_of(steps)
    assert workflow.graph.requires["d"] == {"a"}
    status = {"a": need, "b": one, "c": other}
    assert readiness(workflow.steps["d"], workflow.graph, status.__getitem__) is expected


NESTED = {
    "a": CHAT,
    "b": {
        "switch": [{"else": True, "steps": {"c": {**CHAT, "kill": ["a"]}, "d": {"let": "${c.text}"}}, "value": "${d.value}"}]
    },
    "e": {"each": {"in": [1], "as": "v", "steps": {"f": {"let": "${v}"}}, "value": "${f.value}"}},
    "g": {"let": 1, "kill": ["b", "e"], "if": "${a.text}"},
}


def test_a_kill_reaches_into_a_switch_and_an_each() -> None:
    graph = workflow_of(NESTED).graph
    assert {name: set(killers) for name, killers in graph.killers.items()} == {
        "a": {"c"},
        **{name: {"g"} for name in "bcdef"},
        "g": set(),
    }
    assert (graph.contents["b"], graph.outer["d"], graph.outer["b"]) == (("c", "d"), "b", "")


def test_an_output_is_provisional_until_its_killers_are_decided() -> None:
    steps = {
        "slow": {**CHAT, "yield": "slow"},
        "judge": {"switch": [{"when": "${slow.text == 'x'}", "kill": ["guess"]}], "yield": "judge"},
        "guess": {**CHAT, "yield": "guess"},
    }
    for seconds, provisional, outputs in ((1, True, {"slow", "judge"}), (9, False, {"slow", "judge"})):
        run = TinyRun(
            workflow_of(steps), {"messages": [USER]}, {"slow": "x", "guess": "y"}, seconds={"slow": 5, "guess": seconds}
        )
        run.run()
        assert run.provisional.get("guess", False) is provisional
        assert run.outputs.keys() == outputs, "killed"


def test_items_run_beside_each_other_with_their_own_copies() -> None:
    each = {
        "in": [1, 2],
        "as": "n",
        "steps": {"x": CHAT, "y": {"let": "${x.text} ${n}", "if": "${n > 1}"}},
        "value": "${y.value}",
    }
    run = TinyRun(workflow_of({"all": {"each": each, "yield": "all"}}), {"messages": [USER]}, {"x": "answer"}).run()
    assert run.outputs == {"all": [None, "answer 2"]}
    assert set(run.prompts) == {copy_name("x", (0,)), "x[1]"}
    assert run.now == 1
    assert copy_name("x", (2, 0)) == "x[2][0]"


@pytest.mark.parametrize(("items", "why"), [(None, "got null"), ("ab", "got a text"), ([1] * 4, "got 4 items")])
def test_items_are_a_list_within_its_bound(items: Any, why: str) -> None:
    steps = {"e": {"each": {"in": "${inputs.messages}", "as": "x", "steps": {"a": CHAT}, "value": 1}}}
    work: Any = workflow_of(steps, inputs={"messages": {"type": "messages", "max_length": 3}}).steps["e"].work
    assert work.items_for({"inputs": {"messages": [1, 2, 3]}}) == [1, 2, 3]
    with pytest.raises(EvaluationError, match=f"a list of at most 3 items is expected, {why}"):
        work.items_for({"inputs": {"messages": items}})


# -- requests


def test_a_request_continues_the_exact_messages_and_the_answer() -> None:
    more = ["${inputs.messages[:1]}", {"role": "user", "content": "${a.text}"}]
    chat = {
        "from": "a",
        "append": more,
        "temperature": 0.5,
        "seed": "${a.value.n}",
        "stop": ["x"],
        "extra": {"top_k": "${1 + 1}"},
    }
    workflow = workflow_of(
        {"a": {"chat": {**CHAT["chat"], "tools": [{"name": "${inputs.messages[0].role}"}]}}, "b": {"chat": chat}}
    )
    message = {"role": "assistant", "content": "hi ${x}", "reasoning": "r"}
    scope = {
        "inputs": {"messages": [USER]},
        "a": StepResult(DONE, text="hi ${x}", value={"n": 7}, message=message, messages=[USER, message]),
    }
    assert request_body(call_of(workflow, "b"), scope, 50) == {
        "model": "m",
        "messages": [USER, message, USER, {"role": "user", "content": "hi ${x}"}],
        "max_tokens": 50,
        "temperature": 0.5,
        "seed": 7,
        "stop": ["x"],
        "top_k": 2,
        "tools": [{"name": "user"}],
    }
    scope["a"] = StepResult(DONE, value={"n": "7"}, messages=[])
    with pytest.raises(EvaluationError, match=r"steps\.b\.chat\.seed: a number is expected, got a text"):
        request_body(call_of(workflow, "b"), scope, 50)


@pytest.mark.parametrize("value", [None, "text", [1], [{"content": "x"}], {"role": "user"}])
def test_messages_must_be_messages(value: Any) -> None:
    call = call_of(workflow_of({"a": {"chat": {"from": "${inputs.messages}", "append": ["${inputs.messages}"]}}}), "a")
    with pytest.raises(EvaluationError, match="messages"):
        messages_of(call, {"inputs": {"messages": value}})


def test_a_text_step_continues_the_exact_prompt_and_the_text() -> None:
    workflow = workflow_of({"a": {"text": {"prompt": "p ${inputs.messages}"}}, "b": {"text": {"from": "a", "append": " q"}}})
    assert prompt_of(call_of(workflow, "a"), {"inputs": {"messages": []}}) == "p []"
    assert prompt_of(call_of(workflow, "b"), {"a": StepResult(DONE, prompt="p []", text=" x ")}) == "p [] x  q"
    assert call_of(workflow, "a").value_of(" x ") == "x"
    assert request_body(call_of(workflow, "a"), {"inputs": {"messages": 1}}, 5) == {
        "model": "m",
        "prompt": "p 1",
        "max_tokens": 5,
    }


# -- answers


@pytest.mark.parametrize("answer", ["Yes", " Yes\n", '"Yes"'])
def test_a_choice_is_the_choice_itself(answer: str) -> None:
    assert choice_constraint(("Yes", "No")).read(answer) == "Yes"


def test_a_choice_with_a_space_keeps_it() -> None:
    assert choice_constraint((" Yes", "Yes")).read("Yes") == "Yes"
    assert choice_constraint((" Yes", " No")).read("No") == " No"


@pytest.mark.parametrize(
    ("constraint", "answer"), [(choice_constraint(("Yes",)), "yes"), (AnswerConstraint({}), "{"), (AnswerConstraint({}), "")]
)
def test_an_answer_that_does_not_fit(constraint: AnswerConstraint, answer: str) -> None:
    with pytest.raises(ConstraintUnsatisfiedError):
        constraint.read(answer)


SCHEMA = {
    "type": "object",
    "required": ["n"],
    "properties": {
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
        "t": {"type": "string", "maxLength": 2, "enum": ["a", "b", "ccc"]},
        "one": {"const": 1},
        "zero": {"enum": [0, True]},
        "l": {"type": "array", "items": {"anyOf": [{"const": 1}, {"type": "boolean"}]}, "minItems": 1, "maxItems": 2},
    },
}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"n": 2.0, "t": "a", "l": [1, False], "more": None}, ""),
        ({"n": None}, ""),
        ([], "object is expected, got a list"),
        ({}, "n is missing"),
        ({"n": True}, "n: integer or null is expected, got a boolean"),
        ({"n": 0}, "n: less than 1"),
        ({"n": 4}, "n: more than 3"),
        ({"n": 1, "t": "c"}, "t: it is none of the values of its enum"),
        ({"n": 1, "t": "ccc"}, "t: longer than 2 characters"),
        ({"n": 1, "l": []}, "l: fewer than 1 items"),
        ({"n": 1, "l": [1, 1, 1]}, "l: more than 2 items"),
        ({"n": 1, "l": [1, 2]}, "l[1]: it fits none of anyOf"),
        ({"n": 1, "one": True}, "one: it is not the value of its const"),
        ({"n": 1, "zero": False}, "zero: it is none of the values of its enum"),
    ],
)
def test_a_value_is_checked_against_its_schema(value: Any, why: str) -> None:
    assert mismatch(value, SCHEMA) == why


def test_a_check_of_a_schema_is_bounded() -> None:
    schema = {"items": {"anyOf": [*[{"type": "string"}] * 1000, {"type": "integer"}]}}
    assert not mismatch([1] * 10, schema)
    with pytest.raises(ConstraintUnsatisfiedError, match="too many values"):
        mismatch([1] * 1000, schema)
    large = [[*range(3000), last] for last in range(100)]  # each comparison takes the time of its length
    assert not mismatch(large[-1:], {"items": {"enum": large}})
    with pytest.raises(ConstraintUnsatisfiedError, match="too many values"):
        mismatch(large[-1:] * 100, {"items": {"enum": large}})


# -- plans


def plan(steps: dict[str, Any], **more: Any) -> Any:
    return plan_of(workflow_of(steps, **more), RunAllowance(max_calls=100, max_output_tokens=5000, max_tokens=10, max_s=60))


def each(count: int, steps: dict[str, Any]) -> dict[str, Any]:
    return {
        "each": {"in": list(range(count)), "as": f"v{next(iter(steps))}", "steps": steps, "value": None},
        "yield": next(iter(steps)),
    }


def test_bounds_are_sums_over_all_steps_that_are_possible() -> None:
    found = plan(
        {
            "a": {"chat": {**CHAT["chat"], "max_tokens": 7}},
            "b": {
                "switch": [{"when": "${a.text}", "steps": {"c": CHAT}}, {"else": True, "steps": {"d": {"call": {"use": "x"}}}}]
            },
            "e": each(3, {"f": CHAT, "g": {"each": each(2, {"h": CHAT})["each"]}}),
        }
    )
    assert (found.calls, found.output_tokens) == (1 + 1 + 1 + 3 + 6, 7 + 10 + 30 + 60)


@pytest.mark.parametrize(
    ("steps", "widest"),
    [
        ({"a": CHAT, "b": CHAT, "c": {"chat": {"from": "a"}}}, 2),
        ({"a": CHAT, "b": {"chat": {"from": "a"}}, "c": {"chat": {"from": "b"}}}, 1),
        ({"a": CHAT, "b": {"let": "${a.text}"}, "c": {"chat": {**CHAT["chat"]}, "needs": ["b"]}}, 1),
        (
            {"a": CHAT, "b": {**CHAT, "needs": ["a"]}, "c": {**CHAT, "needs": ["a"]}, "d": {**CHAT, "needs": ["b"]}, "e": CHAT},
            3,
        ),
        ({"a": CHAT, "e": each(3, {"f": CHAT})}, 4),
        ({"a": CHAT, "e": {**each(3, {"f": CHAT}), "needs": ["a"]}, "b": {**CHAT, "needs": ["e"]}}, 3),
        (
            {
                "a": CHAT,
                "s": {"switch": [{"when": "${1}", "steps": {"b": CHAT}}, {"else": True, "steps": {"c": CHAT, "d": CHAT}}]},
            },
            3,
        ),
        (
            {
                "e": each(3, {"f": CHAT}),
                "s": {"switch": [{"else": True, "steps": {"c": CHAT, "d": {**CHAT, "needs": ["e"]}}}]},
            },
            5,  # `c` beside all items of `e`, though `d` waits for them
        ),
        ({f"s{at}": CHAT for at in range(20)}, 16),
        ({"a": {"let": 1}}, 0),
    ],
)
def test_calls_at_once(steps: dict[str, Any], widest: int) -> None:
    assert plan(steps).widest == widest


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([USER] * 8192, ""),
        ([USER] * 8193, "8,193 messages, more than 8,192"),
        ([{"role": "user", "content": "x" * ((4 << 20) - 50)}], ""),
        ([{"role": "user", "content": "x" * (4 << 20)}], "more than 4,194,304"),
    ],
)
def test_the_messages_of_a_step_have_bounds_of_their_own(messages: list[Any], why: str) -> None:
    """A step that continues another one has its messages, too."""
    workflow = workflow_of({"a": CHAT, "b": {"chat": {"from": "a"}}})
    for name in "ab":
        scope = {"inputs": {"messages": messages}, "a": StepResult(DONE, messages=messages)}
        if why:
            with pytest.raises(ValueTooLargeError, match=why):
                messages_of(call_of(workflow, name), scope)
        else:
            assert messages_of(call_of(workflow, name), scope) == messages


@pytest.mark.parametrize(
    ("steps", "more", "path", "why"),
    [
        (
            {"a": {"chat": {**CHAT["chat"], "max_tokens": 5001}}},
            {},
            "",
            "5,001 output tokens; workflows.max_output_tokens is 5,000",
        ),
        ({"a": each(64, {"b": CHAT, "c": CHAT})}, {}, "", "128 calls; workflows.max_calls is 100"),
        ({"a": each(33, {"b": {"call": {"use": "x"}}})}, {}, "", "33 calls of connectors; 32 are possible"),
        (
            {"a": each(64, {"b": {"each": each(64, {"c": {"let": 1}})["each"]}})},
            {},
            "",
            "4,161 copies of steps; 4,096 are possible",
        ),
        ({"a": CHAT, "b": CHAT}, {"limits": {"calls": 1}}, "limits.calls", "2 calls, its own limit is 1"),
        ({"a": CHAT}, {"limits": {"output_tokens": 9}}, "limits.output_tokens", "10 output tokens, its own limit is 9"),
        ({"a": CHAT}, {"limits": {"seconds": 61}}, "limits.seconds", "a run has at most 60 seconds (workflows.max_s)"),
    ],
)
def test_a_run_that_could_exceed_its_limits_is_refused(
    steps: dict[str, Any], more: dict[str, Any], path: str, why: str
) -> None:
    with pytest.raises(DocumentError) as error:
        plan(steps, **more)
    (fault,) = error.value.faults
    assert (fault.path, fault.code) == (path, OVER_LIMITS)
    assert why in fault.text


def test_warnings() -> None:
    found = plan(
        {
            "a": {"text": {"prompt": "p "}},
            "b": {"text": {"from": "a", "append": "${inputs.messages} ", "model": "other"}, "yield": "b"},
            "c": CHAT,
            "d": {"switch": [{"when": "${1}", "emit": {"x": 1}, "steps": {"e": CHAT}}]},
            "f": {"let": 1},
            "g": {"let": 1, "kill": ["c"]},
        },
        outputs={"y": "${f.value}"},
    )
    assert [(each.code, each.path) for each in found.warnings] == [
        ("text_ends_in_space", "steps.a.text.prompt"),
        ("shares_nothing", "steps.b.text.from"),
        ("text_ends_in_space", "steps.b.text.append"),
        ("unused_step", "steps.c"),
        ("unused_step", "steps.d.switch[0].steps.e"),
    ]


def test_steps_that_share_a_prefix() -> None:
    found = plan(
        {
            "a": CHAT,
            "b": {"chat": {"from": "a", "append": [USER]}},
            "c": {"chat": {"from": "a", "append": [USER, USER]}},
            "d": {"chat": {**CHAT["chat"], "model": "other"}},
            "e": each(3, {"f": {"chat": {"append": [USER, {"role": "user", "content": "${vf}"}]}}}),
        }
    )
    assert [(each.steps, each.calls, each.pieces) for each in found.prefixes] == [
        (("a", "b", "c"), 3, ("inputs.messages",)),
        (("f",), 3, ("user: hello",)),
        (("b", "c"), 2, ("inputs.messages", "answer of a", "user: hello")),
    ]


def test_the_union_of_prompts_as_prefixes() -> None:
    union = PrefixUnion()
    system, one, other, answer = PromptPiece("s", 100), PromptPiece("1", 10), PromptPiece("2", 20), PromptPiece("a", 5)
    assert union.add("m", [system, one], [answer]) == 110
    assert union.add("m", [system, other]) == 20
    assert union.add("m", [system, one, answer, other]) == 20
    assert union.add("m", [system, other]) == 1, "the last token is computed again"
    assert union.add("another model", [system]) == 100
    assert union.least_tokens == 251
