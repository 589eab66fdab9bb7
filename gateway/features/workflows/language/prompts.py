"""The request of a `chat` or `text` step: its messages or prompt, and the other members of its body.

A step that continues another one sends the same messages, the answer, and its own: the engine has computed all but the last.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.functions import is_number
from gateway.features.workflows.language.inputs import is_messages
from gateway.features.workflows.language.operations import Scope, WorkBudget
from gateway.features.workflows.language.results import CHAT, StepResult
from gateway.features.workflows.language.values import (
    MAX_MESSAGES_BYTES,
    EvaluationError,
    ValueTooLargeError,
    bytes_of,
    type_name,
)

MAX_MESSAGES: Final = 8192  # of a prompt: the gate and the receipt look at each of them, for some two microseconds


def messages_of(call: ModelCall, scope: Scope, budget: WorkBudget | None = None) -> list[Any]:
    """The messages of a chat step. scope: has the result of its source. Raises EvaluationError."""
    budget = budget or WorkBudget()
    found: list[Any] = []
    if call.source:
        found += _source(call, scope).messages or []
        budget.charge(found)
    elif call.opening:
        found += _messages(call.opening.fill(scope, budget, MAX_MESSAGES_BYTES), call.opening.path)
    for item in call.append.fill(scope, budget) if call.append else ():
        found += _messages(item if isinstance(item, list) else [item], call.append.path if call.append else "")
    if len(found) > MAX_MESSAGES:
        raise ValueTooLargeError(f"a prompt has {len(found):,} messages, more than {MAX_MESSAGES:,}")
    bytes_of(found, MAX_MESSAGES_BYTES)
    return found


def prompt_of(call: ModelCall, scope: Scope, budget: WorkBudget | None = None) -> str:
    """The prompt of a text step. Raises EvaluationError."""
    budget = budget or WorkBudget()
    before = call.opening.fill(scope, budget) if call.opening else ""
    if call.source:
        source = _source(call, scope)
        before = f"{source.prompt}{source.text}"
    after = call.append.fill(scope, budget) if call.append else ""
    for part in (before, after):
        if not isinstance(part, str):
            raise EvaluationError(f"a prompt is a text, got {type_name(part)}")
    bytes_of(before + after)
    budget.charge(before + after)
    return before + after


def request_body(call: ModelCall, scope: Scope, max_tokens: int, budget: WorkBudget | None = None) -> dict[str, Any]:
    """The body without the answer's constraint and streaming. max_tokens: of a step that has none. Raises EvaluationError."""
    budget = budget or WorkBudget()
    body: dict[str, Any] = dict(call.extra.fill(scope, budget)) if call.extra else {}
    body["model"] = call.model
    if call.kind == CHAT:
        body["messages"] = messages_of(call, scope, budget)
    else:
        body["prompt"] = prompt_of(call, scope, budget)
    body["max_tokens"] = call.max_tokens or max_tokens
    for name, template in call.sampling.items():
        value = template.fill(scope, budget)
        if name != "stop" and not is_number(value):
            raise EvaluationError(f"{template.path}: a number is expected, got {type_name(value)}")
        body[name] = value
    for name, passed in (("tools", call.tools), ("tool_choice", call.tool_choice)):
        if passed is not None:
            body[name] = passed.fill(scope, budget)
    return body


def _source(call: ModelCall, scope: Scope) -> StepResult:
    source = scope[call.source or ""]
    assert isinstance(source, StepResult)
    return source


def _messages(value: object, path: str) -> list[Any]:
    if not isinstance(value, list) or not is_messages(value):
        raise EvaluationError(f"{path}: messages ({{role, content}}) are expected, got {type_name(value)}")
    return value
