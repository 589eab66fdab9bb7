"""Dictionaries of structured fields, and hostile ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.prompt_log.structured_field import dictionary

HEAD = "pl1_" + "A" * 43


MANY = {"a": "()", "b": "?0", "c": "tok/en:1", "d": ":aGk=:", "e": "-1.5", "f": "@12"}
GOOD: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("name", {"name": "?1"}),
    (f' keep;ttl=5 , expect="{HEAD}"', {"keep": "?1", "expect": f'"{HEAD}"'}),
    ("a=(1 2);x, b=?0,c=tok/en:1, d=:aGk=:, e=-1.5, f=@12", MANY),
    ('a="x\\"y", a=2', {"a": "2"}),
]
BAD = [
    ",",
    "a,",
    "a,,b",
    "A",
    "a=",
    'a="',
    "a=1.",
    "a=1234567890123456",
    "a b",
    "a=?2",
    "a=(1",
    "a=\u00e9",
    'a="\u00e9"',
    "a;=",
]


@pytest.mark.parametrize(("field", "members"), GOOD)
def test_members_are_found(field: str, members: dict[str, str]) -> None:
    assert dictionary(field) == members


@pytest.mark.parametrize("field", BAD)
def test_other_texts_are_no_dictionaries(field: str) -> None:
    assert dictionary(field) is None


@pytest.mark.parametrize("piece", ["a=(", '"\\', "a;a", "a=:", "((((", "a=1;", "a, ", "-1", '%"a', "a=(1 "])
def test_a_kilobyte_of_anything_is_read_at_once(piece: str) -> None:
    field = (piece * 1024)[:1024]
    assert dictionary(field) is None or "a" in field


@given(st.text(max_size=30))
def test_any_text_is_read(field: str) -> None:
    found = dictionary(field)
    assert found is None or all(found)
