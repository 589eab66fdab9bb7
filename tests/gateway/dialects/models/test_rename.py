"""The model's own name in a body: the right value is found, and no other byte changes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.aliases import Aliases
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.json_edits import apply
from gateway.dialects.models.rename import SCANNED_AT_ONCE, rename, value_of
from gateway.dialects.openai.generations import ChatBody
from gateway.dialects.table import OTHER

ALIAS, MODEL = "claude-x", "qwen3-coder"
ALIASES = Aliases({"claude-*": MODEL, 'odd"name\\': "even"})

# A member's name and its value as they may be written: plainly, with an escape, and what only looks alike.
written_names = st.sampled_from(
    ['"model"', '"mod\\u0065l"', '"\\u006Dodel"', '"x\\"model"', '"models"', '"a"', '"Model"', '"\\\\model"', '"\\u0041"']
)
strings = st.sampled_from(
    ['"claude-x"', '"claude\\u002dx"', '"claude-y"', '"model"', '"\\"model\\":\\"claude-x\\""', '""', '"\\\\"']
)
spaces = st.sampled_from(["", " ", "\n\t "])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A JSON object as text, with this model or another one on any level, and any number of them."""
    values = st.recursive(
        strings | st.sampled_from(["1", "null"]),
        lambda inner: (
            st.lists(st.tuples(written_names, spaces, spaces, inner), max_size=3).map(joined)
            | st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        ),
        max_leaves=8,
    )
    members = draw(st.lists(st.tuples(written_names, spaces, spaces, values), max_size=4))
    at = draw(st.integers(0, len(members)))
    asked = draw(st.tuples(st.sampled_from(['"model"', '"mod\\u0065l"']), spaces, spaces, strings))
    return joined([*members[:at], asked, *members[at:]])


def joined(members: list[tuple[str, str, str, str]]) -> str:
    return "{" + ",".join(f"{name}{before}:{after}{value}" for name, before, after, value in members) + "}"


@given(texts())
@example('{"tools":[{"model":"claude-x"}],"model":"claude-x"}')
@example('{"model":"claude-x","tools":[{"model":"claude-x"}]}')
@example('{"model":"claude-y","model":"claude-x"}')
@example('{"mod\\u0065l":"claude-x","x":{"model":"claude-x"}}')
@example('{"model":"claude\\u002dx","x":{"model":"claude-x"}}')
def test_the_value_that_counts_is_found(text: str) -> None:
    raw = text.encode()
    model = orjson.loads(raw).get("model")
    if not isinstance(model, str):
        return
    start, end = value_of(raw, model, len(raw))
    edited = apply(raw, [(start, end, b'"\x7f"')])
    assert orjson.loads(edited) == orjson.loads(raw) | {"model": "\x7f"}
    assert (edited[:start], edited[start + 3 :]) == (raw[:start], raw[end:])


def parsed(raw: bytes, dialect: Any = None) -> ApiRequest:
    api: ApiRequest = (dialect or ChatBody()).parse(raw)
    rename(api, raw, ALIASES, at_once=True)
    return api


def test_a_request_names_the_model_and_asks_for_usage() -> None:
    raw = b'{"messages": [{"role": "user", "content": "hi"}],\n "model" :\t"claude-x", "stream": true, "n": 1.0}'
    api = parsed(raw)
    assert (api.model, api.alias) == (MODEL, ALIAS)
    expected = raw.replace(b"claude-x", b"qwen3-coder").replace(b"1.0}", b'1.0,"stream_options":{"include_usage":true}}')
    assert apply(raw, api.edits) == expected


@pytest.mark.parametrize("model", ["qwen3-coder", "gpt", "Claude-x", "claude"])
def test_a_model_s_own_name_stays(model: str) -> None:
    raw = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    api = parsed(raw)
    assert (api.model, api.alias, list(api.edits)) == (model, "", [])


def test_a_name_with_signs_that_json_escapes() -> None:
    raw = json.dumps({"model": 'odd"name\\', "messages": [{"role": "user", "content": "hi"}]}).encode()
    api = parsed(raw)
    assert apply(raw, api.edits) == raw.replace(rb"odd\"name\\", b"even")


@pytest.mark.parametrize("first", ["model", "system"])
def test_the_billing_line_is_cut_out_of_the_renamed_body(first: str) -> None:
    """What is cut out is written down for the body as it is after its edits."""
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "You help."}]
    fields: dict[str, Any] = {
        "model": ALIAS,
        "system": billed,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
    }
    raw = json.dumps({first: fields[first], **fields}).encode()
    api = parsed(raw, Messages())
    body = json.loads(apply(apply(raw, api.edits), api.billing))
    assert body == {**fields, "model": MODEL, "system": billed[1:]}


def test_what_is_no_json_object_has_no_alias() -> None:
    for raw in (b"", b"[]", b'{"model": 5}', b'{"model": "claude-x"', b'--x\r\n{"model":"claude-x"}'):
        api = parsed(raw, OTHER)
        assert (list(api.edits), api.alias) == ([], "")


AGENT = {
    "tools": [{"name": "Task", "input_schema": {"properties": {"model": {"enum": ["opus"]}}}}],
    "messages": [{"role": "user", "content": 'Ask {"model": "claude-x"} for "model" \\ ' + "text, " * (SCANNED_AT_ONCE // 4)}],
    "max_tokens": 1,
}


def test_a_large_body_of_an_agent_needs_no_scan() -> None:
    """Where it names the model, first or last, or between its schemas and texts that have the same words in them."""
    for fields in ({"model": ALIAS, **AGENT}, {**AGENT, "model": ALIAS}):
        raw = json.dumps(fields).encode()
        assert len(raw) > SCANNED_AT_ONCE
        assert json.loads(apply(raw, parsed(raw, Messages()).edits)) == {**fields, "model": MODEL}


@pytest.mark.parametrize(
    "more",
    [
        {"x": {"model": ALIAS}},  # which one it is takes a scan
        {"x": "\x00model"},
        {"x": [{"model": 1}] * 100},
        {"x": "\\u006d"},
    ],
)
def test_a_large_body_that_has_to_be_scanned_goes_to_the_parser_process(more: dict[str, Any]) -> None:
    raw = json.dumps({**AGENT, **more, "model": ALIAS}).replace("\\u0000", "\\u006d").encode()
    with pytest.raises(NeedsHelper):
        parsed(raw, Messages())
    api = Messages().parse(raw)
    rename(api, raw, ALIASES, at_once=False)
    assert json.loads(apply(raw, api.edits)) == {**json.loads(raw), "model": MODEL}
