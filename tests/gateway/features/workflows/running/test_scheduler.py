"""The scheduler of runs: each rule by an example, and random documents with random timings, failures and kills."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.language.operations import MAX_WORK
from gateway.features.workflows.language.plan import MAX_AT_ONCE, RunAllowance, plan_of
from gateway.features.workflows.language.values import MAX_VALUE_BYTES
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.gate import PrefixGate, outline_of
from gateway.features.workflows.running.messages import GatedEngine, ModelAnswer, StepFailure
from gateway.features.workflows.running.scheduler import TURN_WORK, RunScheduler
from gateway.features.workflows.running.step_ends import LOOK_WORK
from tests.support.machines import share_of
from tests.support.scripted_runs import ScriptedRun
from tests.support.workflows import workflow_of

USER = {"role": "user", "content": "hello"}
INPUTS = {"messages": [USER]}
CHAT = {"chat": {"from": "${inputs.messages}"}}
BROKEN = StepFailure("upstream", "it broke", 502, repeat=True)
REFUSED = StepFailure("bad", "it is refused", 400)


def run_of(steps: Mapping[str, Any], answers: Mapping[str, Any] | None = None, **more: Any) -> ScriptedRun:
    document = more.pop("document", {})
    names = dict.fromkeys(_names(steps), "text")
    return ScriptedRun(workflow_of(steps, **document), INPUTS, names | dict(answers or {}), **more)


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


def test_a_broken_attempt_is_repeated_after_a_wait_with_the_same_request() -> None:
    run = run_of({"a": {**CHAT, "yield": {"as": "a", "stream": "delta"}}}, failures={"a": [BROKEN]}, pieces=2).run()
    assert [(call.attempt, call.delay_s) for call in run.calls] == [(1, 0.0), (2, 0.5)]
    assert run.calls[0].body == run.calls[1].body
    assert run.scheduler.outputs == {"a": "text"}
    said = run.said
    assert said.count("output.reset a") == said.count("step.started a") == 1
    assert run.now == 1 + 0.5 + 1


@pytest.mark.parametrize(
    ("steps", "failures", "ends"),
    [
        ({"a": {"on_error": "skip"}}, [REFUSED], ["output.reset a", "step.skipped a"]),
        ({"a": {"on_error": {"value": "x"}}}, [REFUSED], ["output.reset a", "step.done a", "output.done a"]),
        ({"a": {}, "k": {**CHAT, "kill": ["a"]}}, [], ["step.done k", "step.killed a", "output.reset a"]),
    ],
)
def test_a_text_that_is_in_no_result_is_taken_back(steps: Any, failures: Any, ends: list[str]) -> None:
    steps["a"] |= {**CHAT, "yield": {"as": "a", "stream": "delta"}}
    run = run_of(steps, failures={"a": failures}, pieces=2, seconds={"a": 9, "k": 6}).run()
    assert "output.delta a" in run.said
    assert run.said[-len(ends) :] == ends


@pytest.mark.parametrize(
    ("failures", "retry", "calls", "status"),
    [
        ([BROKEN] * 2, None, 2, "failed"),
        ([BROKEN] * 3, {"max": 3}, 4, "completed"),
        ([BROKEN] * 4, {"max": 3}, 4, "failed"),
        ([BROKEN], {"max": 0}, 1, "failed"),
        ([REFUSED], {"max": 3}, 1, "failed"),
        ([StepFailure("rate", "wait", 429, waits=True, retry_after_s=7)] * 9, {"max": 0}, 10, "completed"),
    ],
)
def test_retries_are_bounded_and_a_limit_of_the_own_key_is_none(
    failures: list[StepFailure], retry: Any, calls: int, status: str
) -> None:
    step = CHAT | ({"retry": retry} if retry else {})
    run = run_of({"a": step}, failures={"a": failures}).run()
    assert (len(run.calls), run.scheduler.status) == (calls, status)


@pytest.mark.parametrize(("repeatable", "calls"), [(("x",), 2), ((), 1)])
def test_a_connector_is_called_again_only_if_its_operator_allows_it(repeatable: tuple[str, ...], calls: int) -> None:
    steps = {"a": {"call": {"use": "x"}, "retry": {"max": 1}, "on_error": "skip"}}
    run = run_of(steps, failures={"a": [BROKEN]}, connectors={"x": 1}, repeatable=repeatable).run()
    assert len(run.calls) == calls


def test_a_failed_step_ends_the_run_and_kills_what_runs() -> None:
    run = run_of({"a": CHAT, "b": CHAT, "c": {"chat": {"from": "b"}}}, failures={"a": [REFUSED]}, seconds={"b": 9}).run()
    assert run.said[-2:] == ["step.failed a", "step.killed b"]
    assert (run.scheduler.status, run.scheduler.failed_step) == ("failed", "a")
    assert run.scheduler.error == REFUSED


def test_an_error_that_is_skipped_skips_all_that_need_the_step() -> None:
    steps = {
        "a": {**CHAT, "on_error": "skip", "yield": "a"},
        "b": {"chat": {"from": "a"}},
        "c": {"let": "${coalesce(a.text, 'none')} ${a.status}", "needs_any": ["a", "d"], "yield": "c"},
        "d": CHAT,
    }
    run = run_of(steps, failures={"a": [REFUSED]}).run()
    assert run.scheduler.outputs == {"c": "none skipped"}
    assert run.told("step.skipped", "a")["reason"] == "error"
    assert run.told("step.skipped", "b")["reason"] == "dependency"


def test_an_error_that_is_replaced_counts_as_done() -> None:
    steps = {
        "a": {**CHAT, "on_error": {"value": "sorry"}, "yield": "a"},
        "b": {"chat": {"from": "a", "append": [USER]}, "yield": "b"},
    }
    run = run_of(steps, failures={"a": [REFUSED]}).run()
    assert run.scheduler.outputs == {"a": "sorry", "b": "text"}
    assert run.prompts["b"]["messages"] == [USER, {"role": "assistant", "content": "sorry"}, USER]
    assert run.told("step.done", "a")["error"]["code"] == "bad"


def test_an_error_in_the_output_of_a_replaced_step_is_final() -> None:
    steps = {"a": {**CHAT, "on_error": {"value": "sorry"}, "yield": {"as": "a", "value": "${a.value + 1}"}}}
    run = run_of(steps).run()
    assert (run.scheduler.status, run.scheduler.error and run.scheduler.error.code) == ("failed", "expression_failed")


def test_an_answer_that_does_not_fit_is_asked_for_again() -> None:
    steps = {"a": {"chat": {**CHAT["chat"], "output": "integer"}, "retry": {"max": 2}}}
    run = run_of(steps, {"a": "not a number"}).run()
    assert len(run.calls) == 3
    assert run.scheduler.error
    assert run.scheduler.error.code == "constraint_unsatisfied"
    assert run.calls[0].body["response_format"]["json_schema"]["schema"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ({"a": {"let": "${1 + 'x'}"}}, "expression_failed"),
        ({"a": {**CHAT, "if": "${'x' < 1}"}}, "expression_failed"),
        ({"a": {"chat": {"append": ["${1}"]}}}, "expression_failed"),
        ({"a": {"switch": [{"when": "${-'x'}"}]}}, "expression_failed"),
        ({"a": {"switch": [{"else": True, "value": "${-'x'}"}]}}, "expression_failed"),
        ({"a": {"each": {"in": "${('x')[:3]}", "as": "i", "steps": {"b": {"let": 1}}, "value": 1}}}, "expression_failed"),
        ({"a": {"call": {"use": "x", "with": {"v": "${-'x'}"}}}}, "expression_failed"),
        ({"big": {**CHAT}}, "value_too_large"),
    ],
)
def test_a_wrong_type_fails_the_step(steps: Mapping[str, Any], code: str) -> None:
    run = run_of(steps, {"big": "x" * (MAX_VALUE_BYTES + 1)}).run()
    assert run.scheduler.error
    assert run.scheduler.error.code == code
    assert run.scheduler.failed_step == next(iter(steps))


def test_all_values_of_a_run_are_bounded_together() -> None:
    each = {"in": list(range(32)), "as": "i", "steps": {"a": {"let": "${inputs.text}"}}, "value": 1}
    document = {"inputs": {"text": {"type": "string"}, "messages": {"type": "messages"}}}
    workflow = workflow_of({"all": {"each": each}}, **document)
    assert workflow.graph.calls_on_paths().keys() == workflow.graph.steps.keys()
    run = ScriptedRun(workflow, {"text": "x" * (MAX_VALUE_BYTES - 100)}, {}).run()
    assert run.scheduler.error
    assert run.scheduler.error.code == "value_too_large"
    assert run.scheduler.held < 18 << 20


def test_text_of_a_model_is_never_an_expression() -> None:
    steps = {"a": CHAT, "b": {"chat": {"from": "a", "append": [{"role": "user", "content": "${a.text}"}]}, "yield": "b"}}
    run = run_of(steps, {"a": "${inputs.messages} $${"}).run()
    assert run.prompts["b"]["messages"][-1]["content"] == "${inputs.messages} $${"


def test_calls_at_once_are_bounded_and_certain_ones_go_first() -> None:
    steps: dict[str, Any] = {f"u{at}": CHAT for at in range(20)} | {f"s{at}": CHAT for at in range(20)}
    steps["k"] = {"let": "${s19.text}", "kill": [f"u{at}" for at in range(20)]}
    run = run_of(steps).run()
    assert run.peak == MAX_AT_ONCE
    started = [each.split()[1] for each in run.said if each.startswith("step.started")]
    assert started[:20] == [f"s{at}" for at in range(20)]
    assert [call.uncertain for call in run.calls[:21]] == [False] * 20 + [True]


def test_a_run_of_thousands_of_values_is_cut_into_turns() -> None:
    inner = {"each": {"in": list(range(50)), "as": "j", "steps": {"b": {"let": "${i * j}"}}, "value": "${b.value}"}}
    steps = {
        "all": {
            "each": {"in": list(range(50)), "as": "i", "steps": {"row": inner}, "value": "${sum(row.values)}"},
            "yield": "all",
        }
    }
    scheduler = RunScheduler(workflow_of(steps), INPUTS, 10)
    scheduler.begin(0.0, {})
    turns = 1
    while scheduler.turn().more:
        turns += 1
    assert scheduler.status == "completed"
    assert scheduler.outputs["all"] == [i * 1225 for i in range(50)]
    assert turns > 2500 * LOOK_WORK / TURN_WORK


HEAVY = "${len(" + "lower(" * 45 + "inputs.text" + ")" * 45 + ")}"  # most of the work of one step
TEXT_INPUT = {"inputs": {"text": {"type": "string"}}}


@pytest.mark.parametrize(
    "steps",
    [
        {f"s{at}": {"let": HEAVY} for at in range(12)},
        {f"s{at}": {"chat": {"append": [{"role": "user", "content": HEAVY}]}} for at in range(12)},
        {f"s{at}": {"let": 1, "yield": {"as": f"s{at}", "value": HEAVY}} for at in range(12)},
    ],
)
def test_the_work_of_a_turn_is_bounded(steps: dict[str, Any]) -> None:
    scheduler = RunScheduler(workflow_of(steps, **TEXT_INPUT), {"text": "x" * 300_000}, 10)
    scheduler.begin(0.0, {})
    works = list[int]()
    more, calls = True, 0
    while more:
        turn = scheduler.turn()
        more, calls = turn.more, calls + len(turn.calls)
        works.append(turn.work)
    assert scheduler.status == "completed" or calls == 12
    assert sum(works) > 12 * MAX_WORK / 4
    assert max(works) < TURN_WORK + MAX_WORK


@pytest.mark.parametrize(
    "step",
    [
        {"switch": [{"when": HEAVY.replace("len(", "0 == len(")} for _ in range(8)]},
        {"each": {"in": list(range(8)), "as": "i", "steps": {"b": {"let": 1}}, "value": HEAVY}},
        {"chat": {"append": [{"role": "user", "content": HEAVY}] * 8}},
        {"let": 1, "if": HEAVY, "yield": {"as": "a", "value": [HEAVY] * 8}},
    ],
)
def test_the_expressions_of_one_step_are_bounded_together(step: dict[str, Any]) -> None:
    scheduler = RunScheduler(workflow_of({"a": step}, **TEXT_INPUT), {"text": "x" * 300_000}, 10)
    scheduler.begin(0.0, {})
    while scheduler.turn().more:
        pass
    assert scheduler.error
    assert scheduler.error.code == "value_too_large"


def test_too_much_work_is_replaced_as_any_other_error() -> None:
    step = {"let": [HEAVY] * 8, "on_error": {"value": "${inputs.text[:3]}"}, "yield": "a"}
    scheduler = RunScheduler(workflow_of({"a": step}, **TEXT_INPUT), {"text": "x" * 300_000}, 10)
    scheduler.begin(0.0, {})
    while scheduler.turn().more:
        pass
    assert scheduler.outputs == {"a": "xxx"}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("[" + ",".join(["[" * 100 + "]" * 100] * 2000) + "]", "value_too_large"),
        ("[" + ",".join(["1"] * 17_000) + "]", "constraint_unsatisfied"),
        ("[" + ",".join(["1"] * 16_000) + "]", ""),
    ],
)
def test_the_work_on_an_answer_is_bounded_and_counts(answer: str, code: str) -> None:
    step = {"chat": {**CHAT["chat"], "output": {"type": "array", "items": {"type": ["integer", "array"]}}}, "retry": {"max": 0}}
    scheduler = RunScheduler(workflow_of({"a": step}), INPUTS, 10)
    scheduler.begin(0.0, {})
    scheduler.turn()
    judged = scheduler.judged("a", ModelAnswer(answer))
    assert (judged.code if isinstance(judged, StepFailure) else "") == code
    scheduler.answered("a", ModelAnswer(answer), 1.0)
    turn = scheduler.turn()
    assert (scheduler.error.code if scheduler.error else "") == code
    if not code:
        assert turn.work > 16_000 * 1500


def test_a_turn_without_work_tells_what_has_happened() -> None:
    scheduler = RunScheduler(workflow_of({"a": CHAT | {"yield": {"as": "a", "stream": "delta"}}}), INPUTS, 10)
    scheduler.begin(0.0, {})
    scheduler.turn()
    scheduler.streamed("a", "text", 1.0)
    scheduler.answered("a", ModelAnswer("text"), 2.0)
    assert [event.kind for event in scheduler.turn(2.0, 0).events] == ["output.delta", "step.done", "output.done"]
    assert scheduler.status == "running"
    assert not scheduler.turn(2.0).more
    assert scheduler.status == "completed"


def test_a_kill_reaches_into_blocks_and_takes_their_calls() -> None:
    inner = {"b": {**CHAT, "yield": "b"}, "c": {"chat": {"from": "b"}}}
    steps = {
        "s": {"switch": [{"else": True, "emit": {"e": 1}, "steps": inner, "value": "${c.value}"}], "yield": "s"},
        "k": {**CHAT, "kill": ["s"]},
    }
    run = run_of(steps, seconds={"b": 1, "k": 1.5, "c": 9}).run()
    taken = ["step.killed s", "output.retracted e", "output.retracted b", "step.killed c"]
    assert run.said[-5:] == ["step.done k", *taken]
    assert run.scheduler.outputs == {}


def test_kills_within_items_stay_within_their_item() -> None:
    inner = {
        "a": CHAT,
        "b": {"let": "${a.text}", "if": "${i == 1}"},
        "slow": CHAT,
        "k": {"let": "${b.value}", "kill": ["slow"]},
    }
    each = {"in": [0, 1, 2], "as": "i", "steps": inner, "value": "${slow.text}"}
    run = run_of({"all": {"each": each, "yield": "all"}}, seconds={"slow": 5}).run()
    assert run.scheduler.outputs == {"all": ["text", None, "text"]}
    assert [each for each in run.said if "killed" in each] == ["step.killed slow[1]"]
    assert run.told("step.skipped", "k[0]")["reason"] == "dependency"


def test_a_run_is_stopped_from_outside() -> None:
    def stop(run: ScriptedRun) -> None:
        run.scheduler.stop("cancelled", run.now)

    run = run_of({"a": CHAT, "b": {**CHAT, "yield": "b"}}, seconds={"a": 1, "b": 2}).run(stop)
    assert run.scheduler.status == "cancelled"
    assert run.said[-1] == "step.killed b"
    run.scheduler.stop("failed", 3.0)
    assert run.scheduler.status == "cancelled", "a run ends once"


def test_an_output_is_confirmed_when_the_request_of_its_last_killer_cannot_be_made() -> None:
    killer = {"chat": {"append": ["${1}"]}, "needs": ["a"], "kill": ["a"], "on_error": "skip"}
    run = run_of({"a": {**CHAT, "yield": "a"}, "k": killer}).run()
    assert run.said[-3:] == ["output.done a", "step.skipped k", "output.confirmed a"]


# -- the gate

LONG = [{"role": "user", "content": "word " * 2000}]


def siblings(count: int = 3) -> dict[str, Any]:
    message = {"role": "user", "content": "one of them"}
    return {f"s{at}": {"chat": {"from": "${inputs.messages}", "append": [message]}} for at in range(count)}


@pytest.mark.parametrize(
    ("pieces", "started"),
    [(3, [0, 0.25, 0.25]), (0, [0, 0.62625, 0.62625])],  # its first piece; twice its estimated prefill
)
def test_calls_with_a_cold_prefix_wait_for_the_first_of_them(pieces: int, started: list[float]) -> None:
    run = ScriptedRun(workflow_of(siblings()), {"messages": LONG}, dict.fromkeys(siblings(), "text"), pieces=pieces).run()
    copies = [run.scheduler.tree.find(f"s{at}", ()) for at in range(3)]
    assert [copy.started for copy in copies if copy] == pytest.approx(started, abs=0.01)
    assert next(data.get("gate_ms") for kind, data in run.events if kind == "step.started") is None


def test_a_call_that_is_killed_while_it_waits_never_starts() -> None:
    quick = {"quick": {"chat": {"append": [USER]}}, "k": {"let": "${quick.text}", "kill": ["s1"]}}
    steps = {**siblings(), **quick}
    answers, seconds = dict.fromkeys(steps, "text"), {"quick": 0.1}
    run = ScriptedRun(workflow_of(steps), {"messages": LONG}, answers, pieces=3, seconds=seconds).run()
    assert run.scheduler.status == "completed"
    assert "step.killed s1" in run.said
    assert {call.name for call in run.calls} == {"s0", "s2", "quick"}


@pytest.mark.parametrize(
    ("rate", "started"),
    [
        (1000.0, [0, 1, 2]),  # one after the other
        (4000.0, [0, 1, 2]),  # also beyond twice a prefill: each waits so long for the one before it
        (8000.0, [0, 0.62625, 0.62625]),  # another slot computes the prefix sooner
        (0.0, [0, 1, 2]),  # it is not known how soon
    ],
)
def test_with_slots_a_call_waits_for_the_end_of_another_one_with_its_prefix(rate: float, started: list[float]) -> None:
    answers, engine = dict.fromkeys(siblings(), "text"), GatedEngine(rate, slots=True)
    run = ScriptedRun(workflow_of(siblings()), {"messages": LONG}, answers, pieces=3, engine=engine).run()
    copies = [run.scheduler.tree.find(f"s{at}", ()) for at in range(3)]
    assert [copy.started for copy in copies if copy] == pytest.approx(started, abs=0.01)


@pytest.mark.parametrize("token_bytes", [4.0, 2.5])
def test_with_slots_the_wait_for_an_answer_is_as_long_as_a_prefill(token_bytes: float) -> None:
    engine, outline = GatedEngine(1000.0, slots=True, token_bytes=token_bytes), outline_of({"model": "m", "messages": LONG})
    gate, tokens = PrefixGate({"m": engine}), outline.size / token_bytes
    gate.started("first", outline)
    assert gate.leader(outline) == ("first", 2 * tokens / 1000)
    assert not gate.first_token("first")
    assert gate.leader(outline) == ("first", tokens / 1000)
    assert gate.ended("first")
    assert gate.leader(outline) == ("", 0.0)


@pytest.mark.parametrize(("token_bytes", "leader"), [(4.0, ""), (2.5, "first")])
def test_a_long_prefix_is_one_of_many_tokens(token_bytes: float, leader: str) -> None:
    outline = outline_of({"model": "m", "messages": [{"role": "user", "content": "a b c " * 500}]})
    gate = PrefixGate({"m": GatedEngine(token_bytes=token_bytes)})
    gate.started("first", outline)
    assert gate.leader(outline)[0] == leader


def test_of_calls_with_a_cold_prefix_the_one_on_the_longest_path_leads() -> None:
    message = {"role": "user", "content": "more"}
    steps = {**siblings(), "after": {"chat": {"from": "s1", "append": [message]}}}
    run = ScriptedRun(workflow_of(steps), {"messages": LONG}, dict.fromkeys(steps, "text"), pieces=3).run()
    copies = {name: run.scheduler.tree.find(name, ()) for name in siblings()}
    assert {name: copy.gated >= 0 for name, copy in copies.items() if copy} == {"s0": True, "s1": False, "s2": True}


def test_calls_on_the_longest_path_from_each_step() -> None:
    inner = {"chat": {"append": [USER]}}
    steps: dict[str, Any] = {
        "first": CHAT,
        "each": {
            "each": {
                "in": "${[first.text]}",
                "as": "t",
                "steps": {"one": inner, "two": {**inner, "needs": ["one"]}},
                "value": "${two.text}",
            }
        },
        "value": {"let": "${each.values}"},
        "arms": {"switch": [{"when": "${len(value.value) > 1}", "steps": {"taken": inner}, "value": "${other.text}"}]},
        "other": {**inner, "needs_any": ["first"]},
        "last": {**inner, "needs": ["arms"]},
        "alone": inner,
    }
    assert workflow_of(steps).graph.calls_on_paths() == {
        "first": 5,
        "each": 4,
        "one": 4,
        "two": 3,
        "value": 2,
        "arms": 2,
        "taken": 2,
        "other": 2,
        "last": 1,
        "alone": 1,
    }


def test_calls_wait_no_longer_than_their_leader_lives_and_not_for_short_prefixes() -> None:
    failing = siblings(2) | {"s0": {**siblings()["s0"], "on_error": "skip"}}
    answers = dict.fromkeys(siblings(), "text")
    run = ScriptedRun(workflow_of(failing), {"messages": LONG}, answers, seconds={"s0": 0.1}, failures={"s0": [REFUSED]}).run()
    assert run.said[2:4] == ["step.skipped s0", "step.started s1"]
    short = run_of(siblings()).run()
    assert short.peak == 3


def test_a_prefix_that_the_run_has_computed_holds_nobody() -> None:
    steps = {"first": CHAT, **{name: {**step, "needs": ["first"]} for name, step in siblings().items()}}
    run = ScriptedRun(workflow_of(steps), {"messages": LONG}, dict.fromkeys(steps, "text"), pieces=1).run()
    assert run.peak == 3


# -- random documents


def _step(chance: random.Random, names: list[str], depth: int, prefix: str) -> dict[str, Any]:
    """A step that may refer to earlier ones of its scope."""
    source = chance.choice(names) if names and chance.random() < 0.6 else ""
    text = f"${{{source}.value}}" if source else "fixed"
    kind = chance.choice(["chat", "chat", "chat", "let", "switch", "each", "call"] if depth else ["chat", "let"])
    made: dict[str, Any] = {
        "chat": lambda: {"append": [{"role": "user", "content": f"say {text}"}]},
        "let": lambda: f"it is {text}",
        "call": lambda: {"use": "x", "with": {"v": text}},
        "switch": lambda: _arms(chance, names, depth, prefix, source),
        "each": lambda: _items(chance, names, depth, prefix),
    }
    made = {kind: made[kind]()}
    for key, count in (("kill", 1), ("needs", 1), ("needs_any", 2)):
        if len(names) >= count and chance.random() < 0.15:
            made[key] = chance.sample(names, count)
    if chance.random() < 0.15:
        made["if"] = chance.choice(["${1 == 1}", "${1 == 2}"])
    if chance.random() < 0.5:
        made["yield"] = f"o_{prefix}"
    if chance.random() < 0.3:
        made["on_error"] = chance.choice(["skip", {"value": "x"}])
    return made


def _arms(chance: random.Random, names: list[str], depth: int, prefix: str, source: str) -> list[dict[str, Any]]:
    conditions = ["${1 == 1}", "${1 == 2}", *([f"${{{source}.value == 'x'}}"] if source else [])]
    arms: list[dict[str, Any]] = [{"when": chance.choice(conditions)}, {"else": True}]
    for at, arm in enumerate(arms):
        if chance.random() < 0.7:
            arm["steps"] = _block(chance, list(names), depth - 1, f"{prefix}{at}")
            arm["value"] = f"${{{chance.choice(list(arm['steps']))}.value}}"
        if names and chance.random() < 0.5:
            arm["kill"] = [chance.choice(names)]
        if chance.random() < 0.3:
            arm["emit"] = {f"e_{prefix}": at}
    return arms


def _items(chance: random.Random, names: list[str], depth: int, prefix: str) -> dict[str, Any]:
    block = _block(chance, list(names), depth - 1, f"{prefix}i")
    value = f"${{{chance.choice(list(block))}.value}}"
    return {"in": list(range(chance.randint(0, 3))), "as": f"v{prefix}", "steps": block, "value": value}


def _block(chance: random.Random, seen: list[str], depth: int, prefix: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for at in range(chance.randint(1, 4)):
        name = f"s{prefix}_{at}"
        made[name] = _step(chance, [*seen, *made], depth, f"{prefix}_{at}")
    return made


def random_workflow(chance: random.Random) -> Workflow | None:
    try:
        return workflow_of(_block(chance, [], 2, ""))
    except DocumentError:
        return None


@settings(max_examples=share_of(400))
@given(seed=st.integers(0, 1 << 40))
def test_random_documents_end_within_their_plan(seed: int) -> None:
    chance = random.Random(seed)
    workflow = next(found for _ in range(100) if (found := random_workflow(chance)))
    plan = plan_of(workflow, RunAllowance(max_calls=1 << 20, max_output_tokens=1 << 30))
    answers = dict.fromkeys(workflow.graph.steps, chance.choice(["x", "some text"]))
    names = [f"{name}{suffix}" for name in workflow.graph.steps for suffix in ("", "[0]", "[1]")]
    failures = {name: [chance.choice([BROKEN, REFUSED])] * chance.randint(1, 2) for name in names if chance.random() < 0.1}
    run = ScriptedRun(
        workflow,
        INPUTS,
        answers,
        connectors={"x": 1},
        failures=failures,
        jitter=lambda: chance.choice([0.0, 0.5, 1.0, 3.0]),
        pieces=2,
    )
    if chance.random() < 0.1:
        moment = chance.random() * 4
        run.run(lambda each: each.scheduler.stop("cancelled", each.now) if each.now > moment else None)
    else:
        run.run()
    _check_events(run, workflow)
    assert sum(each.startswith("step.started") for each in run.said) <= plan.calls
    assert run.peak <= plan.widest


def _check_events(run: ScriptedRun, workflow: Workflow) -> None:
    """An oracle over the events of an ended run: each step ends once and after its needs; outputs are settled once."""
    ends: dict[str, str] = {}
    started: set[str] = set()
    outputs: dict[str, str] = {}
    for kind, data in run.events:
        name = data.get("step") or data.get("name") or ""
        if kind == "step.started":
            assert name not in started
            started.add(name)
        elif kind.startswith("step.") and kind != "step.decided":
            assert name not in ends
            assert kind != "step.done" or name in started
            ends[name] = kind
        elif kind == "output.done":
            assert name not in outputs
            outputs[name] = "provisional" if data["provisional"] else "settled"
        elif kind in ("output.confirmed", "output.retracted"):
            assert outputs[name] == "provisional"
            outputs[name] = kind
    tree = run.scheduler.tree
    if run.scheduler.status == "completed":
        assert "provisional" not in outputs.values()
        assert started <= ends.keys()
        kept = {name for name, state in outputs.items() if state != "output.retracted"}
        assert run.scheduler.outputs.keys() == kept
        for one in tree.all():
            needs = [tree.find(name, one.indices) for name in workflow.graph.requires[one.step.name]]
            states = [each.result.status for each in needs if each]
            if one.result.status == "done":
                assert set(states) <= {"done"}
                assert all(each.ended <= one.started or one.started < 0 for each in needs if each)
            if (
                ends.get(one.name) == "step.skipped"
                and run.told("step.skipped", one.name)["reason"] == "dependency"
                and not one.decided
            ):
                assert set(states) - {"done"} or one.step.needs_any
    elif run.scheduler.status == "failed":
        assert run.scheduler.error is not None
