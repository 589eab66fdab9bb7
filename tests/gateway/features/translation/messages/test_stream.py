"""Chat streams as Messages' events: what an official client makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gateway.dialects.anthropic.stream import MessageReader
from gateway.dialects.events.sse import MAX_PARSED_EVENT
from gateway.dialects.openai.chat_answer import MAX_CALLS, MAX_NAME
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.messages.stream import MAX_BLOCKS, MAX_HELD, JsonEnd
from gateway.features.translation.messages.translation import MessagesTranslation
from gateway.features.translation.translation import MAX_EVENT
from tests.gateway.dialects.conversations import TEXTS, VALUES
from tests.gateway.dialects.test_openai_stream import cut
from tests.gateway.features.translation.messages.chat_streams import (
    DONE,
    accumulated,
    call,
    chunk,
    counted,
    events,
    translated,
)
from tests.support.paths import CAPTURES

FIRST = chunk({"role": "assistant", "content": ""})
USAGE = counted(prompt_tokens=10, completion_tokens=3, prompt_tokens_details={"cached_tokens": 8})


def blocks(out: bytes) -> list[Any]:
    """The content as the official client has it, less fields that are null."""
    return [block.model_dump(exclude_none=True) for block in accumulated(out).content]


def in_order(found: list[dict[str, Any]]) -> bool:
    """One block after the other, their indexes counting up."""
    is_open, count = False, 0
    for event in found:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == count
            is_open, count = True, count + 1
        elif kind.startswith("content_block"):
            assert is_open
            assert event["index"] == count - 1
            is_open = kind == "content_block_delta"
    return not is_open


def test_a_stream() -> None:
    deltas = [chunk({"reasoning_content": "h"}), chunk({"reasoning": "m"}), chunk({"content": "hi"})]
    calls = [chunk(call(0, "", "f", "c0")), chunk(call(0, '{"a"')), chunk(call(0, ": 1}")), chunk(call(1, "{}", "g", "c1"))]
    out, reader = translated([FIRST, *deltas, *calls, chunk(None, "tool_calls"), USAGE, DONE])
    assert [event["type"] for event in events(out)] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert in_order(events(out))
    message = accumulated(out)
    assert (message.id, message.model, message.stop_reason) == ("msg_1f", "m", "tool_use")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (2, 8, 3)
    assert blocks(out) == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
    ]
    assert reader.done
    assert reader.usage == Usage(10, 3, 8)


def test_it_goes_on_as_it_comes() -> None:
    """Nothing of one call after the other is held."""
    reader = MessagesTranslation().reader(b"")
    reader.feed(FIRST)
    for piece in (chunk({"content": "x"}), chunk(call(0, '{"a": "', "f", "c")), chunk(call(0, "b")), chunk(call(0, '"}'))):
        assert b"_delta" in reader.feed(piece)
    assert b'"name":"g"' in reader.feed(chunk(call(1, "", "g", "d")))


CALLS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps), min_size=1, max_size=4)


@settings(max_examples=50)
@given(CALLS, st.data())
def test_calls_that_come_mixed_are_put_in_order(arguments: list[str], data: st.DataObject) -> None:
    """Whatever the pieces and their order between calls, also where names come late."""
    rest = {number: list(cut(text.encode(), [data.draw(st.integers(0, 40))])) for number, text in enumerate(arguments)}
    named = set[int]()
    chunks = [FIRST, *(chunk(call(number, "", None, f"c{number}")) for number in rest)]
    while rest or len(named) < len(arguments):
        number = data.draw(st.sampled_from(sorted({*rest, *(set(range(len(arguments))) - named)})))
        if number not in named and (number not in rest or data.draw(st.booleans())):
            named.add(number)
            chunks.append(chunk(call(number, "", f"f{number}")))
        else:
            chunks.append(chunk(call(number, rest[number].pop(0).decode())))
            if not rest[number]:
                del rest[number]
    out, _ = translated([*chunks, chunk(None, "tool_calls"), DONE])
    assert in_order(events(out))
    wanted = [
        {"type": "tool_use", "id": f"c{number}", "name": f"f{number}", "input": json.loads(text)}
        for number, text in enumerate(arguments)
    ]
    assert blocks(out) == wanted


def test_a_text_behind_a_call_is_a_block_of_its_own() -> None:
    out, _ = translated([FIRST, chunk(call(0, "{}", "f", "c")), chunk({"content": "done"}), chunk(None, "stop"), DONE])
    assert [block["type"] for block in blocks(out)] == ["tool_use", "text"]


def test_calls_without_indexes_or_with_the_same_are_told_apart_by_their_ids() -> None:
    for index in (None, 0, "x", True):
        pieces = [chunk(call(index, '{"a":', "f", "c")), chunk(call(index, "1}")), chunk(call(index, '{"b":2}', "f", "d"))]
        out, _ = translated([FIRST, *pieces, chunk(None, "tool_calls"), DONE])
        assert [(block["id"], block["input"]) for block in blocks(out)] == [("c", {"a": 1}), ("d", {"b": 2})]
    new_ids = [chunk(call(0, '{"a"', "f", "c")), chunk(call(0, ":1}", None, "d"))]
    assert [block["input"] for block in blocks(translated([FIRST, *new_ids, chunk(None, "stop"), DONE])[0])] == [{"a": 1}]


def test_a_call_without_a_name_is_none() -> None:
    out, _ = translated([FIRST, chunk(call(0, "")), chunk({"content": "x"}), chunk(None, "tool_calls"), DONE])
    assert blocks(out) == [{"type": "text", "text": "x"}]
    assert accumulated(out).stop_reason == "end_turn"


def test_arguments_without_a_name_are_no_answer() -> None:
    with pytest.raises(ReplicaFailure, match="without a name"):
        translated([FIRST, chunk(call(0, "{}")), chunk({"content": "x"}), chunk(None, "tool_calls"), DONE])


def test_calls_without_index_and_id_are_told_apart_by_their_names() -> None:
    first, second = call(None, '{"a": 1', "f"), call(None, '{"b": 2}', "g")
    out, _ = translated([FIRST, chunk(first), chunk(call(None, "}")), chunk(second), chunk(None, "tool_calls"), DONE])
    assert [(block["name"], block["input"]) for block in blocks(out)] == [("f", {"a": 1}), ("g", {"b": 2})]


def test_ids_of_calls_are_unique() -> None:
    """A client gives the results back by them."""
    calls = [chunk(call(index, "{}", "f", "c")) for index in range(3)]
    out, _ = translated([FIRST, *calls, chunk(None, "tool_calls"), DONE])
    assert len({block["id"] for block in blocks(out)}) == 3


def test_arguments_that_come_at_once_may_be_long() -> None:
    text = "x,{" * MAX_PARSED_EVENT
    out, _ = translated([FIRST, chunk(call(0, json.dumps({"a": text}), "f", "c")), chunk(None, "stop"), DONE])
    assert blocks(out)[0]["input"] == {"a": text}


@pytest.mark.parametrize(
    ("reason", "more", "echo", "wanted"),
    [
        ("stop", {}, Echo([], empty=False), ("end_turn", None)),
        ("length", {}, Echo([], empty=False), ("max_tokens", None)),
        ("content_filter", {}, Echo([], empty=False), ("refusal", None)),
        ("stop", {"stop_reason": "END"}, Echo(["END"], empty=False), ("stop_sequence", "END")),
        ("stop", {"stop_reason": "END"}, Echo([], empty=False), ("end_turn", None)),
        ("stop", {"stop_reason": 5}, Echo(["END"], empty=False), ("end_turn", None)),
        ("stop", {}, Echo([], empty=True), ("max_tokens", None)),
    ],
)
def test_why_it_ends(reason: str, more: dict[str, Any], echo: Echo, wanted: tuple[str, str | None]) -> None:
    out, _ = translated([FIRST, chunk({"content": "x"}), chunk({}, reason, **more), DONE], echo.written())
    message = accumulated(out)
    assert (message.stop_reason, message.stop_sequence) == wanted
    assert bool(message.content) != echo.empty


def test_a_stream_without_text_is_an_empty_answer() -> None:
    message = accumulated(translated([chunk(None, "stop"), DONE])[0])
    assert (message.content, message.stop_reason, message.usage.input_tokens) == ([], "end_turn", 0)


@pytest.mark.parametrize("stream", [[], [FIRST], [FIRST, chunk({"content": "x"})], [FIRST, chunk({"content": "x"}), USAGE]])
def test_a_stream_that_does_not_say_why_it_ends_has_no_end(stream: list[bytes]) -> None:
    """As some proxies write it when the engine behind them has died."""
    reader = MessagesTranslation().reader(b"")
    for piece in stream:
        reader.feed(piece)
    with pytest.raises(ReplicaFailure, match="finish_reason"):
        reader.feed(DONE)
    assert not reader.done


def test_the_engines_error_is_raised_by_the_client() -> None:
    error = b'data: {"error": {"message": "boom", "type": "server_error", "code": 500}}\n\n'
    out, reader = translated([FIRST + chunk({"content": "x"}), error, DONE])
    assert reader.reported
    with pytest.raises(anthropic.APIStatusError, match="boom"):
        accumulated(out)


def test_the_engines_error_before_its_first_token_is_not_the_clients() -> None:
    error = b'data: {"error": {"message": "boom", "type": "server_error", "code": 500}}\n\n'
    for before in (b"", FIRST):
        out, reader = translated([before, error, DONE])
        assert b"boom" not in out
        assert not reader.done
        assert not reader.reported
        with pytest.raises(ReplicaFailure, match="boom"):
            reader.raise_failure()


def test_a_stream_with_its_reason_needs_no_done() -> None:
    out, reader = translated([FIRST, chunk({"content": "x"}, "stop")])
    assert reader.done
    assert accumulated(out).stop_reason == "end_turn"


def test_comments_keep_the_clients_connection_alive() -> None:
    out, _ = translated([b": ping\n\n", FIRST, b": ping\n\n", chunk({"content": "x"}, "stop"), DONE])
    assert out.count(b": ping\n\n") == 2
    assert accumulated(out).stop_reason == "end_turn"


def test_a_stream_that_breaks_off_has_no_end() -> None:
    out, reader = translated([FIRST, chunk({"content": "x"})])
    assert not reader.done
    assert b"message_stop" not in out


@given(
    st.sampled_from([None, 0, 8, 10]),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.lists(st.integers(0, 1 << 20), max_size=20),
)
def test_usage_is_read_from_it_as_it_was(cached: int | None, written: int | None, early: bool, places: list[int]) -> None:
    details = {"cached_tokens": cached, "cache_write_tokens": written}
    usage = counted(prompt_tokens=10, completion_tokens=3, prompt_tokens_details=details)
    begin = [counted(prompt_tokens=10, completion_tokens=0)] if early else []
    out, reader = translated([*begin, FIRST, chunk({"content": "x"}), chunk(None, "stop"), usage, DONE])
    found = MessageReader()
    for piece in cut(out, places):
        found.feed(piece)
    assert found.done
    assert found.usage
    assert reader.usage
    cached = reader.usage.cached if not reader.usage.written else reader.usage.cached or 0
    assert found.usage == Usage(10, 3, cached, reader.usage.written)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "tool_calls", "index", "id", "function", "name", "arguments"]), inner)
    ),
    max_leaves=12,
)
PIECES = st.builds(
    lambda index, text, name, id_: {"tool_calls": [{"index": index, "id": id_, "function": {"name": name, "arguments": text}}]},
    st.integers(0, 2) | ANYTHING,
    st.sampled_from(["{", "}", '"', "\\", "{}", ""]) | ANYTHING,
    st.none() | TEXTS | ANYTHING,
    st.none() | TEXTS | ANYTHING,
)
SAID = st.builds(lambda text: {"content": text}, TEXTS) | st.builds(lambda text: {"reasoning_content": text}, TEXTS)
DELTAS = st.lists(SAID | PIECES | ANYTHING, max_size=8)
STREAMS = st.builds(lambda deltas: b"".join([FIRST, *map(chunk, deltas), chunk(None, "stop"), USAGE, DONE]), DELTAS)


LATE_NAME = [call(None, "}"), {"content": "0"}, call(None, "{", "f")]


def written(chunks: list[bytes]) -> bytes | None:
    """None: a call in it has arguments, and no name."""
    try:
        return translated(chunks)[0]
    except ReplicaFailure as failure:
        if "without a name" not in failure.message:
            raise
        return None


@given(STREAMS, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 1 << 20), max_size=20))
@example(b"".join([FIRST, *map(chunk, LATE_NAME), chunk(None, "stop"), USAGE, DONE]), b"\n", [])
def test_any_cutting_and_any_deltas_give_valid_events(stream: bytes, end: bytes, places: list[int]) -> None:
    stream = b": keep-alive\n\n" + stream
    out = written([stream])
    assert in_order(events(out or b""))
    again = written(cut(stream.replace(b"\n", end), places))
    assert (again or b"").replace(b"\r\n", b"\n") == (out or b"")


@given(STREAMS)
@settings(max_examples=30)
def test_texts_arrive_whole(stream: bytes) -> None:
    said = [json.loads(event[6:])["choices"] for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    deltas = [choices[0]["delta"] for choices in said if choices]
    texts = [delta.get("content") for delta in deltas if isinstance(delta, dict)]
    wanted = "".join(text for text in texts if isinstance(text, str))
    out = written([stream])
    assume(out is not None)
    found = [event["delta"].get("text", "") for event in events(out or b"") if event["type"] == "content_block_delta"]
    assert "".join(found) == wanted


@given(st.dictionaries(TEXTS, VALUES), st.sampled_from([None, 1]), st.lists(st.integers(0, 1000), max_size=5))
@example({"a": '"'}, None, [len('{"a": "\\')])
def test_the_end_of_an_object_is_found(value: dict[str, Any], indent: int | None, places: list[int]) -> None:
    text = json.dumps(value, indent=indent)
    end = JsonEnd()
    for piece in cut(text[:-1].encode(), places):
        end.feed(piece.decode())
        assert not end.complete
    end.feed("")
    end.feed(text[-1])
    assert end.complete


# -- parts that are missing


@pytest.mark.parametrize(
    "lost",
    [
        b'data: {"choices":[{"delta":{"content":"x"},"logp\n\n',
        chunk({}, "abort"),
        chunk({"content": "x"}, "error"),
    ],
)
def test_an_answer_that_lacks_a_part_does_not_look_whole(lost: bytes) -> None:
    flood(chunk({"content": "before"}), lost, chunk({"content": "after"}), chunk(None, "stop"))


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n', "?"),
        (b'data: {"choices":[{"delta":{"content":"x"},"logprobs":NaN}]}\n\n', "x"),
        (b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n', "\ufffd"),
        (b'\xef\xbb\xbfdata: {"choices":[{"delta":{"content":"x"}}]}\n\n', "x"),
    ],
)
def test_json_that_only_a_strict_parser_refuses_is_translated(odd: bytes, text: str) -> None:
    out, reader = translated([odd, chunk(None, "stop"), DONE])
    assert reader.done
    assert blocks(out) == [{"type": "text", "text": text}]


def test_events_without_data_lack_nothing() -> None:
    out, _ = translated([FIRST, b"data:\n\n", b"event: ping\ndata: {}\n\n", chunk({"content": "x"}), chunk(None, "stop"), DONE])
    assert blocks(out) == [{"type": "text", "text": "x"}]


@pytest.mark.parametrize(
    "error", [b'data: {"object":"error","message":"no room","code":500}\n\n', b'event: error\ndata: {"message":"no room"}\n\n']
)
def test_other_forms_of_an_engines_error_are_raised_too(error: bytes) -> None:
    out, _ = translated([FIRST, chunk({"content": "x"}), error, DONE])
    with pytest.raises(anthropic.APIStatusError, match="no room"):
        accumulated(out)


def test_an_empty_reason_is_none() -> None:
    out, _ = translated([FIRST, chunk({"content": "x"}), chunk(None, "length"), chunk(None, ""), DONE])
    assert accumulated(out).stop_reason == "max_tokens"


# -- floods


def flood(*chunks: bytes) -> bytes:
    with pytest.raises(ReplicaFailure) as raised:
        translated([FIRST, *chunks, chunk(None, "stop"), DONE])  # else it would lack its end in any case
    assert raised.value.reason == "garbage"
    return chunks[0]


def test_floods_are_the_replicas_failure() -> None:
    flood(*[chunk(call(index, "{}", "f", "c")) for index in range(MAX_CALLS + 1)])
    flood(*[chunk(call(index)) for index in range(MAX_CALLS + 1)])
    flood(*[chunk(call(0, "{}", "f", f"c{index}")) for index in range(MAX_CALLS + 1)])
    flood(chunk(call(0, "{", "f", "c")), *[chunk({"content": "x", "reasoning": "y"})] * MAX_BLOCKS)
    flood(chunk(call(0, "", "f" * (MAX_NAME + 1))))
    held = chunk(call(1, "x" * (1 << 16), "g", "d"))
    flood(chunk(call(0, "{", "f", "c")), *[held] * (MAX_HELD // (1 << 16) + 1))
    flood(b"data: " + b"x" * MAX_EVENT + b"\n\n")
    flood(chunk({"x": [[]] * 50_000}))


def test_as_many_as_may_be_are_translated() -> None:
    calls = [chunk(call(index, "{}", "f", f"c{index}")) for index in range(MAX_CALLS)]
    out, _ = translated([FIRST, *calls, chunk(None, "tool_calls"), DONE])
    assert len(blocks(out)) == MAX_CALLS
    many = [chunk({"content": "x", "reasoning": "y"})] * 2 * MAX_BLOCKS
    assert in_order(events(translated([FIRST, *many, chunk(None, "stop"), DONE])[0])), "nothing waits behind texts"


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize(
    ("file", "usage"),
    [
        ("vllm/chat_5_stream_usage.sse", Usage(845, 8, 832)),
        ("vllm/chat_7_stream_continuous_usage.sse", Usage(845, 8, 832)),
        ("llamacpp/chat_8_stream_usage.sse", Usage(845, 8, 844)),
        ("llamacpp/chat_10_stream_progress.sse", None),
        ("vllm/chat_6_stream_plain.sse", None),
    ],
)
def test_recorded_streams(file: str, usage: Usage | None) -> None:
    data = Path(CAPTURES, file).read_bytes()
    out, reader = translated([data])
    assert in_order(events(out))
    message = accumulated(out)
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, reader.done) == ("end_turn", True)
    assert usage is None or reader.usage == usage
    for size in (1, 7, 100):
        assert translated([data[at : at + size] for at in range(0, len(data), size)])[0] == out
