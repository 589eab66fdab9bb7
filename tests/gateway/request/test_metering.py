"""What a request is charged: once, by what was consumed, whatever happened on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.gateway.conftest import BODY, Running, eventually, running
from tests.gateway.request.test_dialects import events
from tests.support.fakes import (
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    event,
    hangs,
    http,
    status,
    streams,
    writes,
)

Lines = Callable[[], list[dict[str, Any]]]

PRICES: Final = {"m": {"input": 2.0, "output": 10.0, "cached_input": 0.5}}
ROLE: Final = event("").replace(b'"content": ""', b'"role": "assistant"')
LONG: Final = {**BODY, "messages": [{"role": "user", "content": "x" * 3994}]}  # a canonical prompt of 4,000 bytes: 1,000 tokens


async def line(run: Running, request_lines: Lines) -> dict[str, Any]:
    """The only request's."""
    await eventually(request_lines)
    (found,) = request_lines()
    return found


async def read(run: Running, body: dict[str, Any]) -> Any:
    """The headers of an answer that may be no JSON."""
    async with run.session.post(f"{run.url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.headers


async def cost(run: Running) -> float:
    """Millionths of a dollar on /metrics."""
    page = await run.metrics()
    return sum(value for name, value in page.items() if name.startswith("warmroute_cost_usd_total{")) * 1e6


@pytest.mark.parametrize("before", [dies, status(500), status(503), writes(http(200, b"no json"))])
async def test_an_attempt_that_failed_costs_nothing(before: Behaviour, request_lines: Lines) -> None:
    script = iter([before])
    good = answers(prompt=1000, completion=10, cached=400)

    async def first_fails(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await next(script, good)(request, writer)

    async with (
        FakeReplica([first_fails]) as one,
        FakeReplica([first_fails]) as two,
        running(one, two, prices=PRICES) as run,
    ):
        for _ in range(2):
            answer, _, _ = await run.post(LONG)
            assert answer == 200
        assert len(one.requests) + len(two.requests) >= 3
        assert await cost(run) == pytest.approx(2 * (600 * 2 + 400 * 0.5 + 10 * 10))
        lines = request_lines()
        assert {each["cost_usd"] for each in lines} == {0.0015}


@pytest.mark.parametrize("behaviour", [status(400), status(404), status(429), status(500), dies])
async def test_an_error_costs_nothing(behaviour: Behaviour, request_lines: Lines) -> None:
    async with FakeReplica([behaviour]) as one, running(one, prices=PRICES) as run:
        assert (await run.post(LONG))[0] >= 400
        assert await cost(run) == 0
        assert (await line(run, request_lines))["cost_usd"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_has_had_its_prompt_computed(
    stream: bool, request_lines: Lines
) -> None:
    never = asyncio.Event()
    async with FakeReplica([hangs(never)]) as one, running(one, prices=PRICES) as run:
        post = asyncio.create_task(run.post({**LONG, "stream": stream}))
        await eventually(lambda: one.requests)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        found = await line(run, request_lines)
        assert (found["status"], found["estimated"], found["prompt_tokens"], found["completion_tokens"]) == (
            499,
            "tokens",
            1000,
            0,
        )
        assert found["cost_usd"] == 0.002
        assert await cost(run) == pytest.approx(2000)
        page = await run.metrics()
        assert page['warmroute_estimated_answers_total{model="m",what="tokens"}'] == 1
        assert page['warmroute_estimated_cost_usd_total{model="m",tenant="none"}'] == 0.002
        never.set()


async def test_a_stream_that_is_cut_costs_what_has_passed(request_lines: Lines) -> None:
    """The engine's usage never comes: comments and the role are no tokens."""
    parts = (ROLE, b": ping\n\n", event("a"), event("b"), b": ping\n\n", event("c"))
    async with FakeReplica([events(*parts)]) as one, running(one, prices=PRICES) as run:
        await read(run, {**LONG, "stream": True})
        found = await line(run, request_lines)
        assert "error" in found
        assert (found["estimated"], found["prompt_tokens"], found["completion_tokens"]) == ("tokens", 1000, 3)
        assert await cost(run) == pytest.approx(1000 * 2 + 3 * 10)


async def test_a_client_that_leaves_a_large_answer_pays_what_its_engine_has_counted(request_lines: Lines) -> None:
    """vLLM writes the usage before log probabilities of the prompt, which may be megabytes."""
    counts = b'{"prompt_tokens": 1000, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 400}}'
    head = b'{"object": "chat.completion", "choices": [], "usage": ' + counts + b', "prompt_logprobs": "'
    never = asyncio.Event()

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n" + head + b"x" * 4_000_000
        )
        await writer.drain()
        await never.wait()

    async with FakeReplica([behave]) as one, running(one, prices=PRICES) as run:
        async with run.session.post(f"{run.url}/v1/chat/completions", json=LONG) as answer:
            await answer.content.readexactly(3_500_000)
        found = await line(run, request_lines)
        assert (found["prompt_tokens"], found["completion_tokens"], found["cost_usd"]) == (1000, 3, 0.00143)
        never.set()


async def test_usage_that_text_follows_is_not_that_of_the_whole_answer(request_lines: Lines) -> None:
    """An engine that counts too early, or only at its beginning: what has passed counts, if that is more."""
    early = b'data: {"choices": [{"delta": {}}], "usage": {"prompt_tokens": 500, "completion_tokens": 1}}\n\n'
    parts = (ROLE, event("a"), early, *(event("b") for _ in range(20)), b"data: [DONE]\n\n")
    async with FakeReplica([events(*parts)]) as one, running(one, prices=PRICES) as run:
        await read(run, {**LONG, "stream": True})
        found = await line(run, request_lines)
        assert found["prompt_tokens"] == 500
        assert found["completion_tokens"] in (21, 22)
        assert found["estimated"] in ("output", "tokens")


async def test_cached_tokens_that_are_not_reported_are_those_that_were_predicted(request_lines: Lines) -> None:
    """The router predicts 15 blocks of 256 bytes of a prompt of 4,000, which the engine counts as 2,000 tokens."""
    async with FakeReplica([answers(prompt=2000, completion=0)]) as one, running(one, prices=PRICES) as run:
        for _ in range(2):
            await run.post(LONG)
        first, second = request_lines()
        assert (first["estimated"], first["cached_tokens_reported"], first["cost_usd"]) == ("cached", None, 0.004)
        assert first["saved_usd"] == 0
        assert second["estimated"] == "cached"
        assert second["saved_usd"] == pytest.approx(0.96 * 2000 * 1.5 / 1e6, rel=0.01)
        assert second["cost_usd"] == pytest.approx(0.004 - second["saved_usd"])
        page = await run.metrics()
        tokens = {
            kind: page.get(f'warmroute_prompt_tokens_total{{cache="{kind}",model="m",replica="{one.name}"}}', 0)
            for kind in ("hit", "miss", "estimated")
        }
        assert tokens["hit"] == 0
        assert tokens["estimated"] == pytest.approx(0.96 * 2000, rel=0.01)
        assert tokens["miss"] + tokens["estimated"] == 4000
        assert page['warmroute_estimated_answers_total{model="m",what="cached"}'] == 2


async def test_an_answer_without_usage_is_estimated_and_still_named_unmetered(request_lines: Lines) -> None:
    body = b'{"object": "chat.completion", "choices": [{"message": {"content": "%b"}}]}' % (b"x" * 330)
    async with FakeReplica([writes(http(200, body))]) as one, running(one, prices=PRICES) as run:
        _, headers, _ = await run.post(LONG)
        found = await line(run, request_lines)
        assert (found["estimated"], found["prompt_tokens"], found["completion_tokens"]) == ("tokens", 1000, len(body) // 4)
        assert float(headers["X-Warmroute-Cost-Usd"]) == found["cost_usd"]
        assert headers["X-Warmroute-Cost-Estimated"] == "tokens"
        page = await run.metrics()
        assert page['warmroute_unmetered_requests_total{endpoint="/v1/chat/completions",model="m"}'] == 1


async def test_a_plain_answer_says_what_it_costs(request_lines: Lines) -> None:
    async with FakeReplica([answers(prompt=1001, completion=3, cached=1000)]) as one, running(one, prices=PRICES) as run:
        _, headers, _ = await run.post(LONG)
        assert headers["X-Warmroute-Cost-Usd"] == "0.000532"
        assert "X-Warmroute-Cost-Estimated" not in headers
        assert (await line(run, request_lines))["cost_usd"] == 0.000532
        assert await cost(run) == pytest.approx(532)


@pytest.mark.parametrize(
    ("script", "body"),
    [
        (streams("a", prompt=1, completion=1, cached=0), {"stream": True}),
        (status(400), {}),
        (answers(prompt=1, completion=1, cached=0), {"model": "free"}),
    ],
)
async def test_other_answers_do_not(script: Behaviour, body: dict[str, Any]) -> None:
    """A stream's cost is not known when it begins; an error and a model without a price have none."""
    async with FakeReplica([script]) as one, running(one, model_aliases={"free": "m"}, prices={"n": PRICES["m"]}) as run:
        headers = await read(run, {**BODY, **body})
        assert "X-Warmroute-Cost-Usd" not in headers


async def test_what_the_engine_says_of_costs_does_not_pass() -> None:
    spoofed = http(
        200,
        b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}',
        "application/json",
        "X-Warmroute-Cost-Usd: 0",
    )
    async with FakeReplica([writes(spoofed)]) as one, running(one, prices=PRICES) as run:
        _, headers, _ = await run.post(BODY)
        assert headers.getall("X-Warmroute-Cost-Usd") == ["0.000012"]


async def test_who_leaves_a_stream_early_pays_for_its_texts(request_lines: Lines) -> None:
    """An engine that writes ten tokens in an event."""
    never, text = asyncio.Event(), " several words of a text, some ten"

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(20):
            writer.write(chunk(event(text)))
        await writer.drain()
        await never.wait()

    async with FakeReplica([behave]) as one, running(one, prices=PRICES) as run:
        async with run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            seen = b""
            while seen.count(text.encode()) < 20:
                seen += await answer.content.readany()
        found = await line(run, request_lines)
        assert 7 * 20 <= found["completion_tokens"] <= 10 * 20
        never.set()
