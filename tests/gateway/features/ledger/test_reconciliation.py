"""Three books of the same traffic: the ledger, the counters, and what clients saw. They agree to the token and the picodollar.

Two gateways of two workers each, with one Postgres, keys of two tenants, and replicas that answer in all dialects, break off
before and after the first byte, refuse, report nonsense; clients leave in mid-stream and send what is not to be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.measure.ports import free_port
from gateway.accounting.money import DOLLAR
from gateway.features.keys.record import KeySettings
from gateway.features.keys.store import open_key_store
from gateway.features.ledger.sums import MONEY
from tests.chaos.stage import Child, until
from tests.clients.sdk.test_invoices import message, message_stream, message_usage, plain_response
from tests.gateway.features.ledger.conftest import stored
from tests.gateway.features.ledger.test_store import check
from tests.support.fakes import STREAM_HEAD as HEAD
from tests.support.fakes import (
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_in_plain_body,
    event,
    models,
    status,
    streams,
)
from tests.support.postgres import PASSWORD, postgres
from tests.support.tiers import gate

LANES: Final = 24  # of each gateway
M: Final = {"input": 3.0, "cached_input": 0.3, "cache_write": 3.75, "cache_write_1h": 6.0, "output": 15.0}
PRICES: Final = {"m": M, "n": {**M, "tiers": [{"above": 500, "input": 6.0, "output": 22.5}]}}
ABSURD: Final = 10**15
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


async def waits_after_the_first_text(_request: FakeRequest, writer: Any) -> None:
    writer.write(HEAD + chunk(event("hello")))
    await writer.drain()
    await asyncio.get_running_loop().create_future()


def once(first: Behaviour, then: Behaviour) -> Behaviour:
    """first: of each prompt, at the replica that has it first."""
    seen = set[bytes]()

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        known = request.body in seen
        seen.add(request.body)
        await (then if known else first)(request, writer)

    return behave


@dataclass(frozen=True)
class Case:
    """What a client sends, and what a replica does then. leaves: after the first text. usage: the client reads it."""

    behaviour: Behaviour | None
    path: str = CHAT
    stream: bool = False
    leaves: bool = False
    usage: bool = True
    expected: tuple[int, ...] = (200,)
    model: str = ""


CASES: Final = {
    "plain": Case(answers(prompt=1000, completion=40, cached=900)),
    "uncached": Case(answers(prompt=400, completion=3, cached=0)),
    "unreported": Case(answers(prompt=700, completion=5)),
    "completion": Case(answers(prompt=64, completion=8, cached=48), "/v1/completions"),
    "stream": Case(streams("a", "b", prompt=500, completion=2, cached=480), stream=True),
    "cut": Case(streams("a", "b", die=True), stream=True, usage=False),
    "left": Case(waits_after_the_first_text, stream=True, leaves=True, usage=False),
    "retried": Case(once(dies, answers(prompt=300, completion=7, cached=100))),
    "failed once": Case(once(status(503), answers(prompt=301, completion=6, cached=200))),
    "half": Case(dies_in_plain_body, usage=False, expected=(200, 502)),
    "refused": Case(status(400), usage=False, expected=(400,)),
    "absurd": Case(answers(prompt=ABSURD, completion=ABSURD, cached=ABSURD), usage=False),
    "message": Case(message(50, 950, 300, 200, 20), MESSAGES),
    "messages": Case(message_stream(message_usage(2, 300, 20, 100, 1), {"output_tokens": 40}), MESSAGES, stream=True),
    "response": Case(plain_response("completed", 1100, 64, 512, 5), RESPONSES),
    "unknown": Case(None, usage=False, expected=(404,), model="nobody's"),
}
WEIGHTS: Final = [12, 6, 6, 6, 12, 4, 3, 4, 4, 2, 3, 2, 8, 8, 6, 2]


async def by_case(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    found = re.search(rb"case (.+?)\.", request.body)
    assert found
    behaviour = CASES[found[1].decode()].behaviour
    assert behaviour
    await behaviour(request, writer)


@dataclass
class Seen:
    """By a client. counts: prompt, cached, written, completion. cost: USD, as the header has it."""

    case: str
    tenant: str
    status: int
    counts: tuple[int, int, int, int] | None = None
    cost: str = ""


@dataclass
class Clients:
    """keys: by tenant."""

    urls: list[str]
    keys: dict[str, str]
    seen: dict[str, Seen] = field(default_factory=dict)

    async def run(self, requests: int) -> None:
        chance = random.Random(18)
        names, tenants = list(CASES), list(self.keys)
        todo = iter(
            [
                (number, chance.choices(names, WEIGHTS)[0], chance.choice(tenants), chance.choice("mn"))
                for number in range(requests)
            ]
        )
        async with asyncio.timeout(240):
            await asyncio.gather(*(self._lane(url, todo) for url in self.urls for _ in range(LANES)))

    async def _lane(self, url: str, todo: Iterator[tuple[int, str, str, str]]) -> None:
        async with aiohttp.ClientSession() as session:
            for number, name, tenant, model in todo:
                await self._ask(session, url, f"q-{number}", name, tenant, model)

    async def _ask(self, session: aiohttp.ClientSession, url: str, id_: str, name: str, tenant: str, model: str) -> None:
        case = CASES[name]
        headers = {"x-request-id": id_, "Authorization": f"Bearer {self.keys[tenant]}"}
        body = body_of(case.path, f"case {name}. {id_} " + "hello " * 20)
        body |= {"model": case.model or model, "stream": case.stream}
        if case.stream and case.path == CHAT:
            body["stream_options"] = {"include_usage": True}
        async with session.post(url + case.path, json=body, headers=headers) as answer:
            seen = self.seen[id_] = Seen(name, tenant, answer.status, cost=answer.headers.get("x-warmroute-cost-usd", ""))
            if case.leaves and answer.status == 200:
                await answer.content.readuntil(b"\n\n")
                return
            with contextlib.suppress(aiohttp.ClientError):
                raw = await answer.read()
                if case.usage and answer.status == 200:
                    seen.counts = counts_of(raw, stream=case.stream)


def body_of(path: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        CHAT: {"messages": messages},
        MESSAGES: {"messages": messages, "max_tokens": 50},
        RESPONSES: {"input": text, "store": False},
        "/v1/completions": {"prompt": text},
    }[path]


def counts_of(raw: bytes, *, stream: bool) -> tuple[int, int, int, int]:
    """As a client reads them: prompt, cached, written, completion. Of a stream, the last of each name."""
    usage = dict[str, Any]()
    for line in raw.split(b"\n") if stream else [b"data: " + raw]:
        if line.startswith(b"data: {"):
            value = json.loads(line[6:])
            for found in (value.get("usage"), (value.get("message") or {}).get("usage")):
                usage |= found or {}
    if "prompt_tokens" in usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", -1)
        return usage["prompt_tokens"], cached, 0, usage["completion_tokens"]
    if "input_tokens_details" in usage:
        details = usage["input_tokens_details"]
        return usage["input_tokens"], details["cached_tokens"], details["cache_write_tokens"], usage["output_tokens"]
    cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached + written, cached, written, usage["output_tokens"]


@contextlib.asynccontextmanager
async def gateway(folder: Path, name: str, url: str, replicas: list[FakeReplica]) -> AsyncIterator[tuple[str, str]]:
    """(API, metrics) of a gateway of two workers, which ends well."""
    port, metrics = free_port(), free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "log_level": "warning",
        "admin_listen": "off",
        "metrics_listen": f"127.0.0.1:{metrics}",
        "state": {"url": "off"},
        "pools": [{"replicas": [replica.url for replica in replicas]}],
        "prices": PRICES,
        "workers": 2,
        "snapshot": {"file": "off"},
        "ledger": {"url": url},
        "keys": {"url": "ledger"},
        "routing": {"expose_headers": "all"},
        "limits": {"drain_accept_s": 0, "drain_timeout_s": 5},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    with contextlib.ExitStack() as ends:
        child = Child(folder / f"{name}.log", ends, "-m", "gateway.commands.cli", "serve", "--config", str(file))

        async def ready() -> bool:
            assert child.process.poll() is None, child.lines
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/ready") as answer:
                    return answer.status == 200
            return False

        await until(ready, lambda: child.lines)
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}"
        child.signal(signal.SIGTERM)
        assert await child.exit_status() == 0, child.lines
        assert not any("cannot be written" in line or "Traceback" in line for line in child.lines), child.lines


async def counters(urls: list[str], ended: int) -> Counter[tuple[str, ...]]:
    """The sum over the gateways, once so many requests have ended: (name, label values by name)."""

    async def scraped() -> Counter[tuple[str, ...]] | None:
        total = Counter[tuple[str, ...]]()
        async with aiohttp.ClientSession() as session:
            for url in urls:
                async with session.get(f"{url}/metrics") as answer:
                    for family in text_string_to_metric_families(await answer.text()):
                        for sample in family.samples:
                            kinds = sorted(sample.labels.items())
                            total[sample.name, *(value for name, value in kinds if name != "replica")] += sample.value
        requests = sum(value for (name, *_), value in total.items() if name == "warmroute_requests_total")
        return total if requests >= ended else None

    return await until(scraped, lambda: "all requests have ended")  # type: ignore[return-value]


def one(total: Counter[tuple[str, ...]], name: str, *labels: str) -> float:
    """Of all series of this name with these label values."""
    return sum(value for (found, *values), value in total.items() if found == name and set(labels) <= set(values))


def require_what_clients_saw(rows: list[dict[str, Any]], seen: dict[str, Seen]) -> None:
    by_id = {row["request"]: row for row in rows}
    assert len(by_id) == len(rows), "a request is there twice"
    assert by_id.keys() == seen.keys(), "a request is missing, or was never sent"
    for id_, what in seen.items():
        row, case = by_id[id_], CASES[what.case]
        assert what.status in case.expected, (id_, what)
        assert (row["tenant"], row["status"]) == (what.tenant, 499 if case.leaves else what.status), (id_, what, row)
        if case.usage:
            assert what.counts is not None, (id_, what)
            prompt, cached, written, completion = what.counts
            assert (row["prompt"], row["written"], row["completion"]) == (prompt, written, completion), (id_, what, row)
            if cached >= 0:
                assert (row["cached"], row["estimated"]) == (cached, ""), (id_, what, row)
            if not case.stream:
                cost = sum(row[kind] for kind in MONEY if kind != "saved")
                assert round(float(what.cost) * DOLLAR) == cost, (id_, what, row)
        elif what.status != 200:
            assert sum(row[kind] for kind in MONEY) == 0 or what.case == "half", (id_, what, row)
        else:
            assert row["estimated"], (id_, what, row)


def require_what_counters_have(rows: list[dict[str, Any]], total: Counter[tuple[str, ...]]) -> None:
    for model in PRICES:
        mine = [row for row in rows if row["model"] == model]
        hits = one(total, "warmroute_prompt_tokens_total", model, "hit") + one(
            total, "warmroute_prompt_tokens_total", model, "estimated"
        )
        assert hits == sum(row["cached"] for row in mine)
        assert one(total, "warmroute_prompt_tokens_total", model) == sum(row["prompt"] for row in mine)
        assert one(total, "warmroute_completion_tokens_total", model) == sum(row["completion"] for row in mine)
        assert one(total, "warmroute_cache_write_tokens_total", model) == sum(row["written"] for row in mine)
        for tenant in ("acme", "zeta"):
            theirs = [row for row in mine if row["tenant"] == tenant]
            for kind in MONEY:
                booked = sum(row[kind] for row in theirs)
                if kind == "saved":
                    counted = one(total, "warmroute_savings_usd_total", model, tenant)
                else:
                    counted = one(total, "warmroute_cost_usd_total", model, tenant, kind)
                assert counted * DOLLAR == pytest.approx(booked, rel=1e-12, abs=1.0), (model, tenant, kind)


@pytest.mark.tools
@pytest.mark.parametrize("requests", [1_000, 10_000])
@gate("1000", reason="each of the kinds of requests is among them many times")
async def test_the_ledger_the_counters_and_the_clients_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    with postgres() as server:
        url = server.new()
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        store = await open_key_store(url, lambda: 0.0)
        keys = {tenant: (await store.create(KeySettings(tenant)))[1] for tenant in ("acme", "zeta")}
        await store.close()
        public = url.replace(f":{PASSWORD}", "")
        async with (
            FakeReplica([by_case], models("m", "n")) as first,
            FakeReplica([by_case], models("m", "n")) as second,
            gateway(tmp_path, "one", public, [first, second]) as (one_url, one_metrics),
            gateway(tmp_path, "two", public, [second, first]) as (two_url, two_metrics),
        ):
            clients = Clients([one_url, two_url], keys)
            await clients.run(requests)
            total = await counters([one_metrics, two_metrics], requests)
        async with stored(url) as (_, database):
            rows = await check(database)
    assert len(clients.seen) == requests
    require_what_clients_saw(rows, clients.seen)
    require_what_counters_have(rows, total)
