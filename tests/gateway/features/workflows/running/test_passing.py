"""The step whose text is the primary output."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.features.workflows.running.messages import ModelAnswer, RunEvent, StepFailure
from gateway.features.workflows.running.outputs import PASSING, PASSING_RESET
from gateway.features.workflows.running.scheduler import RunScheduler
from tests.support.workflows import workflow_of

CHAT = {"chat": {"append": [{"role": "user", "content": "x"}]}}
BROKEN = StepFailure("upstream", "it broke", 502, repeat=True)
ARMS = [{"when": "${j.text == 'No'}", "value": "${b.text}"}, {"else": True, "value": "${a.value}"}]
SWITCH = {"a": CHAT, "b": CHAT, "j": CHAT, "o": {"switch": ARMS, "yield": "o"}}


def begun(steps: dict[str, Any], **more: Any) -> RunScheduler:
    scheduler = RunScheduler(workflow_of(steps, **more), {}, 10, primary="o")
    scheduler.begin(0.0, {})
    scheduler.turn()
    return scheduler


def source(scheduler: RunScheduler) -> str:
    found = scheduler.board.passing.source()
    return found.name if found is not None else ""


def finish(scheduler: RunScheduler, name: str, text: str = "text") -> list[RunEvent]:
    scheduler.answered(name, ModelAnswer(text), 1.0)
    events = list[RunEvent]()
    more = True
    while more:
        turn = scheduler.turn()
        events, more = [*events, *turn.events], turn.more
    return events


@pytest.mark.parametrize(
    "steps",
    [
        {"a": CHAT, "o": {"let": "It is ${a.text}", "yield": "o"}},
        {"a": CHAT, "o": {"let": "${lower(a.text)}", "yield": "o"}},
        {"a": CHAT, "o": {"let": "${a.text}", "if": "${1 == 1}", "yield": "o"}},
        {"a": CHAT, "b": CHAT, "o": {"let": "${a.text}", "needs": ["b"], "yield": "o"}},
        {"a": {"chat": {**CHAT["chat"], "choices": ["x", "y"]}}, "o": {"let": "${a.text}", "yield": "o"}},
        {"a": {**CHAT, "on_error": {"value": "x"}}, "o": {"let": "${a.text}", "yield": "o"}},
        {"a": CHAT, "k": {"let": 1, "needs": ["a"], "kill": ["o"]}, "o": {"let": "${a.text}", "yield": "o"}},
        {"a": CHAT, "k": {**CHAT, "kill": ["a"]}, "o": {"let": "${a.text}", "yield": "o"}},
        {"a": CHAT, "o": {"switch": [{"when": "${a.text}", "emit": {"o": "x"}}, {"else": True, "emit": {"o": "y"}}]}},
    ],
)
def test_a_text_that_is_changed_or_that_may_be_no_output_does_not_pass(steps: dict[str, Any]) -> None:
    assert source(begun(steps)) == ""


def test_a_text_passes_when_the_step_that_could_kill_it_has_ended() -> None:
    scheduler = begun({"a": CHAT, "k": {**CHAT, "kill": ["z"]}, "z": CHAT, "o": {"let": "${a.text}", "yield": "o"}})
    assert source(scheduler) == "a"
    scheduler = begun({"a": CHAT, "k": {**CHAT, "kill": ["a"], "on_error": "skip"}, "o": {"let": "${a.text}", "yield": "o"}})
    scheduler.failed("k", StepFailure("bad", "it is refused", 400), 1.0)
    scheduler.turn()
    assert source(scheduler) == "a"


@pytest.mark.parametrize(("verdict", "name"), [("No", "b"), ("Yes", "a")])
def test_a_switch_passes_the_text_of_the_arm_that_it_takes(verdict: str, name: str) -> None:
    scheduler = begun(SWITCH)
    assert scheduler.board.passing.steps == {"a", "b"}
    scheduler.streamed("a", "one", 0.5)
    scheduler.streamed("b", "two", 0.5)
    told = [(event.kind, dict(event.data)) for event in scheduler.turn().events]
    assert told == [(PASSING, {"step": "a", "text": "one"}), (PASSING, {"step": "b", "text": "two"})]
    assert source(scheduler) == ""
    finish(scheduler, "j", verdict)
    assert source(scheduler) == name


@pytest.mark.parametrize("decided", [False, True])
def test_a_step_is_repeated_until_its_text_passes(decided: bool) -> None:
    scheduler = begun(SWITCH)
    if decided:
        finish(scheduler, "j")
    scheduler.streamed("a", "one", 0.5)
    scheduler.turn()
    scheduler.failed("a", BROKEN, 1.0)
    turn = scheduler.turn()
    if decided:
        assert (scheduler.status, scheduler.failed_step) == ("failed", "a")
    else:
        assert [event.kind for event in turn.events] == [PASSING_RESET]
        assert [(call.name, getattr(call, "attempt", 0)) for call in turn.calls] == [("a", 2)]


def test_copies_are_looked_at_only_when_a_step_has_ended() -> None:
    scheduler = begun({"a": CHAT, "k": {**CHAT, "kill": ["a"]}, "z": CHAT, "o": {"let": "${a.text}", "yield": "o"}})
    looks = list[int]()
    for _ in range(2):
        scheduler.streamed("a", "one", 0.5)
        scheduler.turn()
        assert source(scheduler) == ""
        looks.append(scheduler.tree.visits)
    assert looks[0] == looks[1] > 0
    finish(scheduler, "z")
    assert source(scheduler) == ""
    assert scheduler.tree.visits > looks[1]


def test_an_end_and_an_entry_in_one_turn_are_a_change() -> None:
    """The number of live copies is the same then."""
    arm = {"when": "${j.text == 'No'}", "steps": {"c": CHAT}, "value": "${c.text}"}
    scheduler = begun({"j": CHAT, "o": {"switch": [arm, {"else": True, "value": "x"}], "yield": "o"}})
    live = scheduler.tree.live
    assert source(scheduler) == ""
    finish(scheduler, "j", "No")
    assert scheduler.tree.live == live
    assert source(scheduler) == "c"


def test_a_decision_in_a_later_turn_is_a_change() -> None:
    scheduler = begun(SWITCH)
    scheduler.answered("j", ModelAnswer("No"), 1.0)
    scheduler.turn(most=0)  # other runs have used up the work
    assert source(scheduler) == ""
    scheduler.turn()
    assert source(scheduler) == "b"


def test_without_a_primary_output_nothing_is_told() -> None:
    scheduler = RunScheduler(workflow_of({"a": {**CHAT, "yield": "o"}}), {}, 10)
    scheduler.begin(0.0, {})
    scheduler.turn()
    scheduler.streamed("a", "one", 0.5)
    assert not scheduler.turn().events
