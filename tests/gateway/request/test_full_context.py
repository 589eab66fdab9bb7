"""A full context reaches the client in the words of its API, native and translated: agents compact, and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.conftest import BODY, running
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.fleet.test_engine_conformance import capture, recorded
from tests.support.fakes import FakeReplica, http, status, writes

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
SGLANG = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "m", "input": "hi"},
    CHAT: BODY,
    "/v1/completions": {"model": "m", "prompt": "hi"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "native"), [*((path, True) for path in ASKED), (MESSAGES, False), (RESPONSES, False)])
async def test_the_words_are_those_of_the_client_s_api(
    path: str, stream: bool, native: bool, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    refuses = status(400, SGLANG)
    async with FakeReplica([refuses if native else chat_only(refuses)]) as replica, running(replica) as run:
        code, _, answer = await run.post({**ASKED[path], "stream": stream}, path)
        assert code == 400
        if path == MESSAGES:
            assert answer["error"]["message"] == "prompt is too long: 61709 tokens > 40960 maximum"
            assert answer["error"]["type"] == "invalid_request_error"
        else:
            assert answer["error"]["message"] == SGLANG
            assert answer["error"]["code"] == "context_length_exceeded"
        assert SGLANG in request_lines()[-1]["error"]  # operators read the engine's words


async def test_missing_numbers_are_those_of_the_gateway() -> None:
    """Its estimate of the prompt, and the context in the replica's list of models."""
    words = status(400, "the request exceeds the available context size. try increasing the context size")
    asked = {**ASKED[MESSAGES], "messages": [{"role": "user", "content": "word " * 4000}]}
    listed = b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x", "max_model_len": 4096}]}'
    async with FakeReplica([words], listing=writes(http(200, listed))) as replica, running(replica) as run:
        _, _, answer = await run.post(asked, MESSAGES)
        message = answer["error"]["message"]
        tokens = int(message.removeprefix("prompt is too long: ").removesuffix(" tokens > 4096 maximum"))
        assert tokens > 4096


async def test_what_generates_nothing_keeps_the_engine_s_words() -> None:
    async with FakeReplica([status(400, SGLANG)]) as replica, running(replica) as run:
        _, _, answer = await run.post({"model": "m", "input": "hi"}, "/v1/embeddings")
        assert answer["error"]["code"] == 400


@recorded
@pytest.mark.parametrize(("engine", "tokens"), [("vllm", 4097), ("llamacpp", 9031)])
async def test_recorded_errors(engine: str, tokens: int) -> None:
    async with FakeReplica([capture(f"{engine}/error_too_long.json")]) as replica, running(replica) as run:
        _, _, answer = await run.post(ASKED[MESSAGES], MESSAGES)
        assert answer["error"]["message"] == f"prompt is too long: {tokens} tokens > 4096 maximum"
