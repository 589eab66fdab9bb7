"""Answers that are kept: what is found in them, and what the client is told."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.responses.stream import ResponseReader
from gateway.features.histories.kept import MAX_KEPT, MAX_VALUES, ClientHistory, KeptReader, stored_answer

OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "status": None, "encrypted_content": None},
    {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "hé", "annotations": [], "logprobs": None}]},
]
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "previous_response_id": None,
    "store": False,
    "output": OUTPUT,
    "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_tokens_details": {"cached_tokens": 1}},
}


def event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def stream(response: dict[str, Any] = RESPONSE, last: str = "response.completed", end: bytes = b"") -> bytes:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    return b"".join(
        [
            event("response.created", response=begun, sequence_number=0),
            event("response.in_progress", response=begun, sequence_number=1),
            event("response.output_text.delta", delta="response.completed", sequence_number=2),
            event(last, response=response, sequence_number=3),
            end,
        ]
    )


def read(data: bytes, cuts: list[int], told: ClientHistory, *, stored: bool) -> tuple[bytes, KeptReader]:
    reader, out, at = KeptReader(ResponseReader(), told), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        out += reader.feed(data[at:cut])
        at = max(at, cut)
    out += reader.finish()
    return out + reader.ending(stored=stored), reader


def objects(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(each.partition(b"data: ")[2]) for each in data.split(b"\n\n") if b"data: {" in each]


@given(st.lists(st.integers(0, 1500), max_size=6), st.booleans(), st.sampled_from([b"", b"data: [DONE]\n\n"]))
def test_any_cutting_tells_the_same(cuts: list[int], stored: bool, end: bytes) -> None:
    data = stream(end=end)
    out, reader = read(data, [cut for cut in cuts if cut < len(data)], ClientHistory("resp_0", "conv_1"), stored=stored)
    assert (reader.done, reader.holds, reader.within_event) == (True, False, False)
    assert reader.usage is not None
    assert reader.usage.cached == 1
    assert orjson.loads(reader.response) == RESPONSE
    told = {"previous_response_id": "resp_0", "conversation": {"id": "conv_1"}}
    expected = objects(data)
    for at, each in enumerate(expected):
        if "response" in each:
            each["response"] |= {**told, "store": True if at < 3 else stored}
    assert objects(out) == expected
    assert out.endswith(end)


@pytest.mark.parametrize("last", ["response.completed", "response.incomplete", "response.failed", "response.created"])
@given(cuts=st.lists(st.integers(0, 2500), max_size=6))
def test_a_response_after_the_last_event_is_not_said_to_be_kept(last: str, cuts: list[int]) -> None:
    """An engine that ends twice, and says that it keeps everything."""
    again = event(last, response={**RESPONSE, "id": "resp_2", "store": True})
    others = b": hello\n\n" + event("response.output_text.delta", delta="x") + b"data: [DONE]\n\n"
    for end, left in ((again + others, others), (others + again, others), (others + again[:-2], others)):
        data = stream(end=end)
        out, reader = read(data, [cut for cut in cuts if cut < len(data)], ClientHistory(), stored=True)
        assert b"resp_2" not in out
        assert out.endswith(left)
        assert orjson.loads(reader.response) == RESPONSE


def test_a_failed_response_is_not_said_to_be_kept() -> None:
    out, _ = read(
        stream({**RESPONSE, "store": True, "error": {"code": "server_error"}}, "response.failed"),
        [],
        ClientHistory(),
        stored=True,
    )
    assert objects(out)[-1]["response"]["store"] is False


def test_the_end_is_held_until_it_is_kept() -> None:
    reader = KeptReader(ResponseReader(), ClientHistory())
    out = reader.feed(stream())
    assert b"event: response.completed" not in out
    assert reader.holds
    assert b"event: response.completed" in reader.ending(stored=True)
    assert reader.ending(stored=True) == b""


def test_a_first_response_has_no_history() -> None:
    out, _ = read(stream({"id": "r", "output": []}), [], ClientHistory(), stored=True)
    last = objects(out)[-1]["response"]
    assert last == {"id": "r", "output": [], "store": True, "previous_response_id": None}


@pytest.mark.parametrize("last", ["response.failed", "error"])
def test_a_failed_stream_is_not_kept(last: str) -> None:
    data = stream({**RESPONSE, "error": {"code": "server_error", "message": "no"}}, last)
    out, reader = read(data, [], ClientHistory(), stored=True)
    assert (reader.response, reader.holds) == (b"", False)
    assert out.endswith(data[data.index(b"event: " + last.encode()) :])
    assert reader.reported


def test_a_long_last_event_goes_on_unread() -> None:
    data = stream({**RESPONSE, "x": "y" * (MAX_KEPT + 5)})
    out, reader = read(data, list(range(0, len(data), 65536)), ClientHistory(), stored=True)
    assert (reader.response, reader.done, reader.within_event) == (b"", True, False)
    begin = data.index(b"event: response.completed")
    assert out.endswith(data[begin:])


def test_a_long_event_that_breaks_off_is_within_it() -> None:
    data = stream({**RESPONSE, "x": "y" * (MAX_KEPT + (2 << 20))})
    reader = KeptReader(ResponseReader(), ClientHistory())
    for at in range(0, len(data) - 10, 65536):
        reader.feed(data[at : min(at + 65536, len(data) - 10)])
    assert reader.within_event


def test_many_values_go_on_unread() -> None:
    data = event("response.completed", response={**RESPONSE, "x": [[]] * MAX_VALUES})
    out, reader = read(data, [], ClientHistory(), stored=True)
    assert (out, reader.response) == (data, b"")
    assert stored_answer(orjson.dumps({**RESPONSE, "x": [[]] * MAX_VALUES})) is None


def test_what_is_kept_of_an_answer() -> None:
    kept = stored_answer(orjson.dumps(RESPONSE))
    assert kept is not None
    assert (kept.id, kept.status) == ("resp_1", "completed")
    assert orjson.loads(b"[" + kept.output + b"]") == [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "hé", "annotations": []}]},
    ], "engines write nulls where they take none"


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"id":"r"}', b'{"output":[]}', b'{"id":"","output":[]}', b'{"id":7,"output":[]}']
)
def test_what_is_no_response_is_not_kept(answer: bytes) -> None:
    assert stored_answer(answer) is None


@given(
    st.dictionaries(
        st.sampled_from(["id", "store", "previous_response_id", "conversation", "x"]), st.none() | st.booleans() | st.text()
    )
)
def test_told_sets_these_members_and_no_other(response: dict[str, Any]) -> None:
    out = orjson.loads(ClientHistory("p", "c").edited(orjson.dumps(response), stored=False))
    assert out == {**response, "store": False, "previous_response_id": "p", "conversation": {"id": "c"}}
