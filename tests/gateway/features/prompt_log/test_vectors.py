"""The frozen vectors: bodies, and the names that every implementation must give them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.naming.canonical import NoNameError, canonical, number
from gateway.features.prompt_log.naming.chain import (
    EMPTY,
    chain_named,
    chain_of,
    digest_of,
    extended,
    head_name,
)
from gateway.features.prompt_log.naming.forms import LATEST, log_in, names_in

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
NAMED = [vector for vector in VECTORS["vectors"] if "frame_name" in vector]
BODIES = [
    pytest.param(vector, form, body, id=f"{vector['name']}-{form}-{number_}")
    for vector in NAMED
    for form, bodies in vector.get("bodies", {}).items()
    for number_, body in enumerate(bodies)
]


@pytest.mark.parametrize(("vector", "form", "body"), BODIES)
def test_a_body_has_its_frame_its_entries_and_its_names(vector: dict[str, Any], form: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    log = log_in(raw, form)
    assert canonical(log.frame) == canonical(vector["frame"])
    assert [canonical(entry).decode() for entry in log.entries] == vector["canonical"]
    assert [digest_of(entry).hex() for entry in log.entries] == vector["digests"]
    assert [head_name(chain) for chain in chain_of(log.entries)] == vector["heads"]
    names = names_in(raw, form)
    assert (names.frame, names.length) == (vector["frame_name"], vector["length"])
    assert head_name(names.chain) == vector["head"]
    assert [head_name(chain) for chain in names.latest] == vector["heads"]


@pytest.mark.parametrize("marker", ["cache_control", "prompt_cache_breakpoint"])
def test_a_cache_marker_of_a_tool_does_not_count_in_any_dialect(marker: str) -> None:
    function, own = {"name": "read", "parameters": {}}, {marker: {"type": "ephemeral"}}
    chat = {"messages": [], "tools": [{"type": "function", "function": function, **own}]}
    messages = {"messages": [], "tools": [{"name": "read", "input_schema": {}, **own}]}
    responses = {"input": [], "tools": [{"type": "function", **function, **own}]}
    bodies = {"chat": chat, "messages": messages, "responses": responses}
    bare = names_in(json.dumps({"input": [], "tools": [{"type": "function", **function}]}).encode(), "responses").frame
    assert {names_in(json.dumps(body).encode(), form).frame for form, body in bodies.items()} == {bare}


def test_a_thousand_turns_have_their_head() -> None:
    vector = next(each for each in VECTORS["vectors"] if each["name"] == "thousand")
    body = {"messages": [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}"} for at in range(1000)]}
    names = names_in(json.dumps(body).encode(), "chat")
    assert (names.length, head_name(names.chain), len(names.latest)) == (1000, vector["head"], LATEST)


def test_two_answers_to_one_input_are_two_heads_over_one_base() -> None:
    vector = next(each for each in VECTORS["vectors"] if each["name"] == "fork")
    base = chain_named(vector["base"])
    assert base is not None
    for text, head in zip(vector["answers"], vector["heads"], strict=True):
        assert head_name(extended(base, [{"role": "assistant", "content": [{"text": text}]}])) == head


def test_the_empty_log_has_a_head() -> None:
    assert head_name(EMPTY) == VECTORS["empty"]
    assert head_name(extended(EMPTY, [])) == VECTORS["empty"]


HALF_A_PAIR = r'{"messages":[{"role":"user","content":"\ud83d"}]}'
BEYOND_DOUBLES = '{"messages":[{"role":"user","content":"x","n":1e999}]}'


@pytest.mark.parametrize("body", [HALF_A_PAIR, BEYOND_DOUBLES])
def test_half_a_surrogate_pair_and_a_number_beyond_doubles_have_no_name(body: str) -> None:
    with pytest.raises(NoNameError):
        names_in(body.encode(), "chat")


@pytest.mark.parametrize(("bits", "text"), VECTORS["numbers"].items())
def test_doubles_are_written_as_ecmascript_writes_them(bits: str, text: str) -> None:
    assert number(struct.unpack(">d", bytes.fromhex(bits))[0]).decode() == text


OF_A_FRAME = "pf1_9fICecSKNaeCJXEs3MxI7pQiWrN-K8trRpKzaUEikzI"


@pytest.mark.parametrize("text", ["", "pl1_", OF_A_FRAME, "pl1_\u00e9" + "A" * 42, "pl1_" + "!" * 43])
def test_other_texts_are_no_heads(text: str) -> None:
    assert chain_named(text) is None


def test_a_head_has_one_spelling() -> None:
    head = head_name(EMPTY)
    assert chain_named(head) == EMPTY
    assert chain_named(head[:-1] + "J") is None, "its last character has unused bits"
    assert chain_named(head + "=") is None
