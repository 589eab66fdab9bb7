"""Ids of responses: in requests, in paths, and in what engines answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.responses.ids import MAX_ID_CHARS, id_in, is_disguised, path_id, refers
from tests.support.paths import CAPTURES


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"conversation": "conv_1"}, "conv_1"),
        ({"conversation": {"id": "conv_1"}}, "conv_1"),
        ({"previous_response_id": None, "conversation": {"id": 5}}, ""),
        ({"previous_response_id": 5}, ""),
        ({"previous_response_id": "x" * (MAX_ID_CHARS + 1)}, ""),
        ({}, ""),
    ],
)
def test_what_a_request_goes_on_with(body: dict[str, Any], found: str) -> None:
    assert refers(body) == found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/input_items", "resp_1"),
        ("/v1/responses/", ""),
        ("/v1/responses", ""),
        ("/v1/responses/" + "x" * (MAX_ID_CHARS + 1), ""),
    ],
)
def test_what_a_path_names(path: str, found: str) -> None:
    assert path_id(path) == found


def test_what_an_answer_is() -> None:
    assert id_in(b'{"id":"resp_1","object":"response"') == "resp_1"
    assert id_in(b'\n { "id" : "resp-2.x" , "output": []}') == "resp-2.x"
    assert id_in(b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_3"') == "resp_3"
    assert id_in(b'{"object": "response", "created_at": 12.5, "error": null, "id": "resp_4"}') == "resp_4"
    for other in (
        b"",
        b"[]",
        b'{"error": {}}',
        b'{"id": 5}',
        b'{"output": [{"id": "resp_4"}]}',
        b'{"id":"' + b"x" * 300 + b'"}',
    ):
        assert id_in(other) == ""


@pytest.mark.parametrize(
    "file", ["vllm/responses_stream.sse", "llamacpp/responses.json", "vllm/responses_tools_call_items.json"]
)
def test_recorded_answers_have_one(file: str) -> None:
    path = Path(CAPTURES, file)
    if not path.exists():
        pytest.skip("the recorded answers are not here")
    raw = path.read_bytes()
    if file.endswith(".json"):
        recorded = json.loads(raw)
        raw = json.dumps(recorded.get("answer") or recorded.get("response")).encode()
    assert id_in(raw).startswith("resp_")


@pytest.mark.parametrize(
    "target",
    [
        "/v1/responses//a",
        "/v1/responses/a/",
        "/v1/responses/",
        "/v1/responses//",
        "/v1//responses/a?x=1",
        "/v1/responses%2Fa",
        "/v1%2fresponses/a",
        "/v1/responses%252Fa",
        "/v1/responses/a%2Fcancel",
        "/v1/responses/a/%2F/cancel",
        "/v1/%72esponses/a",
        "/v1/responses\\a",
        "/v1/responses%5Ca",
        "/v1/conversations//a/items",
    ],
)
def test_a_path_that_a_replica_may_take_for_one_of_ours(target: str) -> None:
    assert is_disguised(target)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/responses",
        "/v1/responses/a",
        "/v1/responses/a?b=c//d%2F",
        "/v1/responses/a%20b%25/input_items",
        "/v1/responses/a%2541",
        "/v1/conversations/a/items/b",
        "/v1/files/responses//a",
        "/v1/responses_of_others//a",
        "/v1/files/a%2Fb",
        "/v1/files/",
    ],
)
def test_a_path_that_means_the_same_to_all(target: str) -> None:
    assert not is_disguised(target)
