"""What a body says of its history, and the body with it written out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.responses.responses import Responses
from gateway.errors import GatewayError
from gateway.features.histories.history import History, written_out

MESSAGE = {"type": "message", "role": "user", "content": "hi"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=3)
BODIES = st.fixed_dictionaries(
    {"input": st.text(max_size=20) | ITEMS},
    optional={
        "previous_response_id": st.none() | st.just("resp_1"),
        "store": st.none() | st.booleans(),
        "background": st.none() | st.booleans(),
        "conversation": st.none(),
        "x": JSON,
    },
)


def history_of(body: bytes) -> History:
    return History(read_object(body))


def replayed(history: History, before: list[bytes]) -> bytes:
    return apply(history.members.raw, written_out(history, before))


def elements(joined: bytes) -> list[Any]:
    return orjson.loads(b"[" + joined + b"]")


@given(BODIES, st.lists(ITEMS, max_size=3), st.sampled_from([None, orjson.OPT_INDENT_2]))
def test_written_out_is_the_body_with_all_items_and_nothing_kept(
    body: dict[str, Any], before: list[list[Any]], form: int | None
) -> None:
    raw = orjson.dumps(body, option=form)
    history = history_of(raw)
    own = body["input"] if isinstance(body["input"], list) else [{**MESSAGE, "content": body["input"]}]
    assert elements(history.own) == own
    assert history.previous == (body.get("previous_response_id") or "")
    assert (history.store, history.background) == (body.get("store") is not False, body.get("background") is True)

    joined = [orjson.dumps(items)[1:-1] for items in before]
    out = orjson.loads(replayed(history, joined))
    expected = {**body, "store": False}
    if any(before):
        expected["input"] = [item for items in before for item in items] + own
    for name in ("previous_response_id", "conversation"):
        if name in expected:
            expected[name] = None
    if "background" in expected:
        expected["background"] = False
    assert out == expected
    assert list(out) == list(expected), "the order of members stays"


def test_other_bytes_stay_as_they_are() -> None:
    raw = b'{ "x" : 1.0e2 ,"model":"\\u006d", "previous_response_id" : "r" , "input": [ {"a" :1} ] ,"store":true}'
    out = replayed(history_of(raw), [b'{"b":2}', b""])
    assert (
        out == b'{ "x" : 1.0e2 ,"model":"\\u006d", "previous_response_id" : null , "input": [{"b":2},{"a" :1}] ,"store":false}'
    )


def test_a_request_without_input_goes_on_with_its_history() -> None:
    out = replayed(history_of(b'{"previous_response_id":"r"}'), [b'{"b":2}'])
    assert out == b'{"previous_response_id":null,"store":false,"input":[{"b":2}]}'
    assert replayed(history_of(b"{}"), []) == b'{"store":false}'


def test_the_replayed_prompt_is_that_of_the_whole_conversation() -> None:
    items = [MESSAGE, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]}]
    last = {**MESSAGE, "content": "and then?"}
    short = orjson.dumps({"model": "m", "input": "and then?", "previous_response_id": "r", "instructions": "be brief"})
    out = replayed(history_of(short), [orjson.dumps(items)[1:-1]])
    whole = orjson.dumps({"model": "m", "input": [*items, last], "instructions": "be brief"})
    assert Responses().parse(out).prompt == Responses().parse(whole).prompt


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_is_named_in_two_forms(conversation: object) -> None:
    assert history_of(orjson.dumps({"conversation": conversation})).conversation == "conv_1"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"previous_response_id": "r" * 257}, "previous_response_id"),
        ({"conversation": ["c"]}, "conversation"),
        ({"conversation": {"id": 1}}, "conversation"),
        ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id"),
    ],
)
def test_what_is_no_history_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        history_of(orjson.dumps(body))
    assert (caught.value.status, caught.value.param) == (400, param)
