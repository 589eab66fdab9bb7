"""The billing line of Claude Code: a text that changes with every request, at the head of its system prompt.

    "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=36ee5;"}, ...]

It is a block of its own, or the first line of a text, in `system` or in a turn of the role `system`, and consists of named
values. A text that merely begins like it is the user's, and stays. No model needs the line. An engine that computes it finds
nothing of the conversation in its cache (measured on llama.cpp: 12 s a turn instead of 0.2 s). So the canonical prompt omits
it, and by default it is not sent to replicas: the block, or the line, is cut out of the body's bytes, and no other byte
changes. vLLM removes it as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Edit, Members, read_list, read_object

PREFIX: Final = "x-anthropic-billing-header:"
_VALUES: Final = r"(?: [a-z][a-z0-9_]*+=[A-Za-z0-9._+-]*+;)++"
_RAW: Final = PREFIX.encode()
_FORM: Final = re.compile(re.escape(PREFIX) + _VALUES + r"(?:\n|\Z)")
_ESCAPED: Final = re.compile(rb"\\u00[2-7]")  # of a character that needs no escape
# The form in which Claude Code writes it: the first block of `system`, alone in the block. The match includes the comma behind
# it.
_BLOCK: Final = re.compile(
    rb'"system"\s*:\s*\[\s*(\{\s*(?:"type"\s*:\s*"text"\s*,\s*)?"text"\s*:\s*"'
    + re.escape(_RAW)
    + _VALUES.encode()
    + rb'"\s*(?:,\s*"type"\s*:\s*"text"\s*)?\}\s*(?:,\s*)?)'
)
_LINE: Final = re.compile(rb'"' + re.escape(_RAW) + _VALUES.encode() + rb"\\n")
_BEFORE: Final = 200  # bytes before the line within which `"system"` stands in that form
_AFTER: Final = 1000


def strip_line(text: str) -> str:
    """The text without its billing line; "" if it consists of that line alone."""
    found = _FORM.match(text) if text.startswith(PREFIX) else None
    return text[found.end() :] if found else text


def billing_edits(raw: bytes, body: Mapping[str, Any]) -> list[Edit]:
    """The edits that cut the billing lines out of a body. body: the parsed body.

    O(length): 0.1 ms a MiB if there is none, or one in the form of Claude Code; 3 ms a MiB for any other form.
    """
    at = raw.find(_RAW)
    if at < 0:
        return []
    if _bills(body.get("system")) and (found := _usual(raw, at)):
        return [(found.start(1), found.end(1), b"")]
    return _scanned(raw, body)


def needs_scan(raw: bytes) -> bool:
    """True if `billing_edits` may have to scan the whole body. O(length), 0.1 ms a MiB."""
    at = raw.find(_RAW)
    return at >= 0 and _usual(raw, at) is None


def _usual(raw: bytes, at: int) -> re.Match[bytes] | None:
    """The block in the form of Claude Code, with the first prefix at `at`. None: another form, a second prefix, or letters
    written as escapes, so that the block in `system` may be another one.
    """
    if raw.find(_RAW, at + 1) >= 0 or _ESCAPED.search(raw) is not None:
        return None
    return _BLOCK.search(raw, max(0, at - _BEFORE), at + _AFTER)


def _scanned(raw: bytes, body: Mapping[str, Any]) -> list[Edit]:
    members, edits = read_object(raw), list[Edit]()
    _cut_content(raw, members, "system", body.get("system"), edits)
    messages = body.get("messages")
    if isinstance(messages, list) and any(_is_billing_turn(message) for message in messages):
        spans, _ = read_list(raw, members.spans["messages"][0])
        for message, (start, _) in zip(messages, spans, strict=True):
            if _is_billing_turn(message):
                _cut_content(raw, read_object(raw, start), "content", message["content"], edits)
    return edits


def _is_billing_turn(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system" and _bills(message.get("content"))


def _bills(content: Any) -> bool:
    """True if the content has a billing line."""
    if isinstance(content, list):
        return any(isinstance(block, dict) and _bills(block.get("text")) for block in content)
    return isinstance(content, str) and strip_line(content) is not content


def _cut_content(raw: bytes, members: Members, name: str, content: Any, edits: list[Edit]) -> None:
    if not _bills(content):
        return
    start, end = members.spans[name]
    if isinstance(content, str):
        edits.append(_first_line(raw, start, end, strip_line(content)))
        return
    spans, _ = read_list(raw, start)
    kept = 0  # number of earlier blocks that stay
    for number, (block, (begin, stop)) in enumerate(zip(content, spans, strict=True)):
        if not isinstance(block, dict) or not _bills(block.get("text")):
            kept += 1
            continue
        rest = strip_line(block["text"])
        if rest:
            edits.append(_text_edit(raw, begin, rest))
            kept += 1
        elif kept:
            edits.append((spans[number - 1][1], stop, b""))  # with the comma before it
        else:
            edits.append((begin, spans[number + 1][0] if number + 1 < len(spans) else stop, b""))


def _text_edit(raw: bytes, begin: int, text: str) -> Edit:
    """The edit for a text within the block that begins at `begin`."""
    start, end = read_object(raw, begin).spans["text"]
    return _first_line(raw, start, end, text)


def _first_line(raw: bytes, start: int, end: int, rest: str) -> Edit:
    """The edit that removes the first line of the JSON string at start:end. rest: the remaining text."""
    found = _LINE.match(raw, start)
    if found and orjson.loads(b'"' + raw[found.end() : end]) == rest:
        return start + 1, found.end(), b""
    return start, end, orjson.dumps(rest)  # the text is written with other escapes
