"""Data-parallel ranks: each is a replica for the router, found from metrics or the configuration, over real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from gateway.config.kinds import MAX_RANKS
from gateway.config.schema import MAX_REPLICAS
from gateway.fleet.engines import SGLANG, VLLM, Facts
from gateway.fleet.membership import Member
from gateway.fleet.prober import RARELY
from gateway.fleet.ranks import FEWER_PAGES, KnownRanks, of_rank
from gateway.request.ranks import is_rank_refusal
from replica.api.server import create_app
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.gateway.conftest import Running, running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, http, models, status, writes

HEADER = "x-data-parallel-rank"
OUT_OF_RANGE = "data_parallel_rank 3 is out of range [0, 2)."


def page(*ranks: int | str, kv: int = 1000, owner: str = "vllm") -> Behaviour:
    """A page of metrics with a running gauge and a cache for each of these labels."""
    lines = []
    for rank in ranks:
        if owner == "sglang":
            lines.append(f'sglang:num_running_reqs{{dp_rank="{rank}",tp_rank="0"}} 2.0')
            lines.append(f'sglang:max_total_num_tokens{{dp_rank="{rank}",tp_rank="0"}} {kv}')
        else:
            lines.append(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 2.0')
            lines.append(f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{kv}"}} 1.0')
    return writes(http(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4"))


def engine(*ranks: int | str, owner: str = "vllm", script: Sequence[Behaviour] = (answers(),)) -> FakeReplica:
    return FakeReplica(list(script), listing=models("m", owner=owner), pages={"/metrics": page(*ranks, owner=owner)})


async def look(run: Running, probes: int = 1) -> None:
    for _ in range(probes):
        await run.gateway.fleet.probe_all(run.gateway.upstream)


def names(run: Running) -> list[str]:
    return [state.name for state in run.gateway.fleet.replicas]


def prompt(number: int, turns: int = 1) -> dict[str, Any]:
    words = [f"This is turn {turn} of conversation {number}. " * 12 for turn in range(turns)]
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in words], "max_tokens": 2}


async def test_ranks_of_the_metrics_are_replicas_with_a_cache_each() -> None:
    async with engine(0, 1, 2) as replica, running(replica) as run:
        await look(run)
        assert names(run) == [f"{replica.name}#{rank}" for rank in range(3)]
        router = run.gateway.router.replicas
        assert [router[name].capacity_tokens for name in names(run)] == [1000] * 3
        states = list(run.gateway.fleet.replicas)
        assert [state.up for state in states] == [True] * 3
        assert [state.facts.running for state in states] == [2] * 3
        used = {(await run.post(prompt(number)))[1]["x-warmroute-replica"] for number in range(12)}
        assert used <= set(names(run))
        sent = [f"{replica.name}#{request.headers[HEADER]}" for request in replica.requests]
        assert sorted(used) == sorted(set(sent))
        run.gateway.fleet.forget_departed()
        assert replica.name not in router, "the server itself is a replica no longer"


async def test_a_conversation_stays_on_its_rank_and_others_spread() -> None:
    async with engine(0, 1, 2, 3) as replica, running(replica) as run:
        await look(run)
        for turns in (1, 2, 3):
            for number in range(8):
                await run.post(prompt(number, turns))
        ranks = [request.headers[HEADER] for request in replica.requests]
        assert ranks[:8] == ranks[8:16] == ranks[16:]
        assert len(set(ranks)) > 1


async def test_all_ranks_are_probed_at_once() -> None:
    async with engine(*range(8)) as replica, running(replica) as run:
        await look(run)
        asked, connections = len(replica.asked), replica.connections
        fleet = run.gateway.fleet
        first = next(iter(fleet.replicas))
        await fleet._prober.probe(first, run.gateway.upstream)
        assert len(replica.asked) == asked + 1
        assert replica.connections == connections
        await replica.stop()
        await fleet._prober.probe(first, run.gateway.upstream)
        assert [state.up for state in fleet.replicas] == [False] * 8


async def test_the_configuration_names_ranks_that_no_metric_shows() -> None:
    async with FakeReplica() as replica:
        async with running({"url": replica.url, "name": "r", "ranks": 2, "capacity_tokens": 1000}) as run:
            assert names(run) == ["r#0", "r#1"]
            assert [state.capacity_tokens for state in run.gateway.fleet.replicas] == [500, 500]
            await run.post(prompt(1))
            assert replica.requests[0].headers[HEADER] in ("0", "1")
        async with running({"url": replica.url, "ranks": 1}) as run:
            await run.post(prompt(1))
            assert HEADER not in replica.requests[-1].headers


async def test_one_rank_and_an_engine_without_metrics_stay_as_they_are() -> None:
    async with engine(0) as one, FakeReplica() as plain, running(one, plain) as run:
        await look(run, 3)
        assert names(run) == [one.name, plain.name]
        await run.post(prompt(1))
        assert not any(HEADER in request.headers for request in [*one.requests, *plain.requests])


async def test_sglang_gets_the_rank_in_the_body_too() -> None:
    async with engine(0, 1, owner="sglang") as replica, running(replica) as run:
        await look(run)
        await run.post({**prompt(1), "routed_dp_rank": 7})
        request = replica.requests[0]
        assert str(request.json["routed_dp_rank"]) == request.headers[HEADER]


@pytest.mark.parametrize("labels", [(4, 5, 6, 7), (0, 2), ("0", "1", "9" * 5)])
async def test_ranks_that_are_not_numbered_from_zero_are_one_replica_of_several_caches(labels: Sequence[int | str]) -> None:
    async with engine(*labels) as replica, running(replica) as run:
        await look(run)
        assert names(run) == [replica.name]
        assert run.gateway.router.replicas[replica.name].caches == len(labels)
        await run.post(prompt(1))
        assert HEADER not in replica.requests[0].headers


@pytest.mark.parametrize("labels", [("x", "-1", "1.5"), tuple(range(MAX_RANKS + 1)), ("٣", "4")])
async def test_absurd_ranks_are_ignored(labels: Sequence[int | str]) -> None:
    async with engine(*labels) as replica, running(replica) as run:
        await look(run)
        assert names(run) == [replica.name]
        assert run.gateway.router.replicas[replica.name].caches == 1
        assert (await run.post(prompt(1)))[0] == 200


async def test_ranks_come_at_once_and_go_after_some_pages() -> None:
    async with engine(0, 1) as replica, running(replica) as run:
        await look(run)
        replica.pages["/metrics"] = page(0, 1, 2, 3)
        await look(run)
        assert len(names(run)) == 4
        replica.pages["/metrics"] = page(0, 1, 2)
        await look(run, FEWER_PAGES)
        assert len(names(run)) == 3
        replica.pages["/metrics"] = page(0)
        await look(run, FEWER_PAGES)
        assert names(run) == [replica.name]
        assert (await run.post(prompt(1)))[0] == 200


async def test_a_page_that_is_missing_says_nothing_about_ranks() -> None:
    async with engine(0, 1) as replica, running(replica) as run:
        await look(run)
        replica.pages["/metrics"] = status(404)
        await look(run, RARELY + FEWER_PAGES)
        assert len(names(run)) == 2


async def test_a_rank_that_has_gone_costs_the_client_nothing() -> None:
    """Until the metrics show it, requests name no rank."""

    async def two_ranks(request: FakeRequest, writer: Any) -> None:
        rank = int(request.headers.get(HEADER, "0"))
        await (answers() if rank < 2 else status(400, OUT_OF_RANGE))(request, writer)

    async with engine(0, 1, 2, 3, script=[two_ranks]) as replica, running(replica) as run:
        await look(run)
        results = [(await run.post(prompt(number)))[0] for number in range(24)]
        assert results == [200] * 24
        assert names(run) == [replica.name], "it has refused one"
        replica.pages["/metrics"] = page(0, 1)
        await look(run, FEWER_PAGES)
        assert names(run) == [f"{replica.name}#0", f"{replica.name}#1"]


async def test_a_400_that_is_the_clients_own_reaches_it() -> None:
    async with engine(0, 1, script=[status(400, "bad tool")]) as replica, running(replica) as run:
        await look(run)
        code, _, body = await run.post(prompt(1))
        assert (code, body["error"]["message"]) == (400, "bad tool")
        assert len(replica.requests) == 1
        assert len(names(run)) == 2


async def test_a_client_that_provokes_the_refusal_is_answered_and_changes_nothing() -> None:
    async with engine(0, 1, script=[status(400, OUT_OF_RANGE)]) as replica, running(replica) as run:
        await look(run)
        code, _, body = await run.post(prompt(1))
        assert (code, body["error"]["message"]) == (400, OUT_OF_RANGE)
        assert [request.headers.get(HEADER) is None for request in replica.requests] == [False, True]
        assert len(names(run)) == 2


async def test_a_drain_of_the_server_drains_its_ranks_and_ranks_that_come() -> None:
    async with engine(0, 1) as replica, running(replica) as run:
        await look(run)
        code, _, body = await run.post({"name": replica.name}, "/warmroute/drain")
        assert (code, body["draining"]) == (200, True)
        replica.pages["/metrics"] = page(0, 1, 2)
        await look(run)
        assert [state.draining for state in run.gateway.fleet.replicas] == [True] * 3
        await run.post({"name": f"{replica.name}#1"}, "/warmroute/undrain")
        await run.post(prompt(1))
        assert [request.headers[HEADER] for request in replica.requests] == ["1"]


async def test_an_operator_adds_and_removes_a_server_with_ranks() -> None:
    async with FakeReplica() as first, FakeReplica() as second, running(first) as run:
        added = {"url": second.url, "name": "s", "ranks": 3}
        code, _, body = await run.post(added, "/warmroute/replicas")
        assert (code, body["replica"]["name"], body["replica"]["source"]) == (201, "s#0", "operators")
        assert (await run.post(added, "/warmroute/replicas"))[0] == 409
        async with run.session.delete(run.admin_url + "/warmroute/replicas/s") as answer:
            assert answer.status == 200
        assert names(run) == [first.name]


async def test_a_name_that_a_rank_would_take_keeps_the_server_whole() -> None:
    async with FakeReplica() as first, FakeReplica() as second:
        replicas: Any = [{"url": first.url, "name": "a", "ranks": 2}, {"url": second.url, "name": "a#1"}]
        async with running(*replicas) as run:
            assert names(run) == ["a", "a#1"]


def test_ranks_beyond_the_bound_of_replicas_are_left_out() -> None:
    members = {f"m{number}": Member(f"m{number}", f"http://h{number}", "p", ranks=64) for number in range(100)}
    expanded = KnownRanks().expand(members)
    assert len(expanded) <= MAX_REPLICAS
    assert sum(member.caches == 64 for member in expanded.values()) > 60


def test_fewer_ranks_count_after_some_pages_in_a_row() -> None:
    known, member = KnownRanks(), Member("a", "http://a", "p")

    def found(count: int) -> bool:
        return known.found(member, VLLM, Facts(VLLM, caches=count, ranks=tuple(Facts(VLLM) for _ in range(count))))

    assert [found(4), found(4), found(3), found(4), found(3), found(3)] == [True] + [False] * 5
    assert found(3)
    assert len(known.expand({"a": member})) == 3
    assert [found(1) for _ in range(FEWER_PAGES)][-1]
    assert known.expand({"a": member}) == {"a": member}


def test_the_configuration_replaces_what_was_found_and_a_refusal_counts_for_its_number() -> None:
    known, member = KnownRanks(), Member("a", "http://a", "p")
    known.found(member, VLLM, Facts(VLLM, caches=4, ranks=(Facts(VLLM),) * 4))

    def expanded(ranks: int | None) -> list[tuple[str, int]]:
        named = replace(member, ranks=ranks)
        return [(each.name, each.caches) for each in known.expand({"a": named}).values()]

    assert len(expanded(None)) == 4
    assert expanded(1) == [("a", 1)]
    assert expanded(2) == [("a#0", 1), ("a#1", 1)]
    assert known.refused(replace(member, name="a#1", server="a", ranks=2, rank=1))
    assert expanded(2) == [("a", 2)]
    assert not known.refused(replace(member, name="a#0", server="a", ranks=2, rank=0)), "once"
    assert len(expanded(3)) == 3
    known.keep({})
    assert expanded(None) == [("a", 1)]


def test_unknown_facts_of_a_rank_is_an_equal_part() -> None:
    whole = Facts(SGLANG, kv_tokens=900, running=6, caches=3)
    part = of_rank(whole, Member("a#1", "http://a", "p", server="a", rank=1))
    assert (part.kv_tokens, part.running) == (300, None)
    alone = Facts(VLLM, kv_tokens=900, running=6)
    assert of_rank(alone, Member("a", "http://a", "p")) is alone


def test_ranks_have_the_role_of_their_server() -> None:
    server = Facts(SGLANG, caches=2, ranks=(Facts(SGLANG), Facts(SGLANG)), role="prefill", bootstrap_port=9)
    rank = of_rank(server, Member("a#1", "http://a", "p", server="a", rank=1))
    assert (rank.role, rank.bootstrap_port) == ("prefill", 9)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (OUT_OF_RANGE, True),
        ("routed_dp_rank=5 out of range [0, 4)", True),
        ("dp_rank must be between 0 and 3", True),
        ("max_tokens is out of range", False),
        ("data_parallel_rank", False),
    ],
)
def test_refusals_of_ranks(text: str, refused: bool) -> None:
    assert is_rank_refusal(text.encode()) is refused


@contextlib.asynccontextmanager
async def simulated(ranks: int) -> AsyncIterator[str]:
    """A simulated replica with ranks; its URL."""
    config = SimConfig(kv_tokens=8000, prefill_rate=1e6, decode_rate=1e5, max_batch=8)
    first, *others = (SimEngine(config) for _ in range(ranks))
    runner = web.AppRunner(create_app(first, "m", None, others), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, socket.create_server(("127.0.0.1", 0))).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_conversations_hit_on_addressed_ranks() -> None:
    """Beside the same server without addresses: there a turn finds its prefix only where chance has led it."""

    async def cached_share(**more: Any) -> float:
        async with simulated(4) as url, running({"url": url, **more}) as run:
            await look(run)
            cached = expected = 0
            for turns in (1, 2, 3, 4):
                for number in range(6):
                    body = (await run.post(prompt(number, turns)))[2]
                    if turns > 1:
                        cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
                        expected += body["usage"]["prompt_tokens"] * (turns - 1) // turns
            return cached / expected

    assert await cached_share() > 0.9
    assert await cached_share(ranks=1) < 0.9
