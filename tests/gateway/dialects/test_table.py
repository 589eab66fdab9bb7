"""Paths and what they are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.table import DIALECTS, ENDPOINTS, OTHER_ENDPOINT, endpoint_of, generates

segments = st.sampled_from(["v1", "responses", "files", "chat", "completions", "resp_1", "", "..", "x" * 99, "é"])


@given(st.lists(segments, max_size=6).map("/".join))
def test_whatever_the_path_its_label_is_one_of_the_table(path: str) -> None:
    label = endpoint_of(f"/{path}")
    assert label in {*ENDPOINTS, OTHER_ENDPOINT}
    assert label in (f"/{path}", OTHER_ENDPOINT) or (label.endswith("/") and f"/{path}".startswith(label))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/compact", "/v1/responses/compact"),
        ("/v1/responses/input_tokens", "/v1/responses/input_tokens"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/"),
        ("/v1/responses2", "other"),
        ("/v1/chat/completions/", "other"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("", "other"),
    ],
)
def test_a_path_is_named_by_itself_or_by_what_it_is_below(path: str, label: str) -> None:
    assert endpoint_of(path) == label


def test_every_path_that_has_a_dialect_is_named() -> None:
    assert {path for path in DIALECTS if not path.endswith("/")} <= set(ENDPOINTS)


def test_on_an_unknown_path_the_prompt_decides_whether_a_model_computes() -> None:
    assert [generates(OTHER_ENDPOINT, has_prompt=prompt) for prompt in (False, True)] == [False, True]
    assert [generates("/v1/embeddings", has_prompt=prompt) for prompt in (False, True)] == [True, True]
    assert [generates("/v1/files", has_prompt=prompt) for prompt in (False, True)] == [False, False]
