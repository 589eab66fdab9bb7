"""Retention through a gateway: where two prompts compete for a replica's cache, the one that is to be kept longer survives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from replica.sim.cost import SimConfig
from tests.gateway.conftest import Running, running
from tests.replica.conftest import serve
from tests.replica.fakes import WatchedEngine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CACHE = 6000  # tokens
USAGE = {CHAT: "prompt_tokens_details", RESPONSES: "input_tokens_details"}


@pytest.fixture
async def run() -> AsyncIterator[Running]:
    engine = WatchedEngine(SimConfig(kv_tokens=CACHE, prefill_rate=1e6, decode_rate=2000.0, max_batch=64))
    async for replica in serve(engine, None):
        async with running(replica.url) as run:
            yield run


def text(name: str) -> str:
    return "".join(f"{name} {number}. " for number in range(600))


async def cached(run: Running, path: str, body: dict[str, Any]) -> int:
    status, _, answer = await run.post({"model": "sim", **body}, path=path)
    assert status == 200, answer
    usage = answer["usage"]
    return usage["cache_read_input_tokens"] if path == MESSAGES else usage[USAGE[path]]["cached_tokens"]  # type: ignore[no-any-return]


def message(name: str, ttl: str = "") -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": text(name)}
    if ttl:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return {"max_tokens": 0, "messages": [{"role": "user", "content": [block]}]}


def chat(name: str, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": text(name)}], **more}


def response(name: str, **more: Any) -> dict[str, Any]:
    return {"max_output_tokens": 1, "input": text(name), "store": False, **more}


@pytest.mark.parametrize(
    ("path", "kept", "other"),
    [
        (MESSAGES, message("kept", "1h"), message),
        (MESSAGES, message("kept", "1h"), partial(message, ttl="5m")),
        (CHAT, chat("kept", prompt_cache_retention="24h"), partial(chat, prompt_cache_retention="in_memory")),
        (CHAT, chat("kept", prompt_cache_options={"mode": "implicit", "ttl": "30m"}), chat),
        (RESPONSES, response("kept", prompt_cache_retention="24h"), response),
        (RESPONSES, response("kept", prompt_cache_options={"ttl": "30m"}), response),
    ],
)
async def test_what_is_to_be_kept_longer_survives(
    run: Running, path: str, kept: dict[str, Any], other: Callable[[str], dict[str, Any]]
) -> None:
    assert await cached(run, path, kept) == 0
    assert await cached(run, path, other("plain")) == 0
    assert await cached(run, path, other("plain")) > 1000, "both fit"
    for number in range(4):
        await cached(run, path, other(f"other {number}"))
    assert await cached(run, path, other("plain")) < 100, "the one that was used last is gone"
    assert await cached(run, path, kept) > 1000


@pytest.mark.parametrize(
    "field", [{"prompt_cache_retention": "7d"}, {"prompt_cache_options": {"ttl": "1h"}}, {"prompt_cache_options": []}]
)
async def test_what_the_replica_cannot_keep_is_a_400(run: Running, field: dict[str, Any]) -> None:
    for path, body in ((CHAT, chat("x")), (RESPONSES, response("x"))):
        status, _, answer = await run.post({"model": "sim", **body, **field}, path=path)
        assert status == 400
        assert next(iter(field)) in answer["error"]["message"]
