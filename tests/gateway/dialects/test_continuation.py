"""Broken streams, pure: wherever a stream is cut, text so far, continuation and splice give the undisturbed answer."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.events.sse import MAX_PARSED_EVENT
from gateway.dialects.openai.continuation import SentText, SplicedReader, TextSoFar, ending
from gateway.dialects.openai.request import CHAT
from gateway.dialects.openai.stream import ChunkReader
from gateway.dialects.usage import Usage
from gateway.request.resumption import READ_STEP, SentBytes
from tests.gateway.dialects.test_continuation_request import continuation, kind_of
from tests.gateway.dialects.test_json_edits import json_text, names
from tests.gateway.dialects.test_openai_stream import cut
from tests.support.continuing_engine import (
    CACHED_TOKENS,
    ENGINE_ERROR,
    PROMPT_TOKENS,
    STORY,
    TEXT,
    Style,
    chat,
    completion,
    events,
    line,
)
from tests.support.fakes import DONE
from tests.support.tiers import gate

USAGE = {"stream_options": {"include_usage": True}}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
styles = st.builds(Style, st.booleans(), st.booleans())
places = st.lists(st.integers(0, 5000), max_size=8)


def text_so_far(kind: str, data: bytes) -> TextSoFar | None:
    """The text of these events; None if it is more than one."""
    reading = SentText(kind)
    for at in range(0, len(data), READ_STEP):
        reading.feed(data[at : at + READ_STEP])
    reading.finish()
    so_far = reading.answer()
    assert so_far is None or isinstance(so_far, TextSoFar)
    return so_far


def after(pieces: list[str], head: dict[str, bytes]) -> TextSoFar:
    """A client that has these pieces."""
    events = [{**head, "choices": orjson.dumps([{"index": 0, "delta": {"content": each}}])} for each in pieces]
    data = [orjson.dumps({name: orjson.Fragment(value) for name, value in each.items()}) for each in events]
    so_far = text_so_far(CHAT, b"".join([b"data: %b\n\n" % each for each in data]))
    assert so_far is not None
    assert so_far.head == head
    return so_far


def read(data: bytes) -> tuple[str, list[str], list[Any], list[Any], int]:
    """What a client makes of a stream: the text, why it ended, the usages, who sent it, how many [DONE]."""
    text, finishes, usages, heads, done = "", list[str](), list[Any](), list[Any](), 0
    for event in data.split(b"\n\n")[:-1]:
        content = event.removeprefix(b"data: ")
        if content == b"[DONE]":
            done += 1
            continue
        answer = json.loads(content)
        assert not done
        heads.append((answer["id"], answer["created"], answer["model"]))
        usages += [answer["usage"]] if answer.get("usage") else []
        for choice in answer["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, finishes, usages, heads, done


def resumed(body: dict[str, Any], cuts: list[int], style: Style, where: list[int]) -> tuple[bytes, Usage | None]:
    """What the client gets, and the usage, where one replica after the other dies after its `cuts` events."""
    kind, sent, usage, parts = kind_of(body), b"", None, 0
    strip = "stream_options" not in body
    asked = {**USAGE, **body}
    for stop in [*cuts, None]:
        so_far = text_so_far(kind, sent)
        assert so_far is not None
        rest = (
            b"" if so_far.finish_reason or so_far.done else continuation(kind, orjson.dumps(asked), so_far.text, so_far.tokens)
        )
        assert rest is not None
        if not rest:
            return sent + ending(kind, so_far, None if strip else usage or so_far.usage), usage or so_far.usage
        splice = SplicedReader(so_far, strip_usage=strip)
        stream = b"".join(events(orjson.loads(rest), f"c-{parts}", style)[:stop])
        sent += b"".join([splice.feed(chunk) for chunk in cut(stream, where)])
        usage, parts = splice.usage or usage, parts + 1
        if splice.done:
            break
    return sent, usage


@given(
    st.sampled_from(
        [
            chat(),
            chat(**USAGE),
            chat(**EACH),
            chat(max_tokens=7, **USAGE),
            completion(**EACH),
            chat(max_tokens=len(STORY)),
            completion(**USAGE),
        ]
    )
    | st.builds(lambda limit: completion(max_tokens=limit), st.integers(1, 30)),
    st.lists(st.integers(1, 25), max_size=3),
    styles,
    places,
)
def test_wherever_it_is_cut_the_client_reads_the_undisturbed_answer(
    body: dict[str, Any], cuts: list[int], style: Style, where: list[int]
) -> None:
    whole, whole_usage = resumed(body, [], style, [])
    sent, usage = resumed(body, cuts, style, where)
    text, finishes, usages, heads, done = read(sent)
    expected = read(whole)
    assert (text, finishes, done) == (expected[0], expected[1], 1)
    assert set(heads) == {("c-0", 0, "m")}
    assert whole_usage is not None
    assert whole_usage.completion == len(STORY[: body.get("max_tokens", 1000)])
    if usage:  # else it was cut where nothing but the usage was missing
        assert (usage.prompt, usage.completion) == (whole_usage.prompt, whole_usage.completion)
        assert usage.cached in (None, CACHED_TOKENS)
    assert bool(usages) is (bool(usage) and "stream_options" in body)
    for counts in usages:
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["prompt_tokens"] == PROMPT_TOKENS


@given(st.integers(0, 25), styles)
def test_the_text_so_far_is_exact(count: int, style: Style) -> None:
    sent = b"".join(events(chat(), style=style)[:count])
    so_far = text_so_far(CHAT, sent)
    assert so_far is not None
    assert so_far.text == "".join(STORY[: so_far.pieces])
    assert so_far.text == read(sent)[0]
    assert so_far.tokens == so_far.pieces
    assert so_far.done is (DONE in sent)


def chunk_of(**choice: Any) -> bytes:
    return line({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]})


@pytest.mark.parametrize(
    "odd",
    [
        chunk_of(delta={"tool_calls": [{"index": 0}]}),
        chunk_of(delta={"content": "a", "reasoning_content": "hm"}),
        chunk_of(delta={"reasoning": "hm"}),
        chunk_of(delta={"content": ["a"]}),
        chunk_of(delta={"content": "a"}, logprobs={"content": []}),
        chunk_of(delta="a"),
        chunk_of(index=1, delta={"content": "a"}),
        line({"choices": [{"index": 0, "delta": {}}, {"index": 1, "delta": {}}]}),
        line({"choices": None}),
        line({"error": {"message": "bad", "code": 400}}),
        b"data: {broken\n\n",
        b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}',  # half of a monster
        b"data: [1]\n\n",
    ],
)
def test_what_is_more_than_a_text_is_not_resumed(odd: bytes) -> None:
    before = events(chat())[0]
    if odd.endswith(b"\n\n"):
        assert text_so_far(CHAT, before + odd) is None
    assert text_so_far(CHAT, before + odd[:40]) is None


def test_comments_and_empty_fields_do_no_harm() -> None:
    data = b": ping\n\n" + chunk_of(delta={"role": "assistant", "content": None, "tool_calls": [], "refusal": None})
    so_far = text_so_far(CHAT, data + chunk_of(delta={"content": "a"}) + chunk_of(delta={}, finish_reason="stop"))
    assert so_far is not None
    assert (so_far.text, so_far.pieces, so_far.finish_reason, so_far.done) == ("a", 1, "stop", False)


def test_streams_beyond_a_bound_are_not_kept() -> None:
    kept = SentBytes(most=10)
    for size in (4, 6):
        kept.add(b"x" * size)
    assert kept.whole() == b"x" * 10
    kept.add(b"x")
    kept.add(b"y")
    assert kept.whole() is None
    assert not kept._data


def memory_of(work: Callable[[], object]) -> int:
    """Bytes that it takes at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_comes_in_small_pieces_takes_no_more_memory() -> None:
    kept = SentBytes()

    def keep() -> None:
        for number in range(100_000):
            kept.add(b"%06d" % number)

    assert memory_of(keep) < 2 * 600_000
    whole = kept.whole()
    assert whole
    assert len(whole) == 600_000


@pytest.mark.parametrize("small", [b"\n\n", b"\r\n\r\n", b":\n\n", b": ping\r\n\r\n", b"retry: 1\n\n", b"data:\n\n", b"id\n\n"])
@gate(r"\n\n", ": ping*", "retry*", "data*", reason="blank lines, a comment, fields with and without a value")
def test_small_events_without_data_are_not_held_together(small: bytes) -> None:
    first, second = chunk_of(delta={"content": "a"}), chunk_of(delta={"content": "b"})
    data = first + small * 40_000 + second
    assert memory_of(lambda: text_so_far(CHAT, data)) < 100_000
    so_far = text_so_far(CHAT, data)
    assert so_far is not None
    assert (so_far.text, so_far.pieces) == ("ab", 2)


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b": c\n", b":\r", b"retry: 9\n", b"data: [DONE]\n\n", b"data:\r\n\r\n"]))
)
def test_lines_without_data_change_nothing_wherever_they_are(lines: list[bytes]) -> None:
    data = b"".join(lines) + b"\n\n"
    so_far = text_so_far(CHAT, chunk_of(delta={"content": "a"}) + data + chunk_of(delta={"content": "b"}))
    assert so_far is not None
    assert (so_far.text, so_far.done) == ("ab", b"[DONE]" in data)


@pytest.mark.parametrize(
    "long", [b"data:\n" * 100_000 + b"\n", b": " + b"x" * MAX_PARSED_EVENT + b"\n\n", b"data", b": half", b"id: 1\n"]
)
def test_an_event_that_is_not_read_whole_is_no_text(long: bytes) -> None:
    """One without an end passes if it is very long: what follows would be part of it."""
    assert text_so_far(CHAT, chunk_of(delta={"content": "a"}) + long) is None


def test_each_event_of_a_continuation_passes_at_once() -> None:
    splice = SplicedReader(after(["a"], {"id": b'"first"'}), strip_usage=True)
    role, *rest = events(chat())
    assert splice.feed(role) == b"", "the client knows the role already"
    assert orjson.loads(splice.feed(rest[0])[6:])["id"] == "first"
    assert splice.feed(rest[1][:20]) == b""
    assert splice.feed(rest[1][20:])
    assert splice.feed(b": ping\n\n") == b": ping\n\n"
    assert splice.feed(DONE[:-2]) == b""
    assert splice.finish() == DONE[:-2]


def test_cached_tokens_are_at_most_the_prompt() -> None:
    splice = SplicedReader(after(["a", " b"], {"id": b'"first"'}), strip_usage=False)
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_cache_hit_tokens": 12, "vendor": 1}
    out = orjson.loads(splice.feed(line({"choices": [], "usage": usage}))[6:])
    assert out["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_cache_hit_tokens": 10,
        "vendor": 1,
    }
    assert splice.usage == Usage(10, 5, 10)


def test_what_was_written_to_the_cache_is_counted() -> None:
    splice = SplicedReader(after(["a", " b"], {"id": b'"first"'}), strip_usage=False)
    details = {"cached_tokens": 4, "cache_write_tokens": 8}
    splice.feed(line({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": details}}))
    assert splice.usage == Usage(10, 5, 4, 6)


# What the first replica began with, and each value of the other replica's events with what it has to become.
FIRST = {"id": b'"c-1"', "created": b"98765432109876543210", "model": b'"m"'}
HEAD = {
    "id": ('"c-2"', '"c-1"'),
    "created": ("12345678901234567890123", "98765432109876543210"),
    "model": ('"\\u006d2"', '"m"'),
}
COUNTS = {"prompt_tokens": ("30", "28"), "completion_tokens": ("3", "5"), "total_tokens": ("33", "33")}
DETAILS = {"cached_tokens": ("29", "28")}
Pair = tuple[str, str]
"""A text before and after."""


@st.composite
def objects(draw: st.DrawFn, members: dict[str, Pair], added: str = "") -> Pair:
    """A JSON object with these members and others, in any order. added: what has to be its last members afterwards."""
    vendor = draw(st.dictionaries(names.filter(lambda name: name not in {*FIRST, *COUNTS, "usage"}), json_text(1), max_size=3))
    others = {name: (value.translate({10: " ", 13: " "}),) * 2 for name, value in vendor.items()}
    gaps = st.sampled_from(["", " ", "\t", "\n"])  # a line feed: here a further data line begins
    before, after = "{", "{"
    for number, (name, values) in enumerate(draw(st.permutations([*{**others, **members}.items()]))):
        begin = ("," if number else "") + draw(gaps) + json.dumps(name) + draw(gaps) + ":" + draw(gaps)
        end = draw(gaps)
        before, after = before + begin + values[0] + end, after + begin + values[1] + end
    return before + "}", after + added + "}"


@st.composite
def other_events(draw: st.DrawFn) -> Pair:
    """An event of the other replica, and what the client has to get."""
    present = draw(st.sets(st.sampled_from(sorted(HEAD))))
    choices = draw(st.sampled_from(['[{"index":0,"delta":{"content":"é"},"n":1E2}]', "[ ]"]))
    members = {"choices": (choices, choices), **{name: HEAD[name] for name in present}}
    if draw(st.booleans()):
        details = {"prompt_tokens_details": draw(objects(DETAILS))} if draw(st.booleans()) else {}
        members["usage"] = draw(objects({**COUNTS, **details}))
    missing = "".join(f',"{name}":{value.decode()}' for name, value in FIRST.items() if name not in present)
    data = draw(objects(members, missing))
    lines = st.lists(st.sampled_from([": ping", "event: message", "id: 7", "retry: 5", "event"]), max_size=2)
    head, tail, end = draw(lines), draw(lines), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    space = draw(st.sampled_from(["", " "]))
    texts = [end.join([*head, *(f"data:{space}{part}" for part in text.split("\n")), *tail]) + end + end for text in data]
    return texts[0], texts[1]


@given(st.lists(other_events(), max_size=3), places)
def test_of_the_other_replicas_events_no_byte_changes_but_what_has_to(pairs: list[Pair], where: list[int]) -> None:
    splice = SplicedReader(after(["a", " b"], FIRST), strip_usage=False)
    sent = "".join(before for before, _ in pairs).encode()
    out = b"".join([splice.feed(chunk) for chunk in cut(sent, where)]) + splice.finish()
    assert out.decode() == "".join(after for _, after in pairs)


def test_an_event_of_another_kind_gets_no_head() -> None:
    splice = SplicedReader(after(["a", " b"], FIRST), strip_usage=False)
    refusal = line({"error": {"message": "too long", "code": 400}})
    assert splice.feed(refusal) == refusal


def test_a_head_is_kept_as_it_was_written() -> None:
    event = b'event: x\ndata: {"created": 12345678901234567890123, "id":\ndata:{"a":\ndata: 1.50}, "choices":[]}\n\n'
    so_far = text_so_far(CHAT, event)
    assert so_far is not None
    assert so_far.head == {"id": b'{"a":  1.50}', "created": b"12345678901234567890123"}
    assert b'"created":12345678901234567890123' in ending(CHAT, so_far, None)


@given(st.integers(0, 20), places, st.booleans())
def test_an_engines_word_of_its_failure_does_not_pass(count: int, where: list[int], strip: bool) -> None:
    good = b"".join(events(chat())[:-1][:count])
    tap = ChunkReader(strip_usage=strip, watchful=True)
    out = b"".join([tap.feed(chunk) for chunk in cut(good + ENGINE_ERROR + DONE, where)]) + tap.finish()
    assert out == good
    assert tap.failure is not None
    assert "out of memory" in tap.failure.message
    assert not tap.done


@pytest.mark.parametrize(
    ("error", "own"),
    [
        ({"message": "x", "code": 500}, True),
        ({"message": "x", "code": 503, "type": "t"}, True),
        ({"message": "x", "code": None, "type": "server_error"}, True),
        ({"message": "x", "code": 400, "type": "server_error"}, False),
        ({"message": "x", "code": "invalid", "type": "invalid_request_error"}, False),
        ("text", False),
        (None, False),
    ],
)
def test_whose_fault_an_error_event_is(error: Any, own: bool) -> None:
    tap, other = ChunkReader(strip_usage=True, watchful=True), ChunkReader(strip_usage=True)
    event, token = line({"error": error}), chunk_of(delta={"content": "a"})
    for reader in (tap, other):
        assert reader.feed(token) == token
    assert tap.feed(event) == (b"" if own else event)
    assert (tap.failure is not None) is own
    assert other.feed(event) == event, "to one who does not look closely it is an event like any other"


def test_an_answer_that_talks_of_errors_is_no_error() -> None:
    data = chunk_of(delta={"content": '{"error": {"code": 500}}'})
    tap = ChunkReader(strip_usage=True, watchful=True)
    assert tap.feed(data) == data
    assert tap.failure is None
    assert TEXT
