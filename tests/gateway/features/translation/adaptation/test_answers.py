"""Distributed-Llama's stream as OpenAI's: any cutting gives the same answer, and no half answer looks whole."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.events.sse import MAX_PARSED_EVENT, data_of, events_of
from gateway.dialects.finished_answer import MAX_ANSWER
from gateway.dialects.openai.chat_answer import ChatAssembler, collected_body
from gateway.dialects.openai.generations import ChatBody
from gateway.errors import ReplicaFailure
from gateway.features.translation.adaptation.answers import AdaptedAnswers
from gateway.features.translation.adaptation.request import adapted
from tests.support.distributed_llama import event

API = ApiRequest("m", None, "", stream=True, metered=True, body=b"")


def answers(**body: Any) -> AdaptedAnswers:
    raw = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body})
    return AdaptedAnswers(adapted(raw), ChatBody(), "7")


def collected(*pieces: bytes) -> bytes:
    """One whole answer."""
    reader, assembler = answers().collecting(), ChatAssembler()
    for piece in pieces:
        assembler.feed(reader.feed(piece))
    assembler.feed(reader.finish())
    return collected_body(assembler)


def stream(*texts: str, reason: str = "stop", done: bytes = b"data: [DONE]") -> bytes:
    events = [event({"role": "assistant", "content": text}, "") for text in texts]
    return b"".join(events) + (event(None, reason) if reason else b"") + done


def read(data: bytes, cuts: list[int], **body: Any) -> tuple[str, str | None, bool]:
    """(text, finish_reason, whether it was complete), of the events for a client."""
    reader, out, at = answers(**body).reader(API, watchful=False), b"", 0
    for end in (*sorted(cuts), len(data)):
        out += reader.feed(data[at:end])
        at = max(at, end)
    out += reader.finish()
    text, reason = "", None
    for each in events_of(out):
        if data_of(each) == b"[DONE]":
            assert reader.done
            continue
        chunk = json.loads(data_of(each))
        assert (chunk["object"], chunk["id"], chunk["model"]) == ("chat.completion.chunk", "chatcmpl-7", "m")
        (choice,) = chunk["choices"]
        assert reason is None
        text += choice["delta"].get("content", "")
        reason = choice["finish_reason"]
    return text, reason, reader.done


@given(texts=st.lists(st.text(min_size=1, max_size=6), max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=6))
def test_any_cutting_gives_the_same(texts: list[str], cuts: list[int]) -> None:
    data = stream(*texts)
    assert read(data, cuts) == ("".join(texts), "stop", True)
    pieces, at = list[bytes](), 0
    for end in (*sorted(cuts), len(data)):
        pieces.append(data[at:end])
        at = max(at, end)
    (choice,) = json.loads(collected(*pieces))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(texts), "stop")


@given(cuts=st.lists(st.integers(0, 600), max_size=6))
def test_a_stop_string_over_several_events_ends_it(cuts: list[int]) -> None:
    assert read(stream("one tw", "o th", "ree"), cuts, stop=["two three"]) == ("one ", "stop", True)
    assert read(stream("one tw", "o"), cuts, stop=["two three"]) == ("one two", "stop", True), "what was held back comes"


def test_after_a_stop_string_the_rest_is_not_wanted() -> None:
    reader = answers(stop="b").reader(API, watchful=False)
    out = reader.feed(event({"role": "assistant", "content": "abc"}, ""))
    assert (reader.done, reader.enough, out.endswith(b"data: [DONE]\n\n")) == (True, True, True)
    assert reader.feed(event({"role": "assistant", "content": "d"}, "")) == reader.finish() == b""


def test_an_answer_of_as_many_pieces_as_tokens_were_allowed_was_cut() -> None:
    assert read(stream("a", "b"), [], max_tokens=2) == ("ab", "length", True)
    assert read(stream("a", "b"), [], max_tokens=3) == ("ab", "stop", True)
    assert read(stream("a", "bc"), [], max_tokens=3) == ("abc", "stop", True), "two tokens in a piece: nobody can know"


def test_a_stream_with_its_reason_needs_no_done() -> None:
    assert read(stream("a", done=b""), []) == ("a", "stop", True)


@pytest.mark.parametrize("data", [stream("a", reason="", done=b""), b""])
def test_half_a_stream_is_not_complete(data: bytes) -> None:
    assert not read(data, [])[2]
    with pytest.raises(ReplicaFailure, match="without its last event"):
        collected(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"data: nonsense\r\n\r\n", "no JSON"),
        (b"data: [1]\r\n\r\n", "without choices"),
        (b'data: {"choices":[]}\r\n\r\n', "without choices"),
        (stream("a", reason=""), "without a finish_reason"),
        (b"data: " + b"x" * (MAX_PARSED_EVENT + 1), "more than"),
    ],
)
def test_what_no_engine_writes_is_its_failure(data: bytes, why: str) -> None:
    with pytest.raises(ReplicaFailure, match=why):
        read(data, [])


def test_a_collected_answer_is_bounded() -> None:
    piece, end = event({"role": "assistant", "content": "x" * 60_000}, ""), stream()
    most = MAX_ANSWER // 60_000
    assert len(collected(*[piece] * most, end)) > most * 60_000
    with pytest.raises(ReplicaFailure, match="more than"):
        collected(*[piece] * (most + 1), end)
