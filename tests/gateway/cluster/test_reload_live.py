"""Reloading the real process: signals, a changed file, requests that run all the while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.commands.demo.processes import Process, admin_url, listening_url, log_line
from tests.gateway.conftest import BODY, eventually
from tests.support.configmap import ConfigMap
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, streams


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it holds; it asks another process, which has no event for it."""
    async with asyncio.timeout(40):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def text_of(*replicas: FakeReplica, **more: Any) -> str:
    base = {"pools": [{"replicas": [replica.url for replica in replicas]}], "limits": {"drain_accept_s": 0}}
    return json.dumps({**base, **more})  # JSON is YAML


@dataclass(slots=True)
class Live:
    process: Process
    url: str
    admin_url: str
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    def hang_up(self) -> None:
        os.kill(self.process.pid, signal.SIGHUP)

    async def logged(self, find: Callable[[dict[str, Any]], Any]) -> Any:
        """The first log line for which `find` returns something, as what it returns."""
        return await asyncio.to_thread(self.process.wait_for, lambda line: find(log_line(line)), 30)

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)

    async def reloads(self, result: str, count: int) -> None:
        """Wait until `count` reloads have ended with this result."""

        async def done() -> bool:
            return await self.metric(f'warmroute_config_reloads_total{{result="{result}"}}') >= count

        await until(done)

    async def only(self, *replicas: FakeReplica) -> None:
        """Wait until nobody else is left."""

        async def alone() -> bool:
            return set(await self.replicas()) == {replica.name for replica in replicas}

        await until(alone)

    async def replicas(self) -> dict[str, dict[str, Any]]:
        async with self.session.get(f"{self.admin_url}/warmroute/replicas") as answer:
            return {row["name"]: row for row in (await answer.json())["replicas"]}

    async def post(self) -> tuple[int, str]:
        async with self.session.post(f"{self.url}/v1/chat/completions", json=BODY) as answer:
            await answer.read()
            return answer.status, answer.headers.get("X-Warmroute-Replica", "")


@contextlib.asynccontextmanager
async def live(*flags: str) -> AsyncIterator[Live]:
    process = Process("gateway", ["serve", "--port", "0", *flags])
    try:
        url = await asyncio.to_thread(process.wait_for, listening_url, 30)
        admin = await asyncio.to_thread(process.wait_for, admin_url)
        async with (
            aiohttp.ClientSession() as session,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        ):
            yield Live(process, url, admin, session, client)
    finally:
        await asyncio.to_thread(process.stop)


@pytest.fixture
def config(tmp_path: Path) -> ConfigMap:
    return ConfigMap(tmp_path)


@pytest.mark.parametrize("by", ["SIGHUP", "the file alone"])
async def test_a_stream_goes_on_while_its_replica_leaves(config: ConfigMap, by: str) -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as old, FakeReplica() as new:
        config.swap(text_of(old))
        async with live("--config", str(config.path)) as gateway:
            parts = aiter(await gateway.client.chat.completions.create(**BODY, stream=True))
            assert (await anext(parts)).choices[0].delta.content == "a"
            config.swap(text_of(new))
            if by == "SIGHUP":
                gateway.hang_up()
            line = await gateway.logged(lambda line: line if line.get("message") == "configuration reloaded" else None)
            names = sorted([f"{old.name} (gone)", f"{new.name} (new)"])
            assert sorted(line["changed"]) == [f"pools.default.replicas.{name}" for name in names]
            assert await gateway.post() == (200, new.name)
            row = (await gateway.replicas())[old.name]
            assert (row["leaving"], row["inflight"]) == (True, 1)
            go_on.set()
            assert [part.choices[0].delta.content async for part in parts] == ["b"]
            await gateway.only(new)
            assert len(old.requests) == 1


async def test_an_invalid_file_changes_nothing_and_the_log_has_the_reason(config: ConfigMap) -> None:
    async with FakeReplica() as one:
        config.swap(text_of(one))
        async with live("--config", str(config.path)) as gateway:
            config.swap(text_of(one, routing={"polcy": "cost"}))
            error = await gateway.logged(lambda line: line.get("error") if "not reloaded" in line.get("message", "") else None)
            assert error == f"{config.path}:1: routing.polcy: unknown key; did you mean 'policy'?"
            assert await gateway.metric('warmroute_config_reloads_total{result="invalid"}') == 1
            assert await gateway.post() == (200, one.name)
            config.swap(text_of(one))
            gateway.hang_up()
            await gateway.reloads("unchanged", 1)


async def test_flags_win_over_a_reloaded_file_too(config: ConfigMap) -> None:
    async with FakeReplica() as one, FakeReplica() as two:
        config.swap(text_of(two))
        flags = ("--config", str(config.path), "--replica", one.url, "--policy", "least_loaded")
        async with live(*flags) as gateway:
            config.swap(text_of(two, routing={"policy": "sticky", "ttl_s": 5}, listen="127.0.0.1:1"))
            gateway.hang_up()
            await gateway.reloads("good", 1)
            assert await gateway.post() == (200, one.name)
            assert await gateway.metric('warmroute_routing_decisions_total{policy="least_loaded",reason="cold"}') == 1


async def test_a_signal_without_a_file_changes_nothing() -> None:
    async with FakeReplica() as one, live("--replica", one.url) as gateway:
        gateway.hang_up()
        await gateway.reloads("unchanged", 1)
        assert await gateway.post() == (200, one.name)


def either() -> Behaviour:
    """A stream for who wants one, else a plain answer."""
    plain, stream = answers(), streams(*"abcdef")

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (stream if request.json.get("stream") else plain)(request, writer)

    return behave


async def test_under_load_no_request_notices_a_reload(config: ConfigMap) -> None:
    async with FakeReplica([either()]) as a, FakeReplica([either()]) as b, FakeReplica([either()]) as c:
        config.swap(text_of(a, b))
        async with live("--config", str(config.path)) as gateway:
            sent, good, wrong, over = 0, 0, list[str](), asyncio.Event()

            async def ask(streaming: bool) -> None:
                nonlocal sent, good
                while not over.is_set():
                    sent += 1
                    try:
                        answer: Any = await gateway.client.chat.completions.create(**BODY, stream=streaming)
                        if streaming:
                            text = "".join([part.choices[0].delta.content or "" async for part in answer if part.choices])
                            assert text == "abcdef"
                        good += 1
                    except (openai.APIError, AssertionError) as error:
                        wrong.append(repr(error))

            asking = [asyncio.create_task(ask(number % 2 == 0)) for number in range(8)]
            for number, fleet in enumerate([(b, c), (c,), (a,), (a, b, c), (b,), (c, a)]):
                config.swap(text_of(*fleet, routing={"ttl_s": 100 + number}))
                gateway.hang_up()
                await gateway.reloads("good", number + 1)
                target = good + 30
                await eventually(lambda target=target: good >= target)  # type: ignore[misc]
            over.set()
            await asyncio.gather(*asking)
            assert wrong == []
            assert sent == good == sum(len(replica.requests) for replica in (a, b, c))
            assert min(len(replica.requests) for replica in (a, b, c)) > 0
            assert await gateway.metric("warmroute_retries_total") == 0
            await gateway.only(c, a)
