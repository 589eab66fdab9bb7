"""Tokens of a run before it begins."""

from __future__ import annotations

from typing import Any

from gateway.features.workflows.language.estimate import MESSAGE_TOKENS, RunEstimate, estimate_of
from gateway.features.workflows.language.plan import copies_of
from tests.support.workflows import workflow_of

HISTORY = [{"role": "user", "content": "x" * 4000}]
CHAT = {"from": "${inputs.messages}"}


def estimated(steps: dict[str, Any], messages: list[dict[str, str]] = HISTORY) -> RunEstimate | None:
    workflow = workflow_of(steps)
    return estimate_of(workflow, copies_of(workflow), {"messages": messages}, 100)


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_shared_prefix_counts_once() -> None:
    found = estimated(
        {
            "a": {"chat": {**CHAT, "max_tokens": 50}},
            "b": {"chat": {"from": "a", "append": [message("y" * 40)]}},
            "c": {"chat": {"from": "a", "append": [message("z" * 80)]}},
        }
    )
    assert found
    history = 1001 + MESSAGE_TOKENS  # its role is a token
    assert (found.steps["a"].prompt, found.steps["a"].answer) == (history, 50)
    b, c = 11 + MESSAGE_TOKENS, 21 + MESSAGE_TOKENS
    assert found.prompt_tokens == history + (history + 50 + b) + (history + 50 + c)
    assert found.least_tokens == history + b + c, "an answer is in the cache of its engine"
    assert found.steps["b"].answer == 100, "the gateway's"


def test_items_differ_from_where_they_depend_on_their_item() -> None:
    each = {
        "in": ["a" * 40, "b" * 40],
        "as": "i",
        "steps": {"s": {"chat": {**CHAT, "append": [message("${i}")]}}},
        "value": "${s.text}",
    }
    found = estimated({"e": {"each": each}, "j": {"chat": {**CHAT, "append": [message("${join(e.values)}")]}}})
    assert found
    own = MESSAGE_TOKENS + 1 + 20  # both items, at most
    assert found.steps["s"].copies == 2
    assert found.least_tokens == 1001 + MESSAGE_TOKENS + 2 * own + (MESSAGE_TOKENS + 1 + 200)


def test_models_share_nothing_and_connectors_have_no_size() -> None:
    two = estimated({"a": {"chat": CHAT}, "b": {"chat": {**CHAT, "model": "other"}}})
    assert two
    assert two.least_tokens == two.prompt_tokens
    steps = {"r": {"call": {"use": "rag"}}, "a": {"chat": {"append": [message("${r.value}")]}}}
    assert estimated(steps) is None


def test_all_copies_count_and_their_common_beginning_once() -> None:
    inner = {"s": {"chat": CHAT}, "t": {"chat": {"from": "s", "append": [message("z" * 40)]}}}
    one = estimated({"e": {"each": {"in": [1], "as": "i", "steps": inner, "value": 1}}})
    many = estimated({"e": {"each": {"in": [1] * 50, "as": "i", "steps": inner, "value": 1}}})
    assert one
    assert many
    assert many.prompt_tokens == 50 * one.prompt_tokens
    own = 11 + MESSAGE_TOKENS  # of `t`; each call computes a token at least
    assert many.least_tokens == one.least_tokens + 49 * (1 + own)


def test_it_is_unknown_for_too_many_pieces_of_prompts() -> None:
    chain: dict[str, Any] = {}
    for at in range(60):
        chain[f"s{at}"] = {"chat": {**({"from": f"s{at - 1}"} if at else {}), "append": [message("x")] * 40}}
    assert estimated({name: chain[name] for name in list(chain)[:10]})
    assert estimated(chain) is None


def test_it_is_unknown_where_the_inputs_are_too_much_work() -> None:
    nested = ["lower(" * 40 + f"inputs.messages[0].content[{at}:]" + ")" * 40 for at in range(3)]
    steps = {f"s{at}": {"chat": {"append": [message(f"${{{each}}}")]}} for at, each in enumerate(nested)}
    assert estimated(steps)
    assert estimated(steps, [message("x" * 400_000)]) is None
    same = {f"s{at}": {"chat": {"append": [message(f"${{{nested[0]}}}")]}} for at in range(9)}
    assert estimated(same, [message("x" * 400_000)]), "one expression is evaluated once"
    assert estimated({"a": {"chat": CHAT}}, [message("x" * 1000)] * 3800)
    assert estimated({"a": {"chat": CHAT}}, [message("x" * 1000)] * 4200) is None, "a run would refuse inputs of this size"
