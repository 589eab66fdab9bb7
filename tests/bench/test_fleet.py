"""The benchmark of several gateways: its loads, and that what it measures is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fleet.__main__ import Load, hits, outage
from bench.fleet.loads import TOKENS, agent_sessions, conversation
from bench.measure.machine import trace_folder
from tests.support.tools import tool


def turns(number: int) -> list[bytes]:
    """A conversation of four, each turn longer than the one before."""
    prompts = [[(number * 1009 + place) % 30_000 for place in range(320 * turn)] for turn in range(1, 5)]
    return [json.dumps({"model": "sim", "prompt": prompt, "max_tokens": 2}).encode() for prompt in prompts]


CONVERSATIONS = [turns(number) for number in range(8)]
LOAD = Load("conversations", CONVERSATIONS, 4, 0.1)


@pytest.mark.skipif(not trace_folder().exists(), reason="the traces are not here")
def test_prompts_share_what_they_share_in_the_trace() -> None:
    session = next(each for each in agent_sessions(20, 4) if len(each) == 4)
    first, second = (json.loads(body)["prompt"] for body in session[:2])
    shared = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert shared % TOKENS == 0
    assert shared > len(first) // 2
    assert len({body for (body,) in conversation(200)}) > 150


@pytest.mark.tools
async def test_two_gateways_that_share_cache_as_one_does(tmp_path: Path) -> None:
    tool("redis-server")
    alone, shared, apart = [
        await hits(LOAD, gateways, shared=shared, folder=tmp_path) for gateways, shared in ((1, False), (2, True), (2, False))
    ]
    assert alone.failed == shared.failed == apart.failed == 0
    assert len(shared.hits) == 32
    assert shared.share() > apart.share()
    assert shared.share() >= alone.share() - 0.1


@pytest.mark.tools
async def test_no_request_fails_when_the_store_does(tmp_path: Path) -> None:
    tool("redis-server")
    long = Load("conversations", CONVERSATIONS, 2, 0.5)
    sent, killed, back = await outage(long, tmp_path, after_s=1.0, down_s=2.0)
    assert sent.failed == 0
    assert 0 < killed < back
