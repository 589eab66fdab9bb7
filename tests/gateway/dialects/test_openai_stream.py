"""Readers of streams: any cutting of a stream gives the same bytes and the same findings."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.events import reader as stream_module
from gateway.dialects.events.first_event import MAX_FIRST
from gateway.dialects.events.sse import EVENT_END
from gateway.dialects.openai.stream import ChunkReader, SeveralReader, failure_of, first_event, is_opening
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from tests.support.fakes import DONE, event, usage
from tests.support.paths import CAPTURES as CAPTURES_FOLDER

COMMENT = b": ping\n\n"
USAGE = event(usage=usage(100, 5, 64))
FOUND = Usage(100, 5, 64)
STREAM = event("a", usage=None) + COMMENT + event("b") + USAGE + DONE
CRLF = STREAM.replace(b"\n", b"\r\n")
MIXED = STREAM.replace(b"\n\n", b"\n\r\n")  # each line may end in its own way


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(strip: bool, chunks: list[bytes]) -> tuple[bytes, Usage | None]:
    reader = ChunkReader(strip_usage=strip)
    out = b"".join([reader.feed(chunk) for chunk in chunks])
    return out + reader.finish(), reader.usage


fragments = st.lists(
    st.sampled_from(
        [
            event("x"),
            event("y", usage=None),
            USAGE,
            DONE,
            COMMENT,
            USAGE.replace(b"\n", b"\r\n"),
            b"\n",
            b"\r\n\r\n",
            b"\r\r",
            b"\n\r\n",
            b"data: {",
        ]
    )
    | st.binary(max_size=6),
    max_size=8,
).map(b"".join)
places = st.lists(st.integers(0, 2000), max_size=12)


@given(fragments, places, st.booleans())
def test_any_cutting_gives_the_same(data: bytes, where: list[int], strip: bool) -> None:
    assert run(strip, cut(data, where)) == run(strip, [data])


@given(fragments, places)
def test_without_stripping_not_a_byte_changes(data: bytes, where: list[int]) -> None:
    assert run(False, cut(data, where))[0] == data


@given(fragments, places, st.booleans())
def test_what_went_out_ends_between_two_events(data: bytes, where: list[int], strip: bool) -> None:
    reader, out = ChunkReader(strip_usage=strip), b""
    for chunk in cut(data, where):
        out += reader.feed(chunk)
        last = max(out.rfind(b"data:"), out.rfind(b"event:"))  # comments and blank lines pass at once
        assert last < 0 or EVENT_END.search(out, last)


@pytest.mark.parametrize(
    ("stream", "usage_event"),
    [(STREAM, USAGE), (CRLF, USAGE.replace(b"\n", b"\r\n")), (MIXED, USAGE.replace(b"\n\n", b"\n\r\n"))],
)
def test_only_the_usage_event_is_taken_out(stream: bytes, usage_event: bytes) -> None:
    assert run(True, [stream]) == (stream.replace(usage_event, b""), FOUND)
    assert run(True, [bytes([byte]) for byte in stream]) == (stream.replace(usage_event, b""), FOUND)
    assert run(False, [stream]) == (stream, FOUND)


def test_usage_beside_choices_is_read_but_stays() -> None:
    """vLLM's continuous_usage_stats, llama.cpp's last chunk: the event has content, it is the client's."""
    data = event("a", usage=usage(100, 5, 64)) + DONE
    assert run(True, [data]) == (data, FOUND)


@pytest.mark.parametrize("strip", [True, False])
def test_a_whole_event_goes_on_at_once(strip: bool) -> None:
    reader = ChunkReader(strip_usage=strip)
    assert reader.feed(event("a")) == event("a")
    assert reader.feed(event("b")[:10]) == b""
    assert reader.feed(event("b")[10:]) == event("b")


@pytest.mark.parametrize("end", [b"\n\n\n", b"\r\n\r\n\n"])
@pytest.mark.parametrize("behind", [b"", b"\r"])
def test_a_line_feed_behind_an_event_belongs_to_the_next_one_wherever_it_is_cut(end: bytes, behind: bytes) -> None:
    head, rest = b": ping" + end, behind + USAGE + DONE
    assert run(True, [head, rest]) == run(True, [head + rest])


def test_the_last_event_needs_no_end() -> None:
    """dllama's [DONE] has no newline after it."""
    assert run(True, [STREAM[:-2]])[0].endswith(b"data: [DONE]")
    assert run(True, [USAGE[:-2]]) == (b"", FOUND)


def test_choices_inside_of_something_else_are_not_meant() -> None:
    data = event("a", usage=usage(100, 5, 64), vendor={"choices": []})
    assert run(True, [data]) == (data, FOUND)


@pytest.mark.parametrize(
    ("data", "done"), [(DONE, True), (b"data:[DONE]", True), (event("[DONE]"), False), (b": [DONE]\n\n", False)]
)
def test_the_end_is_noticed(data: bytes, done: bool) -> None:
    reader = ChunkReader(strip_usage=True)
    reader.feed(data)
    reader.finish()
    assert reader.done is done


@given(places)
def test_an_event_without_end_does_not_fill_the_memory(where: list[int]) -> None:
    monster = b'data: {"usage": "' + b"x" * 5000
    reader, out = ChunkReader(strip_usage=True), b""
    original, stream_module.MAX_EVENT_BYTES = stream_module.MAX_EVENT_BYTES, 1000
    try:
        for chunk in cut(monster + b"\n\n" + STREAM, where):
            out += reader.feed(chunk)
            assert len(reader._held) <= 1000
        out += reader.finish()
    finally:
        stream_module.MAX_EVENT_BYTES = original
    assert out == monster + b"\n\n" + STREAM.replace(USAGE, b"")
    assert reader.usage == FOUND


@pytest.mark.parametrize(
    "bad", [b"data: {broken\n\n", b'data: {"usage": 5, "choices": []}\n\n', b'data: ["usage"]\n\n', b'"usage"\n\n']
)
def test_nonsense_passes_unharmed(bad: bytes) -> None:
    assert run(True, [bad + DONE]) == (bad + DONE, None)


ERROR = b'data: {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}\n\n'


def begins_well(pieces: Sequence[bytes]) -> bool:
    """Whether the stream has begun by the end of the last piece."""
    first = first_event(pieces[0])
    return first is None or any(map(first.feed, pieces))


@pytest.mark.parametrize("error", [ERROR, ERROR.replace(b" ", b""), ERROR.replace(b"\n", b"\r\n")])
def test_a_first_event_that_is_an_error_is_known_by_its_first_bytes(error: bytes) -> None:
    assert not any(begins_well([error[:end]]) for end in range(len(error)))
    assert failure_of(error)
    for pieces in ([error], [error + DONE], [error[:9], error[9:]]):
        with pytest.raises(ReplicaFailure, match=r"out ?of ?memory"):
            begins_well(pieces)
    assert begins_well([error[:-2] + b"x" * MAX_FIRST])


@pytest.mark.parametrize(
    "begin",
    [
        event("a"),
        b"event: x\n",
        b'data: {"id": "error"',
        DONE,
        b'"error"',
        COMMENT,
        b":",
        b"\n",
        b"\r\n",
        b"retry: 5\n",
        b"id: 1\n",
    ],
)
def test_nothing_else_is_waited_for(begin: bytes) -> None:
    assert first_event(begin) is None


def chat(delta: Any = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, **more}
    return b"data: " + json.dumps({"choices": [choice], "prompt_progress": {"processed": 3}}).encode() + b"\n\n"


TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
SILENT = [
    COMMENT,
    b": ping\n",
    b"\n",
    b"event: ping\ndata: {}\n\n",
    chat({"role": "assistant", "content": ""}),
    chat({"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": None}),
    chat({}),
    chat(text=""),
    chat({"content": ""}, logprobs={"content": [{"token": "x"}]}),
    b'data: {"choices": [], "prompt_filter_results": [1]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {}}], "prompt_progress": {"total": 900, "processed": 100}}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": ""}}], "prompt_progress": {"total": 900, "cache": 5}}\n\n',
]
TOKENS = [
    TEXT,
    chat({"content": "x"}),
    chat({"role": "assistant", "content": "x"}),
    chat({"reasoning_content": "x"}),
    chat({"reasoning": "x"}),
    chat({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
    chat({"function_call": {"name": "f"}}),
    chat({"refusal": "x"}),
    chat(message={"content": "x"}),
    chat(text="x"),
    chat({"content": ""}, token_ids=[5]),
    chat({"content": "x"})[:-5] + b", half of it\n\n",
]


@given(st.lists(st.sampled_from(SILENT)), st.sampled_from(TOKENS), places)
def test_a_stream_starts_with_its_first_token(silent: list[bytes], token: bytes, where: list[int]) -> None:
    """What comes before is passed on at once, and is no token."""
    reader = ChunkReader(strip_usage=True)
    before = b"".join(silent)
    assert b"".join([reader.feed(chunk) for chunk in cut(before, where)]) == before
    assert (reader.started, reader.passed) == (False, 0)
    assert reader.feed(token) == token
    assert (reader.started, reader.passed) == (True, 1)


@given(st.lists(st.sampled_from(SILENT)), places)
def test_a_failure_before_the_first_token_does_not_pass(silent: list[bytes], where: list[int]) -> None:
    reader = ChunkReader(strip_usage=False)
    before = b"".join(silent)
    assert b"".join([reader.feed(chunk) for chunk in cut(before + ERROR + DONE, where)]) == before
    with pytest.raises(ReplicaFailure, match="out of memory"):
        reader.raise_failure()
    assert not reader.done


def test_what_a_second_stream_repeats_is_known() -> None:
    assert [event for event in (*SILENT, *TOKENS, event("", "stop"), DONE) if is_opening(event)] == SILENT[4:6]


ENDS = [
    event("x", "stop"),
    event("x") + event("", "stop") + USAGE,
    event("x", "stop") + COMMENT,
    event("x", "stop") + USAGE.replace(b'"usage"', b'"timings": {"n": 1}, "usage"'),
    event("x", "stop") + b'data: {"id": "c", "choices": []}\n\n',
    event("x", "stop") + USAGE + b'data: {"choices":[],"timings":{"n":1}}\n\n' * 3,
    b'data: {"choices": []}\n\n' + event("x", "stop") + b'data: {"choices":[]}\n\n',
]


@given(st.sampled_from(ENDS), places, st.booleans())
def test_a_stream_without_done_is_finished_by_its_finish_reason(data: bytes, where: list[int], strip: bool) -> None:
    reader = ChunkReader(strip_usage=strip)
    for chunk in cut(event("a") + event("b"), where):
        reader.feed(chunk)
    assert not reader.finished
    for chunk in cut(data, where):
        reader.feed(chunk)
    reader.finish()
    assert (reader.finished, reader.done) == (True, False)


@given(places)
def test_several_answers_are_finished_by_the_reason_of_each(where: list[int]) -> None:
    reader = SeveralReader(2, strip_usage=True)
    second = event("b", "stop").replace(b'"index": 0', b'"index": 1')
    assert second != event("b", "stop")
    for chunk in cut(event("a") + second + USAGE, where):
        reader.feed(chunk)
    assert not reader.finished
    for chunk in cut(event("a", "length"), where):
        reader.feed(chunk)
    reader.finish()
    assert reader.finished


@given(places)
def test_what_stands_beside_the_usage_is_the_clients(where: list[int]) -> None:
    """It has not asked for usage, and so it expects a choice in each event."""
    timed = event(usage=usage(100, 5, 64), timings={"predicted_per_second": 44.25})
    reader = ChunkReader(strip_usage=True)
    out = b"".join([reader.feed(chunk) for chunk in cut(event("a", "stop") + timed + DONE, where)]) + reader.finish()
    assert out.startswith(event("a", "stop"))
    assert out.endswith(DONE)
    last = json.loads(out.split(b"\n\n")[1].removeprefix(b"data: "))
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    assert last["timings"] == {"predicted_per_second": 44.25}
    assert "usage" not in last
    assert (reader.usage, reader.passed) == (FOUND, 1)
    completion = timed.replace(b"chat.completion.chunk", b"text_completion")
    assert b'"choices":[{"index":0,"text":"","finish_reason":null}]' in ChunkReader(strip_usage=True).feed(completion)


def seconds(action: Callable[[], object]) -> float:
    """Of the CPU's time, the least of three."""
    return min(timed(action) for _ in range(3))


def timed(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def begins(start: bytes, size: int) -> None:
    first = first_event(start)
    assert first
    first.feed(start)
    for _ in range(size):
        assert first.feed(b"a") is False


def taps(start: bytes, size: int) -> None:
    reader = ChunkReader(strip_usage=True)
    reader.feed(start)
    for _ in range(size):
        assert reader.feed(b"a") == b""


@pytest.mark.parametrize(
    ("drip", "start", "size"),
    [(begins, b'data: {"error": "', 4_000), (taps, b":", 20_000), (taps, b"data: ", 20_000)],
    ids=["error", "comment", "event"],
)
def test_what_comes_byte_by_byte_is_read_in_linear_time(drip: Callable[[bytes, int], None], start: bytes, size: int) -> None:
    """Sixteen times as much takes sixteen times as long, not 256 times."""
    assert seconds(lambda: drip(start, 16 * size)) < 64 * seconds(lambda: drip(start, size))


CAPTURES = sorted(CAPTURES_FOLDER.glob("*/*stream*.sse"))


@pytest.mark.skipif(not CAPTURES, reason="no recorded answers of engines beside the repository")
def test_what_real_engines_stream_is_understood() -> None:
    """vLLM's and llama.cpp's own streams: usage where they were asked for it, the end in each, every other byte untouched."""
    found = {}
    for path in CAPTURES:
        data = path.read_bytes()
        if b"chat.completion.chunk" not in data:
            continue
        reader = ChunkReader(strip_usage=False)
        assert reader.feed(data) + reader.finish() == data
        assert reader.done
        found[f"{path.parent.name}/{path.stem}"] = reader.usage
        stripped = ChunkReader(strip_usage=True)
        out = stripped.feed(data) + stripped.finish()
        assert stripped.usage == reader.usage
        assert out.count(b"data: ") in (data.count(b"data: "), data.count(b"data: ") - 1)
    assert found["vllm/chat_5_stream_usage"] is not None
    assert found["vllm/chat_5_stream_usage"].cached is not None
    assert found["vllm/chat_6_stream_plain"] is None
    assert found["llamacpp/chat_8_stream_usage"] is not None
