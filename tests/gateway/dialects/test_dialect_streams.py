"""The streams of Messages and Responses: recorded ones and made ones, whatever their cutting into chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.answer import MAX_PARSED_ANSWER
from gateway.dialects.dialect import Dialect, StreamReader
from gateway.dialects.events.reader import MAX_EVENT_BYTES
from gateway.dialects.events.sse import MAX_PARSED_EVENT
from gateway.dialects.table import Dialects
from gateway.dialects.usage import Usage
from tests.gateway.dialects.events.test_named import named
from tests.gateway.dialects.test_openai_stream import cut
from tests.support.paths import CAPTURES

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
places = st.lists(st.integers(0, 1 << 20), max_size=20)


def dialect(path: str) -> Dialect:
    return Dialects().at(path)


def read(path: str, chunks: Sequence[bytes]) -> tuple[bytes, StreamReader]:
    api = dialect(path).parse(b'{"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}')
    reader = dialect(path).reader(api, watchful=False)
    out = b"".join(map(reader.feed, chunks))
    return out + reader.finish(), reader


STARTED = named("message_start", message={"usage": {"input_tokens": 845, "output_tokens": 0}})
SPLIT = named("message_start", message={"usage": {"cache_read_input_tokens": 844, "input_tokens": 1, "output_tokens": 0}})
SAID = named("content_block_delta", delta={"type": "text_delta", "text": 'message_ "usage" event: error'}, index=0)
VLLM_END = {"input_tokens": 13, "output_tokens": 8, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 832}
COMPLETED = {
    "input_tokens": 215,
    "input_tokens_details": {"cached_tokens": 192},
    "output_tokens": 8,
    "output_tokens_details": {},
}

FIRST_TOKEN = {MESSAGES: SAID, RESPONSES: named("response.output_text.delta", delta="a")}

STREAMS: list[tuple[str, bytes, Usage | None, bool]] = [
    (MESSAGES, STARTED + SAID + named("message_delta", usage=VLLM_END) + named("message_stop"), Usage(845, 8, 832), True),
    (
        MESSAGES,
        SPLIT + SAID + named("message_delta", usage={"output_tokens": 8}) + named("message_stop"),
        Usage(845, 8, 844),
        True,
    ),
    (MESSAGES, STARTED + SAID, None, False),  # broke off: what was cached of its prompt is not known, and would count as a miss
    (MESSAGES, SPLIT + SAID, Usage(845, 0, 844), False),
    (MESSAGES, STARTED + named("message_delta", usage={"output_tokens": 8}) + named("message_stop"), Usage(845, 8, None), True),
    (MESSAGES, SAID + named("message_stop"), None, True),
    (RESPONSES, named("response.completed", response={"usage": COMPLETED}, sequence_number=3), Usage(215, 8, 192), True),
    (RESPONSES, named("response.incomplete", response={"usage": {"input_tokens": 5, "output_tokens": 1}}), Usage(5, 1), True),
    (RESPONSES, named("response.completed", response={"usage": None}), None, True),
    (RESPONSES, named("response.output_text.delta", delta='"response.completed"', sequence_number=1), None, False),
]


@given(st.sampled_from(STREAMS), places, st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_goes_on_as_it_is_and_is_understood(
    stream: tuple[str, bytes, Usage | None, bool], where: list[int], end: bytes
) -> None:
    path, data, usage, done = stream
    data = data.replace(b"\n", end)
    out, reader = read(path, cut(data, where))
    assert out == data
    assert (reader.usage, reader.done, reader.reported) == (usage, done, None)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize(
    ("file", "path", "usage"),
    [
        ("vllm/messages_anthropic_stream.sse", MESSAGES, Usage(845, 8, 832)),
        ("vllm/messages_stream_cached.sse", MESSAGES, Usage(215, 4, 192)),
        ("llamacpp/messages_anthropic_stream.sse", MESSAGES, Usage(845, 8, 844)),
        ("vllm/responses_stream.sse", RESPONSES, Usage(215, 8, 192)),
    ],
)
def test_recorded_streams(file: str, path: str, usage: Usage) -> None:
    data = Path(CAPTURES, file).read_bytes()
    for size in (1, 7, 100, len(data)):
        out, reader = read(path, [data[at : at + size] for at in range(0, len(data), size)])
        assert (out, reader.usage, reader.done) == (data, usage, True)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize(
    ("file", "path", "usage"),
    [
        ("vllm/messages_billing_header_blocks.json", MESSAGES, Usage(215, 4, 192)),
        ("vllm/messages_tool_result.json", MESSAGES, Usage(93, 4, 0, 64)),
        ("vllm/responses_list_input.json", RESPONSES, None),
        ("vllm/responses_tools_call_items.json", RESPONSES, Usage(229, 8, 192, 32)),
        ("llamacpp/responses.json", RESPONSES, Usage(37, 16, 6)),
    ],
)
def test_recorded_answers(file: str, path: str, usage: Usage | None) -> None:
    recorded = json.loads(Path(CAPTURES, file).read_text("utf-8"))
    answer = recorded.get("answer") or recorded.get("response")
    found = dialect(path).usage_of(json.dumps(answer).encode())
    assert found
    assert usage is None or found == usage


FAILURES = [
    (MESSAGES, named("error", error={"type": "api_error", "message": "boom"}), True),
    (MESSAGES, named("error", error={"type": "InternalServerError", "message": "boom"}), True),
    (MESSAGES, named("error", error={"type": "invalid_request_error", "message": "no"}), False),
    (RESPONSES, named("response.failed", response={"error": {"code": "server_error", "message": "boom"}}), True),
    (RESPONSES, named("error", error={"type": "server_error", "message": "boom"}), True),
    (RESPONSES, named("error", code="invalid_prompt", message="no"), False),
]


@given(st.sampled_from(FAILURES), places)
def test_a_failure_that_the_engine_reports_goes_on_and_is_known(failure: tuple[str, bytes, bool], where: list[int]) -> None:
    path, data, own = failure
    data = FIRST_TOKEN[path] + data
    out, reader = read(path, cut(data, where))
    assert out == data
    assert bool(reader.reported) == own
    assert reader.done != own, "the client's own error is a complete answer"
    if reader.reported:
        assert "boom" in str(reader.reported)


@pytest.mark.parametrize("size", [MAX_PARSED_EVENT, MAX_EVENT_BYTES, 5 * MAX_EVENT_BYTES])
@pytest.mark.parametrize("chunk", [1 << 12, 1 << 16, 1 << 24])
def test_the_last_event_of_a_response_may_be_long(size: int, chunk: int) -> None:
    """It repeats the whole response: instructions and tools, images, the text."""
    schema = {"usage": {"input_tokens": {"type": "integer"}}}
    response = {"instructions": "x" * size, "tools": [{"parameters": schema}], "usage": COMPLETED, "user": None}
    data = named("response.completed", response=response, sequence_number=9)
    out, reader = read(RESPONSES, [data[at : at + chunk] for at in range(0, len(data), chunk)])
    assert out == data
    assert (reader.usage, reader.done) == (Usage(215, 8, 192), True)


@given(st.sampled_from([MESSAGES, RESPONSES]), st.integers(0, 300), st.booleans())
def test_a_large_plain_answer_is_metered_by_its_end(path: str, behind: int, streamed: bool) -> None:
    counts: dict[str, Any] = VLLM_END if path == MESSAGES else COMPLETED
    usage = Usage(845, 8, 832) if path == MESSAGES else Usage(215, 8, 192)
    body = json.dumps({"content": "x" * MAX_PARSED_ANSWER, "usage": counts, "behind": "y" * behind}).encode()
    if not streamed:
        assert dialect(path).usage_of(body) == usage
        return
    tail = dialect(path).answer_tail(body[:100])
    assert tail
    tail.feed(body[100:])
    assert tail.usage() == usage


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        (MESSAGES, None),
        (MESSAGES, {"output_tokens": 5}),
        (MESSAGES, {"input_tokens": -1}),
        (MESSAGES, {"input_tokens": "5"}),
        (MESSAGES, {"input_tokens": 10**9, "cache_read_input_tokens": 10**9}),
        (RESPONSES, {"input_tokens": 10**10, "output_tokens": 1}),
        (RESPONSES, {"input_tokens": 5, "output_tokens": 10**10}),
        (RESPONSES, {"prompt_tokens": 5}),
        (RESPONSES, 5),
    ],
)
def test_counts_that_make_no_sense_are_none(path: str, counts: Any) -> None:
    assert dialect(path).usage_of(json.dumps({"usage": counts}).encode()) is None
    stream = named("message_delta", usage=counts) + named("response.completed", response={"usage": counts})
    assert read(path, [stream])[1].usage is None


def test_what_was_written_to_the_cache_is_known() -> None:
    hours = {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 12}
    counts = {"input_tokens": 5, "cache_creation_input_tokens": 16, "cache_read_input_tokens": 8, "output_tokens": 2}
    odd: list[tuple[Any, int]] = [(hours, 12), (None, 0), ({"ephemeral_1h_input_tokens": 99}, 16), ([1], 0)]
    for by_ttl, found in odd:
        usage = {**counts, "cache_creation": by_ttl}
        assert dialect(MESSAGES).usage_of(json.dumps({"usage": usage}).encode()) == Usage(29, 2, 8, 16, found)
        stream = named("message_start", message={"usage": usage}) + named("message_delta", usage={"output_tokens": 2})
        assert read(MESSAGES, [stream])[1].usage == Usage(29, 2, 8, 16, found)
    details = {"cached_tokens": 8, "cache_write_tokens": 20}
    body = {"usage": {"input_tokens": 29, "input_tokens_details": details, "output_tokens": 2}}
    assert dialect(RESPONSES).usage_of(json.dumps(body).encode()) == Usage(29, 2, 8, 20)


def test_cached_tokens_that_are_not_reported_are_not_zero() -> None:
    def usage_of(path: str, **counts: int) -> Usage | None:
        return dialect(path).usage_of(json.dumps({"usage": {"output_tokens": 1, **counts}}).encode())

    assert usage_of(MESSAGES, input_tokens=5) == Usage(5, 1, None)
    assert usage_of(MESSAGES, input_tokens=5, cache_creation_input_tokens=16) == Usage(21, 1, 0, 16)
    assert usage_of(MESSAGES, input_tokens=5, cache_read_input_tokens=0) == Usage(5, 1, 0)
    assert usage_of(RESPONSES, input_tokens=5) == Usage(5, 1, None)
