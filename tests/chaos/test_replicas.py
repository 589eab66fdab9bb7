"""Failures of replicas under load, one after the other; the first replica is always healthy."""

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
from tests.chaos.stage import Stage, stage, start_replica, until
from tests.chaos.wire import port_of

pytestmark = pytest.mark.processes

IMPATIENT: dict[str, Any] = {"timeouts": {"first_byte_s": 8, "idle_s": 3}, "health": {"interval_s": 0.5, "timeout_s": 1}}


async def assert_counted(scene: Stage, load: Load, *, resume: bool) -> None:
    """No request is lost or refused; errors appear only in broken streams without resume_streams."""
    broken, cut = await scene.total("broken_responses_total"), load.fates[CUT]
    assert broken > 0, "no stream was broken off: this shows nothing"
    assert load.sent == load.fates[ANSWERED] + cut
    if resume:
        assert cut == 0
        assert await scene.total("resumed_streams_total", 'result="good"') == await scene.total("resumed_streams_total") > 0
    else:
        assert cut > 0
        assert all("failed while it answered" in why or why == "out of memory" for why in load.reasons)
    await scene.assert_consistent(load)


@pytest.mark.parametrize("resume", [True, False])
async def test_all_faults_one_after_the_other(tmp_path: Path, resume: bool) -> None:
    schedule = list(FAULTS)
    random.Random(4).shuffle(schedule)
    async with stage(tmp_path, resume=resume) as scene:
        async with Load(scene.url) as load:
            for behaviour, replica in zip(schedule, itertools.cycle(scene.replicas[1:]), strict=False):
                await scene.inject(replica, behaviour)
        await assert_counted(scene, load, resume=resume)
        assert await scene.total("retries_total") > 0
        # A stream that broke off between its last word and its usage has unknown counts.
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
                again = await start_replica(tmp_path / f"{life}.log", scene.ends, simulated=True, port=port_of(doomed.url))
                doomed.child = again.child
                await until(lambda: scene.is_up(doomed, True), lambda: "it is known to be up")
        await assert_counted(scene, load, resume=True)
        assert await scene.total("replica_restarts_total", doomed.name, 'reason="refused"') == 2


async def test_frozen_and_thawed(tmp_path: Path) -> None:
    async with stage(tmp_path, **IMPATIENT) as scene:
        frozen = scene.replicas[1]
        async with Load(scene.url) as load:
            await load.streams()
            frozen.child.signal(signal.SIGSTOP)
            await until(lambda: scene.is_up(frozen, False), lambda: "it is known to be down")
            await until(lambda: scene.is_idle_at(frozen), lambda: "its requests moved to other replicas")
            frozen.child.signal(signal.SIGCONT)
            await until(lambda: scene.is_up(frozen, True), lambda: "it is known to be up")
            await load.more(20)
        await assert_counted(scene, load, resume=True)
        down = [line for line in map(json.loads, scene.gateway.lines) if line["message"] == "replica down"]
        assert [(line["replica"], line["reason"]) for line in down] == [(frozen.name, "timeout")]


async def test_requests_without_any_replica_get_clear_errors(tmp_path: Path) -> None:
    async with stage(tmp_path) as scene:
        async with Load(scene.url) as load:
            await load.streams()
            await asyncio.gather(*(replica.command(REFUSES) for replica in scene.replicas))
            await load.more(100, REFUSED)
            await asyncio.gather(*(replica.command("healthy") for replica in scene.replicas))
            await load.more(30)
        clear = ("503 no_replica_available", "502 replica_failed", "The replica ")
        assert all(why.startswith(clear) for why in load.reasons)
        assert await scene.total("requests_total", 'code="503"') == load.reasons["503 no_replica_available"] > 0
        await scene.assert_consistent(load)
