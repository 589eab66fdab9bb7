"""Signs of life and of death beside the regular probes: answers, hung-up connections, failed requests; and hostile answers."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.fleet import engines
from gateway.fleet.engine_client import MAX_MODELS, facts_of
from gateway.fleet.state import EXTRA_PROBES, NOT_PROBED, ReplicaState
from gateway.upstream.client import UpstreamClient
from tests.gateway.conftest import BODY, Running, eventually, longest_pause, running
from tests.gateway.servers import live_of
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, dies, http, models, status, streams, writes
from tests.support.pages import parse_page

QUICK = {"interval_s": 0.02, "timeout_s": 0.05}
PATIENT = {"interval_s": 0.02, "timeout_s": 0.5}  # answers come more often than that, on a busy machine too
MODELS = models("m")


@dataclass(slots=True)
class Listing:
    """A model list that is answered until `stuck` is set, and then never. asked: how often it was asked for."""

    stuck: bool = False
    behave: Behaviour = MODELS
    asked: int = 0
    never: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        if self.stuck:
            await self.never.wait()
        await self.behave(request, writer)


def only(run: Running) -> ReplicaState:
    (state,) = run.gateway.fleet.replicas
    return state


# -- answers are signs of life


async def test_a_replica_that_answers_requests_is_not_down_while_its_model_list_hangs() -> None:
    listing = Listing()
    async with FakeReplica(listing=listing) as replica, running(replica, health=PATIENT) as run:
        listing.stuck = True
        begun = listing.asked
        while listing.asked < begun + 4:  # so that three have failed
            assert (await run.post())[0] == 200
            assert only(run).up
        assert "answers requests" in only(run).error
        assert (await run.get("/ready"))[0] == 200
        listing.stuck = False
        await eventually(lambda: not only(run).error)


async def test_the_chunks_of_a_stream_are_signs_of_life_too() -> None:
    listing, go_on = Listing(), asyncio.Event()

    async def ticks(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        while not go_on.is_set():
            writer.write(b'data: {"choices": []}\n\n')
            await asyncio.sleep(0.005)
        writer.write(b"data: [DONE]\n\n")
        writer.write_eof()

    async with FakeReplica([ticks], listing=listing) as replica, running(replica, health=PATIENT) as run:
        listing.stuck = True
        begun = listing.asked
        streaming = asyncio.create_task(run.session.post(run.url + "/v1/chat/completions", json={**BODY, "stream": True}))
        await eventually(lambda: replica.requests)
        await eventually(lambda: listing.asked >= begun + 4 or not only(run).up)
        assert only(run).up
        go_on.set()
        async with await streaming as answer:
            assert b"[DONE]" in await answer.read()


async def test_a_replica_that_answers_nothing_is_down() -> None:
    listing = Listing()
    async with FakeReplica(listing=listing) as replica, running(replica, health=PATIENT) as run:
        assert (await run.post())[0] == 200
        listing.stuck = True
        await eventually(lambda: not only(run).up)
        assert run.gateway.upstream.silence_s(replica.url) > 0.5


async def test_probes_are_no_signs_of_life() -> None:
    """Else a model list that comes byte by byte would keep itself alive."""

    async def trickles(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.002)

    listing = Listing()
    async with FakeReplica(listing=listing) as replica, running(replica, health=QUICK) as run:
        listing.behave = trickles
        await eventually(lambda: not only(run).up)
        assert run.gateway.upstream.silence_s(replica.url) == float("inf")


@pytest.mark.parametrize("bad", [status(500), writes(http(200, b"[]"))])
async def test_a_probe_that_is_answered_badly_counts_whatever_requests_get(bad: Behaviour) -> None:
    listing = Listing()
    async with FakeReplica(listing=listing) as replica, running(replica, health=QUICK) as run:
        listing.behave = bad
        while only(run).up:
            assert (await run.post())[0] == 200


# -- nobody is live


async def test_replicas_that_are_down_by_probes_alone_are_tried() -> None:
    listings = [Listing(), Listing()]
    one, two = (FakeReplica(listing=listing) for listing in listings)
    async with one, two, running(one, two, health={"interval_s": 0.02, "timeout_s": 0.2}) as run:
        fleet = list(run.gateway.fleet.replicas)
        for listing in listings:
            listing.stuck = True
        await eventually(lambda: not any(state.up for state in fleet))
        assert (await run.get("/ready"))[0] == 200, "a balancer in front must not keep the requests away that may be answered"
        assert "m" in run.gateway.fleet.catalog.names
        async with asyncio.timeout(10):
            while not any(state.up for state in fleet):  # until its answers are noticed
                assert (await run.post())[0] == 200
        run.gateway.fleet.drain(fleet[0], on=True)
        run.gateway.fleet.drain(fleet[1], on=True)
        assert (await run.post())[0] == 503, "an operator's word is no doubt"


async def test_a_replica_in_doubt_is_not_tried_beside_a_live_one() -> None:
    listing = Listing()
    one, two = FakeReplica(listing=listing), FakeReplica()
    async with one, two, running(one, two, health=PATIENT, routing={"policy": "round_robin"}) as run:
        listing.stuck = True
        state = run.gateway.fleet.named(one.name)
        assert state
        await eventually(lambda: not state.up)
        assert {(await run.post())[0] for _ in range(6)} == {200}
        assert not one.requests


async def test_a_replica_whose_model_list_never_came_is_tried_where_the_configuration_knows_the_models() -> None:
    async with FakeReplica(listing=Listing(stuck=True)) as replica:
        pool = {"replicas": [replica.url], "models": ["*"]}
        async with running(pools=[pool], health=QUICK) as run:
            assert (await run.get("/ready"))[0] == 503
            assert (await run.post())[0] == 200


async def test_a_replica_that_cannot_be_connected_to_is_not_tried() -> None:
    replica = FakeReplica()
    async with replica, running(replica, health=QUICK) as run:
        await replica.stop()
        await eventually(lambda: not only(run).up)
        assert (await run.post())[0] == 503
        assert (await run.get("/ready"))[0] == 503


# -- looks


async def test_failed_requests_make_the_prober_look_a_few_times() -> None:
    listing = Listing()
    bad, good = FakeReplica([dies], listing=listing), FakeReplica()
    async with bad, good, running(bad, good, routing={"policy": "round_robin"}) as run:
        for number in range(60):
            assert (await run.post({**BODY, "user": str(number)}))[0] == 200
        assert len(bad.requests) >= 5
        await eventually(lambda: listing.asked > 1)
        assert listing.asked <= 1 + EXTRA_PROBES


async def test_a_process_that_ends_between_two_probes_is_seen_by_the_connections_that_it_closes() -> None:
    replica = FakeReplica()
    async with replica, running(replica) as run:  # a probe a minute
        assert (await run.post())[0] == 200
        assert run.gateway.router.trie.held()[replica.name] > 0
        await replica.stop()
        await eventually(lambda: not only(run).up)
        assert run.gateway.router.trie.held()[replica.name] == 0
        restarts = [value for name, value in (await run.metrics()).items() if 'restarts_total{reason="refused"' in name]
        assert restarts == [1]


async def test_an_engine_that_closes_idle_connections_is_well_and_has_its_habit() -> None:
    listing = Listing()
    async with FakeReplica(listing=listing) as replica, running(replica) as run:
        fleet, state = run.gateway.fleet, only(run)
        assert (await run.post())[0] == 200

        async def hung_up(idle_s: float, looks: bool) -> None:
            asked = listing.asked
            fleet.connection_closed(replica.url, idle_s)
            assert state.probe_now.is_set() is looks
            await eventually(lambda: listing.asked == asked + looks and not state.probe_now.is_set())
            await eventually(lambda: state.closed_after_s is None)

        await hung_up(1.0, True)
        await eventually(lambda: state.idle_limit_s == 1.0)
        for idle_s in (1.0, 0.95, 2.0, 1.01):
            await hung_up(idle_s, False)
        await hung_up(0.2, True)
        await eventually(lambda: state.idle_limit_s == 0.2)
        await hung_up(0.1, True)
        for _ in range(100):
            fleet.connection_closed(replica.url, 0.01)
        assert listing.asked == 1 + EXTRA_PROBES
        assert state.up
        assert run.gateway.router.trie.held()[replica.name] > 0


async def test_an_engine_that_closes_each_connection_soon_is_not_stormed() -> None:
    ended = asyncio.Event()

    async def ends_soon(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        def end() -> None:
            writer.close()
            ended.set()

        await streams("a")(request, writer)
        asyncio.get_running_loop().call_later(0.01, end)

    listing = Listing()
    async with FakeReplica([ends_soon], listing=listing) as replica, running(replica) as run:
        for _ in range(20):
            async with run.session.post(run.url + "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
                assert b"[DONE]" in await answer.read()
            await ended.wait()
            ended.clear()
        assert only(run).up
        assert listing.asked <= 1 + EXTRA_PROBES


# -- what a replica may answer to a probe


def listed(entries: list[Any]) -> Behaviour:
    return writes(http(200, json.dumps({"object": "list", "data": entries}).encode()))


async def test_a_model_list_is_cut_at_a_bound() -> None:
    long = [{"id": "m"}, {"id": "x" * 1_000_000}, {"id": "y" * 257}, *({"id": f"m{number}"} for number in range(20_000))]
    async with FakeReplica(listing=listed(long)) as replica, running(replica) as run:
        assert only(run).up
        assert len(only(run).models) == MAX_MODELS
        assert max(map(len, only(run).models)) <= 256
        assert (await run.post())[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"data": [{"id": f"m{number}"} for number in range(100_000)]}).encode(),
        b'{"data":[' + b"{}," * 1_000_000 + b"{}]}",
        b'{"data":' + b"[" * 1_000_000,
        b'{"data":[{"id":"' + b"m" * (5 << 20) + b'"}]}',
    ],
)
async def test_a_model_list_without_measure_is_none(body: bytes) -> None:
    async with FakeReplica(listing=writes(http(200, body))) as replica, running(replica) as run:
        assert (only(run).up, only(run).down_by, dict(only(run).models)) == (False, "garbage", {})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("extra", [nested(300), nested(900), "x" * 100_000, {f"k{number}": 0 for number in range(10_000)}])
async def test_an_entry_that_cannot_be_shown_whole_is_cut_to_openais_fields(extra: Any, caplog: Any) -> None:
    bad = {"id": "bad", "object": "model", "created": 7, "owned_by": "o", "max_model_len": 100, "extra": extra}
    async with FakeReplica(listing=listed([bad, {"id": "good", "owned_by": "o"}])) as replica, running(replica) as run:
        status, _, body = await run.get("/v1/models")
        cut = {"id": "bad", "object": "model", "created": 7, "owned_by": "o"}
        assert (status, json.loads(body)["data"]) == (200, [cut, {"id": "good", "owned_by": "o"}])
        status, _, body = await run.get("/v1/models/bad")
        assert (status, json.loads(body)) == (200, cut)
        assert (await run.post({**BODY, "model": "bad"}))[0] == 200
        assert only(run).context_tokens == 100
    (warning,) = [record for record in caplog.records if "too large or too deep" in record.message]
    assert (warning.models, warning.first) == (1, "bad")


@pytest.mark.parametrize("field", ["owned_by", "created", "max_model_len"])
@pytest.mark.parametrize("value", [nested(300), "x" * 100_000, [], None, True, -1, 1e300, 2**70])
async def test_no_field_of_a_model_list_makes_it_unreadable(field: str, value: Any) -> None:
    async with FakeReplica(listing=listed([{"id": "m", field: value}])) as replica, running(replica) as run:
        status, _, body = await run.get("/v1/models")
        assert (status, [entry["id"] for entry in json.loads(body)["data"]], len(body) < 20_000) == (200, ["m"], True)
        assert (await run.post())[0] == 200


async def flood_of_interim_answers(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        await writer.drain()


async def endless_list(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"data": [')
    while True:
        writer.write(b'{"id": "m"},' * 10_000)
        await writer.drain()


@pytest.mark.parametrize("hostile", [flood_of_interim_answers, endless_list])
async def test_a_flood_in_the_answer_to_a_probe_ends(hostile: Behaviour) -> None:
    async with FakeReplica(listing=hostile) as replica, running(replica) as run:
        await eventually(lambda: only(run).error != NOT_PROBED)
        assert (only(run).up, only(run).down_by in ("garbage", "timeout")) == (False, True)


async def test_a_flood_of_interim_answers_to_a_request_ends() -> None:
    async with FakeReplica([flood_of_interim_answers]) as replica, running(replica) as run:
        assert (await run.post())[0] == 502


@pytest.mark.parametrize(
    "page",
    [
        b'vllm:cache_config_info{kv_cache_size_tokens="128"} 1\n' * 40_000,
        b"vllm:num_requests_running{" + b'a="b",' * 300_000 + b"} 1\n",
        (b"vllm:cache_config_info{" + b'a="b",' * 700 + b"} 1\n") * 500,
        b"vllm:num_requests_running 1\n" * 75_000,
        (b"vllm:num_requests_running{" + b"a" * 60_000 + b"} 1\n") * 35,
        (b"vllm:num_requests_running{" + b'a="' * 20_000 + b"} 1\n") * 35,
    ],
)
def test_a_page_of_metrics_without_measure_is_read_up_to_a_bound(page: bytes) -> None:
    begun = time.thread_time()
    parsed = parse_page(page)
    assert sum(map(len, parsed.values())) <= 2048
    assert sum(len(sample.labels) for samples in parsed.values() for sample in samples) <= 70_000
    assert time.thread_time() - begun < 3.0


async def test_the_event_loop_turns_while_a_large_page_of_metrics_is_read() -> None:
    """At once it would take 40 to 80 ms of CPU time."""
    page = http(200, b"\n" * engines.MAX_PAGE_BYTES, "text/plain")
    async with FakeReplica(pages={"/metrics": writes(page)}) as replica:
        relay = UpstreamClient(live_of())
        found = []

        async def read() -> None:
            found.append(await facts_of(relay, replica.url, 30.0, {}, engines.Facts(), inquire=False))

        longest = min([await longest_pause(read) for _ in range(3)])
        relay.close()
    assert (replica.asked, found[0][1]) == (["/metrics"] * 3, False)
    assert longest < 0.025
