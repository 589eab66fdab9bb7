"""A gateway of two workers: they behave like one process; and one of them is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.hostile import FAULTS
from tests.chaos.load import ANSWERED, LOST, Load
from tests.chaos.stage import Stage, configured, stage, start_replica, until
from tests.chaos.test_replicas import assert_counted
from tests.chaos.wire import port_of

pytestmark = pytest.mark.processes

CLIENTS = 30


async def test_faults_of_replicas_are_hidden_by_both(tmp_path: Path) -> None:
    schedule = random.Random(7).sample(list(FAULTS), 5)
    async with stage(tmp_path, workers=2) as scene:
        async with Load(scene.url) as load:
            for behaviour in schedule:
                await scene.inject(scene.replicas[1], behaviour)
        await assert_counted(scene, load, resume=True)
        assert await scene.total("workers") == 2


async def test_a_killed_replica_is_one_restart_for_both(tmp_path: Path) -> None:
    async with stage(tmp_path, simulated=True, workers=2) as scene:
        doomed = scene.replicas[1]
        async with Load(scene.url) as load:
            await load.streams()
            doomed.child.signal(signal.SIGKILL)
            await until(lambda: scene.is_up(doomed, False), lambda: "it is known to be down")
            await load.more(20)
            again = await start_replica(tmp_path / "again.log", scene.ends, simulated=True, port=port_of(doomed.url))
            doomed.child = again.child
            await until(lambda: scene.is_up(doomed, True), lambda: "both know it to be up")
        await assert_counted(scene, load, resume=True)
        assert await scene.total("replica_restarts_total", doomed.name) == 1


async def test_a_killed_worker_takes_only_its_own_requests_with_it(tmp_path: Path) -> None:
    async with stage(tmp_path, workers=2) as scene:

        async def counted() -> float:
            return await scene.total("requests_total", 'code="200"')

        async with Load(scene.url, count=CLIENTS) as load:
            for number in (1, 2):
                # Only once both accept: else one has all connections, and its end is the end of all.
                await until(partial(accepts, scene, 2), lambda: "both accept connections")
                await load.more(2 * CLIENTS)
                await load.streams()
                doomed, survivor = scene.pids[1:]
                before, shown = load.fates[LOST], await counted()
                os.kill(doomed, signal.SIGKILL)
                await until(partial(replaced, scene, doomed), lambda: "there are two again")
                assert survivor in scene.pids
                assert await counted() >= shown, "a counter never goes back"
                await load.more(2 * CLIENTS)  # each client has asked since, and again
                gone = load.fates[LOST]
                await load.more(2 * CLIENTS)
                assert load.fates[LOST] == gone, "nothing but what ran there"
                assert gone - before < CLIENTS
                assert await scene.total("worker_restarts_total") == number
        broken = ("ConnectionResetError", "IncompleteReadError", "BrokenPipeError")
        assert all(any(kind in why for kind in broken) for why in load.lost), load.lost
        assert load.sent == load.fates[ANSWERED] + load.fates[LOST]

        async def idle() -> bool:
            names = ("replica_inflight", "pool_inflight", "pool_slots_taken")
            return not sum([await scene.total(name) for name in names])

        await until(idle, lambda: "no lease is open")
        shown = await counted()
        assert 0 < shown <= load.fates[ANSWERED], "without what a killed worker had counted since its last report"
        os.kill(doomed := scene.pids[1], signal.SIGKILL)
        await until(partial(replaced, scene, doomed), lambda: "there are two again")
        await until(partial(accepts, scene, 2), lambda: "both accept connections")
        assert await counted() == shown, "all that was shown"
        await scene.assert_sockets_closed()


async def accepts(scene: Stage, count: int) -> bool:
    return await scene.total("workers") == count


async def replaced(scene: Stage, doomed: int) -> bool:
    return doomed not in scene.pids and len(scene.pids) == 3


async def test_both_reload_and_no_request_is_affected(tmp_path: Path) -> None:
    async with stage(tmp_path, workers=2) as scene:
        a, b, c = scene.replicas
        fleets = [(b, c), (a,), (c, b)]
        async with Load(scene.url) as load:
            for number, fleet in enumerate(fleets, 1):
                await load.streams()
                scene.config.write_text(configured(fleet, workers=2, timeouts={"idle_s": 100 + number}), "utf-8")
                scene.gateway.signal(signal.SIGHUP)

                async def taken(count: int = number) -> bool:
                    return await scene.total("config_reloads_total", 'result="good"') == count

                await until(taken, lambda: "it is reloaded")
                await asyncio.gather(load.more(10), load.streams())
        assert load.sent == load.fates[ANSWERED]
        assert await scene.total("retries_total") == await scene.total("broken_responses_total") == 0
        await scene.assert_consistent(load)
