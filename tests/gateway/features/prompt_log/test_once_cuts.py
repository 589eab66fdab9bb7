"""Clients that are cut at every place, over two gateways on one store, while replicas die: each token is generated once."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.prompt_log.kept import CHAT, FORMS, MESSAGES, RESPONSES, USER, asked, kept_in
from tests.gateway.features.prompt_log.test_once import both, cut, results, text_of
from tests.support.fakes import FakeReplica, FakeRequest
from tests.support.paths import ROOT
from tests.support.postgres import PASSWORD
from tests.support.tiers import gate

LARGEST = 1_400  # bytes of an answer with its head
PROMPT, COMPLETION = 100, 4  # tokens of each generation, as the engines count them


class CountingEngine:
    """An engine that counts its whole generations, by the text that is asked. dying: it resets each connection."""

    def __init__(self) -> None:
        self.generated = Counter[str]()
        self.dying = False

    async def answer(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if self.dying:
            raise ConnectionResetError
        path = request.path
        turns = request.json["input" if path == RESPONSES else "messages"]
        await both(path)(request, writer)
        await writer.drain()
        self.generated[turns[-1]["content"]] += 1


@gate("sqlite-60", reason="sixty cuts; the store's statements have tests with Postgres (test_once_store.py)")
@pytest.mark.parametrize("cuts", [60, 1_000])
async def test_each_token_is_generated_once(cuts: int, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    chance = random.Random(cuts)
    engines = [CountingEngine() for _ in range(3)]
    state, ledger = {"url": url.replace(f":{PASSWORD}@", "@")}, {"url": f"sqlite:///{tmp_path}/ledger.db"}
    config: dict[str, Any] = {"state": state, "ledger": ledger, "limits": {"drain_timeout_s": 5}}
    replicas = [FakeReplica([engine.answer]) for engine in engines]
    limit, done = asyncio.Semaphore(64), asyncio.Event()

    async def one(number: int, gateways: list[Running]) -> None:
        path, token, turns = chance.choice(list(FORMS)), f"cut-{number:06}", [{"role": "user", "content": f"turn {number}"}]
        async with limit:
            for _ in range(chance.randrange(1, 3)):
                size = chance.choice([0, chance.randrange(LARGEST), LARGEST])
                run, stream = chance.choice(gateways), chance.random() < 0.7
                await cut(run, path, token, turns, size, stream=stream)
            while True:
                run, stream = chance.choice(gateways), chance.random() < 0.5
                code, _, raw = await complete(run, path, token, turns, stream=stream)
                if code == 200:
                    assert text_of(path, raw, stream=stream) == "hello"
                    return
                assert code in (409, 502, 503), raw

    async def kill() -> None:
        while not done.is_set():
            engine = chance.choice(engines)
            engine.dying = True
            await asyncio.sleep(0.02)
            engine.dying = False
            await asyncio.sleep(0.05)

    async with (
        replicas[0] as a,
        replicas[1] as b,
        replicas[2] as c,
        running(a, b, c, **config) as first,
        running(a, b, c, **config) as second,
    ):
        killing = asyncio.create_task(kill())
        await asyncio.gather(*(one(number, [first, second]) for number in range(cuts)))
        done.set()
        await killing
        found = [results(await run.metrics()) for run in (first, second)]
    generated = sum((engine.generated for engine in engines), Counter[str]())
    del generated["ping"]  # the gateways' own checks of engines that are slow on a busy machine
    assert generated == Counter({f"turn {number}": 1 for number in range(cuts)})
    with sqlite3.connect(tmp_path / "ledger.db") as file:
        sums = "select count(*), sum(prompt), sum(completion) from warmroute_usage where status = 200 and metered = 1"
        counted = file.execute(sums).fetchone()
    assert counted == (cuts, cuts * PROMPT, cuts * COMPLETION), "the ledger has each generation once, with its tokens"
    assert not any(each.get("taken_over") for each in found), found


async def complete(run: Running, path: str, token: str, turns: list[Any], *, stream: bool) -> tuple[int, Any, bytes]:
    """An answer, or the status of an error; 503 for a stream that breaks off."""
    headers = {"Authorization": "Bearer k", "Prompt-Log": f'once="{token}"'}
    body = {"model": "m", "input" if path == RESPONSES else "messages": turns, "stream": stream}
    body |= {"max_tokens": 9} if path == MESSAGES else {}
    async with run.session.post(run.url + path, json=body, headers=headers) as answer:
        raw = await answer.read()
        broken = stream and answer.status == 200 and b"prompt_log" not in raw
        return (503 if broken else answer.status), answer.headers, raw


GATEWAY = """
import asyncio, sys
from pathlib import Path
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import kept_in

async def main():
    async with running(sys.argv[2], **kept_in(Path(sys.argv[1]))) as run:
        print(run.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_gateway_that_is_killed_leaves_its_tokens_to_another_one(tmp_path: Path) -> None:
    """It is generated twice at most: once by the dead gateway, once after 60 s by the other one."""
    hold, engine = asyncio.Event(), CountingEngine()

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await engine.answer(request, writer)

    async with FakeReplica([slow]) as replica, running(replica, **kept_in(tmp_path)) as other:
        arguments = sys.executable, "-c", GATEWAY, str(tmp_path), replica.url
        process = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout
            url = (await process.stdout.readline()).decode().strip()
            dead = Running(other.gateway, url, "", other.session)
            client = asyncio.create_task(complete(dead, CHAT, "c0ffee-0001", [USER], stream=True))
            await eventually(lambda: replica.requests)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await asyncio.gather(client, return_exceptions=True)
        await eventually(lambda: replica.gone)
        with sqlite3.connect(tmp_path / "state.db") as file:  # sixty seconds later
            assert file.execute("select alive_until from warmroute_once").fetchone()[0] > time.time()
            file.execute("update warmroute_once set alive_until = ?", [time.time() - 1])
        hold.set()
        code, told, _ = await asked(other, CHAT, 'once="c0ffee-0001"', [USER])
        assert (code, told["kept"], sum(engine.generated.values())) == (200, True, 1)
        assert results(await other.metrics()) == {"taken_over": 1}
