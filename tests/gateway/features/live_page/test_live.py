"""GET /warmroute/live, its events, its reasons, and the picture of the index: running gateways over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.admission.pool_queue import Place
from gateway.dialects.table import DIALECTS
from gateway.features.live_page.broadcast import MAX_WATCHERS, RECENT, Broadcast
from gateway.features.live_page.feed import BURST, QUIET_S
from gateway.features.live_page.live import LiveEndpoints
from gateway.features.live_page.under_way import MAX_ROWS, SHOWN_AFTER_S, rows_under_way
from gateway.features.live_page.view import LiveView
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.server.endpoints import ADMIN, side_runner
from tests.gateway.conftest import BODY, Running, eventually, listening, running
from tests.gateway.features.workers.conftest import star
from tests.support.compiled import uncompiled
from tests.support.fakes import FakeReplica, answers, models, status, streams
from tests.support.in_memory import BytesRequest

ENDPOINTS = ["/warmroute/live", "/warmroute/live/events", "/warmroute/live/requests/a:1", "/warmroute/trie"]
CHAT = "/v1/chat/completions"
PRICES = {"*": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}


async def asked(run: Running, path: str = "/warmroute/live") -> Any:
    code, headers, raw = await run.get(path)
    assert code == 200, raw
    assert headers["Cache-Control"] == "no-store"
    return json.loads(raw)


Event = tuple[str, dict[str, Any]]


@contextlib.asynccontextmanager
async def events(run: Running, **options: Any) -> AsyncIterator[AsyncIterator[Event]]:
    async def read(answer: aiohttp.ClientResponse) -> AsyncIterator[Event]:
        name = ""
        async for line in answer.content:
            key, _, value = line.decode().rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)

    async with run.session.get(run.admin_url + "/warmroute/live/events", **options) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        yield read(answer)


async def until(stream: AsyncIterator[Event], **wanted: Any) -> dict[str, Any]:
    """The first row of a request that has these values."""
    async with asyncio.timeout(40):
        async for _, frame in stream:
            for row in frame["requests"]:
                if all(row.get(key) == value for key, value in wanted.items()):
                    return dict(row)
    raise AssertionError("the stream has ended")


async def test_requests_are_shown_as_they_happen() -> None:
    hold = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=hold, prompt=100, cached=40)]) as one, running(one, prices=PRICES) as run:
        async with events(run) as stream:
            name, hello = await anext(stream)
            assert (name, hello["requests"], hello["workers"]) == ("hello", [], 1)
            body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
            async with run.session.post(
                run.url + "/v1/chat/completions", json=body, headers={"X-Request-Id": "r1", "X-Tenant-Id": "acme"}
            ) as answer:
                begun = await until(stream, id="r1")
                assert (begun["state"], begun["replica"], begun["reason"], begun["tenant"]) == (
                    "running",
                    one.name,
                    "cold",
                    "acme",
                )
                hold.set()
                await answer.read()
            ended = await until(stream, id="r1", state="ended")
        assert ended["key"] == begun["key"]
        assert ended["time"] == begun["time"]
        assert (ended["status"], ended["prompt_tokens"], ended["cached_tokens"]) == (200, 100, 40)
        assert ended["cost_usd"] == pytest.approx((60 + 4 + 8) / 1e6)
        assert ended["saved_usd"] == pytest.approx(36 / 1e6)
        assert 0 < ended["ttft_s"] <= ended["seconds"]
        why = await asked(run, f"/warmroute/live/requests/{ended['key']}")
        assert why["request"] == ended
        [candidate] = why["decision"]["candidates"]
        assert candidate["replica"] == one.name
        assert candidate["cost"]["total_s"] == pytest.approx(sum(v for k, v in candidate["cost"].items() if k != "total_s"))
        assert (await run.get("/warmroute/live/requests/a:1"))[0] == 404


async def test_what_is_under_way_is_shown_with_its_owner_and_its_place_whenever_the_watch_began(tmp_path: Path) -> None:
    """Also a request without a client, and one that waits in a queue: before the first question, and without rows of a feed."""
    hold = asyncio.Event()
    state = {"url": f"sqlite:///{tmp_path}/state.sqlite"}
    async with FakeReplica([streams("a", hold=hold), answers(), answers()]) as one:
        pools = [{"replicas": [one.url], "max_inflight": 1, "queue_s": 3600}]
        async with running(one, pools=pools, state=state, limits={"keepalive_s": 0, "drain_timeout_s": 1}) as run:
            sent = {"X-Request-Id": "r1", "X-Tenant-Id": "acme", "Session-Id": "s-1", "User-Agent": "codex_cli_rs/1"}
            first = asyncio.create_task(
                run.session.post(run.url + CHAT, json={**BODY, "stream": True}, headers=sent).__aenter__()
            )
            await eventually(lambda: one.requests)
            pool = run.gateway.fleet.target("m").admission
            second = asyncio.create_task(run.post(headers={"X-Request-Id": "r2", "X-Tenant-Id": "blue"}))
            await eventually(lambda: pool.waiting == 1)
            begun = await run.post({"model": "m", "input": "hi", "background": True}, path="/v1/responses")
            await eventually(lambda: pool.waiting == 2)
            rows: dict[str, Any] = {}
            while len(rows) < 3 or rows["r1"]["state"] == "computing":  # from their second second on
                rows = {row["id"]: row for row in (await asked(run))["under_way"]}
            own = begun[2]["id"]
            assert [rows[id_]["state"] for id_ in ("r1", "r2", own)] == ["answering", "queued", "queued"]
            assert [rows[id_]["attended"] for id_ in ("r1", "r2", own)] == [True, True, False]
            assert [rows[id_]["place"] for id_ in ("r1", "r2", own)] == [None, 1, 2]
            assert [rows["r1"][name] for name in ("tenant", "session", "client", "user_agent", "replica", "model")] == [
                *("acme", "s-1", "127.0.0.1", "codex_cli_rs/1", one.name, "m")
            ]
            assert rows[own]["client"] == "127.0.0.1", "of the client that asked for it"
            hold.set()
            await (await first).read()
            await second
            await eventually(lambda: len(one.requests) == 3)
            while (await asked(run))["under_way"]:
                pass


async def test_a_request_that_its_client_has_left_runs_unattended() -> None:
    """Until an equal request adopts it."""
    hold = asyncio.Event()
    async with (
        FakeReplica([streams("a", hold=hold)]) as one,
        running(one, limits={"adopt_s": 3600, "drain_timeout_s": 1}) as run,
    ):
        answer = await run.session.post(run.url + CHAT, json={**BODY, "stream": True}).__aenter__()
        rows: list[dict[str, Any]] = []
        while not rows:
            rows = (await asked(run))["under_way"]
        assert rows[0]["attended"]
        answer.close()
        while rows[0]["attended"]:
            rows = (await asked(run))["under_way"]
        hold.set()
        async with run.session.post(run.url + CHAT, json={**BODY, "stream": True}) as adopted:
            assert b'"a"' in await adopted.read()
        assert len(one.requests) == 1


@uncompiled
def test_of_a_flood_of_waiting_requests_the_oldest_have_rows() -> None:
    def made(number: int, *, queued: bool) -> Exchange:
        exchange = Exchange(BytesRequest(b"{}", CHAT), DIALECTS[CHAT], SettledRequest(f"r-{number}", CHAT, float(number)))
        exchange.place = Place() if queued else None
        return exchange

    flood = [made(number, queued=number % 2 == 0) for number in range(1000)]
    rows = rows_under_way(flood, 2000.0, 5.0)
    assert [row["id"] for row in rows] == [f"r-{number}" for number in range(2 * MAX_ROWS)]
    assert rows[3]["time"] == 8.0
    assert rows_under_way(flood[:1], SHOWN_AFTER_S / 2, 0.0) == []


async def test_all_candidates_are_explained_and_failures_are_shown() -> None:
    async with FakeReplica([status(500)]) as one, FakeReplica([answers()]) as other, running(one, other) as run:
        await asked(run)
        for number in itertools.count():  # each is a new prompt, which may go to either
            messages = [{"role": "user", "content": f"{number} hello " * 200}]
            assert (await run.post({"model": "m", "messages": messages}))[0] == 200
            if one.requests:
                break
        rows = (await asked(run))["requests"]
        moved = next(row for row in rows if row["failed_attempts"])
        assert moved["failed_attempts"][0]["replica"] == one.name
        assert moved["replica"] == other.name
        why = await asked(run, f"/warmroute/live/requests/{moved['key']}")
        assert {each["replica"] for each in why["decision"]["candidates"]} == {one.name, other.name}
        assert why["decision"]["replica"] == one.name


async def test_requests_that_reach_no_replica_are_shown() -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run)
        assert (await run.post(b"{"))[0] == 400
        [row] = (await asked(run))["requests"]
        assert (row["status"], row["code"], row["replica"], row["state"]) == (400, "invalid_json", "", "ended")
        assert (await asked(run, f"/warmroute/live/requests/{row['key']}"))["decision"] is None


async def test_nothing_is_kept_without_watchers() -> None:
    async with FakeReplica() as one, running(one) as run:
        view = run.gateway[LiveView]
        observers = len(run.gateway.observers)
        await run.post()
        assert len(view.feed) == 0
        await asked(run)
        assert len(run.gateway.observers) == observers + 1
        await run.post()
        assert len(view.feed) == 1
        view.sweep(run.gateway.clock() + QUIET_S + 1)
        assert (len(view.feed), len(run.gateway.observers)) == (0, observers)


async def test_sums_over_time_are_there_when_the_page_is_opened() -> None:
    async with FakeReplica([answers(prompt=100, cached=50)]) as one, running(one, prices=PRICES) as run:
        view = run.gateway[LiveView]
        view.sums.sample(run.gateway.clock())
        for _ in range(3):
            await run.post()
        # Two steps later, as a sweep would find it.
        for step in range(1, 5):
            view.sums.sample(run.gateway.clock() + 2 * step)
        found = await asked(run)
        sums = {key: sum(point[key] for point in found["points"]) for key in ("requests", "prompt_tokens", "cached_tokens")}
        assert sums == {"requests": pytest.approx(3), "prompt_tokens": pytest.approx(300), "cached_tokens": pytest.approx(150)}
        assert sum(point["saved_usd"] for point in found["points"]) == pytest.approx(150 * 0.9 / 1e6)
        [row] = found["replicas"]
        assert (row["prompt_tokens"], row["cached_tokens"], row["circuit"]) == (300, 150, "closed")
        assert (
            found["pools"] == [{"name": "default", "waiting": 0, "running": 0, "limit": 1024}] or found["pools"][0]["limit"] > 0
        )


async def test_all_workers_are_shown_whichever_is_asked() -> None:
    async with FakeReplica([answers()]) as one, star(one) as (_, [first, second]):
        assert (await asked(first.run))["workers"] == 2
        for number in range(4):
            run = (first, second)[number % 2].run
            assert (await run.post(headers={"X-Request-Id": f"r{number}"}))[0] == 200
        found = await asked(second.run)
        assert sorted(row["id"] for row in found["requests"]) == ["r0", "r1", "r2", "r3"]
        for row in found["requests"]:
            why = await asked(first.run, f"/warmroute/live/requests/{row['key']}")
            assert why["decision"]["candidates"]
        async with events(first.run) as stream:
            assert len((await anext(stream))[1]["requests"]) == 4
            await second.run.post(headers={"X-Request-Id": "r4"})
            await until(stream, id="r4", state="ended")


async def test_a_head_of_the_events_has_none() -> None:
    """It would have a body without end, which a proxy takes for the next answer."""
    async with FakeReplica() as one, running(one) as run:
        async with run.session.head(f"{run.admin_url}/warmroute/live/events") as answer:
            assert answer.status == 405
        async with run.session.get(f"{run.admin_url}/warmroute/live/events") as answer:
            assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: hello")


async def test_only_operators_see_anything() -> None:
    async with FakeReplica() as one, running(one, admin_key="secret") as run:
        for path in ENDPOINTS:
            assert (await run.get(path))[0] == 401, path
            assert (await run.get(path, headers={"Authorization": "Bearer wrong"}))[0] == 401, path
            async with run.session.get(run.url + path) as answer:
                assert answer.status == 401, "on the clients' port too"
        assert (await run.get("/warmroute/live", headers={"Authorization": "Bearer secret"}))[0] == 200
    async with FakeReplica() as one, running(one) as run:
        for path in ENDPOINTS:
            assert (await run.get(path, headers={"Sec-Fetch-Site": "cross-site"}))[0] == 403, path
            async with run.session.get(run.url + path) as answer:
                assert answer.status == 403, "without a key, nothing on the clients' port"


async def test_watchers_are_bounded_and_slow_ones_are_let_go() -> None:
    async with FakeReplica() as one, running(one) as run, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            await anext(await stack.enter_async_context(events(run)))
        code, _, raw = await run.get("/warmroute/live/events")
        assert (code, json.loads(raw)["error"]["code"]) == (503, "too_many_watchers")
        await stack.aclose()

        async def let_in() -> bool:
            async with run.session.get(run.admin_url + "/warmroute/live/events") as answer:
                return answer.status == 200

        async with asyncio.timeout(40):
            while not await let_in():  # noqa: ASYNC110  (that they are gone is noticed at the next frame)
                await asyncio.sleep(0.05)


async def test_one_that_reads_nothing_is_disconnected_and_its_place_is_free() -> None:
    async with FakeReplica() as one, running(one) as run, contextlib.AsyncExitStack() as stack:
        broadcast = Broadcast(run.gateway.local, run.gateway.control, time.time, every_s=0.001)
        served = run.gateway.served
        watched = LiveEndpoints(served.operator, run.gateway.local, broadcast, stall_s=0.5)
        runner = side_runner(dataclasses.replace(served, endpoints=watched.routes()), ADMIN)
        address = (await stack.enter_async_context(listening(runner))).removeprefix("http://").split(":")
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((address[0], int(address[1])))
        sock.sendall(b"GET /warmroute/live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: repr(broadcast).endswith("to 1>"))
        await eventually(lambda: repr(broadcast).endswith("to 0>"))

        def gone() -> bool:
            """Only what is sent there finds out: who reads nothing does not see the end."""
            try:
                sock.sendall(b"x")
            except ConnectionError:
                return True
            return False

        await eventually(gone)


async def test_a_flood_is_sampled() -> None:
    async with FakeReplica([answers()]) as one, running(one) as run:
        await asked(run)
        whole = int(BURST) + 120
        await asyncio.gather(*(run.post(headers={"X-Request-Id": f"r{at}"}) for at in range(whole)))
        feed = run.gateway[LiveView].feed
        await eventually(lambda: feed.ended == whole)
        feed.check()
        assert feed.hidden > 0
        assert len((await asked(run))["requests"]) <= RECENT


async def test_what_clients_can_name_is_cut() -> None:
    name = "<script>alert(1)</script>" + "x" * 200
    async with FakeReplica([answers()], listing=models(name)) as one, running(one) as run:
        await asked(run)
        await run.post({**BODY, "model": name}, headers={"X-Tenant-Id": "<b>" + "t" * 500})
        [row] = (await asked(run))["requests"]
        assert row["model"] == name[:100]
        assert max(len(str(value)) for value in row.values()) <= 300


async def test_the_index_is_drawn_level_by_level() -> None:
    async with FakeReplica([answers(prompt=700)]) as one, running(one) as run:
        for tail in ("a", "b"):
            messages = [{"role": "system", "content": "head " * 400}, {"role": "user", "content": f"{tail} " * 400}]
            assert (await run.post({"model": "m", "messages": messages}))[0] == 200
        found = await asked(run, "/warmroute/trie?depth=2")
        root = found["node"]
        assert (root["way"], root["blocks"], root["children"]) == ("", 0, 1)
        [head] = root["shown"]
        assert head["holders"][0]["replica"] == one.name
        assert (head["children"], len(head["shown"])) == (2, 2)
        leaf = head["shown"][0]
        assert leaf["way"].startswith(head["way"] + ".")
        assert leaf["depth_tokens"] == head["tokens"]
        again = await asked(run, f"/warmroute/trie?way={leaf['way']}&depth=1")
        assert again["node"]["way"] == leaf["way"]
        assert again["node"]["blocks"] == leaf["blocks"]
        gone = await asked(run, f"/warmroute/trie?way={head['way']}.{'0' * 16}")
        assert gone["node"]["way"] == head["way"], "as far as it leads"
        bad = ["depth=0", "depth=5", "depth=x", "children=1000", "way=zz", "way=" + ".".join(["0" * 16] * 300), "depth=²"]
        for query in bad:
            assert (await run.get(f"/warmroute/trie?{query}"))[0] == 400, query
