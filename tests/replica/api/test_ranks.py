"""Data-parallel ranks of a simulated replica: a cache each, chosen by a header, else in turn, as in vLLM."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from replica.api.ranks import HEADER, Ranks
from replica.api.server import create_app
from replica.engine import EngineRequest
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.replica.fakes import FakeClock

CONFIG = SimConfig(kv_tokens=8000, prefill_rate=1e6, decode_rate=1e5, max_batch=8)
LONG = "Tell me about the prefix cache of a replica, at some length and with patience. " * 8


@asynccontextmanager
async def ranked(count: int) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    first, *others = (SimEngine(CONFIG) for _ in range(count))
    runner = web.AppRunner(create_app(first, "sim", None, others), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, socket.create_server(("127.0.0.1", 0))).start()
    async with aiohttp.ClientSession() as http:
        yield http, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def chat(http: aiohttp.ClientSession, url: str, rank: str | None = None) -> tuple[int, Any]:
    body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
    headers = {} if rank is None else {HEADER: rank}
    async with http.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


def cached(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_each_rank_has_a_cache_of_its_own() -> None:
    async with ranked(3) as (http, url):
        found = [cached((await chat(http, url, rank))[1]) > 0 for rank in ("0", "0", "1", "2", "1", "2")]
        assert found == [False, True, False, False, True, True]
        async with http.get(url + "/metrics") as response:
            text = await response.text()
        for rank in range(3):
            assert f'vllm:prefix_cache_queries_total{{engine="{rank}",model_name="sim"}}' in text
            assert f'vllm:num_requests_running{{engine="{rank}",model_name="sim"}} 0.0' in text
            assert f'vllm:request_success_total{{engine="{rank}",finished_reason="length",model_name="sim"}} 2.0' in text
        async with http.post(url + "/reset_prefix_cache") as response:
            assert (await response.json())["success"] is True
        assert [cached((await chat(http, url, rank))[1]) for rank in ("0", "1", "2")] == [0, 0, 0]


async def test_without_a_header_the_ranks_take_turns() -> None:
    async with ranked(3) as (http, url):
        found = [cached((await chat(http, url))[1]) > 0 for _ in range(6)]
        assert found == [False, False, False, True, True, True]


@pytest.mark.parametrize(("rank", "code"), [("3", 400), ("-1", 400), ("9" * 30, 400), ("x", 200), ("", 200), ("2", 200)])
async def test_a_rank_that_does_not_exist_is_refused_as_by_vllm(rank: str, code: int) -> None:
    async with ranked(3) as (http, url):
        status, body = await chat(http, url, rank)
        assert status == code
        if code == 400:
            assert body["error"]["message"] == f"data_parallel_rank {int(rank)} is out of range [0, 3)."


async def test_the_rank_with_fewest_requests_is_chosen() -> None:
    clock = FakeClock()
    engines = [SimEngine(CONFIG, clock) for _ in range(2)]
    ranks = Ranks(engines)
    await ranks.start()
    engines[0].submit(EngineRequest([1] * 64, 5))
    assert [ranks.choose(None) for _ in range(4)] == [1, 1, 1, 1]
    assert ranks.choose("0") == 0
    await ranks.close()
