"""What the parser process answers, without the process: the same as parsing in the loop, or an error for the client."""

from __future__ import annotations

import json
import marshal
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.dialects.anthropic.messages import CountTokens, Messages
from gateway.dialects.api_request import ApiRequest, router_prompt
from gateway.dialects.dialect import ASK
from gateway.dialects.json_edits import apply
from gateway.dialects.json_structure import MAX_STRUCTURE
from gateway.dialects.openai.continuation_request import continue_body
from gateway.dialects.openai.request import CHAT, COMPLETION
from gateway.dialects.responses.responses import Responses
from gateway.dialects.table import OTHER, Dialects
from gateway.errors import GatewayError
from gateway.parser import helper, wire

BLOCKS = (16, 4)
ATTRIBUTES: tuple[str, ...] = getattr(ApiRequest, "__mypyc_attrs__", ()) or ApiRequest.__slots__  # if compiled, or not


def result(job: tuple[Any, ...], body: bytes) -> tuple[Any, ...]:
    """What comes back, read as the parent does."""
    frame = helper.answer(job, body)
    assert wire.RESULT.unpack(frame[: wire.RESULT.size]) == (len(frame) - wire.RESULT.size,)
    values: tuple[Any, ...] = marshal.loads(frame[wire.RESULT.size :])
    return values


def parsed(kind: str, body: bytes, scope: tuple[str, ...] = (), aliases: dict[str, str] | None = None) -> tuple[Any, ...]:
    return result((wire.PARSE, kind, *BLOCKS, scope, aliases or {}), body)


BILLED = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "You help."}]
values = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.integers(0, 9), max_size=9)
messages = st.lists(st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=99)}), max_size=3)
bodies = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "n", ""])},
    optional={
        "messages": messages,
        "prompt": values,
        "input": values,
        "stream": st.booleans() | st.none(),
        "stream_options": st.none() | st.just(5) | st.dictionaries(st.just("include_usage"), st.booleans()),
        "cache_salt": values,
        "lora_path": values,
        "store": st.booleans(),
        "tools": values,
        "echo": st.booleans(),
        "n": st.none() | st.integers(0, 3),
        "truncation": st.sampled_from(["auto", "disabled"]),
    },
)


# The examples: every attribute has a value that is not its default.
@given(
    bodies,
    st.sampled_from([CHAT, COMPLETION, OTHER.name, Messages.name, CountTokens.name, Responses.name]),
    st.sampled_from(["", "  \n"]),
)
@example({"model": "m", "prompt": ["one", "two"], "stream": True, "cache_salt": "s", "lora_path": "a"}, COMPLETION, "")
@example({"model": "m", "input": "x" * 100, "store": True}, OTHER.name, "")
@example({"model": "m", "messages": [{"role": "user", "content": "x"}], "system": BILLED}, CountTokens.name, "")
def test_it_is_the_same_as_parsing_at_once(body: dict[str, Any], kind: str, tail: str) -> None:
    raw = json.dumps(body).encode() + tail.encode()
    status, *fields = parsed(kind, raw)
    if status == wire.REFUSED:
        with pytest.raises(GatewayError) as caught:
            Dialects().named(kind).parse(raw)
        error = caught.value
        assert fields == [error.status, error.code, error.message, error.param]
        return
    assert status == wire.DONE
    api = Dialects().named(kind).parse(raw)
    api.body, api.edits = apply(raw, api.edits), ()
    if api.has_prompt:
        router_prompt(api, BLOCKS)  # in the place of the canonical prompt, as in the other process
    there = wire.ParsedBody(*fields)
    assert of_request(wire.request_of(there, apply(raw, there.edits))) == of_request(api)


@pytest.mark.parametrize("kind", [CHAT, OTHER.name, Messages.name])
def test_an_alias_is_replaced_before_keys_are_made(kind: str) -> None:
    raw = orjson.dumps({"model": "claude-x", "messages": [{"role": "user", "content": "x" * 99}], "x": {"model": "claude-x"}})
    there = wire.ParsedBody(*parsed(kind, raw, aliases={"claude-*": "m"})[1:])
    own = raw.replace(b"claude-x", b"m", 1)
    assert apply(raw, there.edits) == own
    assert (there.model, there.alias) == ("m", "claude-x")
    assert there.prompt == wire.ParsedBody(*parsed(kind, own)[1:]).prompt


def of_request(api: ApiRequest) -> dict[str, Any]:
    """All of its attributes."""
    return {name: getattr(api, name) for name in ATTRIBUTES}


def test_no_attribute_of_a_request_is_left_behind() -> None:
    """The body stays here; the keys are made of the prompt's fields."""
    assert set(wire.ParsedBody._fields) == set(ATTRIBUTES) - {"body", "made"}


def test_a_scope_keeps_keys_apart() -> None:
    raw = orjson.dumps({"model": "m", "prompt": "x" * 100})
    keys = [wire.ParsedBody(*parsed(COMPLETION, raw, scope)[1:]).prompt for scope in ((), ("a",), ("b",))]
    assert len(set(keys)) == 3
    api = Dialects().named(COMPLETION).parse(raw)
    prompt = router_prompt(api, BLOCKS, scope=("a",))
    assert keys[1] == (prompt.keys, prompt.units, prompt.block_units, prompt.scale)


@pytest.mark.parametrize(
    ("head", "item", "tail"),
    [
        (b'{"model":"m","messages":[{"role":"u","content":[', b"{}", b"]}]}"),
        (b'{"model":"m","messages":[', b'{"role":""}', b"]}"),
        (b'{"model":"m","messages":[{"role":"u","content":"x"}],"x":[', b"[]", b"]}"),
        (b'{"model":"m","messages":[{"role":"u","content":"x"}],"x":[', b'""', b"]}"),
    ],
)
def test_too_many_values_are_refused_before_they_are_built(head: bytes, item: bytes, tail: bytes) -> None:
    status, code, name, message, _ = parsed(CHAT, head + b",".join([item] * MAX_STRUCTURE) + tail)
    assert (status, code, name) == (wire.REFUSED, 413, "request_too_complex")
    assert f"{MAX_STRUCTURE:,}" in message


def test_on_other_paths_too_many_values_are_no_error() -> None:
    raw = b'{"input":[' + b"1," * MAX_STRUCTURE + b'1],"model":"m"}'
    status, *fields = parsed(OTHER.name, raw)
    assert (status, fields[0], fields[-1]) == (wire.DONE, "m", None)


def test_a_text_of_brackets_and_commas_is_no_structure() -> None:
    raw = orjson.dumps({"model": "m", "messages": [{"role": "u", "content": '[{"a": 1, "b": []}], ' * 100_000}]})
    status, *fields = parsed(CHAT, raw)
    assert (status, fields[0]) == (wire.DONE, "m")


def test_a_continuation_is_the_same_as_in_the_loop() -> None:
    raw = b'{"model":"m" ,"max_tokens":9,"messages":[{"role":"user","content":"Hi"}]}'
    status, verdict, edits = result((wire.CONTINUE, CHAT, "Well", 2), raw)
    assert (status, verdict) == (wire.DONE, ASK)
    assert (verdict, edits) == continue_body(CHAT, raw, "Well", 2)


def test_a_bug_is_reported_to_the_parent() -> None:
    status, text = result(("no such operation",), b"{}")
    assert status == wire.FAILED
    assert "KeyError" in text
