"""64 simulated replicas in one process behind a gateway: a fleet on a laptop."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from gateway.commands.demo.processes import listening_url, ready_url
from tests.gateway.server.test_system import samples, started, summed

REPLICAS, DOCUMENTS, QUESTIONS, AT_ONCE = 64, 40, 8, 32


class Fleet:
    """The URLs of one process's replicas."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    def read_line(self, line: str) -> bool:
        if url := ready_url(line):
            self.urls.append(url)
        return len(self.urls) == REPLICAS


async def ask(http: aiohttp.ClientSession, url: str, document: int, question: int) -> tuple[str, int]:
    """Which replica answered, and how many tokens it had cached."""
    prompt = f"document {document} says: " + f"{document} " * 400 + f"question {question}?"
    async with http.post(url + "/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 8}) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return answer.headers["x-warmroute-replica"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_fleet_of_64_keeps_documents_where_they_are() -> None:
    fleet = Fleet()
    with contextlib.ExitStack() as stack:
        count = ("--count", str(REPLICAS), "--speed", "10", "--prefill-chunk", "512")
        replicas = stack.enter_context(started("replicas", "replica", "--engine", "sim", "--port", "0", *count))
        replicas.wait_for(fleet.read_line)
        flags = [flag for url in fleet.urls for flag in ("--replica", url)]
        url = stack.enter_context(started("gateway", "serve", "--port", "0", *flags)).wait_for(listening_url)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            room = asyncio.Semaphore(AT_ONCE)

            async def one(document: int, question: int) -> tuple[str, int]:
                async with room:
                    return await ask(http, url, document, question)

            first = await asyncio.gather(*(one(document, 0) for document in range(DOCUMENTS)))
            again = await asyncio.gather(
                *(one(document, question) for question in range(1, QUESTIONS) for document in range(DOCUMENTS))
            )
        assert len({name for name, _ in first}) > DOCUMENTS // 2, "new documents are spread"
        assert [cached for _, cached in first] == [0] * DOCUMENTS
        assert sum(cached > 300 for _, cached in again) > 0.9 * len(again)
        assert sum(summed(samples(one), "vllm:prefix_cache_hits_total") > 0 for one in fleet.urls) > DOCUMENTS // 2
        assert samples(fleet.urls[0])["process_resident_memory_bytes"] < 300e6
