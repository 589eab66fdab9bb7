"""Findings about replicas, from their answers to what follows from them, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest

from gateway.features.audit.auditor import Auditor
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, FakeRequest, answers, streams

SIZE = 16_000  # bytes of a prompt


def body(number: int) -> dict[str, Any]:
    text = f"{number:04} " * (SIZE // 5)
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


async def ask(run: Running, number: int, *, stream: bool) -> None:
    async with run.session.post(f"{run.url}/v1/chat/completions", json={**body(number), "stream": stream}) as answer:
        await answer.read()


async def ask_from(address: str, run: Running, request: dict[str, Any]) -> None:
    """A request from another address of this machine."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{run.url}/v1/chat/completions", json=request) as answer,
    ):
        await answer.read()


async def replica_of(run: Running, number: int) -> str:
    return (await run.post(body(number)))[1]["X-Warmroute-Replica"]


async def findings(run: Running) -> dict[str, list[str]]:
    """In the rows and in the metrics, which agree."""
    rows = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
    found = {row["name"]: row["findings"] for row in rows}
    shown = [name for name, value in (await run.metrics()).items() if name.startswith("warmroute_replica_finding") and value]
    assert len(shown) == sum(map(len, found.values()))
    return found


async def test_impossible_counts_are_a_finding_and_are_not_billed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.audit")
    liar = FakeReplica([answers(prompt=90_000, cached=0, completion=5)])
    prices = {"m": {"input": 1.0, "output": 1.0, "cached_input": 0.1}}
    async with liar, running(liar, prices=prices) as run:
        costs, auditor, scales = [], run.gateway[Auditor], run.gateway.router.scales
        for number in range(12):
            _, headers, _ = await run.post(body(number))
            costs.append((float(headers["X-Warmroute-Cost-Usd"]), headers.get("X-Warmroute-Cost-Estimated", "")))
            auditor.judge()
        assert await findings(run) == {liar.name: ["prompt_excess"]}
        assert costs[0][1] == "tokens"
        assert costs[0][0] < 0.01
        assert costs[-1][0] < 0.01
        assert costs[-1][1] == "tokens"
        known = scales.units_per_token("m")
        for number in range(12, 24):
            await run.post(body(number))
        assert scales.units_per_token("m") == known, "nothing is learned from it"
        liar.script = (answers(prompt=4000, cached=0, completion=5),)
        for number in range(60):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await run.post(body(number))
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: []}
    said = [record.message for record in caplog.records if record.name == "warmroute.audit"]
    assert said == ["a replica's answers contradict each other", "a finding of the audit has ended"]


async def test_a_single_replica_that_counts_nine_times_too_much_is_found() -> None:
    """Its prompts have 4 bytes a token, so 2.25 tokens a byte are impossible. Neither is an estimate learned from them."""
    liar = FakeReplica([answers(prompt=9 * SIZE // 4, cached=0, completion=5)])
    async with liar, running(liar, prices={"m": {"input": 1.0, "output": 1.0}}) as run:
        for number in range(12):
            await run.post(body(number))
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: ["prompt_excess"]}
        _, headers, _ = await run.post(body(12))
        assert headers["X-Warmroute-Cost-Estimated"] == "tokens"
        assert float(headers["X-Warmroute-Cost-Usd"]) < 0.005
        assert run.gateway.router.scales.units_per_token("m") == 4.0


async def test_fields_that_only_some_templates_print_are_bytes_of_a_prompt() -> None:
    """Those of Command-R print `documents`: the count is right, and paid."""
    documents = [{"title": f"{number}", "snippet": "word " * 100} for number in range(100)]
    honest = FakeReplica([answers(prompt=12_000, cached=0, completion=5)])
    async with honest, running(honest, prices={"m": {"input": 1.0, "output": 1.0}}) as run:
        question = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "documents": documents}
        for _ in range(12):
            _, headers, _ = await run.post(question)
            assert "X-Warmroute-Cost-Estimated" not in headers
        run.gateway[Auditor].judge()
        assert await findings(run) == {honest.name: []}


async def test_made_up_tenants_are_one_client() -> None:
    async def counts(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        odd = request.headers["x-tenant-id"] != "honest"
        await answers(prompt=90_000 if odd else 4000, cached=0, completion=5)(request, writer)

    async with FakeReplica([counts]) as replica, running(replica) as run:
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=elsewhere) as other:
            for number in range(3):
                json_, tenant = body(number), {"X-Tenant-Id": "honest"}
                async with other.post(f"{run.url}/v1/chat/completions", json=json_, headers=tenant) as answer:
                    assert answer.status == 200
        for number in range(12):
            assert (await run.post(body(number), headers={"X-Tenant-Id": f"t{number}"}))[0] == 200
        run.gateway[Auditor].judge()
        assert await findings(run) == {replica.name: []}


async def test_cached_tokens_of_prompts_that_were_never_sent_there_are_not_believed() -> None:
    async def lies(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await answers(prompt=4000, cached=3990, completion=5)(request, writer)

    told = answers(prompt=4000, cached=0, completion=5)
    async with FakeReplica([lies]) as liar, FakeReplica([told]) as honest, running(liar, honest) as run:
        for number in range(60):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await run.post(body(number))
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: [], honest.name: []}, "it may have held them before the gateway began"
        run.gateway[Auditor].complete_from = 0.0
        for number in range(100, 160):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await run.post(body(number))
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: ["cached_unsent"], honest.name: []}
        state = run.gateway.fleet.named(liar.name)
        assert state
        assert state.miscounts_cached
        before = await run.metrics()
        for number in range(200, 220):
            await run.post(body(number))
        after = await run.metrics()
        hit = f'warmroute_prompt_tokens_total{{model="m",replica="{liar.name}",cache="hit"}}'
        assert after.get(hit, 0) == before.get(hit, 0), "they are estimated"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_answers_with_nothing_at_once_gets_little_work(stream: bool) -> None:
    nothing = streams("", prompt=4000, cached=3990) if stream else answers("", prompt=4000, completion=0)
    some = streams("a", "b", prompt=4000) if stream else answers(prompt=4000)
    async with FakeReplica([nothing]) as empty, FakeReplica([some]) as honest, running(empty, honest) as run:
        for number in range(40):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await ask(run, number, stream=stream)
        run.gateway[Auditor].judge()
        assert (await findings(run))[empty.name] == ["answers_empty"]
        assert run.gateway.router.trie.held()[empty.name] == 0, "it has computed nothing"
        before = len(honest.requests)
        for number in range(100, 140):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await ask(run, number, stream=stream)
        assert len(honest.requests) - before >= 30
        assert run.gateway.router.ledger.of(empty.name).rate.tokens == 0


async def test_clients_whose_answers_are_empty_by_their_own_choice_move_nothing_of_others() -> None:
    """By a stop sequence, say: two addresses have more than half of a replica's answers."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        told = answers("", prompt=4000, cached=0, completion=0) if "stop" in request.json else answers(prompt=4000, cached=0)
        await told(request, writer)

    async with FakeReplica([behave]) as one, FakeReplica([behave]) as other, running(one, other) as run:
        for number in range(30):
            await run.post(body(number))
        await run.post(body(1000))  # the replica that has it is sent the others
        trie = run.gateway.router.trie
        held = dict(trie.held())
        for number in range(60):
            run.gateway[Auditor].sweep(run.gateway.clock())
            await ask_from(f"127.0.0.{2 + number % 2}", run, body(1000) | {"stop": ["x"]})
        run.gateway[Auditor].judge()
        assert ["answers_empty"] in (await findings(run)).values()
        assert trie.held() == held
        assert trie.evicted["purge"] == 0


async def test_a_conversation_leaves_a_replica_that_has_begun_to_answer_with_nothing() -> None:
    broken = False

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        told = answers("", prompt=4000, completion=0) if broken else answers(prompt=4000)
        await told(request, writer)

    async with FakeReplica([behave]) as one, FakeReplica([answers(prompt=4000)]) as other, running(one, other) as run:
        kept = [number for number in range(40) if await replica_of(run, number) == one.name]
        assert len(kept) > 10
        broken = True
        for number in kept * 3:
            run.gateway[Auditor].sweep(run.gateway.clock())
            await run.post(body(number))
            run.gateway[Auditor].judge()
        assert (await findings(run))[one.name] == ["answers_empty"]
        assert one.name not in [await replica_of(run, number) for number in kept]


async def test_what_a_replica_did_before_its_restart_is_forgotten() -> None:
    async with FakeReplica([answers(prompt=90_000, completion=5)]) as liar, running(liar) as run:
        for number in range(12):
            await run.post(body(number))
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: ["prompt_excess"]}
        state = run.gateway.fleet.named(liar.name)
        assert state
        state.up_since = run.gateway.clock()
        run.gateway[Auditor].judge()
        assert await findings(run) == {liar.name: []}
