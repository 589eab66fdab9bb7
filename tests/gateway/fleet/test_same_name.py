"""What changes under one name: sleeping engines, weights and adapters that are replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.fleet.prober import RARELY
from tests.gateway.conftest import Running, running
from tests.support.fakes import Behaviour, FakeReplica, answers, http, writes

LONG = {"model": "m", "messages": [{"role": "user", "content": "All of it again, word by word. " * 100}]}


def page(*awake: int | str) -> Behaviour:
    """vLLM's metrics, with the sleep state of each rank."""
    lines = []
    for rank, value in enumerate(awake):
        label = f'engine="{rank}",model_name="m"'
        lines.append(f"vllm:num_requests_running{{{label}}} 0.0")
        lines.append(f'vllm:engine_sleep_state{{{label},sleep_state="awake"}} {value}')
        lines.append(f'vllm:engine_sleep_state{{{label},sleep_state="discard_all"}} 0.0')
    return writes(http(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4"))


def of_json(body: Any) -> Behaviour:
    return writes(http(200, json.dumps(body).encode()))


def listing(**roots: str) -> Behaviour:
    entries = [{"id": name, "object": "model", "owned_by": "vllm", "root": root} for name, root in roots.items()]
    return of_json({"object": "list", "data": entries})


def engine(**pages: Behaviour) -> FakeReplica:
    named = {"/" + name: behaviour for name, behaviour in pages.items()}
    return FakeReplica([answers(prompt=800, cached=0)], listing=listing(m="/models/m", a="/adapters/1"), pages=named)


async def look(run: Running, probes: int = 1) -> None:
    for _ in range(probes):
        await run.gateway.fleet.probe_all(run.gateway.upstream)


def held(run: Running) -> list[int]:
    return list(run.gateway.router.trie.held().values())


def restarts(run: Running, reason: str) -> float:
    return sum(value for (_, why), value in run.gateway.metrics.replica_restarts.values.items() if why == reason)


async def test_a_sleeper_gets_no_request_and_is_believed_to_hold_nothing() -> None:
    async with engine(metrics=page(1.0)) as first, engine(metrics=page(1.0)) as second, running(first, second) as run:
        await look(run)
        await run.post(LONG)
        sleeper, other = (first, second) if first.requests else (second, first)
        sleeper.pages["/metrics"] = page("0.0")
        await look(run)
        assert held(run) == [0, 0]
        assert restarts(run, "sleep") == 1
        for _ in range(3):
            assert (await run.post(LONG))[0] == 200
        assert (len(sleeper.requests), len(other.requests)) == (1, 3)
        rows = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
        assert sorted(row["asleep"] for row in rows) == [False, True]
        sleeper.pages["/metrics"] = page("1.0")
        other.pages["/metrics"] = page("0.0")
        await look(run)
        await run.post(LONG)
        assert len(sleeper.requests) == 2


async def test_all_asleep_is_an_error_that_says_so() -> None:
    async with engine(metrics=page("0.0", "0.0")) as replica, running(replica) as run:
        await look(run)
        code, _, body = await run.post(LONG)
        assert code == 503
        assert "draining or asleep" in body["error"]["message"]
        assert not replica.requests
        replica.pages["/metrics"] = page(1, 1)
        await look(run)
        assert (await run.post(LONG))[0] == 200


async def test_one_rank_that_is_awake_is_not_asleep_and_nonsense_is_ignored() -> None:
    for awake in (("1", "0"), ("NaN",), ("-1",), ("x",)):
        async with engine(metrics=page(*awake)) as replica, running(replica) as run:
            await look(run)
            assert (await run.post(LONG))[0] == 200


async def test_a_page_that_is_missing_wakes_nobody() -> None:
    async with engine(metrics=page("0.0")) as replica, running(replica) as run:
        await look(run)
        del replica.pages["/metrics"]
        await look(run, 2)
        assert (await run.post(LONG))[0] == 503


@pytest.mark.parametrize("pages", [{}, {"metrics": writes(http(200, b"vllm:num_requests_running 0\n", "text/plain"))}])
async def test_an_engine_whose_metrics_do_not_tell_is_asked_if_it_sleeps(pages: dict[str, Behaviour]) -> None:
    async with engine(is_sleeping=of_json({"is_sleeping": True}), **pages) as replica, running(replica) as run:
        assert (await run.post(LONG))[0] == 503
        replica.pages["/is_sleeping"] = of_json({"is_sleeping": False})
        await look(run)
        assert (await run.post(LONG))[0] == 200
        replica.pages["/is_sleeping"] = of_json({"is_sleeping": True})
        await look(run)
        for _ in range(2):
            assert (await run.post(LONG))[0] == 503
            replica.pages["/is_sleeping"] = of_json({"error": "no answer"})
            await look(run)
        assert not replica.requests[1:]


async def test_an_engine_that_does_not_tell_is_asked_rarely() -> None:
    async with engine(is_sleeping=of_json({})) as replica, running(replica) as run:
        await look(run, RARELY)
        assert replica.asked.count("/is_sleeping") == 2
        assert (await run.post(LONG))[0] == 200


async def test_other_weights_under_one_name_end_the_belief() -> None:
    async with engine(metrics=page(1), weight_info=of_json({"weight_version": "step-1"})) as replica, running(replica) as run:
        await look(run)
        await run.post(LONG)
        await look(run)
        assert held(run)[0] > 0
        replica.pages["/weight_info"] = of_json({"weight_version": "step-2"})
        await look(run)
        assert (held(run), restarts(run, "weights")) == ([0], 1)
        await run.post(LONG)
        for answer in ({"weight_version": 7}, [], {"weight_version": None}, "x"):
            replica.pages["/weight_info"] = of_json(answer)
            await look(run)
        del replica.pages["/weight_info"]
        await look(run)
        assert held(run)[0] > 0
        assert restarts(run, "weights") == 1


async def test_an_engine_without_a_version_is_asked_rarely() -> None:
    async with engine(metrics=page(1)) as replica, running(replica) as run:
        await look(run, RARELY)
        assert replica.asked.count("/weight_info") <= 2


async def test_an_adapter_from_another_path_under_its_name_ends_the_belief() -> None:
    async with engine(metrics=page(1)) as replica, running(replica) as run:
        await look(run)
        await run.post(LONG)
        replica.listing = listing(m="/models/m", a="/adapters/1", b="/adapters/9")
        await look(run)
        assert held(run)[0] > 0, "another adapter changes nothing"
        replica.listing = listing(m="/models/m", a="/adapters/2", b="/adapters/9")
        await look(run)
        assert (held(run), restarts(run, "weights")) == ([0], 1)


@pytest.mark.parametrize(("path", "keeps"), [("/v1/load_lora_adapter", False), ("/v1/unload_lora_adapter", True)])
async def test_an_adapter_that_is_loaded_through_the_gateway(path: str, keeps: bool) -> None:
    async with engine(metrics=page(1)) as replica, running(replica) as run:
        await look(run)
        await run.post(LONG)
        asked = run.gateway.fleet.named(replica.name)
        assert asked is not None
        assert (await run.post({"lora_name": "a", "lora_path": "/x", "load_inplace": True}, path))[0] == 200
        assert (held(run)[0] > 0) == keeps
