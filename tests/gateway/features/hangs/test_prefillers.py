"""A prefiller that hangs: decoders compute the prompts themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import eventually
from tests.gateway.features.hangs.test_hang_watch import STREAM, staged
from tests.support.hanging_engine import HangingEngine, texts_of


def long(name: str) -> dict[str, Any]:
    return {**STREAM, "messages": [{"role": "user", "content": f"{name} hello " * 500}]}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_its_legs_end_and_new_prompts_have_none(ranks: int) -> None:
    prefiller, decoder = HangingEngine(), HangingEngine()

    def pools(urls: list[str]) -> list[dict[str, Any]]:
        return [{"prefill": [{"url": urls[0], "ranks": ranks}], "decode": [urls[1]]}]

    async with staged(prefiller, decoder, warm=False, pools=pools) as stage:
        prefiller.works.clear()
        waiting = [asyncio.ensure_future(stage.stream(long(name))) for name in "abcd"]
        await eventually(lambda: len(prefiller.requests) == len(waiting))
        for _ in range(600):
            if not all(each.done() for each in waiting):
                await stage.pass_s(1)
        assert [texts_of(await each) for each in waiting] == [["a", "b", "c"]] * len(waiting)
        asked = prefiller.checks
        assert texts_of(await stage.stream(long("e"))) == ["a", "b", "c"]
        assert prefiller.checks == asked


async def test_where_decoders_cannot_compute_prompts_a_replica_that_does_both_gets_them() -> None:
    prefiller, both = HangingEngine(), HangingEngine()
    decoder = HangingEngine(stuck=lambda request: "bootstrap_room" in request.json)

    def pools(urls: list[str]) -> list[dict[str, Any]]:
        prefill, decode, unified = ({"url": url, "engine": "sglang"} for url in urls)
        return [{"prefill": [prefill], "decode": [decode], "replicas": [unified]}]

    async with staged(prefiller, decoder, both, warm=False, pools=pools) as stage:
        prefiller.works.clear()
        waiting = [asyncio.ensure_future(stage.stream(long(name))) for name in "abcdef"]
        await eventually(lambda: prefiller.requests and decoder.requests)
        for _ in range(600):
            if not all(each.done() for each in waiting):
                await stage.pass_s(1)
        assert [texts_of(await each) for each in waiting] == [["a", "b", "c"]] * len(waiting)


async def test_a_prompt_hangs_two_prefillers_at_most() -> None:
    prefillers, decoder = [HangingEngine() for _ in range(3)], HangingEngine()

    def pools(urls: list[str]) -> list[dict[str, Any]]:
        return [{"prefill": urls[:3], "decode": urls[3:]}]

    async with staged(*prefillers, decoder, warm=False, pools=pools) as stage:
        for each in prefillers:
            each.works.clear()
        waiting = asyncio.ensure_future(stage.stream(long("a")))
        await eventually(lambda: sum(len(each.requests) for each in prefillers) == 1)
        for _ in range(600):
            if not waiting.done():
                await stage.pass_s(1)
        assert texts_of(await waiting) == ["a", "b", "c"]
        legs = [sum(b"a hello" in request.body for request in each.requests) for each in prefillers]
        assert sorted(legs) == [0, 1, 1]
