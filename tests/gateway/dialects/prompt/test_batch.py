"""Batches: all elements count, and the key is of what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import NeedsHelper, router_prompt
from gateway.dialects.openai.generations import Completion
from gateway.dialects.prompt.batch import common_length, pairs_prompt, sized_prompt
from gateway.dialects.table import OTHER
from gateway.errors import GatewayError


def sized(prompt: Any, most: int = 0) -> Any:
    return sized_prompt({"prompt": prompt}, "prompt", most)


def beginning(parts: Sequence[Any]) -> Any:
    """The longest one that all have, tried out from the longest on."""
    first = parts[0]
    return next(first[:size] for size in range(len(first), -1, -1) if all(part[:size] == first[:size] for part in parts))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", (b"text", 4)),
        ("", (b"", 0)),
        ("é", ("é".encode(), 2)),
        (["one"], (b"one", 3)),
        (["one", "once", "on"], (b"on", 9)),
        (["one", "two"], (b"", 6)),
        (["é", "è"], (b"", 4)),
        ([1, 2], ([1, 2], 2)),
        ([[1, 2], [1, 2, 3], [1, 4]], ([1], 7)),
        ([[1, 2], [3]], ([], 3)),
    ],
)
def test_a_prompt_and_the_size_of_all_of_it(prompt: Any, expected: Any) -> None:
    assert sized(prompt) == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 5, {"a": 1}, [1, "x"], [True], [1.5], [None], ["a", 5], [[1], "a"], [[1], []]]
)
def test_anything_else_is_refused(prompt: Any) -> None:
    with pytest.raises(GatewayError, match="'prompt' must be a string"):
        sized(prompt)


@given(st.lists(st.text(alphabet="aé", max_size=6), min_size=1, max_size=5))
def test_texts_share_what_all_of_them_begin_with(texts: list[str]) -> None:
    shared, size = sized(texts)
    assert shared.decode() == beginning(texts)
    assert size == len("".join(texts).encode())


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
def test_token_ids_likewise(batch: list[list[int]]) -> None:
    shared, size = sized(batch)
    assert shared == beginning(batch)
    assert size == sum(map(len, batch))


@pytest.mark.parametrize("batch", [["a"] * 9, [[1]] * 9])
def test_many_elements_are_for_the_parser_process(batch: Any) -> None:
    with pytest.raises(NeedsHelper):
        sized(batch, most=8)
    with pytest.raises(NeedsHelper):
        OTHER.parse(orjson.dumps({"input": batch}), 8)
    with pytest.raises(NeedsHelper):
        pairs_prompt({"query": "a", "documents": batch}, 8)
    sized(batch, most=9)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"query": "abc", "documents": ["1234", "12"]}, (b"abc", 12)),
        ({"query": "abc", "documents": [{"text": "1234"}, {"image": "x"}, "é"]}, (b"abc", 12)),
        ({"query": "abc", "documents": []}, (b"abc", 3)),
        ({"query": "abc", "texts": ["1"]}, (b"abc", 4)),
        ({"text_1": "abc", "text_2": "de"}, (b"abc", 5)),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, (b"", 4)),
        ({"queries": ["a", "b"], "documents": "cde"}, (b"", 8)),
        ({"query": 5, "documents": ["1"]}, None),
        ({"query": "abc", "documents": 5}, None),
        ({"query": "abc"}, None),
        ({}, None),
    ],
)
def test_a_query_counts_with_each_document(body: dict[str, Any], expected: Any) -> None:
    assert pairs_prompt(body) == expected


@pytest.mark.parametrize(
    ("dialect", "key", "batch", "blocks", "units"),
    [
        (Completion(), "prompt", ["x" * 300 + "a", "x" * 300 + "b"], 1, 602),
        (OTHER, "input", ["a" * 300, "b" * 300], 0, 600),
        (OTHER, "input", [[1] * 70, [1] * 80], 0, 150),
        (OTHER, "messages", [{"role": "user", "content": "x" * 600}], 0, 606),
        (OTHER, "prompt", "x" * 600, 0, 600),
    ],
)
def test_the_router_gets_the_size_of_all_and_the_keys_of_what_is_shared(
    dialect: Any, key: str, batch: Any, blocks: int, units: int
) -> None:
    api = dialect.parse(orjson.dumps({"model": "m", key: batch}))
    assert not (api.countable and api.metered)
    prompt = router_prompt(api, (256, 64))
    assert (prompt.blocks, prompt.units) == (blocks, units)
    assert api.has_prompt
    one = dialect.parse(orjson.dumps({"model": "m", key: batch[0]}))
    assert router_prompt(one, (256, 64)).keys.startswith(prompt.keys)


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_the_common_length_is_a_simple_count(same: bytes, one: bytes, other: bytes) -> None:
    count = next((at for at, (a, b) in enumerate(zip(same + one, same + other, strict=False)) if a != b), None)
    assert common_length(same + one, same + other) == (len(same) + min(len(one), len(other)) if count is None else count)
