"""A replica that does not know a path, and one that does not know what the body names."""

from __future__ import annotations

import json

import pytest

from gateway.request.unknown_path import MOST_READ, is_unknown_path, may_be


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"detail":"Not Found"}'),  # FastAPI: vLLM, SGLang
        (405, b'{"detail":"Method Not Allowed"}'),
        (404, b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}'),  # llama.cpp
        (404, b"404: Not Found"),  # aiohttp
        (404, b"404 page not found"),  # Go: Ollama
        (404, b""),
        (404, b"<html>" + b"x" * MOST_READ),
        (404, b'["Not Found"]'),
        (501, b'{"error": "not implemented"}'),
    ],
)
def test_a_path_that_is_not_known(status: int, body: bytes) -> None:
    assert may_be(status)
    assert is_unknown_path(status, body)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"type":"error","error":{"type":"NotFoundError","message":"The model `x` does not exist."}}'),
        (404, b'{"error":{"message":"No model is called x.","type":"invalid_request_error","code":"model_not_found"}}'),
        (404, b'{"error":{"message":"Response with id resp_1 not found.","type":"invalid_request_error"}}'),
        (404, b'{"error": {}}'),
        (404, b'{"error": {"message": "' + b"x" * MOST_READ),
        (400, b'{"detail":"Not Found"}'),
        (200, b"404 page not found"),
        (500, b""),
    ],
)
def test_a_path_that_is_known(status: int, body: bytes) -> None:
    assert not is_unknown_path(status, body)
    assert may_be(status) == (status == 404)


def test_any_nesting_is_harmless() -> None:
    assert not is_unknown_path(404, b"[" * MOST_READ)
    assert is_unknown_path(404, json.dumps({"error": {"message": " Not Found. "}}).encode())
