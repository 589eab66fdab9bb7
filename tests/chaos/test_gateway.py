"""The gateway itself is stopped, frozen, or reloaded, under load."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.chaos.hostile import MODEL
from tests.chaos.load import ANSWERED, CUT, Fate, Load, clients, questions
from tests.chaos.stage import configured, stage, until

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_gateway_stopped_under_load_answers_accepted_requests(tmp_path: Path, workers: int) -> None:
    async with stage(tmp_path, workers=workers) as scene:
        async with Load(scene.url) as load:
            await load.more(60)
            scene.gateway.signal(signal.SIGTERM)
            await load.over()
        assert load.lost == []
        assert load.sent == load.fates[ANSWERED]
        assert await scene.gateway.exit_status() == 0
        await scene.assert_log_clean(load.sent)


async def test_requests_in_the_kernel_at_sigterm_are_answered(tmp_path: Path) -> None:
    """Requests on connections that are open, and whole connections."""
    async with stage(tmp_path) as scene:
        asking = questions(1)
        with clients(scene.url, 10, keep=True) as known, clients(scene.url, 20, keep=False) as new:
            assert await asyncio.gather(*(client.ask(next(asking)) for client in known)) == [Fate(ANSWERED)] * 10
            scene.gateway.signal(signal.SIGSTOP)
            asked = [(client, next(asking)) for client in (*known, *new)]
            for client, question in asked:
                await client.connect()
                await client.send(question)
            scene.gateway.signal(signal.SIGTERM)
            scene.gateway.signal(signal.SIGCONT)
            fates = await asyncio.gather(*(client.receive(question) for client, question in asked), return_exceptions=True)
        assert fates == [Fate(ANSWERED)] * 30
        assert await scene.gateway.exit_status() == 0
        await scene.assert_log_clean(40)


async def test_streams_beyond_the_drain_timeout_end_with_an_error_event(tmp_path: Path) -> None:
    async with stage(tmp_path, limits={"drain_timeout_s": 1}) as scene:
        with clients(scene.url, 10, keep=True) as crowd:
            asking = questions(1, endless=True)
            asked = [asyncio.create_task(client.ask(next(asking))) for client in crowd]
            await asyncio.gather(*(client.started.wait() for client in crowd))
            scene.gateway.signal(signal.SIGTERM)
            fates = await asyncio.gather(*asked)
        assert fates == [Fate(CUT, "The gateway is shutting down. Retry the request.")] * 10
        assert await scene.gateway.exit_status() == 0
        await scene.assert_log_clean(10)


async def test_repeated_reloads_under_load(tmp_path: Path) -> None:
    """Replicas leave and come back, prices and timeouts change: no request is affected."""
    async with stage(tmp_path) as scene:
        a, b, c = scene.replicas
        fleets = [(b, c), (c,), (a,), (a, b, c), (b,), (c, a)]
        async with Load(scene.url) as load:
            for number, fleet in enumerate(fleets, 1):
                await load.streams()
                prices = {MODEL: {"input": number, "output": number}}
                scene.config.write_text(configured(fleet, prices=prices, timeouts={"idle_s": 100 + number}), "utf-8")
                scene.gateway.signal(signal.SIGHUP)

                async def taken(count: int = number) -> bool:
                    return await scene.total("config_reloads_total", 'result="good"') == count

                await until(taken, lambda: "it is reloaded")
                await load.more(10)
        assert load.sent == load.fates[ANSWERED]
        assert await scene.total("retries_total") == await scene.total("broken_responses_total") == 0
        assert await scene.total("config_reloads_total") == len(fleets)
        assert await scene.total("cost_usd_total") > 0

        async def only_the_last() -> bool:
            return {key for key in await scene.metrics() if "replica_up{" in key} == {
                f'warmroute_replica_up{{replica="{replica.name}"}}' for replica in fleets[-1]
            }

        await until(only_the_last, lambda: "only the last fleet is left")
        await scene.assert_consistent(load)
