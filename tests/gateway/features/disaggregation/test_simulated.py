"""Prefill and decode over HTTP with simulated engines, in both forms, beside the same engines in one pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from replica.api.server import ServerConfig, create_app
from replica.api.transfer import Role, TransferConfig, Wire
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.disaggregation.legs import TEXT, ways

MODEL = "sim"
CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": TEXT}]}
FAST = {"prefill_rate": 100_000.0, "decode_rate": 1000.0}


@dataclass
class Simulated:
    """One simulated replica on loopback."""

    engine: SimEngine
    runner: web.AppRunner
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.runner.cleanup()


@contextlib.asynccontextmanager
async def simulated(role: Role | None, wire: Wire = "vllm", lease_s: float = 30.0, **config: Any) -> AsyncIterator[Simulated]:
    engine = SimEngine(SimConfig(**{**FAST, **config}))
    transfers = TransferConfig(role, wire, token_s=1e-6, lease_s=lease_s) if role else None
    runner = web.AppRunner(create_app(engine, MODEL, ServerConfig(transfers=transfers)), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Simulated(engine, runner, runner.addresses[0][1])
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def pool(
    wire: Wire, prefill: int = 1, decode: int = 1, **config: Any
) -> AsyncIterator[tuple[Running, list[Simulated], list[Simulated]]]:
    """A gateway over simulated prefillers and decoders."""
    async with contextlib.AsyncExitStack() as stack:
        first = [await stack.enter_async_context(simulated("prefill", wire, **config)) for _ in range(prefill)]
        second = [await stack.enter_async_context(simulated("decode", wire, **config)) for _ in range(decode)]
        engine = "sglang" if wire == "sglang" else "auto"
        made = {
            "name": "p",
            "prefill": [
                {"url": each.url, "name": f"p{number}", "engine": engine, "bootstrap_port": each.port}
                for number, each in enumerate(first)
            ],
            "decode": [{"url": each.url, "name": f"d{number}", "engine": engine} for number, each in enumerate(second)],
        }
        run = await stack.enter_async_context(running(pools=[made]))
        yield run, first, second


async def plain(body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """The answer of one replica that does both."""
    async with simulated(None) as one, running(one.url) as run:
        return (await run.post(body, path=path))[2]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_the_answer_is_that_of_one_replica_and_usage_the_prefillers(wire: Wire) -> None:
    expected = await plain(CHAT)
    async with pool(wire) as (run, (prefiller,), (decoder,)):
        code, headers, answer = await run.post(CHAT)
        assert (code, headers["X-Warmroute-Replica"], headers["X-Warmroute-Cached-Tokens"]) == (200, "d0", "0")
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        more = [*CHAT["messages"], answer["choices"][0]["message"], {"role": "user", "content": "again " * 900}]
        code, _, second = await run.post({**CHAT, "messages": more})
        assert code == 200
        assert await ways(run) == {"remote": 2}
        counts = await run.metrics()
        metered = counts['warmroute_prompt_tokens_total{cache="hit",model="sim",replica="d0"}']
    one = expected["usage"]["prompt_tokens"]
    assert one - 32 < metered <= one, "the prefiller had the first prompt"
    assert counts['warmroute_completion_tokens_total{model="sim",replica="d0"}'] == 16
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= metered
    prefiller.engine.check()
    decoder.engine.check()


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 8}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": MODEL, "input": TEXT, "max_output_tokens": 8, "store": False}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_is_taken_over(wire: Wire, path: str, body: dict[str, Any], stream: bool) -> None:
    async with pool(wire) as (run, _, _):
        async with run.session.post(run.url + path, json={**body, "stream": stream}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            assert '"error":' not in text.replace('"error":null', "")
        assert await ways(run) == {"remote": 1}
        counts = await run.metrics()
    assert counts['warmroute_completion_tokens_total{model="sim",replica="d0"}'] == 8


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_the_dead_are_replaced(wire: Wire) -> None:
    async with pool(wire, prefill=2, decode=2) as (run, prefillers, decoders):
        for seed in range(3):
            message = {"role": "user", "content": f"{seed} {TEXT}"}
            assert (await run.post({**CHAT, "messages": [message]}))[0] == 200
        await prefillers[0].stop()
        await decoders[1].stop()
        for seed in range(6):
            message = {"role": "user", "content": f"{seed} {TEXT} and more"}
            code, _, answer = await run.post({**CHAT, "messages": [message]})
            assert code == 200, answer
        await prefillers[1].stop()
        code, _, answer = await run.post({**CHAT, "messages": [{"role": "user", "content": f"last {TEXT}"}]})
        assert code == (200 if wire == "vllm" else 502), "SGLang's decoders compute no prompts"


async def test_a_prefiller_whose_lease_is_over_before_the_transfer() -> None:
    async with pool("vllm", lease_s=-1.0) as (run, _, (decoder,)):
        code, _, answer = await run.post(CHAT)
        assert code == 200
        assert answer["choices"] == (await plain(CHAT))["choices"]
        assert await ways(run) == {"transfer_failed": 1}
        assert (await run.metrics())['warmroute_prompt_tokens_total{cache="miss",model="sim",replica="d0"}'] == 2006
        decoder.engine.check()


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_clients_that_leave_hold_nothing(wire: Wire) -> None:
    async with pool(wire, prefill_rate=200.0) as (run, (prefiller,), (decoder,)):
        bodies = [{**CHAT, "messages": [{"role": "user", "content": f"{number} {TEXT}"}]} for number in range(5)]
        sending = [asyncio.ensure_future(run.post(body)) for body in bodies]
        await eventually(lambda: prefiller.engine.load().running + prefiller.engine.load().waiting >= 5)
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await eventually(lambda: prefiller.engine.load().running + prefiller.engine.load().waiting == 0)
        await eventually(lambda: decoder.engine.load().running + decoder.engine.load().waiting == 0)
        assert all(pool.admission.inflight == 0 for pool in run.gateway.fleet.pools)


async def test_conversations_stay_at_their_prefiller() -> None:
    async with pool("vllm", prefill=2, decode=2) as (run, _, _):
        for conversation in range(8):
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{conversation}.{turn} " + TEXT})
                code, _, answer = await run.post({**CHAT, "messages": messages})
                assert code == 200
                messages.append(answer["choices"][0]["message"])
        assert (await ways(run))["remote"] == 24
        counts = await run.metrics()
    hit = sum(value for name, value in counts.items() if name.startswith('warmroute_prompt_tokens_total{cache="hit"'))
    miss = sum(value for name, value in counts.items() if name.startswith('warmroute_prompt_tokens_total{cache="miss"'))
    assert hit / (hit + miss) > 0.45, "half of all tokens are of earlier turns"
