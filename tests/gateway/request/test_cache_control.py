"""Cache control through a whole gateway: what the client reads of the cache, what is metered, and prompts without an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.gateway.conftest import Running, running
from tests.gateway.dialects.anthropic.test_answer_edits import LLAMACPP, OURS, SILENT_ENGINE, VLLM
from tests.gateway.features.translation.test_translation import CHAT, chat_only, claude
from tests.gateway.request.test_dialects import ASKED, MESSAGES, events, message
from tests.support.fakes import Behaviour, FakeReplica, answers, http, models, streams, writes

PRICES = {"m": {"input": 1.0, "output": 10.0, "cached_input": 0.1, "cache_write": 2.0, "cache_write_1h": 4.0}}
RULES = "".join(f"{number}. You help. " for number in range(800))
TTL_1H = {"type": "ephemeral", "ttl": "1h"}
UNIT = 1e-6  # USD of a token at a price of 1


def asked(ttl: str = "5m", *, marked: bool = True, **more: Any) -> dict[str, Any]:
    """A long system prompt, which nearly all of the prompt is."""
    block: dict[str, Any] = {"type": "text", "text": RULES}
    if marked:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return {**ASKED, "system": [block], **more}


async def spoken(run: Running, body: dict[str, Any]) -> anthropic.types.Message:
    """The answer as the official client reads it, streamed if the body says so."""
    async with claude(run) as client:
        if not body.pop("stream", False):
            return await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            return await stream.get_final_message()


ENGINES = [
    (message(input_tokens=600, cache_read_input_tokens=400), False),
    (events(LLAMACPP), True),
    (events(VLLM), True),
    (chat_only(answers(prompt=1000, completion=4, cached=400)), False),
    (chat_only(streams("hello", prompt=1000, completion=4, cached=400)), True),
]


@pytest.mark.parametrize(("engine", "stream"), ENGINES)
async def test_usage_says_what_was_written_where_the_engine_does_not(
    engine: Behaviour, stream: bool, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeReplica([engine]) as replica, running(replica, prices=PRICES) as run:
        usage = (await spoken(run, asked("1h", stream=stream))).usage
        written = usage.cache_creation_input_tokens
        assert written is not None
        assert usage.cache_read_input_tokens == 400, "the engine's word"
        assert usage.input_tokens + written + 400 == 1000
        assert 550 < written <= 600, "nearly all of the prompt is marked"
        page = await run.metrics()
        label = f'model="m",replica="{replica.name}"'
        assert page[f"warmroute_cache_write_tokens_total{{{label}}}"] == written
        line = request_lines()[-1]
        assert line["cache_write_tokens"] == written
        cost = usage.input_tokens * 1.0 + 400 * 0.1 + 4 * 10.0 + written * 4.0
        assert line["cost_usd"] == pytest.approx(cost * UNIT)


@pytest.mark.parametrize(("engine", "stream"), ENGINES)
async def test_without_breakpoints_answers_are_as_they_were(engine: Behaviour, stream: bool) -> None:
    async with FakeReplica([engine]) as replica, running(replica) as run:
        usage = (await spoken(run, asked(marked=False, stream=stream))).usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0) == (600, 400, 0)


@pytest.mark.parametrize("data", [OURS, SILENT_ENGINE])
async def test_an_engine_that_splits_or_reports_nothing_has_its_own_words(data: bytes) -> None:
    async with (
        FakeReplica([events(data)]) as replica,
        running(replica) as run,
        run.session.post(run.url + MESSAGES, json=asked(stream=True)) as answer,
    ):
        assert await answer.read() == data


async def test_an_engine_without_a_cache_writes_nothing() -> None:
    page = b'vllm:cache_config_info{enable_prefix_caching="False",engine="0"} 1.0\nvllm:num_requests_running{engine="0"} 0\n'
    engine = message(input_tokens=1000, cache_read_input_tokens=0)
    metrics = writes(http(200, page, "text/plain"))
    async with (
        FakeReplica([engine], listing=models("m", owner="vllm"), pages={"/metrics": metrics}) as replica,
        running(replica) as run,
    ):
        assert (await spoken(run, asked())).usage.cache_creation_input_tokens == 0


# -- max_tokens: 0


async def refuses_nothing(request: Any, writer: Any) -> None:
    """Native, as vLLM and llama.cpp: a prompt without an answer is none of their requests."""
    if request.json["max_tokens"] < 1:
        await writes(http(400, b'{"type": "error", "error": {"type": "BadRequestError", "message": "max_tokens"}}'))(
            request, writer
        )
    elif request.json.get("stream"):
        await events(VLLM)(request, writer)
    else:
        await message(input_tokens=600, cache_read_input_tokens=400)(request, writer)


PREWARMED = [
    (refuses_nothing, False),
    (refuses_nothing, True),
    (chat_only(answers(prompt=1000, completion=1, cached=400)), False),
    (chat_only(streams("hello", prompt=1000, completion=1, cached=400)), True),
]


@pytest.mark.parametrize(("engine", "stream"), PREWARMED)
@pytest.mark.parametrize("marked", [False, True])
async def test_a_prompt_is_computed_without_an_answer(engine: Behaviour, stream: bool, marked: bool) -> None:
    async with FakeReplica([engine]) as replica, running(replica, model_aliases={"claude-*": "m"}) as run:
        answer = await spoken(run, asked(marked=marked, model="claude-opus-4-5-latest", stream=stream, max_tokens=0))
        assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)
        assert (answer.usage.cache_creation_input_tokens or 0) > 0 if marked else answer.usage.input_tokens == 600
        sent = replica.requests[-1].json
        assert (sent["model"], sent["max_tokens"]) == ("m", 1)
        label = f'model="m",replica="{replica.name}"'
        consumed = 1 if replica.requests[-1].path == CHAT else 4
        assert (await run.metrics())[f"warmroute_completion_tokens_total{{{label}}}"] == consumed, "as it was generated"


async def test_a_prewarm_is_promised_and_found(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    engine = message(input_tokens=len(RULES) // 4)
    async with FakeReplica([engine]) as one, FakeReplica([engine]) as two, running(one, two) as run:
        await spoken(run, asked(max_tokens=0))
        await spoken(run, asked())
        first, second = request_lines()
        assert (first["replica"], first["breakpoint"], second["reason"]) == (second["replica"], "new", "warm")
        assert second["breakpoint"] in ("kept", "missed"), "it was promised"


async def test_our_replica_is_asked_for_nothing() -> None:
    empty = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": "max_tokens"}
    empty |= {"stop_sequence": None, "usage": {"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 0}}
    engine = writes(http(200, json.dumps(empty).encode()))
    async with FakeReplica([engine], listing=models("m", owner="warmroute")) as replica, running(replica) as run:
        async with run.session.post(run.url + MESSAGES, json={**ASKED, "max_tokens": 0}) as answer:
            assert await answer.json() == empty
        assert replica.requests[-1].json["max_tokens"] == 0


@pytest.mark.parametrize("size", [5_000, 900_000])
async def test_a_large_prewarm_is_read_elsewhere(size: int) -> None:
    said = "x" * size
    body = {**ASKED, "messages": [{"role": "user", "content": said, "max_tokens": 0}], "max_tokens": 0}
    async with FakeReplica([refuses_nothing]) as replica, running(replica) as run:
        status, _, answer = await run.post(body, path=MESSAGES)
        assert (status, answer["content"]) == (200, [])
        assert replica.requests[-1].json == {**body, "max_tokens": 1}, "no other byte"


@pytest.mark.parametrize("most", [False, 0.0, "0", None])
async def test_what_is_no_number_of_tokens_is_the_engine_s_to_refuse(most: Any) -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        _, _, answer = await run.post({**ASKED, "max_tokens": most}, path=MESSAGES)
        assert replica.requests[-1].json["max_tokens"] == most
        assert answer["content"] != []
