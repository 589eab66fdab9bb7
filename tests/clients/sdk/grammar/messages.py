"""A stream of Anthropic's Messages.

    message_start  (block)*  message_delta+  message_stop          ping: anywhere after the first
    block:         content_block_start(index)  content_block_delta(index)*  content_block_stop(index); one by one, from 0

The deltas are of the block's kind; the arguments of a call are an object in the end; a thought is signed once, at its end, if
it is signed at all. `error` ends a stream, and nothing follows it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RawMessageStreamEvent)
MESSAGE: Final[TypeAdapter[Message]] = TypeAdapter(Message)
COUNTS: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
STOPPED: Final = "message_stop"
_TEXTS: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def message_of(frames: list[tuple[str, bytes]], *, foreign: bool = False) -> dict[str, Any] | None:
    """The message that the events add up to; None: the stream ends with an error. Fails where it is no such stream."""
    events = [parsed(name, data, foreign=foreign) for name, data in frames]
    assert events, "no event"
    kinds = [event["type"] for event in events]
    assert kinds.count("error") == (kinds[-1] == "error"), kinds
    assert kinds[-1] in ("error", STOPPED), f"a stream that ends with {kinds[-1]}"
    said = [event for event in events if event["type"] not in ("ping", "error")]
    if not said:
        return None
    message = started(said[0])
    rest = blocks(message, said[1:])
    if kinds[-1] == "error":
        assert STOPPED not in kinds
        return None
    ended(message, rest)
    MESSAGE.validate_json(json.dumps(message), strict=True)
    return message


def parsed(name: str, data: bytes, *, foreign: bool) -> Any:
    event = json.loads(data)
    assert event["type"] == name, (name, event)
    if name == "error":
        assert isinstance(event["error"]["type"], str)
        assert isinstance(event["error"]["message"], str)
    elif name != "ping":
        EVENT.validate_json(data, strict=True, extra="allow" if foreign else "forbid")
    return event


def started(event: dict[str, Any]) -> dict[str, Any]:
    assert event["type"] == "message_start"
    message: dict[str, Any] = event["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    return message


def blocks(message: dict[str, Any], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts the blocks into the message; returns the events behind them."""
    content: list[dict[str, Any]] = message["content"]
    pieces = list[str]()
    inside = False
    for at, event in enumerate(events):
        kind = event["type"]
        if kind == "content_block_start":
            assert (inside, event["index"]) == (False, len(content)), "blocks come one after the other, from 0"
            inside, pieces = True, []
            content.append(begun(event["content_block"]))
        elif kind == "content_block_delta":
            assert (inside, event["index"]) == (True, len(content) - 1)
            add(content[-1], event["delta"], pieces)
        elif kind == "content_block_stop":
            assert (inside, event["index"]) == (True, len(content) - 1)
            inside = False
            finish(content[-1], pieces)
        else:
            assert not inside, f"{kind} in an open block"
            return events[at:]
    return []


def begun(block: dict[str, Any]) -> dict[str, Any]:
    """A block of texts begins empty."""
    if block["type"] in _TEXTS:
        assert block[block["type"]] == ""
    if block["type"] == "tool_use":
        assert block["input"] == {}
    return dict(block)


def add(block: dict[str, Any], delta: dict[str, Any], pieces: list[str]) -> None:
    kind = delta["type"]
    if kind == "signature_delta":
        assert block["type"] == "thinking"
        assert block["signature"] == "", "it is signed once"
        block["signature"] = delta["signature"]
    elif kind == "input_json_delta":
        assert block["type"] == "tool_use"
        pieces.append(delta["partial_json"])
    else:
        expected, name = _TEXTS[block["type"]]
        assert kind == expected, (block, delta)
        assert not block.get("signature"), "the signature is the last delta"
        pieces.append(delta[name])


def finish(block: dict[str, Any], pieces: list[str]) -> None:
    text = "".join(pieces)
    if block["type"] == "tool_use":
        block["input"] = json.loads(text) if text else {}
        assert isinstance(block["input"], dict)
    elif block["type"] in _TEXTS:
        block[block["type"]] = text


def ended(message: dict[str, Any], rest: list[dict[str, Any]]) -> None:
    kinds = [event["type"] for event in rest]
    assert kinds == ["message_delta"] * (len(kinds) - 1) + [STOPPED], kinds
    assert len(kinds) >= 2
    for event in rest[:-1]:
        message |= event["delta"]
        usage = event["usage"]
        message["usage"] |= {name: usage[name] for name in COUNTS if usage.get(name) is not None}
        assert usage["output_tokens"] >= message["usage"]["output_tokens"], "counts of a stream grow"
        message["usage"]["output_tokens"] = usage["output_tokens"]
    assert message["stop_reason"] is not None
    called = [block["type"] for block in message["content"]].count("tool_use")
    assert called or message["stop_reason"] != "tool_use"
