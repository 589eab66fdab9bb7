"""Messages of Responses' WebSocket mode as bodies of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_edits import apply
from gateway.errors import GatewayError
from gateway.features.websocket.create_message import created

OWN = {"type", "stream_id", "generate"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OTHERS = st.dictionaries(st.sampled_from(["model", "input", "é", "stream", "max_output_tokens", "a,b", "types"]), VALUES)


@given(
    OTHERS,
    st.sampled_from(["", "a", "A-1_.x"]),
    st.sampled_from([None, True, False]),
    st.randoms(),
    st.sampled_from([None, 1]),
)
def test_only_what_is_of_the_socket_changes(
    others: Any, stream_id: str, generate: bool | None, chance: Any, indent: int | None
) -> None:
    """The oracle reads and writes all of it."""
    whole = {**others, "type": "response.create"} | ({"stream_id": stream_id} if stream_id else {})
    whole |= {} if generate is None else {"generate": generate}
    values = {"stream": True} | ({"max_output_tokens": 16} if generate is False else {})
    names = list(whole)
    chance.shuffle(names)
    raw = json.dumps({name: whole[name] for name in names}, indent=indent, ensure_ascii=chance.random() < 0.5).encode()
    found = created(b" " + raw + b"\n")
    body = json.loads(apply(b" " + raw + b"\n", found.edits))
    assert body == {**{name: value for name, value in whole.items() if name not in OWN}, **values}
    assert list(body) == [name for name in values if name not in whole] + [name for name in names if name not in OWN]
    assert found.stream_id == stream_id


def test_no_other_byte_changes() -> None:
    raw = b'{"type":"response.create", "model" : "m","n":1.50,"stream":false ,"x":"\\u00e9"}'
    assert apply(raw, created(raw).edits) == b'{"model" : "m","n":1.50,"stream":true ,"x":"\\u00e9"}'


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", "invalid_request", None),
        (b"[]", "invalid_request", None),
        (b"hello", "invalid_request", None),
        (b"{", "invalid_request", None),
        (b"{}", "unknown_message_type", "type"),
        (b'{"type":"response.cancel"}', "unknown_message_type", "type"),
        (b'{"type":["response.create"]}', "unknown_message_type", "type"),
        (b'{"type":"' + b"x" * 100_000 + b'"}', "unknown_message_type", "type"),
        (b'{"type":"response.create","type":1}', "unknown_message_type", "type"),
        (b'{"type":nonsense}', "invalid_request", "type"),
        (b'{"t\\u0079pe":"response.create"}', "invalid_request", "type"),
        (b'{"type":"response.create","stream_id":""}', "invalid_request", "stream_id"),
        (b'{"type":"response.create","stream_id":7}', "invalid_request", "stream_id"),
        (b'{"type":"response.create","stream_id":"a b"}', "invalid_request", "stream_id"),
        (b'{"type":"response.create","stream_id":"' + b"x" * 257 + b'"}', "invalid_request", "stream_id"),
        (b'{"type":"response.create","background":true}', "invalid_request", "background"),
        (b'{"type":"response.create","generate":0}', "invalid_request", "generate"),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, code: str, param: str | None) -> None:
    with pytest.raises(GatewayError) as refused:
        created(raw)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(("value", "refers"), [(None, False), ("resp_1", True)])
def test_a_message_that_goes_on_with_a_response(value: str | None, refers: bool) -> None:
    raw = json.dumps({"type": "response.create", "previous_response_id": value}).encode()
    assert created(raw).refers is refers
