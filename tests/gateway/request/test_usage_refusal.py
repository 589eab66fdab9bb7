"""Servers that refuse `stream_options`, which the gateway adds: they are asked again without it, and never with it again."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.request.usage_refusal import is_refusal
from tests.gateway.conftest import running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, http, status, streams

REFUSALS: list[tuple[int, Any]] = [
    (400, {"error": {"message": "Unrecognized request argument supplied: stream_options", "type": "invalid_request_error"}}),
    (
        422,
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
    ),
    (400, {"error": {"message": "Additional properties are not allowed"}}),
]
QUESTION = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


def strict(code: int, error: Any, answer: Behaviour) -> Behaviour:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if not request.path.endswith("completions"):
            await status(404, "Not Found")(request, writer)
        elif "stream_options" in request.json:
            writer.write(http(code, json.dumps(error).encode()))
        else:
            await answer(request, writer)

    return behave


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(("code", "error"), REFUSALS)
async def test_a_server_that_refuses_the_wish_is_asked_without_it(
    code: int, error: Any, path: str, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    body = {**QUESTION, "prompt": "hi"} if path == "/v1/completions" else QUESTION
    async with FakeReplica([strict(code, error, streams("a", "b"))]) as replica, running(replica) as run:
        for _ in range(3):
            async with run.session.post(run.url + path, json=body) as answer:
                assert (answer.status, b"error" in await answer.read()) == (200, False)
        asked = ["stream_options" in each.json for each in replica.requests if each.path.endswith("completions")]
        assert asked == [True, False, False, False]
        assert all("failed_attempts" not in line for line in request_lines())


async def test_options_of_the_client_are_its_own() -> None:
    async with FakeReplica([strict(*REFUSALS[0], streams("a"))]) as replica, running(replica) as run:
        for _ in range(2):
            async with run.session.post(
                run.url + "/v1/chat/completions", json={**QUESTION, "stream_options": {"include_usage": True}}
            ) as answer:
                assert answer.status == 400
        assert ["stream_options" in each.json for each in replica.requests] == [True, True]


async def test_a_refusal_for_another_reason_is_the_clients() -> None:
    """It is not repeated, and where it is, nothing is learned from it."""
    refusals = [status(400, "the prompt is too long"), status(400, "unknown field"), status(400, "unknown field"), streams("a")]
    async with FakeReplica(refusals) as replica, running(replica) as run:
        for expected in (400, 400, 200):
            async with run.session.post(run.url + "/v1/chat/completions", json=QUESTION) as answer:
                assert answer.status == expected
        assert ["stream_options" in each.json for each in replica.requests] == [True, True, False, True]


async def test_a_compressed_refusal_is_read() -> None:
    code, error = REFUSALS[0]

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if "stream_options" in request.json:
            writer.write(http(code, gzip.compress(json.dumps(error).encode()), "application/json", "Content-Encoding: gzip"))
        else:
            await streams("a", "b")(request, writer)

    async with FakeReplica([behave]) as replica, running(replica) as run:
        for _ in range(2):
            async with run.session.post(run.url + "/v1/chat/completions", json=QUESTION) as answer:
                assert (answer.status, b"error" in await answer.read()) == (200, False)
        assert ["stream_options" in each.json for each in replica.requests] == [True, False, False]


async def test_a_compressed_full_context_has_the_words_of_the_clients_api() -> None:
    error = {"error": {"message": "This model's maximum context length is 4096 tokens. Your prompt has 5000 tokens."}}
    refusal = http(400, gzip.compress(json.dumps(error).encode()), "application/json", "Content-Encoding: gzip")

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal)

    async with (
        FakeReplica([behave]) as replica,
        running(replica) as run,
        run.session.post(run.url + "/v1/messages", json=QUESTION) as answer,
    ):
        assert answer.status == 400
        assert "prompt is too long" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_server_that_fails_at_the_wish_is_asked_without_it(named: bool) -> None:
    """Some frameworks answer 500 for a field that they do not expect. Any other 500 is a failure, as before."""
    what = "Completions.create() got an unexpected keyword argument " + ("'stream_options'" if named else "")
    error = {"error": {"message": what}}
    async with FakeReplica([strict(500, error, streams("a", "b"))]) as replica, running(replica) as run:
        for _ in range(2):
            async with run.session.post(run.url + "/v1/chat/completions", json=QUESTION) as answer:
                assert answer.status == (200 if named else 500)
        asked = ["stream_options" in each.json for each in replica.requests]
        assert asked == ([True, False, False] if named else [True] * len(asked))


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (b"stream_options: unknown", True),
        (b"Extra inputs are not permitted", True),
        (b"unexpected keyword argument 'x'", True),
        (b"unknown field `x`", True),
        (b"unknown field `logprobs`", False),
        (b"The model does not exist", False),
        (b"maximum context length is 4096 tokens", False),
        (b"", False),
    ],
)
def test_the_words_of_a_refusal(error: bytes, refused: bool) -> None:
    assert is_refusal(400, error, b'{"model": "m", "logprobs": true, "stream_options": {"include_usage": true}}') == refused
