"""Requests for an adapter over HTTP: which model names are adapters, and where they go."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.fleet.engine_client import ModelEntry, adapter_of
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, answers, http, writes

PAGE = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:lora_requests_info{max_lora="%d",running_lora_adapters="a"} 1.7e9\n'


def engine(slots: int = 2, owner: str = "vllm") -> FakeReplica:
    adapters = [{"id": name, "owned_by": owner, "parent": "m"} for name in "abc"]
    entries = [{"id": "m", "owned_by": owner, "parent": None}, *adapters]
    pages = {"/metrics": writes(http(200, PAGE % slots, "text/plain"))}
    listing = writes(http(200, json.dumps({"object": "list", "data": entries}).encode()))
    return FakeReplica([answers(prompt=20)], listing=listing, pages=pages)


def body(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


async def look(run: Running) -> None:
    await run.gateway.fleet.probe_all(run.gateway.upstream)


def entry(parent: str = "") -> ModelEntry:
    return ModelEntry(b"{}", True, "vllm", None, parent=parent)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("m", ""),
        ("a", "a"),
        ("m:a", "a"),
        ("n:a", ""),
        ("m:", ""),
        ("m:x", ""),
        ("x", ""),
        ("own", ""),
        ("lost", ""),
        ("m:7b", ""),
    ],
)
def test_which_names_are_adapters(name: str, adapter: str) -> None:
    models = {"m": entry(), "n": entry(), "a": entry("m"), "own": entry("own"), "lost": entry("gone"), "m:7b": entry()}
    assert adapter_of(models, name) == adapter


async def test_requests_for_an_adapter_stay_where_it_is_loaded_unless_that_is_busy() -> None:
    async with engine() as first, engine() as second, running(first, second) as run:
        await look(run)
        for number in range(8):
            assert (await run.post(body("a", f"{number}")))[0] == 200
        home, other = (first, second) if first.requests else (second, first)
        assert (len(home.requests), len(other.requests)) == (8, 0)
        dry = (await run.post(body("a", "?"), "/warmroute/route"))[2]
        assert {each["replica"]: each["cost"]["adapter_s"] > 0 for each in dry["candidates"]} == {
            home.name: False,
            other.name: True,
        }
        busy = run.gateway.router.ledger.open(home.name, 50_000, 50_000, time.monotonic())
        await run.post(body("a", "meanwhile"))
        busy.close(time.monotonic())
        assert (len(home.requests), len(other.requests)) == (8, 1)


async def test_a_body_names_an_adapter_for_sglang() -> None:
    async with engine(owner="sglang") as replica, running(replica) as run:
        replica.script = [answers(prompt=800)]
        long = body("m", "hello " * 500)
        assert (await run.post({**long, "lora_path": "a"}))[0] == 200

        async def matched(**more: Any) -> tuple[bool, bool]:
            """(blocks match, the adapter has to be loaded), by a dry run."""
            (found,) = (await run.post({**long, **more}, "/warmroute/route"))[2]["candidates"]
            return found["matched_tokens"] > 0, found["cost"]["adapter_s"] > 0

        assert await matched(lora_path="a") == (True, False)
        assert await matched(lora_path="b") == (False, True)
        assert await matched(lora_path=["a"]) == (False, False), "of a batch"
        assert await matched(lora_path="x") == (False, False), "the engine lists none of this name"
        assert await matched() == (False, False)
        assert await matched(model="b", lora_path="a") == (False, True), "the model's name decides"
    async with engine() as replica, running(replica) as run:
        replica.script = [answers(prompt=800)]
        assert (await run.post({**long, "lora_path": "a"}))[0] == 200
        assert await matched(lora_path="a") == (True, False)
        assert run.gateway.router.adapters.load_s(replica.name, "a") > 0, "vLLM does not read it"


async def test_the_engine_reports_how_many_it_keeps() -> None:
    async with engine(slots=2) as replica, running(replica) as run:
        await look(run)
        for name in "abc":
            await run.post(body(name, "x"))
        adapters = run.gateway.router.adapters
        assert [adapters.load_s(replica.name, name) > 0 for name in "abc"] == [True, False, False]


async def test_a_request_that_computes_nothing_loads_nothing() -> None:
    async with engine() as replica, running(replica) as run:
        await look(run)
        await run.post({"model": "a", "prompt": "x"}, "/tokenize")
        assert replica.requests
        assert run.gateway.router.adapters.load_s(replica.name, "a") > 0
