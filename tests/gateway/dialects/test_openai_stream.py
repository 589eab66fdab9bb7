"""Readers of streams: any cutting of a stream gives the same bytes and the same findings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.events import reader as stream_module
from gateway.dialects.events.sse import without_data
from gateway.dialects.openai.stream import MAX_ERROR_BYTES, ChatOpening, ChunkReader, begins_well, failure_of
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
        assert out == b"" or out.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"))


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


@pytest.mark.parametrize("error", [ERROR, ERROR.replace(b" ", b""), ERROR.replace(b"\n", b"\r\n")])
def test_a_first_event_that_is_an_error_is_known_by_its_first_bytes(error: bytes) -> None:
    for end in range(len(error)):
        assert not begins_well(error[:end])
        assert ChatOpening().feed(error[:end]) is False
    assert failure_of(error)
    for whole in (error, error + DONE):
        assert not begins_well(whole)
        with pytest.raises(ReplicaFailure, match=r"out ?of ?memory"):
            ChatOpening().feed(whole)
    assert begins_well(error[:-2] + b"x" * MAX_ERROR_BYTES)
    assert ChatOpening().feed(error[:-2] + b"x" * MAX_ERROR_BYTES)


@pytest.mark.parametrize("begin", [event("a"), b"event: x\n", b'data: {"id": "error"', DONE, b'"error"'])
def test_nothing_else_is_waited_for(begin: bytes) -> None:
    assert ChatOpening().feed(begin)
    assert begins_well(begin) == begin.startswith(b"data:")


LINES = [b": ping\n\n", b":\r\n", b"\n", b"\r", b"retry: 3000\n", b': data: {"error"\r']
SILENT = st.lists(st.sampled_from(LINES)).map(b"".join)


@given(SILENT, st.sampled_from([event("a"), DONE, b"event: x\ndata: y\n\n", b"id: 1\n"]), st.integers(0, 200))
def test_lines_without_data_are_separated_from_the_first_data(silent: bytes, data: bytes, end: int) -> None:
    assert without_data(silent + data) == len(silent)
    part = silent[:end]
    assert without_data(part) == len(part)


@pytest.mark.parametrize("begin", [b":", b": pi", b"re", b"retry:", b"retry: 3", b": ping\n:"])
def test_the_begin_of_a_line_without_data_is_none_either(begin: bytes) -> None:
    assert without_data(begin) == len(begin)


def opened(data: bytes) -> bool | str:
    """The oracle of Opening: all the bytes at once."""
    rest = data[without_data(data) :]
    if not rest:
        return False
    head = rest.replace(b" ", b"")[:14]
    if not b'data:{"error"'.startswith(head[:13]):
        return True
    ends = [rest.find(end) + len(end) for end in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n") if end in rest]
    if not ends:
        return False
    failure = failure_of(rest[: min(ends)])
    return failure.message if failure else True


@given(
    SILENT,
    st.sampled_from([ERROR, ERROR[:-1], ERROR[:20], b'data: {"error": 1}\r\n\r\n', event("a"), DONE, b"retr", b":", b""]),
    st.lists(st.integers(0, 500), max_size=30),
)
def test_the_begin_of_a_stream_is_the_same_however_it_is_cut(silent: bytes, data: bytes, where: list[int]) -> None:
    opening, so_far = ChatOpening(), b""
    for piece in cut(silent + data, where):
        so_far += piece
        found: bool | str
        try:
            found = opening.feed(piece)
        except ReplicaFailure as failure:
            found = failure.message
        assert found == opened(so_far)
        assert opening.silent == (without_data(so_far) == len(so_far))
        if found is not False:
            return


def seconds(action: Callable[[], object]) -> float:
    """Of the CPU's time, the least of three."""
    return min(timed(action) for _ in range(3))


def timed(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def begins(start: bytes, size: int) -> None:
    opening = ChatOpening()
    opening.feed(start)
    for _ in range(size):
        assert opening.feed(b"a") is False


def taps(start: bytes, size: int) -> None:
    reader = ChunkReader(strip_usage=True)
    reader.feed(start)
    for _ in range(size):
        assert reader.feed(b"a") == b""


@pytest.mark.parametrize(
    ("drip", "start", "size"),
    [(begins, b":", 4_000), (begins, b'data: {"error": "', 4_000), (taps, b"data: ", 40_000)],
    ids=["comment", "error", "event"],
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
