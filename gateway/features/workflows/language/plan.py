"""The plan of a workflow: what a run can do at most, which prompts share which prefix, and probable mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.features.workflows.language.document import Block, ConnectorCall, EachItem, ModelCall, WorkflowStep
from gateway.features.workflows.language.faults import OVER_LIMITS, DocumentFaults, refused
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.prefixes import SharedPrefix, shared_prefixes
from gateway.features.workflows.language.results import TEXT
from gateway.features.workflows.language.templates import TextTemplate
from gateway.features.workflows.language.workflow import Workflow

MAX_AT_ONCE: Final = 16
MAX_CONNECTOR_CALLS: Final = 32
MAX_COPIES: Final = 4096  # of all steps together, also of steps that call nothing


@dataclass(frozen=True, slots=True)
class RunAllowance:
    """Bounds of the gateway on a run. max_tokens: of a step that has none."""

    max_calls: int = 256
    max_output_tokens: int = 65_536
    max_tokens: int = 1024
    max_s: float = 600.0


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """A probable mistake in a valid document."""

    code: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkflowPlan:
    """calls: of models and connectors, at most. output_tokens: at most. widest: calls at once, at most."""

    calls: int
    output_tokens: int
    widest: int
    prefixes: Sequence[SharedPrefix]
    warnings: Sequence[PlanWarning]


def plan_of(workflow: Workflow, allowance: RunAllowance) -> WorkflowPlan:
    """Raises DocumentError if a run could do more than is allowed."""
    graph = workflow.graph
    copies = copies_of(workflow)
    models = {name: step.work for name, step in graph.steps.items() if isinstance(step.work, ModelCall)}
    connectors = sum(copies[name] for name, step in graph.steps.items() if isinstance(step.work, ConnectorCall))
    calls = connectors + sum(copies[name] for name in models)
    output_tokens = sum(copies[name] * (call.max_tokens or allowance.max_tokens) for name, call in models.items())
    if (total := sum(copies.values())) > MAX_COPIES:
        raise refused("", f"a run could have {total:,} copies of steps; {MAX_COPIES:,} are possible", OVER_LIMITS)
    _check_limits(workflow, allowance, calls, output_tokens, connectors)
    widest = min(MAX_AT_ONCE, _widest(workflow.steps, graph.requires))
    return WorkflowPlan(calls, output_tokens, widest, shared_prefixes(graph, copies), list(_warnings(workflow)))


def copies_of(workflow: Workflow) -> dict[str, int]:
    """By step: the number of its copies at most."""
    return {name: _copies(workflow.graph, name) for name in workflow.graph.steps}


def _copies(graph: StepGraph, name: str) -> int:
    """The number of copies of a step at most."""
    found = 1
    for outer in graph.around(name):
        work = graph.steps[outer].work
        found *= work.bound if isinstance(work, EachItem) else 1
    return found


def _check_limits(workflow: Workflow, allowance: RunAllowance, calls: int, output_tokens: int, connectors: int) -> None:
    faults, limits = DocumentFaults(), workflow.limits
    for key, what, found, most, own in (
        ("max_calls", "calls", calls, allowance.max_calls, limits.calls),
        ("max_output_tokens", "output_tokens", output_tokens, allowance.max_output_tokens, limits.output_tokens),
    ):
        name = what.replace("_", " ")
        if own is not None and found > own:
            faults.add(f"limits.{what}", f"a run could have {found:,} {name}, its own limit is {own:,}", OVER_LIMITS)
        if found > most:
            faults.add("", f"a run could have {found:,} {name}; workflows.{key} is {most:,}", OVER_LIMITS)
    if connectors > MAX_CONNECTOR_CALLS:
        text = f"a run could have {connectors:,} calls of connectors; {MAX_CONNECTOR_CALLS} are possible"
        faults.add("", text, OVER_LIMITS)
    if limits.seconds is not None and limits.seconds > allowance.max_s:
        text = f"a run has at most {allowance.max_s:g} seconds (workflows.max_s); a limit can only lower that"
        faults.add("limits.seconds", text, OVER_LIMITS)
    faults.require_none()


def _widest(block: Block, needs: Mapping[str, frozenset[str]]) -> int:
    """Calls at once at most: the heaviest set of steps of which none needs another one, each with its calls at once.

    By Dilworth's theorem it is the sum of the weights less the greatest flow along needs. Of a switch, one arm runs. Needs of
    steps within a step do not count: the others within it may run before.
    """
    weight = {name: _own_width(step, needs) for name, step in block.items()}
    left, right = dict(weight), dict(weight)
    after = _closure(block, needs)
    flow = dict.fromkeys(((one, other) for one in after for other in after[one]), 0)
    for name in block:
        while left[name] and (path := _augmenting(name, after, flow, right)):
            amount = min(left[name], right[path[-1]], *(flow[edge] for edge in _backward(path)))
            for forward in zip(path[::2], path[1::2], strict=True):
                flow[forward] += amount
            for backward in _backward(path):
                flow[backward] -= amount
            left[name] -= amount
            right[path[-1]] -= amount
    return sum(weight.values()) - sum(flow.values())


def _backward(path: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Edges of a path whose flow is taken back."""
    return zip(path[2::2], path[1::2], strict=False)


def _augmenting(
    start: str, after: Mapping[str, set[str]], flow: Mapping[tuple[str, str], int], right: Mapping[str, int]
) -> list[str]:
    """A path from a step on the left to a step on the right with free weight: left, right, left, right, ...; empty: none."""
    trails, waiting = {start: [start]}, [start]
    reached = set[str]()
    while waiting:
        name = waiting.pop()
        for other in after[name] - reached:
            reached.add(other)
            trail = [*trails[name], other]
            if right[other]:
                return trail
            for back in trails.keys() ^ after.keys():
                if other in after[back] and flow[back, other]:
                    trails[back] = [*trail, back]
                    waiting.append(back)
    return []


def _closure(block: Block, needs: Mapping[str, frozenset[str]]) -> dict[str, set[str]]:
    """By step: all steps of the block that it needs, directly or not."""
    found: dict[str, set[str]] = {}

    def of(name: str) -> set[str]:
        if name not in found:
            direct = needs[name] & block.keys()
            found[name] = set(direct).union(*map(of, direct))
        return found[name]

    for name in block:
        of(name)
    return found


def _own_width(step: WorkflowStep, needs: Mapping[str, frozenset[str]]) -> int:
    if isinstance(step.work, ModelCall | ConnectorCall):
        return 1
    width = max((_widest(inner, needs) for inner in step.blocks), default=0)
    return width * step.work.bound if isinstance(step.work, EachItem) else width


def _warnings(workflow: Workflow) -> Iterator[PlanWarning]:
    graph = workflow.graph
    used = _used(workflow)
    for name, step in graph.steps.items():
        work = step.work
        if isinstance(work, ModelCall):
            source = graph.steps[work.source].work if work.source else None
            if isinstance(source, ModelCall) and source.model != work.model:
                text = f"it continues {work.source!r} with another model, so that their prompts share nothing"
                yield PlanWarning("shares_nothing", f"{step.path}.{work.kind}.from", text)
            for template in (work.opening, work.append):
                if work.kind == TEXT and template and _ends_in_space(template.value):
                    text = "a prompt that ends in a space: tokenizers join the space to the next word"
                    yield PlanWarning("text_ends_in_space", template.path, text)
        if name not in used:
            yield PlanWarning("unused_step", step.path, "no output and no other step uses its result")


def _ends_in_space(value: object) -> bool:
    last = value.pieces[-1] if isinstance(value, TextTemplate) else value
    return isinstance(last, str) and last.endswith((" ", "\t"))


def _used(workflow: Workflow) -> set[str]:
    """Steps that yield, kill, or are named by anything; and the steps around them."""
    graph = workflow.graph
    used = set().union(*(graph.steps_in(each) for each in (workflow.outputs or {}).values()))
    for name, step in graph.steps.items():
        late = (graph.steps_in(template) for template, _ in step.late)
        used |= graph.requires[name].union(step.needs_any, *late)
        emits = any(arm.emit for arm in getattr(step.work, "arms", ()))
        if step.output or emits or graph.kills_of(step):
            used |= {name, *graph.around(name)}
    return used
