"""Several gateways with one mind, over a real server: what they share, and what becomes of it when the server fails."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.features.sharing.messages import ALL, VERSION, Envelope, Offer, encode_envelope
from gateway.features.sharing.metrics import SharingMetrics
from tests.gateway.conftest import BODY, Running, eventually
from tests.gateway.features.sharing.conftest import gateway_process, sharing
from tests.support.fakes import FakeReplica, answers, hangs, streams
from tests.support.redis import RedisServer, serving

STREAM = {**BODY, "stream": True}
LOG = "warmroute:{default}:log"


def at(store: RedisServer, **more: Any) -> dict[str, Any]:
    return {"sharing": {"url": store.url, **more}}


def held(run: Running) -> dict[str, int]:
    return {name: blocks for name, blocks in run.gateway.router.trie.held().items() if blocks}


def up(run: Running) -> bool:
    return run.gateway.metrics.of(SharingMetrics).up.values.get(()) == 1


def others(run: Running) -> float:
    return run.gateway.metrics.of(SharingMetrics).gateways.values.get((), 0)


def errors(run: Running, reason: str) -> float:
    return run.gateway.metrics.of(SharingMetrics).errors.values[(reason,)]


def refused(run: Running, reason: str) -> float:
    return run.gateway.metrics.of(SharingMetrics).refused.values[(reason,)]


async def together(*runs: Running) -> None:
    await eventually(lambda: all(up(run) and others(run) == len(runs) - 1 for run in runs))


def body(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"prompt {number} " * 100}]}


# -- what is shared


async def test_what_one_gateway_places_another_finds(store: RedisServer) -> None:
    script = [answers(prompt=250)]
    async with (
        FakeReplica(script) as a,
        FakeReplica(script) as b,
        sharing(a, b, **at(store)) as one,
        sharing(a, b, **at(store)) as two,
    ):
        await together(one, two)
        for number in range(8):
            _, headers, _ = await one.post(body(number))
            await eventually(lambda: held(two) == held(one))
            _, again, _ = await two.post(body(number))
            assert again["X-Warmroute-Replica"] == headers["X-Warmroute-Replica"]
            assert int(again["X-Warmroute-Cached-Tokens"]) > 0


async def test_what_runs_at_one_gateway_is_seen_by_the_other_until_it_is_over(store: RedisServer) -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as replica:
        one_at_a_time = {"pools": [{"replicas": [replica.url], "max_inflight": 1, "max_queue": 0}]}
        async with sharing(**at(store), **one_at_a_time) as one, sharing(**at(store), **one_at_a_time) as two:
            await together(one, two)
            async with one.session.post(f"{one.url}/v1/chat/completions", json=STREAM) as answer:
                await answer.content.readany()
                ledger = two.gateway.router.ledger
                await eventually(lambda: ledger.of(replica.name).decoding == 1)
                assert (await two.post())[0] == 429, "a pool's max_inflight is for all gateways together"
                go_on.set()
                await answer.read()
            await eventually(lambda: ledger.of(replica.name).inflight == 0)
            async with two.session.post(f"{two.url}/v1/chat/completions", json=STREAM) as answer:
                assert answer.status == 200


async def test_what_each_gateway_exports_adds_up_to_what_there_is(store: RedisServer) -> None:
    """Each knows what all of them have booked; alerts and autoscaling add their values up."""
    hold = asyncio.Event()
    async with FakeReplica([hangs(hold)] * 3) as replica:
        pool = {"pools": [{"replicas": [replica.url], "max_inflight": 4}]}
        async with sharing(**at(store), **pool) as one, sharing(**at(store), **pool) as two:
            await together(one, two)
            asking = [asyncio.create_task(run.post()) for run in (one, two, two)]
            loads = [run.gateway.router.ledger.of for run in (one, two)]
            await eventually(lambda: [of(replica.name).inflight for of in loads] == [3, 3])
            load = loads[0](replica.name)
            booked = load.booked_tokens
            pages = [await run.metrics() for run in (one, two)]

            def exported(name: str, label: str) -> list[float]:
                return [page[f"warmroute_{name}{{{label}}}"] for page in pages]

            of_replica, of_pool = f'replica="{replica.name}"', 'pool="default"'
            assert exported("replica_inflight", of_replica) == exported("pool_inflight", of_pool) == [1, 2]
            assert sum(exported("replica_booked_tokens", of_replica)) == booked > 0
            assert 0 < sum(exported("pool_prefill_backlog_seconds", of_pool)) <= booked / load.rate.value
            assert exported("pool_slots_taken", of_pool) == [3, 3], "as each would refuse the next but one"
            assert exported("pool_inflight_limit", of_pool) == [4, 4]
            hold.set()
            await asyncio.gather(*asking)


async def test_replicas_that_two_gateways_name_differently_are_counted(store: RedisServer) -> None:
    async with FakeReplica() as replica:
        pools = [{"pools": [{"replicas": [{"url": replica.url, "name": name}]}]} for name in ("a", "b")]
        async with sharing(**at(store), **pools[0]) as one, sharing(**at(store), **pools[1]) as two:
            await together(one, two)
            for number in range(3):
                await one.post(body(number))
            await eventually(lambda: two.gateway.metrics.sharing_unknown_replicas.values[()] == 3)
            assert one.gateway.metrics.sharing_unknown_replicas.values[()] == 0
            assert held(two) == {}


async def test_learned_rates_and_scales_are_shared(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        for number in range(6):
            await one.post({**body(number), "stream": True}, headers={"x-session-id": f"s{number}"})
        await eventually(lambda: held(two) == held(one))
        first, second = one.gateway.router, two.gateway.router
        await eventually(lambda: second.ledger.open_leases == 0 and len(second.sessions) == 6)
        assert second.ledger.of(replica.name).rate.value == pytest.approx(first.ledger.of(replica.name).rate.value)
        assert second.units_per_token("m") == pytest.approx(first.units_per_token("m"))
        assert len(first.sessions) == 6


async def test_a_replica_that_fails_one_gateway_is_probed_by_the_other(store: RedisServer) -> None:
    never = {"health": {"interval_s": 600}}
    async with (
        FakeReplica() as a,
        FakeReplica() as b,
        sharing(a, b, **at(store), **never) as one,
        sharing(a, b, **at(store), **never) as two,
    ):
        await together(one, two)
        await a.stop()
        while one.gateway.fleet.named(a.name).up:  # type: ignore[union-attr]
            await one.post(body(random.randrange(10**9)))
        await eventually(lambda: not two.gateway.fleet.named(a.name).up)  # type: ignore[union-attr]


async def test_two_clusters_in_one_server_are_apart(store: RedisServer) -> None:
    async with (
        FakeReplica() as replica,
        sharing(replica, **at(store, cluster="x")) as one,
        sharing(replica, **at(store, cluster="y")) as two,
    ):
        await eventually(lambda: up(one) and up(two))
        await one.post()
        with store.client as client:
            await eventually(lambda: client.xlen("warmroute:{x}:log") > 1)
            assert {key.decode() for key in client.keys("*")} == {"warmroute:{x}:log", "warmroute:{y}:log"}
        assert held(two) == {}
        assert others(two) == others(one) == 0


# -- who comes and who goes


async def test_one_that_comes_later_begins_with_what_the_others_know(
    store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
        for number in range(20):
            await one.post(body(number))
        known = held(one)
        with store.client as client:
            client.delete(LOG)  # what was published before is gone, as it is after a while
            await eventually(lambda: client.exists(LOG))
        async with sharing(replica, **at(store)) as two:
            assert held(two) == known, "before its first request"
            restored = [each.__dict__ for each in caplog.records if each.message == "prefix index restored"]
            assert [each["source"] for each in restored] == ["another gateway"]
            _, headers, _ = await two.post(body(3))
            assert int(headers["X-Warmroute-Cached-Tokens"]) > 0
        with store.client as client:
            assert not [key for key in client.keys("*") if b"snapshot" in key], "who took it has removed it"


async def test_one_that_comes_while_the_store_is_away_learns_the_rest_when_it_is_back(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
        for number in range(20):
            await one.post(body(number))
        with store.client as client:
            client.delete(LOG)  # what was published before is gone, as it is after a while
            await eventually(lambda: client.exists(LOG))
        store.pause()
        async with sharing(replica, **at(store)) as two:
            assert not held(two)
            await two.post(body(100))
            store.go_on()
            await eventually(lambda: held(two) == held(one))
            for number in (3, 100):
                assert int((await two.post(body(number)))[1]["X-Warmroute-Cached-Tokens"]) > 0


def sources(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of what gateways have begun with."""
    return [each.__dict__["source"] for each in caplog.records if each.message == "prefix index restored"]


async def test_a_file_goes_before_a_sibling_that_knows_much_less_which_is_taken_in_beside_it(
    store: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "s"
    async with FakeReplica() as replica:
        async with sharing(replica, file=file, **at(store)) as one:
            for number in range(20):
                await one.post(body(number))
        with store.client as client:
            client.flushall()
        async with sharing(replica, **at(store)) as two:
            await two.post(body(100))
            async with sharing(replica, file=file, **at(store)) as one:
                assert sources(caplog) == [str(file), "another gateway"]
                for number in (3, 100):
                    assert int((await one.post(body(number)))[1]["X-Warmroute-Cached-Tokens"]) > 0
                known = held(one)
            caplog.clear()
            async with sharing(replica, file=file, **at(store)) as one:
                assert sources(caplog) == [str(file), "another gateway"]
                assert held(one) == known


async def test_a_sibling_that_knows_as_much_goes_before_the_file(
    store: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "s"
    async with FakeReplica() as replica, sharing(replica, **at(store)) as two:
        for _ in range(2):
            caplog.clear()
            async with sharing(replica, file=file, **at(store)) as one:
                await together(one, two)
                for number in range(20):
                    await one.post(body(number))
                await eventually(lambda: held(two) == held(one))
        assert sources(caplog) == ["another gateway"]


async def test_one_that_comes_later_does_not_wait_for_those_that_were_just_killed(
    store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As its predecessor was, perhaps: the stream shows them as if they were alive."""
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
        await one.post()
        await eventually(lambda: up(one))
        with store.client as client:
            for number in range(20):
                dead = encode_envelope(Envelope(1, 0.0, "dead", ()))
                client.xadd(LOG, {"v": VERSION, "f": "1/256", "g": f"dead{number}", "e": dead})
        async with sharing(replica, **at(store)) as two:
            assert held(two) == held(one)
    assert "another gateway has sent no snapshot" not in caplog.messages


async def test_one_that_comes_later_sees_what_runs(store: RedisServer) -> None:
    go_on = asyncio.Event()
    async with (
        FakeReplica([streams("a", "b", hold=go_on)]) as replica,
        sharing(replica, **at(store)) as one,
        one.session.post(f"{one.url}/v1/chat/completions", json=STREAM) as answer,
    ):
        await answer.content.readany()
        async with sharing(replica, **at(store)) as two:
            await eventually(lambda: two.gateway.router.ledger.of(replica.name).inflight == 1)
            go_on.set()
            await answer.read()
            await eventually(lambda: two.gateway.router.ledger.of(replica.name).inflight == 0)


async def test_a_gateway_that_ends_says_goodbye(store: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
        async with sharing(replica, **at(store)) as two:
            await together(one, two)
        await eventually(lambda: others(one) == 0)
    reasons = [record.__dict__["reason"] for record in caplog.records if record.message == "another gateway is gone"]
    assert reasons == ["it has ended"], "nobody waits until nothing comes from it any more"


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_a_gateway_has_open_is_over_when_it_is_killed(store: RedisServer, tmp_path: Path, workers: int) -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as replica, sharing(replica, **at(store)) as one:
        whole = {**at(store), "workers": workers, "pools": [{"replicas": [replica.url]}]}
        async with gateway_process(tmp_path, **whole) as (url, process):
            await eventually(lambda: others(one) == 1)
            async with one.session.post(f"{url}/v1/chat/completions", json=STREAM) as answer:
                await answer.content.readany()
                await eventually(lambda: one.gateway.router.ledger.of(replica.name).decoding == 1)
                process.kill()
                await process.wait()
                await eventually(lambda: others(one) == 0)
                assert one.gateway.router.ledger.of(replica.name).inflight == 0
            go_on.set()


async def test_workers_share_with_other_gateways(store: RedisServer, tmp_path: Path) -> None:
    async with FakeReplica() as a, FakeReplica() as b, sharing(a, b, **at(store)) as one:
        for number in range(8):
            await one.post(body(number))
        whole = {**at(store), "workers": 2, "pools": [{"replicas": [a.url, b.url]}]}
        async with gateway_process(tmp_path, **whole) as (url, _):
            for number in range(8):
                async with one.session.post(f"{url}/v1/chat/completions", json=body(number)) as answer:
                    assert int(answer.headers["X-Warmroute-Cached-Tokens"]) > 0, "what was known before it began"
            before = held(one)
            async with one.session.post(f"{url}/v1/chat/completions", json=body(99)) as answer:
                assert answer.status == 200
            await eventually(lambda: sum(held(one).values()) > sum(before.values()))
            async with one.session.get(f"{url}/metrics") as page:
                assert "warmroute_sharing_up 1.0" in await page.text()


async def shared(run: Running) -> dict[str, Any]:
    """What operators see."""
    found: dict[str, Any] = json.loads((await run.get("/warmroute/sharing"))[2])
    return found


async def test_operators_see_the_other_gateways_and_why_the_store_is_away(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store, cluster="x")) as one:
        await together(one)
        async with sharing(replica, **at(store, cluster="x")) as two:
            await together(one, two)
            first, second = await shared(one), await shared(two)
            about = {name: first[name] for name in ("configured", "up", "problem", "cluster")}
            assert about == {"configured": True, "up": True, "problem": None, "cluster": "x"}
            (seen,) = first["gateways"]
            assert (seen["gateway"], seen["host"]) == (second["gateway"], socket.gethostname())
            assert 0 <= seen["silent_for_s"] <= seen["seen_for_s"] < 60
        await eventually(lambda: others(one) == 0)
        store.kill()
        await eventually(lambda: not up(one) and errors(one, "unreachable"))
        gone = await shared(one)
        assert (gone["up"], gone["gateways"]) == (False, [])
        assert gone["problem"].startswith("unreachable (ConnectionError: ")
    async with FakeReplica() as replica, sharing(replica) as alone:
        about = await shared(alone)
        assert (about["configured"], about["up"], about["gateways"]) == (False, False, [])


async def test_operators_of_a_gateway_with_workers_see_the_same(
    store: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "secret")
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
        whole = {**at(store), "workers": 2, "pools": [{"replicas": [replica.url]}]}
        async with gateway_process(tmp_path, **whole) as (url, _):
            await eventually(lambda: others(one) == 1)
            (seen,) = (await shared(one))["gateways"]
            async with one.session.get(f"{url}/warmroute/sharing", headers={"Authorization": "Bearer secret"}) as answer:
                found = await answer.json()
            assert (found["configured"], found["up"], found["gateway"]) == (True, True, seen["gateway"])
            assert len(found["gateways"]) == 1


async def test_the_file_is_read_where_there_is_no_sibling(store: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "index.snapshot"
    async with FakeReplica() as replica:
        async with sharing(replica, file=file, **at(store)) as one:
            await one.post()
            known = held(one)
        async with sharing(replica, file=file, **at(store)) as two:
            assert held(two) == known != {}


# -- the server fails


async def test_without_the_server_each_goes_on_alone_and_together_when_it_is_back(
    store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    script = [answers(prompt=250)]
    async with (
        FakeReplica(script) as a,
        FakeReplica(script) as b,
        sharing(a, b, **at(store)) as one,
        sharing(a, b, **at(store)) as two,
    ):
        await together(one, two)
        store.kill()
        await eventually(lambda: not up(one) and not up(two))
        for number in range(9):  # one of them gets more
            assert (await (one, two)[number % 2].post(body(number)))[0] == 200
        assert held(one) != held(two)
        assert errors(one, "unreachable") > 0
        store.start()
        begun = time.monotonic()
        await eventually(lambda: held(one) == held(two))
        assert time.monotonic() - begun < 5.0
        assert sum(held(one).values()) > 0
        await together(one, two)
        for number in range(9):  # one of them gets more
            _, headers, _ = await (two, one)[number % 2].post(body(number))
            assert int(headers["X-Warmroute-Cached-Tokens"]) > 0
    away = [record for record in caplog.records if "the store is away" in record.message]
    assert len(away) == 2, "each says it once"


async def test_a_gateway_starts_while_the_server_is_down(tmp_path: Path) -> None:
    store = RedisServer(tmp_path)  # not started
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        assert (await one.post())[0] == 200
        with serving(store):
            await together(one, two)
            await eventually(lambda: held(two) == held(one) != {})


async def test_a_server_that_hangs_holds_no_request(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        store.pause()
        for number in range(20):
            async with asyncio.timeout(2):
                assert (await one.post(body(number)))[0] == 200
        await eventually(lambda: not up(one))
        store.go_on()
        await together(one, two)
        await eventually(lambda: held(two) == held(one) != {})


async def test_what_did_not_fit_while_the_server_was_away_is_offered_as_a_snapshot(store: RedisServer) -> None:
    async with (
        FakeReplica() as replica,
        sharing(replica, unsent_bytes=2000, **at(store)) as one,
        sharing(replica, **at(store)) as two,
    ):
        await together(one, two)
        store.kill()
        await eventually(lambda: not up(one) and not up(two))
        for number in range(30):
            await one.post(body(number))
        await eventually(lambda: one.gateway.metrics.of(SharingMetrics).dropped.values.get((), 0) > 0)
        store.start()
        await eventually(lambda: held(two) == held(one) != {})
        await eventually(lambda: two.gateway.router.ledger.open_leases == 0)


async def test_a_full_server(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")) as store:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
            await eventually(lambda: errors(one, "full") > 0)
            assert (await one.post())[0] == 200
            assert not up(one)
            with store.client as client:
                client.config_set("maxmemory", "0")
            await eventually(lambda: up(one))


async def test_a_wrong_password_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(RedisServer(tmp_path, password="right-one")) as store:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
            await eventually(lambda: errors(one, "denied") > 0)
            assert (await one.post())[0] == 200
    told = next(record.__dict__ for record in caplog.records if record.message.startswith("the store is away"))
    assert (told["reason"], told["url"]) == ("denied", store.url)
    assert told["error"].endswith("set WARMROUTE_SHARING_PASSWORD")


async def test_the_password_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_SHARING_PASSWORD", "right-one")
    with serving(RedisServer(tmp_path, password="right-one")) as store:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
            await eventually(lambda: up(one))


async def test_a_server_that_is_flushed(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        await one.post(body(1))
        with store.client as client:
            client.flushall()
        await one.post(body(2))
        await two.post(body(3))
        await eventually(lambda: held(one) == held(two))
        assert sum(held(one).values()) > 0
        await together(one, two)


# -- what somebody else writes


async def test_garbage_in_the_stream(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        with store.client as client:
            for number in range(500):
                client.xadd(LOG, {"x": "garbage"})
                client.xadd(LOG, {"v": VERSION, "f": "1/256", "g": f"evil{number % 7}", "e": random.randbytes(200)})
        await one.post()
        await eventually(lambda: held(two) == held(one) != {})
        assert refused(two, "garbage") >= 500
        assert refused(two, "version") >= 500


async def test_an_offer_that_is_no_snapshot_does_not_end_the_sharing(store: RedisServer) -> None:
    key = "warmroute:{default}:snapshot:evil"
    envelope = encode_envelope(Envelope(1, 0.0, "evil", ((ALL, Offer("", key, 0.0)),)))
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        with store.client as client:
            client.set(key, "not a list")
            client.xadd(LOG, {"v": VERSION, "f": "1/256", "g": "evil", "e": envelope})
        await eventually(lambda: others(one) == others(two) == 2)
        await one.post()
        await eventually(lambda: held(two) == held(one) != {})
        assert up(one)
        assert up(two)
        assert errors(one, "garbage") == errors(two, "garbage") == 0


async def test_our_key_is_something_else(store: RedisServer) -> None:
    with store.client as client:
        client.set(LOG, "mine")
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
            await eventually(lambda: errors(one, "garbage") > 0)
            assert (await one.post())[0] == 200
            assert client.get(LOG) == b"mine", "it is not ours to delete"
            client.delete(LOG)
            await eventually(lambda: up(one))


async def test_a_stream_that_cannot_be_continued_is_begun_anew(store: RedisServer) -> None:
    with store.client as client:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
            await together(one, two)
            client.xadd(LOG, {"x": "y"}, id=f"{(1 << 64) - 1}-{(1 << 64) - 1}")
            await one.post()
            await eventually(lambda: held(two) == held(one) != {})
            await together(one, two)


async def test_a_stream_of_the_future(store: RedisServer) -> None:
    """Somebody, or a clock that was set back, has left ids that are later than now: times are wrong, nothing else is."""
    with store.client as client:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
            await together(one, two)
            client.xadd(LOG, {"x": "y"}, id=f"{int(time.time() * 1000) + 3_600_000}-0")
            await one.post()
            await eventually(lambda: held(two) == held(one) != {})
            one.gateway.router.check()
            two.gateway.router.check()


# -- other versions, other configurations


async def test_other_lengths_of_blocks_are_refused(store: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    odd = {"routing": {"block_bytes": 128}}
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store), **odd) as two:
        await eventually(lambda: refused(one, "format") > 0 and refused(two, "format") > 0)
        await two.post()
        assert held(one) == {}
        assert others(one) == others(two) == 0
    told = [record for record in caplog.records if "are refused" in record.message]
    assert {record.__dict__["error"] for record in told} == {
        "routing.block_bytes is 128 there and 256 here: both must have the same configuration",
        "routing.block_bytes is 256 there and 128 here: both must have the same configuration",
    }
    assert all(record.levelno == logging.ERROR for record in told)


async def test_replicas_that_only_one_of_them_has(store: RedisServer) -> None:
    script = [answers(prompt=250)]
    async with (
        FakeReplica(script) as a,
        FakeReplica(script) as b,
        sharing(a, b, **at(store)) as one,
        sharing(b, **at(store)) as two,
    ):
        await together(one, two)
        for number in range(20):
            await one.post(body(number))
        await eventually(lambda: held(two).get(b.name) == held(one)[b.name])
        assert set(held(two)) == {b.name}


# -- for operators


async def test_operators_see_the_others(store: RedisServer) -> None:
    async with FakeReplica() as replica, sharing(replica, **at(store)) as one, sharing(replica, **at(store)) as two:
        await together(one, two)
        seen = await one.metrics()
        assert seen["warmroute_sharing_up"] == 1
        assert seen["warmroute_sharing_gateways"] == 1
        assert json.loads((await one.get("/warmroute/replicas"))[2])
