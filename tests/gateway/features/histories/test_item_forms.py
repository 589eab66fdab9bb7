"""Items of kept responses, found by their ids and their places."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.histories.item_forms import picked


def joined(*items: Any) -> bytes:
    return b",".join(map(orjson.dumps, items))


def test_the_last_one_that_has_an_id_is_it() -> None:
    items = joined({"id": "a", "n": 1}, {"id": "b"}, {"id": "a", "n": 2}, {"role": "user"})
    assert picked(items, {"a", "never"}, {}) == {"a": b'{"id":"a","n":2}'}


def test_an_id_goes_before_a_place() -> None:
    items = joined({"id": "a"}, {"n": 2})
    assert picked(items, {"a"}, {"a": 1, "msg_in1_r": 1, "msg_in0_r": 0}) == {
        "a": b'{"id":"a"}',
        "msg_in1_r": b'{"n":2}',
        "msg_in0_r": b'{"id":"a"}',
    }


@pytest.mark.parametrize("at", [1, 2, 9_999_999])
def test_there_is_nothing_at_a_place_behind_the_last(at: int) -> None:
    assert picked(joined({"id": "a"}), (), {"x": at}) == {}
    assert picked(b"", (), {"x": at}) == {}


def test_what_is_no_item_is_none() -> None:
    assert picked(b'1,"a",null,[{"id":"a"}],{"id":7},{"id":["a"]}', {"a"}, {"x": 0}) == {"x": b'{"id":7}'}


def test_what_is_nested_too_deeply_is_not_there() -> None:
    deep = b'{"id":"a","x":' + b"[" * 900 + b"]" * 900 + b'},{"id":"b"}'
    assert picked(deep, {"a", "b"}, {"x": 0}) == {"b": b'{"id":"b"}'}


items = st.lists(st.fixed_dictionaries({}, optional={"id": st.sampled_from("abc") | st.integers(0, 2), "n": st.integers(0, 9)}))


@given(items, st.sets(st.sampled_from("abcd")), st.dictionaries(st.sampled_from(["x", "a"]), st.integers(0, 5)))
def test_it_is_what_a_search_finds(items: list[dict[str, Any]], ids: set[str], places: dict[str, int]) -> None:
    expected = {}
    for id_ in ids:
        if having := [item for item in items if item.get("id") == id_]:
            expected[id_] = having[-1]
    for id_, at in places.items():
        if id_ not in expected and at < len(items):
            expected[id_] = items[at]
    assert {id_: orjson.loads(item) for id_, item in picked(joined(*items), ids, places).items()} == expected
