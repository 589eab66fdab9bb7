"""What is edited into answers of Messages: the usage's split, nothing for `max_tokens: 0`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.answer_edits import MessageEditor
from gateway.dialects.anthropic.cache_split import CacheSplit, marked_in
from gateway.dialects.anthropic.stream import MessageReader
from gateway.dialects.anthropic.usage import parse_usage
from gateway.dialects.events.sse import events_of, object_of
from gateway.dialects.usage import Usage
from router import Prompt
from tests.gateway.dialects.events.test_named import named
from tests.gateway.dialects.test_openai_stream import cut

MARKED = CacheSplit(80, 50, 100)
SPLIT_BY_ENGINE = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}


def usage(fresh: int = 600, read: int | None = 400, created: int | None = None, **more: Any) -> dict[str, Any]:
    """1,000 tokens."""
    counts = {"cache_creation_input_tokens": created, "cache_read_input_tokens": read}
    return {
        "input_tokens": fresh,
        **{name: count for name, count in counts.items() if count is not None},
        "output_tokens": 4,
        **more,
    }


def whole(
    counts: dict[str, Any] | None, marked: CacheSplit | None = MARKED, *, silent: bool = False
) -> tuple[dict[str, Any], Any]:
    body: dict[str, Any] = {"id": "msg_1", "content": [{"type": "text", "text": "é"}], "stop_reason": "end_turn"}
    if counts is not None:
        body["usage"] = counts
    raw = json.dumps(body, indent=1).encode()
    edited, counted = MessageEditor(marked, silent=silent).whole(raw, parse_usage(body))
    return json.loads(edited), counted


@pytest.mark.parametrize(
    ("counts", "marked", "written", "hours"),
    [
        (usage(), MARKED, 400, 100),
        (usage(created=0), MARKED, 400, 100),
        (usage(fresh=1000, read=0), MARKED, 800, 500),
        (usage(fresh=300, read=700), MARKED, 100, 0),
        (usage(fresh=600, read=400), CacheSplit(100, 0, 100), 600, 0),
        (usage(fresh=600, read=400), CacheSplit(300, 300, 100), 600, 600),
    ],
)
def test_what_was_written_is_said_and_adds_up(counts: dict[str, Any], marked: CacheSplit, written: int, hours: int) -> None:
    answer, counted = whole(counts, marked)
    said = answer["usage"]
    assert said["cache_creation_input_tokens"] == written
    assert said["cache_creation"] == {"ephemeral_5m_input_tokens": written - hours, "ephemeral_1h_input_tokens": hours}
    assert said["cache_read_input_tokens"] == counts["cache_read_input_tokens"], "the engine's word"
    assert said["input_tokens"] + written + said["cache_read_input_tokens"] == 1000
    assert counted == Usage(1000, 4, counts["cache_read_input_tokens"], written, hours), "the meter counts the same"
    assert answer["content"] == [{"type": "text", "text": "é"}]


@pytest.mark.parametrize(
    "counts",
    [
        usage(fresh=200, read=800),  # all that is marked was cached
        usage(fresh=300, read=400, created=300),  # the engine has split it
        usage(cache_creation=SPLIT_BY_ENGINE),  # likewise: none was written
        usage(fresh=1000, read=None),  # it does not report what was cached
        {"input_tokens": "many", "cache_read_input_tokens": 1},
        {"input_tokens": 10**12, "cache_read_input_tokens": 0},
        None,
    ],
)
def test_an_engine_s_own_word_is_never_changed(counts: dict[str, Any] | None) -> None:
    body = json.dumps({"content": [], "usage": counts} if counts else {"content": []}, indent=1).encode()
    own = parse_usage({"usage": counts})
    assert MessageEditor(MARKED, silent=False).whole(body, own) == (body, own)


@pytest.mark.parametrize(
    "body", [b"[1]", b'{"usage": [1]}', b'{"usage": "x"}', b'{"a": [' + b"[]," * 40_000 + b'[]], "usage": {}}']
)
@pytest.mark.parametrize("silent", [False, True])
def test_an_answer_that_is_none_goes_on(body: bytes, silent: bool) -> None:
    out, _ = MessageEditor(MARKED, silent=silent).whole(body, None)
    assert out == body or (silent and json.loads(out)["content"] == [])


def test_where_breakpoints_are() -> None:
    prompt = Prompt(b"k" * 80, 1000, 100, "m")
    assert marked_in(prompt) is None
    prompt.breakpoints = ((7, 0),)
    assert marked_in(prompt) is None, "where an earlier one may have been"
    prompt.breakpoints = ((3, 3600), (8, 300), (9, 0), (2, 3600))
    marked = marked_in(prompt)
    assert marked is not None
    assert (marked.last, marked.hours, marked.units) == (800, 300, 1000)


# -- streams


def stream(first: dict[str, Any], last: dict[str, Any]) -> bytes:
    begin = named("message_start", message={"id": "msg_1", "content": [], "usage": first})
    says = named("content_block_start", index=0, content_block={"type": "text", "text": ""})
    says += named("content_block_delta", index=0, delta={"type": "text_delta", "text": "message_"})
    says += b": comment\n\n" + named("ping") + named("content_block_stop", index=0)
    delta = named("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=last)
    return begin + says + delta + named("message_stop")


LLAMACPP = stream(usage(output_tokens=0), {"output_tokens": 4})  # the parts come first
VLLM = stream({"input_tokens": 1000, "output_tokens": 0}, usage(created=0))  # the parts come last
OURS = stream(usage(cache_creation=SPLIT_BY_ENGINE), usage(created=0))
SILENT_ENGINE = stream({"input_tokens": 1000, "output_tokens": 0}, {"output_tokens": 4})


def through(
    chunks: list[bytes], marked: CacheSplit | None = MARKED, *, silent: bool = False
) -> tuple[bytes, Usage | None, bool]:
    reader = MessageEditor(marked, silent=silent).reader(MessageReader())
    out = b"".join([reader.feed(chunk) for chunk in chunks]) + reader.finish()
    return out, reader.usage, reader.done


@pytest.mark.parametrize("data", [LLAMACPP, VLLM])
@given(st.lists(st.integers(0, 1200), max_size=12))
def test_the_last_usage_of_a_stream_is_split(data: bytes, cuts: list[int]) -> None:
    out, counted, done = through(cut(data, cuts))
    assert done
    assert counted == Usage(1000, 4, 400, 400, 100)
    before, after = list(events_of(data)), list(events_of(out))
    assert [event for event in before if b"message_delta" not in event] == [
        event for event in after if b"message_delta" not in event
    ], "no other event changes"
    said = next(object_of(event) for event in after if b"event: message_delta" in event)
    assert said["usage"] == {
        "input_tokens": 200,
        "cache_creation_input_tokens": 400,
        "cache_read_input_tokens": 400,
        "cache_creation": {"ephemeral_5m_input_tokens": 300, "ephemeral_1h_input_tokens": 100},
        "output_tokens": 4,
    }


@pytest.mark.parametrize("data", [OURS, SILENT_ENGINE])
def test_the_stream_of_an_engine_that_splits_or_reports_nothing_stays(data: bytes) -> None:
    assert through([data])[0] == data


@pytest.mark.parametrize("data", [LLAMACPP, VLLM, OURS, SILENT_ENGINE])
@given(st.lists(st.integers(0, 1200), max_size=12))
def test_of_a_stream_for_no_tokens_the_content_is_left_out(data: bytes, cuts: list[int]) -> None:
    out, counted, done = through(cut(data, cuts), None, silent=True)
    assert done
    assert counted is not None
    assert counted.completion == 4, "metered as it was generated"
    events = [object_of(event) for event in events_of(out)]
    assert [event.get("type") for event in events] == ["message_start", None, "ping", "message_delta", "message_stop"]
    assert events[3]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[3]["usage"]["output_tokens"] == 0


def test_an_answer_for_no_tokens_is_empty() -> None:
    answer, counted = whole(usage(), None, silent=True)
    assert (answer["content"], answer["stop_reason"], answer["stop_sequence"]) == ([], "max_tokens", None)
    assert answer["usage"]["output_tokens"] == 0
    assert counted == Usage(1000, 4, 400)


def test_no_content_goes_out_where_no_usage_is_reported() -> None:
    answer, counted = whole(None, silent=True)
    assert (answer["content"], answer["stop_reason"], counted) == ([], "max_tokens", None)
    said, stop = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "x"}), named("message_stop")
    out, _, _ = through([said, named("message_delta", delta={"stop_reason": "end_turn"}), stop], silent=True)
    assert out.endswith(stop)
    assert object_of(out.removesuffix(stop))["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert out.count(b"event: ") == 2


@pytest.mark.parametrize(
    "event",
    [
        named("message_start"),
        named("message_start", message=[1]),
        named("message_delta", usage=[1]),
        named("message_delta"),
        named("message_delta", delta=1, usage={"input_tokens": -1}),
        b"event: message_delta\ndata: no JSON\n\n",
        b"event: message_delta\ndata: [" + b"[]," * 30_000 + b"1]\n\n",
        b"event: message_delta\ndata: " + b"[" * 2000 + b"\n\n",
        named("message_delta", usage={"input_tokens": 1, "x": "y" * 70_000}),
    ],
)
@pytest.mark.parametrize("silent", [False, True])
def test_events_of_another_shape_pass(event: bytes, silent: bool) -> None:
    assert through([event], silent=silent)[0] == event


def test_a_stream_that_breaks_off_is_not_done() -> None:
    out, _, done = through([VLLM[: VLLM.index(b"event: message_delta")]])
    assert not done
    failed = named("error", error={"type": "api_error", "message": "boom"})
    reader = MessageEditor(MARKED, silent=False).reader(MessageReader())
    assert reader.feed(out) + reader.feed(failed) == out + failed
    assert reader.reported is not None
