"""Chat streams as the events of a response."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.openai.chat_answer import MAX_CALLS, MAX_NAME
from gateway.dialects.responses.responses import Responses
from gateway.dialects.responses.stream import ResponseReader
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure, shutting_down
from gateway.features.translation.responses.stream import MAX_COLLECTED, MAX_ITEMS
from tests.gateway.dialects.conversations import VALUES
from tests.gateway.dialects.test_dialect_streams import places
from tests.gateway.dialects.test_openai_stream import cut
from tests.gateway.features.translation.responses.streams import (
    DONE,
    ECHO,
    TRANSLATION,
    USAGE,
    call,
    chunk,
    events_of,
    response_of,
    stream,
    translated,
)
from tests.support.paths import CAPTURES

BEGIN = ["response.created", "response.in_progress"]
TEXT_END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
TEXTS = st.text(min_size=1, max_size=9)
DELTAS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"content": TEXTS}),
        st.fixed_dictionaries({"reasoning_content": TEXTS}),
        st.fixed_dictionaries({"refusal": TEXTS}),
        st.builds(call, st.sampled_from([0, 1, 2]), st.sampled_from(["f", "g", "patch"]), TEXTS, st.none()),
        st.builds(call, st.sampled_from([0, 1]), st.just("mcp__cal__add"), TEXTS, st.sampled_from(["c1", "c2"])),
    ),
    max_size=12,
)
REASONS = st.sampled_from(["stop", "tool_calls", "length", "content_filter", "other"])


def kinds(out: bytes) -> list[str]:
    return [event.type for event in events_of(out)]


def test_a_text() -> None:
    out, reader = translated([stream({"content": "Hel"}, {"content": 'lo "you"'})])
    opened = ["response.output_item.added", "response.content_part.added"]
    deltas = ["response.output_text.delta"] * 2
    assert kinds(out) == [*BEGIN, *opened, *deltas, *TEXT_END, "response.completed"]
    response = response_of(out)
    assert response.output_text == 'Hello "you"'
    assert (response.status, response.created_at, response.model, response.instructions) == ("completed", 17, "m", "s")
    assert response.metadata == {"a": "b"}
    assert reader.done
    assert reader.usage == Usage(20, 5, 16, 4)
    assert response.usage
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_the_beginning_is_written_with_the_first_chunk() -> None:
    reader = TRANSLATION.reader(b"{}")
    assert kinds_of(reader.feed(chunk({"role": "assistant", "content": ""}))) == BEGIN
    assert kinds_of(reader.feed(chunk({"content": "x"})))[-1] == "response.output_text.delta"


def kinds_of(out: bytes) -> list[str]:
    return [line.removeprefix("event: ") for line in out.decode().splitlines() if line.startswith("event: ")]


def test_reasoning_text_and_parallel_calls() -> None:
    out, _ = translated(
        [
            stream(
                {"reasoning_content": "h", "reasoning": "h"},
                {"reasoning": "m"},
                {"content": "I look."},
                call(0, "f", "", "c0"),
                call(0, None, '{"a":'),
                call(1, "g", "{}", "c1"),
                call(0, None, "1}"),
                reason="tool_calls",
            )
        ]
    )
    thought, said, first, second = (item.to_dict() for item in response_of(out).output)
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert said["status"] == "completed"
    assert (first["call_id"], first["name"], first["arguments"]) == ("c0", "f", '{"a":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("c1", "g", "{}")
    assert len({str(item["id"]) for item in (thought, said, first, second)}) == 4


def test_engines_that_number_no_calls_or_all_alike_send_whole_ones() -> None:
    for index in (None, 0):
        out, _ = translated([stream(call(index, "f", "{}", "c0"), call(index, "f", '{"a":1}', "c1"))])
        assert [(item.call_id, item.arguments) for item in response_of(out).output if item.type == "function_call"] == [
            ("c0", "{}"),
            ("c1", '{"a":1}'),
        ]


def test_calls_of_custom_tools_and_of_namespaces_come_back_as_such() -> None:
    patch = json.dumps({"input": 'a\n"b"'})
    out, _ = translated([stream(call(0, "patch", patch[:7], "c"), call(0, None, patch[7:]), call(1, "mcp__cal__add", "{}"))])
    custom, added = response_of(out).output
    assert custom.type == "custom_tool_call"
    assert (custom.name, custom.input) == ("patch", 'a\n"b"')
    assert added.type == "function_call"
    assert (added.name, added.namespace) == ("add", "mcp__cal__")
    assert added.call_id.startswith("call_"), "the engine gave it none"
    (long,) = response_of(translated([stream(call(0, "f", "{}", "c" * (MAX_NAME + 1)))])[0]).output
    assert long.type == "function_call"
    assert long.call_id.startswith("call_"), "no engine gives such a one"
    broken, _ = translated([stream(call(0, "patch", "plain", "c"))])
    assert response_of(broken).output[0].to_dict()["input"] == "plain"


@pytest.mark.parametrize(("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(reason: str, why: str) -> None:
    out, _ = translated([stream({"content": "x"}, call(0, "f", "{}"), call(1, "g", '{"a'), reason=reason)])
    response = response_of(out)
    assert kinds(out)[-1] == "response.incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == why
    assert [item.to_dict()["status"] for item in response.output] == ["completed", "completed", "incomplete"]
    said, _ = translated([stream({"reasoning": "x"}, {"content": "x"}, reason=reason)])
    assert [item.to_dict()["status"] for item in response_of(said).output] == ["completed", "incomplete"]


def test_a_stream_of_nothing() -> None:
    with pytest.raises(ReplicaFailure, match="finish_reason"):
        translated([DONE])
    out, reader = translated([stream(usage=None)])
    assert kinds(out) == [*BEGIN, "response.completed"]
    assert reader.done
    assert response_of(out).usage is None


@given(DELTAS, REASONS, places)
def test_any_cutting_gives_the_same_valid_events(deltas: list[Any], reason: str, where: list[int]) -> None:
    data = stream(*deltas, reason=reason)
    out, reader = translated([data])
    assert translated(cut(data, where))[0] == out
    response = response_of(out)
    assert reader.last_number == len(events_of(out)) - 1
    assert response.output_text == "".join(delta.get("content", "") for delta in deltas)
    for item in response.output:
        if item.type == "function_call":
            pieces = [event.delta for event in events_of(out) if getattr(event, "item_id", "") == item.id and is_piece(event)]
            assert "".join(pieces) == item.arguments


def is_piece(event: Any) -> bool:
    return bool(event.type == "response.function_call_arguments.delta")


@given(DELTAS, REASONS, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_usage_is_what_our_own_reader_finds(deltas: list[Any], reason: str, cached: int, written: int, more: int) -> None:
    details = {"cached_tokens": cached, "cache_write_tokens": written}
    usage = {"prompt_tokens": cached + written + more, "completion_tokens": more, "prompt_tokens_details": details}
    out, reader = translated([stream(*deltas, reason=reason, usage=usage)])
    found = ResponseReader()
    assert found.feed(out) + found.finish() == out
    assert (found.usage, found.done, found.last_number) == (reader.usage, True, reader.last_number)


@given(
    st.lists(VALUES | st.dictionaries(st.sampled_from(["content", "reasoning", "refusal", "tool_calls"]), VALUES), max_size=5)
)
def test_values_of_any_type_are_survived(deltas: list[Any]) -> None:
    response_of(translated([stream(*deltas)])[0])


@given(st.lists(st.fixed_dictionaries({}, optional={"index": VALUES, "id": VALUES, "function": VALUES}), max_size=5))
def test_calls_of_any_type_are_survived(calls: list[Any]) -> None:
    with contextlib.suppress(ReplicaFailure):  # of a call without a name
        response_of(translated([stream(call(0, "f", "{}"), {"tool_calls": calls})])[0])


def test_ids_of_calls_are_unique() -> None:
    """Clients match results by them; the SDK refuses a response that has one twice."""
    out, _ = translated([stream(call(0, "f", "{}", "c"), call(1, "f", "{}", "c"), call(2, "f", "{}", "c"))])
    assert len({item.call_id for item in response_of(out).output if item.type == "function_call"}) == 3


def test_calls_without_index_and_id_are_told_apart_by_their_names() -> None:
    pieces = [call(None, "f", '{"a": 1'), call(None, None, "}"), call(None, "g", '{"b": 2}')]
    found = response_of(translated([stream(*pieces, reason="tool_calls")])[0]).output
    assert [(item.name, item.arguments) for item in found if item.type == "function_call"] == [
        ("f", '{"a": 1}'),
        ("g", '{"b": 2}'),
    ]


def test_arguments_may_be_an_object() -> None:
    (item,) = response_of(translated([stream(call(0, "f", {"a": [1]}, "c"))])[0]).output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"a": [1]}


@pytest.mark.parametrize("arguments", [None, "", " ", "\n\t\r "])
def test_a_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    """Clients parse them, and engines do in the next turn's history."""
    out, _ = translated([stream(call(0, "f", arguments, "c"))])
    (item,) = response_of(out).output
    assert item.type == "function_call"
    assert item.arguments == f"{arguments or ''}{{}}"
    assert "".join(event.delta for event in events_of(out) if is_piece(event)) == item.arguments


@pytest.mark.parametrize("lost", [b'data: {"choices":[{"del\n\n', chunk({}, "abort"), chunk({"content": "x"}, "error")])
def test_an_answer_that_lacks_a_part_does_not_look_whole(lost: bytes) -> None:
    assert flooded(chunk({"content": "before"}), lost, chunk({}, "stop"), DONE) == "garbage"


def test_an_error_of_the_engine() -> None:
    error = {"error": {"message": "out of\nmemory", "type": "server_error", "code": 500}}
    out, reader = translated([chunk({"content": "x"}), b"data: " + json.dumps(error).encode() + b"\n\n", DONE])
    assert kinds(out)[-2:] == ["error", "response.failed"]
    failed = events_of(out)[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "out of memory")
    assert reader.reported
    ours = ResponseReader()
    ours.feed(out)
    assert ours.reported, "our own reader takes it for a failure, too"


def test_an_error_of_the_gateway_has_the_next_number() -> None:
    reader = TRANSLATION.reader(ECHO)
    before = reader.feed(chunk({"content": "x"}))
    event = Responses().error_event(shutting_down(), reader)
    assert event
    assert [one.type for one in events_of(before + event)][-1] == "error"


def flooded(*pieces: bytes) -> str:
    with pytest.raises(ReplicaFailure) as caught:
        translated(pieces)
    return caught.value.reason


def test_floods_are_refused() -> None:
    calls = [chunk(call(number, "f", "{}", f"c{number}")) for number in range(MAX_CALLS + 1)]
    assert flooded(*calls) == "garbage"
    assert flooded(chunk({"tool_calls": [call(number, "f")["tool_calls"][0] for number in range(MAX_CALLS + 1)]})) == "garbage"
    assert flooded(chunk(call(0, "f" * (MAX_NAME + 1)))) == "garbage"
    assert flooded(chunk(call(0, None, "{}")), chunk({}, "stop"), DONE) == "garbage", "a call without a name"
    piece = "x" * 60_000
    assert flooded(*[chunk({"content": piece})] * (MAX_COLLECTED // len(piece) + 1)) == "garbage"
    assert flooded(*[chunk(call(0, "f", {"a": piece}))] * (MAX_COLLECTED // len(piece) + 1)) == "garbage"
    assert flooded(*[chunk(call(0, "f", piece))] * (MAX_COLLECTED // len(piece) + 1)) == "garbage"
    turns = [chunk({"content": "x"}), chunk({"reasoning": "x"})]
    assert flooded(*turns * MAX_ITEMS) == "garbage"
    parts = [chunk({"content": "x"}), chunk({"refusal": "x"})]
    assert flooded(*parts * MAX_ITEMS) == "garbage"


def test_what_a_response_repeats_of_a_long_text_is_bounded() -> None:
    piece = "x" * 60_000
    out, _ = translated([stream(*[{"content": piece}] * (MAX_COLLECTED // len(piece)))])
    assert len(out) < 6 * MAX_COLLECTED
    assert len(response_of(out).output_text) == MAX_COLLECTED // len(piece) * len(piece)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize(
    ("file", "usage"),
    [
        ("vllm/chat_5_stream_usage.sse", True),
        ("vllm/chat_6_stream_plain.sse", False),
        ("vllm/chat_7_stream_continuous_usage.sse", True),
        ("llamacpp/chat_8_stream_usage.sse", True),
        ("llamacpp/chat_9_stream_plain.sse", False),
        ("llamacpp/chat_10_stream_progress.sse", True),
    ],
)
def test_recorded_streams(file: str, usage: bool) -> None:
    data = Path(CAPTURES, file).read_bytes()
    out, reader = translated([data])
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    said = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])
    response = response_of(out)
    assert said
    assert response.output_text == said
    assert reader.done
    assert (reader.usage is not None) == usage
    assert (response.usage is not None) == usage
    for size in (1, 7, 100):
        assert translated([data[at : at + size] for at in range(0, len(data), size)])[0] == out


def test_usage_in_every_chunk_counts_once() -> None:
    assert USAGE["prompt_tokens"] == 20
    out, _ = translated([chunk({"content": "x"}, usage={"prompt_tokens": 20, "completion_tokens": 1}) + stream()])
    usage = response_of(out).usage
    assert usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 5, 25)
    assert usage.input_tokens_details.cached_tokens == 16
