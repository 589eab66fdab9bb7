"""Prompts as sequences of pieces, which share prefixes: in a document (symbols), and in a run (messages with their tokens)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from gateway.features.workflows.language.document import EachItem, ModelCall
from gateway.features.workflows.language.expressions import INPUTS
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.inputs import is_messages
from gateway.features.workflows.language.operations import WorkBudget
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.language.templates import TextTemplate, ValueTemplate, canonical_text
from gateway.features.workflows.language.values import MAX_MESSAGES_BYTES, json_of, text_of


class PromptPiece(NamedTuple):
    """A piece of a prompt in a run. key: equal for equal pieces after equal pieces. tokens: their number."""

    key: Hashable
    tokens: int


class PrefixUnion:
    """The union of prompts as prefixes: the tokens that no order of the calls can avoid. O(pieces) for each prompt."""

    def __init__(self) -> None:
        self.least_tokens = 0
        self._roots: dict[str, _UnionNode] = {}

    def add(self, model: str, prompt: Sequence[PromptPiece], answer: Sequence[PromptPiece] = ()) -> int:
        """Add a call; returns the tokens that it computes at least. answer: pieces of its answer that a cache may hold, which
        are all but the last token.
        """
        node = self._roots.setdefault(model, _UnionNode())
        new = 0
        for piece in prompt:
            new += 0 if piece.key in node.inner else piece.tokens
            node = node.inner.setdefault(piece.key, _UnionNode())
        for piece in answer:
            node = node.inner.setdefault(piece.key, _UnionNode())
        new = max(new, 1)  # an engine computes the last token of a prompt again
        self.least_tokens += new
        return new


@dataclass(slots=True)
class _UnionNode:
    inner: dict[Hashable, _UnionNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Steps whose prompts begin alike. pieces: expressions, messages, and answers of steps, in words. calls: with copies."""

    model: str
    steps: tuple[str, ...]
    pieces: tuple[str, ...]
    calls: int


@dataclass(slots=True)
class _SharedNode:
    piece: str = ""
    outer: _SharedNode | None = None
    steps: dict[str, int] = field(default_factory=dict)
    inner: dict[str, _SharedNode] = field(default_factory=dict)

    def pieces(self) -> tuple[str, ...]:
        found: list[str] = []
        node = self
        while node.outer is not None:
            found.append(node.piece)
            node = node.outer
        return tuple(reversed(found))


def shared_prefixes(graph: StepGraph, copies: Mapping[str, int]) -> list[SharedPrefix]:
    """Prefixes that two calls or more share, the shorter first. copies: calls of a step at most."""
    roots: dict[str, _SharedNode] = {}
    outlines = PromptOutlines(graph)
    for name, step in graph.steps.items():
        if isinstance(step.work, ModelCall):
            node = roots.setdefault(step.work.model, _SharedNode())
            for piece in outlines.same_for_all_copies(name):
                node = node.inner.setdefault(piece, _SharedNode(piece, node))
                node.steps[name] = copies[name]
    return [each for model, root in roots.items() for each in _shared(root, model)]


def _shared(root: _SharedNode, model: str) -> Iterator[SharedPrefix]:
    waiting = list(root.inner.values())
    while waiting:
        node = waiting.pop(0)
        calls = sum(node.steps.values())
        if calls > 1 and all(inner.steps != node.steps for inner in node.inner.values()):
            yield SharedPrefix(model, tuple(node.steps), node.pieces(), calls)
        waiting += [inner for inner in node.inner.values() if sum(inner.steps.values()) > 1]


class OutlinePiece(NamedTuple):
    """A piece of a prompt in symbols. words: equal for equal pieces. names: on which it depends. template: of its own text.
    source: the step whose answer it is.
    """

    words: str
    names: frozenset[str]
    template: ValueTemplate | None = None
    source: str = ""


class PromptOutlines:
    """Prompts of a document's steps in symbols."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._known: dict[str, list[OutlinePiece]] = {}

    def same_for_all_copies(self, name: str) -> Iterator[str]:
        """The pieces of a step's prompt until the first difference between items of an `each` around it."""
        own = self.own_names(name)
        for piece in self.of(name):
            if piece.names & own:
                return
            yield piece.words

    def own_names(self, name: str) -> frozenset[str]:
        """Variables and steps that differ between the copies of a step."""
        own = set[str]()
        for outer in self._graph.around(name):
            work = self._graph.steps[outer].work
            if isinstance(work, EachItem):
                own |= {work.variable, *self._graph.contents[outer]}
        return frozenset(own)

    def of(self, name: str) -> list[OutlinePiece]:
        if name not in self._known:
            call = self._graph.steps[name].work
            assert isinstance(call, ModelCall)
            own = _split(call.opening) if call.opening else []
            if call.append:
                own += call.append.items if call.kind == CHAT else _split(call.append)
            before: list[OutlinePiece] = []
            if call.source:
                answer = OutlinePiece(f"answer of {call.source}", frozenset([call.source]), None, call.source)
                before = [*self.of(call.source), answer]
            self._known[name] = [*before, *(OutlinePiece(_words(each), frozenset(_names(each)), each) for each in own)]
        return self._known[name]


def known_beginning(graph: StepGraph, prefix: SharedPrefix, inputs: Mapping[str, Any], budget: WorkBudget) -> dict[str, Any]:
    """The body of a request with the first pieces of a shared prefix, as far as inputs alone give them; empty: nothing is
    known. Raises EvaluationError.
    """
    call = graph.steps[prefix.steps[0]].work
    assert isinstance(call, ModelCall)
    scope = {INPUTS: inputs}
    body: dict[str, Any] = {"model": call.model}
    for name, template in (("tools", call.tools), ("extra", call.extra)):
        if template is not None and not _names(template) <= scope.keys():
            return {}
        if template is not None:
            given = template.fill(scope, budget)
            body = body | {name: given} if name == "tools" else given | body
    found = list[Any]()
    for piece in islice(PromptOutlines(graph).of(prefix.steps[0]), len(prefix.pieces)):
        if piece.template is None or not piece.names <= scope.keys():
            break
        found.append(piece.template.fill(scope, budget, MAX_MESSAGES_BYTES))
    if call.kind != CHAT:
        body["prompt"] = "".join(map(text_of, found))
    else:
        body["messages"] = [message for each in found for message in (each if isinstance(each, list) else [each])]
        found = found if is_messages(body["messages"]) else []
    budget.charge(body)
    return body if found else {}


def _split(template: ValueTemplate) -> list[ValueTemplate]:
    """The pieces of a text."""
    if isinstance(template.value, TextTemplate):
        return [ValueTemplate(template.path, TextTemplate((each,))) for each in template.value.pieces]
    return [template]


def _names(template: ValueTemplate) -> set[str]:
    return {each.root for each in template.all_references}


def _words(template: ValueTemplate) -> str:
    if template.expression:
        return template.expression.canonical
    value = canonical_text(template.value)
    if isinstance(value, dict) and value.keys() == {"role", "content"} and isinstance(value["content"], str):
        return f"{value['role']}: {value['content']}"
    return value if isinstance(value, str) else json_of(value)
