"""Replicas that do their worst under load, one failure after the other; the first of them is always well."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.hostile import FAULTS, REFUSES
from tests.chaos.load import ANSWERED, CUT, REFUSED, Load
from tests.chaos.stage import Stage, a_replica, stage, until
from tests.chaos.wire import port_of

IMPATIENT: dict[str, Any] = {"timeouts": {"first_byte_s": 3, "idle_s": 3}, "health": {"interval_s": 0.5, "timeout_s": 1}}


async def is_counted(scene: Stage, load: Load, *, resume: bool) -> None:
    """Nothing is lost and nobody refused; nobody is told of an error but by a stream that broke where none are resumed."""
    broken, cut = await scene.total("broken_responses_total"), load.fates[CUT]
    assert broken > 0, "no stream was broken off: this shows nothing"
    assert load.sent == load.fates[ANSWERED] + cut
    if resume:
        assert cut == 0
        assert await scene.total("resumed_streams_total", 'result="good"') == await scene.total("resumed_streams_total") > 0
    else:
        assert cut > 0
        assert all("failed while it answered" in why or why == "out of memory" for why in load.whys)
    await scene.counts(load)


@pytest.mark.parametrize("resume", [True, False])
async def test_all_that_can_go_wrong_one_after_the_other(tmp_path: Path, resume: bool) -> None:
    schedule = list(FAULTS)
    random.Random(4).shuffle(schedule)
    async with stage(tmp_path, resume=resume) as scene:
        async with Load(scene.url) as load:
            for mood, replica in zip(schedule, itertools.cycle(scene.replicas[1:]), strict=False):
                await scene.feel(replica, mood)
        await is_counted(scene, load, resume=resume)
        assert await scene.total("retries_total") > 0
        # Where a stream broke off between its last word and its usage, nobody knows what it took.
        billed, unknown = await scene.total("completion_tokens_total"), await scene.total("unmetered_requests_total")
        assert billed == load.tokens or (unknown and billed < load.tokens) or not resume, "each token once, whoever made it"


async def test_killed_and_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, simulated=True) as scene:
        doomed = scene.replicas[1]
        async with Load(scene.url) as load:
            for life in range(2):
                await load.streams()
                doomed.child.signal(signal.SIGKILL)
                await until(lambda: scene.is_up(doomed, False), lambda: "it is known to be down")
                await load.more(20)
                again = await a_replica(tmp_path / f"{life}.log", scene.ends, simulated=True, port=port_of(doomed.url))
                doomed.child = again.child
                await until(lambda: scene.is_up(doomed, True), lambda: "it is known to be up")
        await is_counted(scene, load, resume=True)
        assert await scene.total("replica_restarts_total", doomed.name, 'reason="refused"') == 2


async def test_frozen_and_thawed(tmp_path: Path) -> None:
    async with stage(tmp_path, **IMPATIENT) as scene:
        frozen = scene.replicas[1]
        async with Load(scene.url) as load:
            await load.streams()
            frozen.child.signal(signal.SIGSTOP)
            await until(lambda: scene.is_up(frozen, False), lambda: "it is known to be down")
            await until(lambda: scene.has_none(frozen), lambda: "its requests have gone elsewhere")
            frozen.child.signal(signal.SIGCONT)
            await until(lambda: scene.is_up(frozen, True), lambda: "it is known to be up")
            await load.more(20)
        await is_counted(scene, load, resume=True)
        down = [line for line in map(json.loads, scene.gateway.lines) if line["message"] == "replica down"]
        assert [(line["replica"], line["reason"]) for line in down] == [(frozen.name, "timeout")]


async def test_when_nobody_is_left_everybody_is_told(tmp_path: Path) -> None:
    async with stage(tmp_path) as scene:
        async with Load(scene.url) as load:
            await load.streams()
            await asyncio.gather(*(replica.is_to(REFUSES) for replica in scene.replicas))
            await load.more(100, REFUSED)
            await asyncio.gather(*(replica.is_to("well") for replica in scene.replicas))
            await load.more(30)
        clear = ("503 no_replica_available", "502 replica_failed", "The replica ")
        assert all(why.startswith(clear) for why in load.whys)
        assert await scene.total("requests_total", 'code="503"') == load.whys["503 no_replica_available"] > 0
        await scene.counts(load)
