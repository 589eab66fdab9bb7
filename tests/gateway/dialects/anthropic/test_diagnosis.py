"""Where a prompt has left an earlier one, and how the question is taken out of the body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.diagnosis import FIELD, compared, field_removal, previous_message
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.api_request import router_prompt
from gateway.dialects.diagnosis import MAX_KEYS, Fingerprint
from gateway.dialects.json_edits import apply
from gateway.errors import GatewayError

TOOL = {"name": "ls", "input_schema": {"type": "object"}}
SAID = [{"role": "user", "content": "".join(f"{number} " for number in range(2000))}]
MORE = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "system": "help", "tools": [TOOL], "messages": SAID, FIELD: {}}


def fingerprint(body: dict[str, Any]) -> Fingerprint:
    api = Messages().parse(json.dumps(body).encode())
    assert api.diagnosis is not None
    return Fingerprint(api.model, api.diagnosis.head, router_prompt(api, (256, 64)).keys, 1000)


def reason(before: dict[str, Any], now: dict[str, Any]) -> Any:
    told = json.loads(compared(fingerprint(before), fingerprint(now)))
    return told and told["cache_miss_reason"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "n", "system": "other"}, "model_changed"),
        ({"tools": [TOOL, {**TOOL, "name": "cat"}], "system": "other"}, "tools_changed"),
        ({"tools": []}, "tools_changed"),
        ({"system": "other", "cache_salt": "s"}, "system_changed"),
        ({"chat_template_kwargs": {"a": 1}}, "unavailable"),
        ({"cache_salt": "s"}, "unavailable"),
        ({"messages": [{"role": "user", "content": "other"}, *SAID]}, "messages_changed"),
    ],
)
def test_the_first_part_that_differs_is_the_reason(change: dict[str, Any], kind: str) -> None:
    found = reason(BODY, {**BODY, **change})
    assert found["type"] == kind
    if kind != "unavailable":
        assert 900 < found["cache_missed_input_tokens"] <= 1000, "nearly all of it"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"messages": SAID + MORE},
        {"tool_choice": {"type": "none"}},
        {"temperature": 1, "metadata": {"user_id": "u"}, "max_tokens": 0},
        {"system": [{"type": "text", "text": "help", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_goes_on_has_no_reason(change: dict[str, Any]) -> None:
    assert reason(BODY, {**BODY, **change}) is None


def test_only_what_lies_behind_the_difference_is_missed() -> None:
    text = SAID[0]["content"]
    half = text[: len(text) // 2] + "X" + text[len(text) // 2 + 1 :]
    found = reason(BODY, {**BODY, "messages": [{"role": "user", "content": half}]})
    assert found["type"] == "messages_changed"
    assert 450 < found["cache_missed_input_tokens"] < 600


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_the_common_prefix_is_that_of_an_oracle(same: int, one: int, other: int) -> None:
    shared = bytes(range(same)) * 8
    keys = [b"".join(shared[at : at + 1] * 8 for at in range(same)) + last * 8 * n for last, n in ((b"x", one), (b"y", other))]
    head = ("", "", "")
    told = json.loads(compared(Fingerprint("m", head, keys[0], same + one), Fingerprint("m", head, keys[1], 0)))
    if one == 0:
        assert told is None
    else:
        assert told["cache_miss_reason"] == {"type": "messages_changed", "cache_missed_input_tokens": one}


def test_a_prompt_without_end_is_remembered_in_part() -> None:
    assert len(Fingerprint("m", ("", "", ""), b"k" * (8 << 20), 1).keys) == MAX_KEYS


def test_an_unknown_message() -> None:
    assert json.loads(compared(None, fingerprint(BODY))) == {"cache_miss_reason": {"type": "previous_message_not_found"}}


@pytest.mark.parametrize(
    "asked", [[], "x", 1, {"previous_message_id": 1}, {"previous_message_id": ""}, {"previous_message_id": "m" * 257}]
)
def test_a_wrong_question_is_refused(asked: Any) -> None:
    with pytest.raises(GatewayError, match="diagnostics") as caught:
        previous_message({FIELD: asked})
    assert caught.value.status == 400


def test_who_asks_nothing() -> None:
    assert previous_message({}) is None
    assert previous_message({FIELD: None}) is None
    assert previous_message({FIELD: {}}) == previous_message({FIELD: {"previous_message_id": None}}) == ""


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        (b'{"diagnostics": {"a": [1, "}"]} , "b": 2}', b'{ "b": 2}'),
        (b' { "b": 2 , "diagnostics": {} , "c": "diagnostics" }', b' { "b": 2 , "c": "diagnostics" }'),
        (b'{"a": 1, "diagnostics": {}, "a": 2, "c": 3}', b'{ "a": 2, "c": 3}'),
        (b'{"b": 2, "diagnostics": {} }', b'{"b": 2 }'),
        (b'{ "diagnostics": {}\n}', b"{\n}"),
        (b'{"b": 2, "diag\\u006eostics": {}}', b'{"b": 2}'),
    ],
)
def test_it_is_cut_out_of_the_body(raw: bytes, left: bytes) -> None:
    assert apply(raw, field_removal(raw)) == left


def test_twice_is_refused_unless_both_can_be_cut() -> None:
    with pytest.raises(GatewayError, match="twice"):
        field_removal(b'{"diagnostics": 1, "a": 2, "diagnostics": {}}')
    both = b'{"a": 1, "diagnostics": 1, "diagnostics": {}, "b": 2}'
    assert apply(both, field_removal(both)) == b'{"a": 1, "b": 2}'
