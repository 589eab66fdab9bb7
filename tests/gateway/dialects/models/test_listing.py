"""The list of models in both forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ModelInfo
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Model
from pydantic import TypeAdapter

from gateway.config.aliases import Aliases
from gateway.dialects.models.listing import MAX_LIMIT, Listing, anthropic_entry
from gateway.errors import GatewayError


def entry(name: str, **more: Any) -> bytes:
    return json.dumps({"id": name, "object": "model", "created": 1753878173, "owned_by": "vllm", **more}).encode()


def listing(*names: str, aliases: dict[str, str] | None = None) -> Listing:
    return Listing({name: entry(name) for name in names}, Aliases(aliases) if aliases else None)


def openai_ids(made: Listing) -> list[str]:
    whole = json.loads(made.answer)
    assert whole["object"] == "list"
    return [TypeAdapter(Model).validate_python(each, strict=True).id for each in whole["data"]]


def test_without_aliases_replicas_entries_are_passed_on_as_they_are() -> None:
    made = Listing({"m": b'{"id": "m", "odd": [1.50]}'}, None)
    assert made.answer == b'{"object":"list","data":[{"id": "m", "odd": [1.50]}]}'


def test_an_alias_of_a_model_that_is_there_is_listed_with_what_it_stands_for() -> None:
    made = Listing(
        {"qwen": entry("qwen", max_model_len=32768, permission=[{"id": "p"}])}, Aliases({"claude-*": "qwen", "gpt": "gone"})
    )
    assert openai_ids(made) == ["qwen", "claude-*"]
    shown = json.loads(made.answer)["data"][1]
    assert shown == {
        "id": "claude-*",
        "object": "model",
        "created": 1753878173,
        "owned_by": "vllm",
        "root": "qwen",
        "max_model_len": 32768,
    }


def test_a_model_whose_name_is_an_alias_is_shown_as_that() -> None:
    made = listing("a", "b", "c", aliases={"*": "c", "b": "b"})
    assert openai_ids(made) == ["a", "b", "c", "*"]
    assert [each.get("root") for each in json.loads(made.answer)["data"]] == ["c", None, None, "c"]


@pytest.mark.parametrize("raw", [b"[]", b'{"created": "x", "owned_by": 5, "max_model_len": true}'])
def test_an_entry_may_be_anything(raw: bytes) -> None:
    made = Listing({"m": raw}, Aliases({"a": "m"}))
    assert json.loads(made.entries["a"]) == {"id": "a", "object": "model", "created": 0, "owned_by": "", "root": "m"}


@pytest.mark.parametrize("created", [1753878173, 0, -1, 10**12, 10**40, None, "x", True, 1.5])
def test_anthropic_s_form_is_what_its_client_reads(created: Any) -> None:
    info = TypeAdapter(ModelInfo).validate_json(anthropic_entry("m", entry("m", created=created)))
    assert (info.id, info.type, info.display_name) == ("m", "model", "m")
    assert info.created_at.timestamp() == (created if created == 1753878173 else 0)


names = st.lists(st.integers(0, 99).map(str), unique=True, max_size=30)


@given(names, st.integers(1, 12))
def test_pages_are_the_whole_list(ids: list[str], limit: int) -> None:
    made, found, at, more = listing(*ids), list[str](), "", True
    while more:
        page = json.loads(made.page(at, "", str(limit)))
        part = [each["id"] for each in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((part[0], part[-1]) if part else (None, None))
        found += part
        at, more = page["last_id"], page["has_more"]
        assert len(part) == limit or not more
    assert found == ids


@given(names, st.integers(1, 12))
def test_pages_before_a_model_end_with_the_one_before_it(ids: list[str], limit: int) -> None:
    made = listing(*ids)
    for place, name in enumerate(ids):
        page = json.loads(made.page("", name, str(limit)))
        assert [each["id"] for each in page["data"]] == ids[max(0, place - limit) : place]
        assert page["has_more"] == (place > limit)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (("gone", "", ""), "after_id"),
        (("", "gone", ""), "before_id"),
        (("a", "b", ""), "before_id"),
        *((("", "", limit), "limit") for limit in ("0", "-1", "x", "1001", "9" * 5000, "١", "1.0")),
    ],
)
def test_a_page_that_cannot_be(arguments: tuple[str, str, str], parameter: str) -> None:
    with pytest.raises(GatewayError) as caught:
        listing("a", "b").page(*arguments)
    assert (caught.value.status, caught.value.param) == (400, parameter)


def test_the_default_page_has_twenty_and_the_largest_a_thousand() -> None:
    made = listing(*map(str, range(1200)))
    assert len(json.loads(made.page("", "", ""))["data"]) == 20
    assert len(json.loads(made.page("5", "", str(MAX_LIMIT)))["data"]) == 1000
