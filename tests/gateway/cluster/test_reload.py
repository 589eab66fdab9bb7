"""Another configuration for a running gateway: what changes, what stays, and what no request notices."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.source import ConfigSource
from gateway.fleet.membership import configured
from tests.gateway.conftest import BODY, Running, config_over, eventually, longest_pause, running
from tests.support.configmap import ConfigMap
from tests.support.configs import load
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, dies, dies_now, http, models, streams, writes
from tests.support.limits import open_files
from tests.support.tiers import gate


async def reload(run: Running, *replicas: FakeReplica | dict[str, Any], **more: Any) -> None:
    await run.gateway.local.reload.take(config_over(*replicas, **more))


async def rows(run: Running) -> dict[str, dict[str, Any]]:
    listed = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
    return {row["name"]: row for row in listed}


async def opened(run: Running) -> Any:
    """A stream's parts, its first one taken."""
    parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
    assert (await anext(parts)).choices[0].delta.content == "a"
    return parts


# -- replicas


@pytest.mark.parametrize("outcome", ["its facts", "nothing"])
async def test_a_probe_that_ends_after_its_replica_has_left_changes_nothing(outcome: str) -> None:
    """The first probes go on while requests are served, so that a reload may come between."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    def held(behaviour: Behaviour) -> Behaviour:
        async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await go_on.wait()
            await behaviour(request, writer)

        return behave

    def page(tokens: int) -> Behaviour:
        text = f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{tokens}"}} 1.0\n'
        return writes(http(200, text.encode(), "text/plain; version=0.0.4"))

    old = FakeReplica(listing=models("m", owner="vllm"), pages={"/metrics": page(1000)})
    health = {"interval_s": 60, "failures": 1}
    async with old, FakeReplica() as new, running(old, new, health=health) as run:
        if outcome == "its facts":
            old.pages["/metrics"] = held(page(2000))
        else:
            old.listing = held(dies)
        look = asyncio.create_task(run.gateway.fleet.probe_all(run.gateway.upstream))
        await asked.wait()
        await reload(run, new, health=health)
        await eventually(lambda: old.name not in run.gateway.router.replicas)
        go_on.set()
        await look
        assert old.name not in run.gateway.router.replicas
        assert not [name for name in await run.metrics() if old.name in name and "_total" not in name]


async def test_a_replica_that_joins_answers_at_once_and_one_that_leaves_finishes_its_requests() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as old, FakeReplica() as new, running(old) as run:
        parts = await opened(run)
        await reload(run, new)
        for _ in range(4):
            code, headers, _ = await run.post()
            assert (code, headers["X-Warmroute-Replica"]) == (200, new.name)
        listed = await rows(run)
        assert (listed[old.name]["leaving"], listed[old.name]["pool"], listed[old.name]["inflight"]) == (True, None, 1)
        assert (listed[new.name]["leaving"], listed[new.name]["up"]) == (False, True)
        assert run.gateway.fleet.forget_departed() == (), "it is still busy"
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        await eventually(lambda: old.name not in run.gateway.router.replicas)
        assert list(await rows(run)) == [new.name]
        gauges = {name for name in await run.metrics() if name.startswith("warmroute_replica_") and "_total" not in name}
        assert not [name for name in gauges if old.name in name]
        assert [name for name in gauges if new.name in name]
        await eventually(lambda: old.name not in repr(run.gateway.upstream))
        run.gateway.router.check()


class Counted:
    """A model list that counts how often it is asked for."""

    def __init__(self) -> None:
        self.looks = 0

    async def __call__(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        self.looks += 1
        await models("m")(request, writer)


async def test_a_replica_that_has_left_is_no_longer_probed() -> None:
    left, joined, health = Counted(), Counted(), {"interval_s": 0.01}
    async with FakeReplica(listing=left) as old, FakeReplica(listing=joined) as new, running(old, health=health) as run:
        await eventually(lambda: left.looks > 3)
        await reload(run, new, health=health)
        await eventually(lambda: not run.gateway.fleet.leaving)
        seen, now = left.looks, joined.looks
        await eventually(lambda: joined.looks > now + 5)
        assert left.looks <= seen + 1, "one may have been on its way"


async def test_a_replica_that_stays_keeps_all_that_it_has() -> None:
    go_on = asyncio.Event()
    async with (
        FakeReplica([answers(prompt=400), streams("a", "b", hold=go_on, prompt=400), answers(prompt=400)]) as stays,
        FakeReplica() as joins,
        running(stays) as run,
    ):
        await run.post()
        (state,) = run.gateway.fleet.replicas
        breaker, rate = state.breaker, run.gateway.router.ledger.of(state.name).rate
        held = run.gateway.router.trie.held()[state.name]
        parts = await opened(run)
        await reload(run, joins, {"url": stays.url, "capacity_tokens": 100_000})
        assert set(run.gateway.fleet.replicas) > {state}
        newcomer = run.gateway.fleet.named(joins.name)
        assert newcomer
        assert set(run.gateway.router.ledger.starting) == {newcomer.name}, "its first requests will be slow"
        assert (state.up, state.breaker, state.capacity_tokens) == (True, breaker, 100_000)
        assert run.gateway.router.ledger.of(state.name).rate is rate
        assert run.gateway.router.ledger.of(state.name).inflight == 1
        assert run.gateway.router.trie.held()[state.name] == held > 0
        assert run.gateway.router.replicas[state.name].capacity_tokens == 100_000
        assert (await run.metrics())[f'warmroute_replica_capacity_tokens{{replica="{state.name}"}}'] == 100_000
        code, headers, _ = await run.post()
        assert (code, headers["X-Warmroute-Replica"]) == (200, stays.name), "its cache is still known"
        assert int(headers["X-Warmroute-Cached-Tokens"]) > 0
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]


async def test_a_replica_that_is_back_before_it_was_gone_has_lost_nothing() -> None:
    go_on = asyncio.Event()
    script = [streams("a", "b", hold=go_on), answers()]
    async with FakeReplica(script) as one, FakeReplica() as two, running(one) as run:
        parts = await opened(run)
        (state,) = run.gateway.fleet.replicas
        held = run.gateway.router.trie.held()[one.name]
        await reload(run, two)
        assert run.gateway.fleet.leaving == [state]
        await reload(run, one)
        assert list(run.gateway.fleet.replicas) == [state]
        assert not state.leaving
        assert run.gateway.router.trie.held()[one.name] == held > 0
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        assert (await run.post())[1]["X-Warmroute-Replica"] == one.name


async def test_a_new_name_is_a_new_replica() -> None:
    async with FakeReplica() as one, running(one) as run:
        await run.post()
        await reload(run, {"url": one.url, "name": "renamed"})
        assert (await run.post())[1]["X-Warmroute-Replica"] == "renamed"
        await eventually(lambda: list(run.gateway.router.replicas) == ["renamed"])
        assert (await run.post())[0] == 200


async def test_a_name_may_go_to_another_url_while_requests_run() -> None:
    go_on = asyncio.Event()
    old, new = FakeReplica([streams("a", "b", hold=go_on)]), FakeReplica()
    async with old, new, running(old) as run:
        await reload(run, {"url": old.url, "name": "x"})
        parts = await opened(run)
        await reload(run, {"url": new.url, "name": "x"})
        assert (await run.post())[0] == 200
        assert (len(old.requests), len(new.requests)) == (1, 1)
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        assert (await rows(run))["x"]["inflight"] == 0
        run.gateway.router.check()


async def test_a_replica_that_joins_and_does_not_answer_is_down_and_probed() -> None:
    async with FakeReplica() as one, FakeReplica() as late, running(one) as run:
        await late.stop()
        await reload(run, one, late, health={"interval_s": 0.01})
        assert (await rows(run))[late.name]["up"] is False
        assert (await run.post())[0] == 200
        async with late:
            state = run.gateway.fleet.named(late.name)
            assert state
            await eventually(lambda: state.up)


async def test_a_request_that_fails_over_after_a_reload_goes_to_a_current_replica() -> None:
    die = asyncio.Event()

    async def dies_on_demand(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await die.wait()
        dies_now(writer)

    async with FakeReplica([dies_on_demand]) as old, FakeReplica() as new, running(old) as run:
        asking = asyncio.create_task(run.post())
        await eventually(lambda: old.requests)
        await reload(run, new)
        die.set()
        code, headers, _ = await asking
        assert (code, headers["X-Warmroute-Replica"]) == (200, new.name)


# -- pools


async def test_a_pool_with_more_slots_admits_its_waiters() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on), answers()]) as one:
        pool = {"replicas": [one.url], "max_inflight": 1, "max_queue": 4}
        async with running(pools=[pool]) as run:
            parts = await opened(run)
            waiting = asyncio.create_task(run.post())
            admission = run.gateway.fleet.pools[0].admission
            await eventually(lambda: admission.waiting == 1)
            await reload(run, pools=[{**pool, "max_inflight": 2}])
            assert (await waiting)[0] == 200
            assert run.gateway.fleet.pools[0].admission is admission
            go_on.set()
            assert [part.choices[0].delta.content async for part in parts] == ["b"]


async def test_pools_are_known_again_by_their_names() -> None:
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three:
        first = {"name": "a", "models": ["m"], "replicas": [one.url]}
        second = {"models": ["n"], "replicas": [two.url]}
        async with running(pools=[first, second]) as run:
            m, n = (pool.admission for pool in run.gateway.fleet.pools)
            await reload(run, pools=[second, {"name": "a", "models": ["m", "o"], "replicas": [three.url, one.url]}])
            assert [pool.admission for pool in run.gateway.fleet.pools] == [n, m]
            assert set(run.gateway.fleet.target("o").replicas) == {one.name, three.name}
            await reload(run, pools=[{"models": ["n"], "replicas": ["http://127.0.0.1:9"]}])
            assert [pool.admission for pool in run.gateway.fleet.pools] == [n]
            await reload(run, pools=[{"name": "b", "models": ["n"], "replicas": ["http://127.0.0.1:9"]}])
            assert run.gateway.fleet.pools[0].admission is not n, "the same replicas and models under another name"
            waiting = [name for name in await run.metrics() if name.startswith("warmroute_pool_waiting")]
            assert waiting == ['warmroute_pool_waiting{pool="b"}'], "a pool that is no more has no gauges"


# -- everything else


async def test_prices_policy_and_bounds_change() -> None:
    async with FakeReplica() as one, running(one, prices={"m": {"input": 1, "output": 1}}) as run:
        await run.post()
        before = await run.metrics()
        routing = {"policy": "round_robin", "ttl_s": 5, "memory_mb": 1}
        await reload(run, one, prices={"m": {"input": 1000, "output": 1000}}, routing=routing)
        router = run.gateway.router
        assert (router.policy_name, router.trie.ttl_s, router.trie.max_bytes) == ("round_robin", 5, 1 << 20)
        await run.post()
        after = await run.metrics()
        cost = next(name for name in after if name.startswith("warmroute_cost_usd_total") and '"output"' in name)
        assert after[cost] - before[cost] == pytest.approx(1000 * before[cost])
        assert after['warmroute_config_reloads_total{result="good"}'] == 1
        assert after["warmroute_config_loaded_timestamp_seconds"] > before["warmroute_config_loaded_timestamp_seconds"]


async def test_limits_and_timeouts_change() -> None:
    big = json.dumps({**BODY, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode()
    never = asyncio.Event()
    async with FakeReplica([answers(), silent(never)]) as one, running(one) as run:
        assert (await run.post(io.BytesIO(big)))[0] == 200
        limits = {"drain_timeout_s": 5, "body_mb": 1, "connections": 1}
        await reload(run, one, limits=limits, timeouts={"first_byte_s": 0.05})
        async with asyncio.timeout(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(run.url.rpartition(":")[2]))
            assert b" 503 " in await reader.readline(), "one connection is open already"
            writer.close()
            assert (await run.post())[0] == 504
        assert (await run.post(io.BytesIO(big)))[0] == 413
        assert run.gateway.config.limits.drain_timeout_s == 5
        one.script = (streams("a", "b", hold=never),)
        for timeouts, error in (({"idle_s": 0.05}, b"nothing came for 0.05 s"), ({"total_s": 0.05}, b"longer than 0.05 s")):
            await reload(run, one, timeouts=timeouts)
            async with run.session.post(run.url + "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
                assert error in await answer.read()


async def test_what_clients_may_take_their_time_for_changes() -> None:
    async with FakeReplica() as one, running(one) as run:
        await reload(run, one, limits={"body_s": 0.1, "client_idle_s": 0.1})
        async with asyncio.timeout(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port)
            assert await reader.read() == b"", "nothing was sent"
            writer.close()
            for base, path in ((run.url, "/v1/chat/completions"), (run.admin_url, "/warmroute/drain")):
                reader, writer = await asyncio.open_connection("127.0.0.1", URL(base).port)
                writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n".encode())
                assert b" 408 " in await reader.readline()
                writer.close()


def silent(until: asyncio.Event) -> Any:
    async def behave(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
        await until.wait()

    return behave


async def test_health_rules_change_and_are_followed_at_once() -> None:
    async with FakeReplica() as one, running(one) as run:
        (state,) = run.gateway.fleet.replicas
        assert list(state.models) == ["m"]
        one.listing = models("m", "new")
        await reload(run, one, health={"interval_s": 30})
        await eventually(lambda: "new" in state.models)  # the old rules would have looked after a minute
        assert run.gateway.config.health.interval_s == 30


async def test_what_needs_a_restart_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        routing = {"block_bytes": 64, "ttl_s": 7}
        fixed = {"listen": "127.0.0.1:1", "state": {"url": "sqlite"}, "log_level": "debug"}
        fixed["tracing"] = {"endpoint": "http://127.0.0.1:1", "sample": 0.5}
        await reload(run, two, **fixed, routing=routing)
        (record,) = [record for record in caplog.records if "restart" in record.message]
        keys = ["listen", "routing.block_bytes", "log_level", "tracing.endpoint", "state"]
        assert (record.levelno, vars(record)["keys"]) == (logging.WARNING, keys)
        assert run.gateway.config.routing.block_bytes == run.gateway.live.config.routing.block_bytes == 256
        assert run.gateway.router.trie.ttl_s == 7, "all else is as in the file"
        assert run.gateway.config.tracing.sample == 0.5
        assert run.gateway.config.tracing.endpoint == "off"
        assert (await run.post())[1]["X-Warmroute-Replica"] == two.name
        await reload(run, two, **fixed, routing=routing)
        assert (await run.metrics())['warmroute_config_reloads_total{result="unchanged"}'] == 1


# -- the source


def test_a_changed_file_is_noticed_once_it_is_quiet(tmp_path: Path) -> None:
    files = ConfigMap(tmp_path)
    files.swap("one")
    source = ConfigSource(files.path, config_over)
    assert not source.differs()
    files.swap("two")
    assert [source.differs(), source.differs()] == [False, True]
    source.taken()
    assert not source.differs()
    files.path.write_text("half of")
    assert not source.differs()
    files.path.write_text("half of it, and the other half")
    assert not source.differs(), "somebody is still writing"
    assert source.differs()
    source.taken()
    polls = 0
    while polls < 6 and not source.differs():
        files.path.write_text(f"always {polls} another")
        polls += 1
    assert 2 < polls < 6, "it changes all the time, and is read all the same"
    source.taken()
    files.path.unlink()
    assert [source.differs(), source.differs()] == [False, True], "a file that is gone is worth a word"
    source.taken()
    assert not source.differs()


async def test_a_pipe_in_the_place_of_the_file_is_refused_and_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("one")
    config = config_over({"url": "http://a:1"})
    source = ConfigSource(path, lambda: config, poll_s=0.001)
    path.unlink()
    os.mkfifo(path)
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match="is not a regular file"):
            await source.next()
        path.unlink()
        path.write_text("two")
        assert await source.next() == config


def test_without_a_file_nothing_ever_differs() -> None:
    source = ConfigSource(None, config_over)
    assert [source.differs(), source.differs()] == [False, False]


async def test_a_file_that_cannot_be_read_for_lack_of_descriptors_is_read_at_a_later_look(tmp_path: Path) -> None:
    files = ConfigMap(tmp_path)
    files.swap(json.dumps({"pools": [{"replicas": ["http://a:1"]}]}))
    readings = list[str]()

    def read() -> Config:
        readings.append("")
        with open_files(3) if len(readings) < 3 else contextlib.nullcontext():
            return load(files.path, {}, env={})

    source = ConfigSource(files.path, read, poll_s=0.001)
    files.swap(json.dumps({"pools": [{"replicas": ["http://b:1"]}]}))
    async with asyncio.timeout(20):
        assert (await source.next()).pools[0].replicas[0].url == "http://b:1"
    assert len(readings) == 3
    assert not source.differs(), "once it was read, it is read"
    files.path.write_text("pools: 1")
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError):
            await source.next()


async def test_a_reading_that_fails_does_not_end_the_watching(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        results: list[Any] = [RuntimeError("a bug"), ConfigError("pools: no"), config_over(two)]

        def read() -> Config:
            result = results.pop(0)
            if isinstance(result, Exception):
                raise result
            assert isinstance(result, Config)
            return result

        reloading = type(run.gateway.local.reload)(
            live=run.gateway.live,
            source=(source := ConfigSource(None, read)),
            membership=run.gateway.local.membership,
            parts=run.gateway.local.parts,
            metrics=run.gateway.metrics,
            now=lambda: 7.0,
        )
        watching = asyncio.create_task(reloading.run())
        for left in (2, 1, 0):
            source.asked.set()
            await eventually(lambda left=left: len(results) == left and not source.asked.is_set())  # type: ignore[misc]
        await eventually(lambda: run.gateway.metrics.reloads.values["good",] == 1)
        assert run.gateway.metrics.reloads.values == {("good",): 1, ("invalid",): 1, ("unchanged",): 0}
        assert run.gateway.metrics.config_loaded.values[()] == 7.0
        assert list(run.gateway.fleet.target("m").replicas) == [two.name]
        logged = {record.message: vars(record).get("error") for record in caplog.records}
        assert logged["configuration not reloaded: it is invalid"] == "pools: no"
        assert "reload failed" in logged
        watching.cancel()


@pytest.mark.parametrize(("pools", "replicas"), [(500, 1), (1, 1000), (100, 10)])
@gate("100-10", reason="pools and replicas, both many")
async def test_a_reload_to_many_replicas_does_not_hold_requests(pools: int, replicas: int) -> None:
    def many(path: str) -> list[dict[str, Any]]:
        """None of them is there."""
        urls = [[f"http://127.0.0.1:9/{path}/{number}-{each}" for each in range(replicas)] for number in range(pools)]
        return [
            {
                "models": [f"m{number}"],
                "replicas": [{"url": url, "name": f"{number}-{path}-{each}"} for each, url in enumerate(chosen)],
            }
            for number, chosen in enumerate(urls)
        ]

    pauses = list[float]()
    async with FakeReplica() as one, running(one) as run:
        for path in "abc":
            config = load(None, {"listen": "127.0.0.1:0", "health": {"interval_s": 60}, "pools": many(path)}, env={})

            async def change(config: Config = config) -> None:
                await run.gateway.local.reload.take(config)
                await eventually(lambda: all(state.failed_probes > 1 for state in run.gateway.fleet.replicas))

            pauses.append(await longest_pause(change))
    assert min(pauses) < 0.5, "each time: it is not the machine; what grows with the square would take seconds"


async def test_the_event_loop_turns_while_many_replicas_are_asked_that_will_join() -> None:
    urls = [{"url": f"http://127.0.0.1:9/{number}", "name": f"r{number}"} for number in range(2000)]
    config = load(None, {"listen": "127.0.0.1:0", "pools": [{"replicas": urls}]}, env={})
    members = {each.name: each for each in configured(config)}
    async with FakeReplica() as one, running(one) as run:
        shares = []
        for _ in range(3):
            begun = time.thread_time()
            pause = await longest_pause(lambda: run.gateway.fleet.probe_joining(members, run.gateway.upstream, 60))
            shares.append(pause / (time.thread_time() - begun))
    assert min(shares) < 0.15, "of the time that it takes; at once it would be a third"
