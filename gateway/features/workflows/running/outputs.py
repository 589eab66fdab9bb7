"""Outputs of a run: yielded values, which may be provisional, and texts as they are streamed.

An output is provisional while a step that is undecided could kill the step that yields it. It is confirmed as soon as none can,
retracted if one does. Each output that came as provisional gets exactly one of the two events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.features.workflows.language.document import OutputRule
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.passing import PassingText
from gateway.features.workflows.running.step_copies import NEVER, StepCopy, StepTree

SNAPSHOT_S: Final = 0.2
PASSING, PASSING_RESET = "step.text", "step.text_reset"  # for an answer of chat only; never sent as events
PROVISIONAL, SETTLED, RETRACTED = "provisional", "settled", "retracted"


class Output:
    """A yielded value. state: PROVISIONAL, SETTLED or RETRACTED."""

    __slots__ = ("name", "source", "state", "value")

    def __init__(self, name: str, value: Any, source: StepCopy, state: str) -> None:
        self.name, self.value, self.source, self.state = name, value, source, state


class OutputBoard:
    """All outputs of a run. passing: the text of the primary output of a chat answer. outputs: by name."""

    def __init__(self, tree: StepTree, passing: PassingText) -> None:
        self.passing = passing
        self.outputs: dict[str, Output] = {}
        self._tree = tree

    def add(self, name: str, value: Any, source: StepCopy) -> RunEvent:
        provisional = self._tree.may_be_killed(source)
        self.outputs[name] = Output(name, value, source, PROVISIONAL if provisional else SETTLED)
        return RunEvent("output.done", {"name": name, "value": value, "provisional": provisional})

    def retract(self, source: StepCopy) -> Iterator[RunEvent]:
        """The step that yielded is killed."""
        for each in self.outputs.values():
            if each.source is source and each.state == PROVISIONAL:
                each.state = RETRACTED
                yield RunEvent("output.retracted", {"name": each.name})

    def settle(self) -> Iterator[RunEvent]:
        """Confirms all outputs that no step can retract any more. O(provisional outputs * copies of killers)."""
        for each in self.outputs.values():
            if each.state == PROVISIONAL and not self._tree.may_be_killed(each.source):
                each.state = SETTLED
                yield RunEvent("output.confirmed", {"name": each.name})

    @property
    def values(self) -> dict[str, Any]:
        """All that was yielded and not retracted."""
        return {name: each.value for name, each in self.outputs.items() if each.state != RETRACTED}

    @property
    def provisional(self) -> list[str]:
        return [name for name, each in self.outputs.items() if each.state == PROVISIONAL]

    # -- streams

    def stream(self, one: StepCopy, text: str, now: float) -> Iterator[RunEvent]:
        """A piece of the text of a step has arrived."""
        rule = one.step.output
        passes = one.step.name in self.passing.steps
        if not text or not (passes or (rule is not None and rule.stream)):
            return
        one.streamed = True
        if passes:
            yield RunEvent(PASSING, {"step": one.name, "text": text})
        if rule is None or not rule.stream:
            return
        if rule.stream != "snapshot":
            yield RunEvent("output.delta", {"name": rule.name, "text": text})
            return
        one.pieces.append(text)
        if one.shown == NEVER or now - one.shown >= SNAPSHOT_S:
            one.shown = now
            yield _snapshot(rule, "".join(one.pieces), is_end=False)

    def reset(self, one: StepCopy) -> Iterator[RunEvent]:
        """The step is repeated, killed, or has failed: its client forgets the text so far."""
        if not one.streamed:
            return
        one.streamed, one.shown = False, NEVER
        one.pieces.clear()
        if one.step.name in self.passing.steps:
            yield RunEvent(PASSING_RESET, {"step": one.name})
        if one.step.output is not None and one.step.output.stream:
            yield RunEvent("output.reset", {"name": one.step.output.name})

    def close_stream(self, one: StepCopy, text: str) -> Iterator[RunEvent]:
        """The text of a step is complete."""
        one.pieces.clear()
        if one.step.output and one.step.output.stream == "snapshot":
            yield _snapshot(one.step.output, text, is_end=True)


def _snapshot(rule: OutputRule, content: str, *, is_end: bool) -> RunEvent:
    return RunEvent("output.snapshot", {"name": rule.name, "value": {"content": content, "is_end": is_end}})
