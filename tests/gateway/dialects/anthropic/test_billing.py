"""The billing line is cut out of a body's bytes, and nothing else changes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.billing import PREFIX, billing_edits, needs_scan
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.json_edits import apply

LINE = f"{PREFIX} cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ODD = f'{LINE} "é' + "\\}]\n"
lines = st.builds(lambda before, text: before + text, st.sampled_from(["", LINE, f"{LINE}\n", ODD]), texts)
blocks = st.lists(st.builds(lambda text: {"type": "text", "text": text}, lines), max_size=3)
contents = lines | blocks
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": contents})
bodies = st.fixed_dictionaries(
    {"messages": st.lists(turns, max_size=3)},
    optional={"system": contents, "model": texts, "metadata": st.dictionaries(texts, lines, max_size=2)},
)


def stripped(content: Any) -> Any:
    """What is to remain of a content, found the plain way."""
    if isinstance(content, str):
        first, _, rest = content.partition("\n")
        return rest if first == LINE else content
    kept = [(block, stripped(block["text"])) for block in content]
    return [{**block, "text": text} for block, text in kept if text or text == block["text"]]


def expected(body: dict[str, Any]) -> dict[str, Any]:
    wanted = copy.deepcopy(body)
    if "system" in wanted:
        wanted["system"] = stripped(wanted["system"])
    for message in wanted["messages"]:
        if message["role"] == "system":
            message["content"] = stripped(message["content"])
    return wanted


@given(bodies, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (" ,\n", " :\t")]))
def test_the_line_is_cut_out_and_nothing_else_changes(
    body: dict[str, Any], ascii_only: bool, indent: int | None, separators: tuple[str, str]
) -> None:
    def written(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators).encode()

    raw = written(body)
    edits = billing_edits(raw, body)
    cut = apply(raw, edits)
    assert json.loads(cut) == expected(body)
    if expected(body) == body:
        assert cut == raw


CLAUDE = {
    "model": "claude",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi\u00e9", "cache_control": {"type": "ephemeral"}}]}],
    "system": [
        {"type": "text", "text": LINE},
        {"type": "text", "text": "You are Claude Code.\n", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "max_tokens": 32000,
}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_claude_code_sends_needs_no_scan(separators: tuple[str, str]) -> None:
    raw = json.dumps(CLAUDE, separators=separators).encode()
    assert not needs_scan(raw)
    cut = apply(raw, billing_edits(raw, CLAUDE))
    block = json.dumps(CLAUDE["system"][0], separators=separators) + separators[0]  # type: ignore[index]
    assert cut == raw.replace(block.encode(), b"")


def test_a_text_keeps_its_escapes() -> None:
    raw = b'{"system": "' + LINE.encode() + b'\\nYou \\u00e9 \\/ \\"help\\".", "messages": [{"role": "user", "content": "x"}]}'
    cut = apply(raw, billing_edits(raw, json.loads(raw)))
    assert cut == raw.replace(LINE.encode() + b"\\n", b"")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "m", "messages": [{"role": "user", "content": "x-anthropic-billing-header: is a header"}]}',
        b'{"model": "m", "system": "Of x-anthropic-billing-header: nothing", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "input_schema": {"system":'
        b' [{"text": "x-anthropic-billing-header: x"}]}}]}',
        b'{"model": "m", "system": "x-anthropic-billing-header: a; You are a pirate.", "messages": []}',
        b'{"model": "m", "system": "x-anthropic-billing-header: cch=1; You are a pirate.", "messages": []}',
        b'{"model": "m", "system": "x-anthropic-billing-header: cch=1;\\rBe kind.", "messages": []}',
        b'{"model": "m", "messages": [{"role": "system", "content": "x-anthropic-billing-header: Rules: 1, 2"}]}',
    ],
)
def test_what_is_none_stays(raw: bytes) -> None:
    assert billing_edits(raw, json.loads(raw)) == []


def test_a_schema_is_not_cut_in_the_place_of_system() -> None:
    """The line in `system` is written with an escape; the same block stands in a tool."""
    block = b'{"type": "text", "text": "' + LINE.encode() + b'"}'
    tool = b'{"name": "t", "input_schema": {"default": {"system": [' + block + b"]}}}"
    raw = b'{"tools": [' + tool + b'], "system": [' + block.replace(b"x-a", b"\\u0078-a") + b'], "messages": []}'
    cut = json.loads(apply(raw, billing_edits(raw, json.loads(raw))))
    assert cut == {**json.loads(raw), "system": []}


def test_of_two_systems_the_last_counts() -> None:
    """As for every parser that builds a dictionary."""
    raw = b'{"system": [{"text": "' + LINE.encode() + b'"}], "messages": [{"role": "user", "content": "x"}], "system": "s"}'
    assert billing_edits(raw, json.loads(raw)) == []


def test_a_large_body_that_needs_a_scan_is_scanned_elsewhere() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 40_000}, {"role": "system", "content": LINE}]}
    raw = json.dumps(body).encode()
    with pytest.raises(NeedsHelper):
        Messages().parse(raw, most=1000)
    assert json.loads(apply(raw, Messages().parse(raw).billing))["messages"][1] == {"role": "system", "content": ""}
    usual = json.dumps({**CLAUDE, "messages": body["messages"][:1]}).encode()
    assert Messages().parse(usual, most=1000).billing
