"""A gateway begins with what the one before it knew: one process, or several workers."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import compose, serve
from gateway.cluster.commands import SingleProcess
from gateway.cluster.messages import Join
from gateway.config.schema import ReplicaConfig, RoutingConfig
from gateway.core import Surroundings
from gateway.features.sharing.single_process import single_process
from gateway.features.snapshots.file import read, write
from gateway.features.snapshots.keeper import SnapshotFile, file_of
from gateway.features.snapshots.knowledge import Knowledge
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.origins import has_restarted
from gateway.features.snapshots.single_process import SingleKnowledge
from gateway.features.snapshots.snapshot import Header, Origin, Snapshot, format_of
from gateway.fleet.engines import Facts
from router import Replica, Router
from router.snapshot.collect import collect
from router.snapshot.records import encode
from router.types import KEY_BYTES
from tests.gateway.conftest import LOGGED, Running, config_over, eventually
from tests.gateway.features.sharing.conftest import gateway_process, sharing
from tests.gateway.features.workers.conftest import star
from tests.support.fakes import FakeReplica, answers, status

TOKENS = 250  # of `body`


def knowledge_of(run: Running) -> Knowledge:
    control = run.gateway.control
    assert isinstance(control, SingleProcess)
    assert isinstance(control.lasting, SingleKnowledge)
    return control.lasting.knowledge


def body(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"prompt {number} " * 100}]}


def held(run: Running) -> dict[str, int]:
    return {name: blocks for name, blocks in run.gateway.router.trie.held().items() if blocks}


async def cached(run: Running, number: int) -> int:
    return int((await run.post(body(number)))[1]["X-Warmroute-Cached-Tokens"])


def told(caplog: pytest.LogCaptureFixture, message: str, field: str) -> list[Any]:
    """A field of each of these log lines."""
    return [record.__dict__[field] for record in caplog.records if record.message == message]


async def test_a_restart_begins_with_what_was_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "index"
    async with FakeReplica() as a, FakeReplica() as b:
        async with sharing(a, b, file=file) as one:
            homes = [(await one.post(body(number)))[1]["X-Warmroute-Replica"] for number in range(10)]
            known = held(one)
        assert told(caplog, "snapshot written", "path") == [str(file)], "the last one"
        async with sharing(a, b, file=file) as two:
            assert held(two) == known
            assert told(caplog, "prefix index restored", "source") == [str(file)]
            for number in range(10):
                _, headers, _ = await two.post(body(number))
                assert headers["X-Warmroute-Replica"] == homes[number]
                assert int(headers["X-Warmroute-Cached-Tokens"]) > 0
            assert two.gateway.metrics.of(SnapshotMetrics).restored_blocks.values[()] == sum(known.values())


async def test_the_age_and_the_size_of_what_the_next_start_reads_are_metrics(tmp_path: Path) -> None:
    """Of one that was read its age, of each that is written both. The age is that of the snapshot itself, not of its file."""
    file, name = tmp_path / "index", "warmroute_snapshot_timestamp_seconds"
    async with FakeReplica() as replica:
        async with sharing(replica, file=file) as one:
            await one.post()
            assert name not in await one.metrics(), "there is none yet"
        made = file.stat().st_mtime
        async with sharing(replica, file=file) as two:
            assert (await two.metrics())[name] == pytest.approx(made, abs=5)
            os.utime(file, (0, 0))
            await two.gateway.control.stop()
            found = await two.metrics()
            assert found[name] == pytest.approx(time.time(), abs=5)
            assert found["warmroute_snapshot_bytes"] == file.stat().st_size


async def test_a_gateway_that_knows_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as replica, FakeReplica() as other:
        async with sharing(replica, file=file) as one:
            await one.post()
        before = file.read_bytes()
        async with sharing(other, file=file) as two:  # its replica is not there yet: it may come
            assert held(two) == {}
        assert file.read_bytes() == before
        async with sharing(replica, file=file) as three:
            assert held(three) != {}


async def test_a_file_that_is_of_no_use_is_a_cold_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as replica:
        async with sharing(replica, file=file) as one:
            await one.post()
        async with sharing(replica, file=file, routing={"block_bytes": 128}) as two:
            assert held(two) == {}
        assert "routing.block_bytes is 256 there and 128 here" in str(
            [record.__dict__.get("reason") for record in caplog.records]
        )
        file.write_bytes(b"garbage")
        async with sharing(replica, file=file) as three:
            assert held(three) == {}
            assert (await three.post())[0] == 200
        async with sharing(replica, file=file) as four:
            assert held(four) != {}, "it was written anew"


async def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("this is a file")
    async with FakeReplica() as replica, sharing(replica, file=tmp_path / "folder" / "index") as run:
        await run.post()
        for _ in range(3):
            await run.gateway.control.stop()
        assert run.gateway.metrics.of(SnapshotMetrics).written.values[("failed",)] == 3
    assert len([record for record in caplog.records if record.message == "snapshot not written"]) == 1


async def test_a_replica_that_joins_late_gets_what_was_known_of_it(tmp_path: Path) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as a, FakeReplica() as b:
        async with sharing(a, b, file=file) as one:
            for number in range(10):
                await one.post(body(number))
            known = held(one)
        async with sharing(a, file=file) as two:
            assert held(two) == {a.name: known[a.name]}
            await two.gateway.control.execute(Join("default", ReplicaConfig(url=b.url)))
            await eventually(lambda: held(two) == known)


def large(replica: FakeReplica, prompts: int) -> Snapshot:
    """What a router knows that has seen so many prompts of five blocks."""
    router, now = Router(policy="cost", ttl_s=600, memory_bytes=256 << 20, chance=random.Random(1)), time.monotonic()
    router.add(Replica(replica.name, None))
    for _ in range(prompts):
        router.trie.insert(replica.name, os.urandom(5 * KEY_BYTES), now)
    header = Header(format_of(RoutingConfig()), {replica.name: Origin(replica.url, "", None)})
    return Snapshot(header, [encode(records) for records in collect(router, now)], now)


async def test_one_that_is_stopped_while_it_begins_leaves_the_file_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, stop, hurry, started = tmp_path / "index", asyncio.Event(), asyncio.Event(), list[str]()
    async with FakeReplica() as replica:
        write(file, large(replica, 20_000))
        before = file.read_bytes()
        around = Surroundings(control_plane=lambda local: single_process(local, snapshot=SnapshotFile(file, 60.0)))
        gateway = compose(config_over(replica), LOGGED, around)
        serving = asyncio.create_task(serve(gateway, stop, hurry, started.append))
        while not gateway.router.trie.blocks:  # noqa: ASYNC110  (its steps have no event)
            await asyncio.sleep(0)
        stop.set()
        await serving
        assert gateway.router.trie.blocks < 100_000
    assert file.read_bytes() == before
    assert not started, "it does not listen for a moment"
    assert "snapshot written" not in caplog.messages


async def test_what_is_missing_here_makes_only_the_begin_partial(tmp_path: Path) -> None:
    """A resync brings what others have of replicas that this gateway is not to have."""
    async with FakeReplica() as replica, FakeReplica() as other, sharing(replica) as run:
        await run.post()
        knowledge = knowledge_of(run)
        await knowledge.restore(large(other, 3))
        found = await knowledge.collect()
        assert found
        assert not found.header.partial
        await knowledge.restore_first(large(other, 3))
        found = await knowledge.collect()
        assert found
        assert found.header.partial, "the replica may still join"


# -- restarts of replicas


async def test_a_replica_that_restarted_meanwhile_is_cold(tmp_path: Path) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as replica:
        async with sharing(replica, file=file) as one:
            await one.post()
            state = one.gateway.fleet.named(replica.name)
            assert state
            state.started = 1000.0
        async with sharing(replica, file=file) as two:
            state = two.gateway.fleet.named(replica.name)
            assert state
            assert state.started == 1000.0, "the next probe compares with it"
            assert held(two) != {}
            two.gateway.fleet._prober._apply_facts(state, Facts(started=2000.0))
            assert held(two) == {}


async def test_a_replica_that_is_down_is_cold(tmp_path: Path) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as a, FakeReplica() as b:
        async with sharing(a, b, file=file) as one:
            for number in range(10):
                await one.post(body(number))
        await b.stop()
        async with sharing(a, b, file=file) as two:
            assert set(held(two)) == {a.name}


async def test_a_replica_that_loads_its_model_is_cold(tmp_path: Path) -> None:
    file, loading = tmp_path / "index", status(503, "Loading model")
    async with FakeReplica() as a, FakeReplica() as b, FakeReplica() as c:
        async with sharing(a, b, c, file=file) as one:
            for number in range(15):
                await one.post(body(number))
            snapshot = await knowledge_of(one).collect()
            assert snapshot
        listing, a.listing = a.listing, loading
        async with sharing(a, b, c, file=file) as two:
            assert set(held(two)) == {b.name, c.name}
            await knowledge_of(two).restore(snapshot)
            assert set(held(two)) == {b.name, c.name}
            b.listing = loading
            await two.gateway.fleet.probe_all(two.gateway.upstream)
            assert set(held(two)) == {c.name}
            a.listing = b.listing = listing
            await two.gateway.fleet.probe_all(two.gateway.upstream)
            await knowledge_of(two).restore(snapshot)
            assert set(held(two)) == {c.name}, "they came up after the snapshot"
            restarts = {name: value for name, value in (await two.metrics()).items() if "loading" in name and value}
            assert restarts == {f'warmroute_replica_restarts_total{{reason="loading",replica="{b.name}"}}': 1}


async def test_a_replica_whose_restart_nobody_saw_is_cold_from_its_first_report_on(tmp_path: Path) -> None:
    file = tmp_path / "index"
    async with FakeReplica([answers(prompt=TOKENS, cached=TOKENS - 10)]) as replica:
        async with sharing(replica, file=file) as one:
            for number in [0, 0, 1, 2]:
                await one.post(body(number))
        for report, kept in ((TOKENS - 10, True), (0, False)):
            async with sharing(replica, file=file) as two:
                before = held(two)[replica.name]
                replica.script = (answers(prompt=TOKENS, cached=report),)
                await two.post(body(1))
                assert (held(two)[replica.name] == before) is kept
                replica.script = (answers(prompt=TOKENS, cached=0),)
                await two.post(body(2))
                assert (held(two)[replica.name] == before) is kept, "confirmed, so one miss more is no restart"
                replica.script = (answers(prompt=TOKENS, cached=TOKENS - 10),)
                for number in range(3):
                    await two.post(body(number))


@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(lambda url: Origin(url, "", 1000.0), id="the other gateway has not noticed a restart yet"),
        pytest.param(lambda _: Origin("http://elsewhere", "", None), id="its replica of this name is another one"),
        pytest.param(lambda _: None, id="it does not have the replica"),
    ],
)
async def test_what_a_gateway_knows_of_a_replica_that_is_up_stays(origin: Callable[[str], Origin | None]) -> None:
    """When the gateways share again after an outage, each offers the others a snapshot."""
    async with FakeReplica() as replica, sharing(replica) as one, sharing(replica) as other:
        await other.post(body(0))
        snapshot = await knowledge_of(other).collect()
        assert snapshot
        found = origin(replica.url)
        stale = replace(snapshot, header=Header(snapshot.header.format, {replica.name: found} if found else {}))
        state = one.gateway.fleet.named(replica.name)
        assert state
        state.started = 2000.0
        for number in range(1, 10):
            await one.post(body(number))
        known = held(one)
        await knowledge_of(one).restore(stale)
        assert held(one) == known
        assert await cached(one, 1) > 0
        assert await cached(one, 0) < await cached(one, 1), "of it nothing was taken in"
        await knowledge_of(one).restore(snapshot)
        assert held(one).keys() == known.keys()
        assert held(one)[replica.name] > known[replica.name]


async def test_which_process_a_replica_is() -> None:
    async with FakeReplica() as replica, sharing(replica) as run:
        state = run.gateway.fleet.named(replica.name)
        assert state
        same = Origin(replica.url, "", None)
        assert not has_restarted(state, same, 0.0)
        assert has_restarted(state, None, 0.0)
        assert has_restarted(state, Origin("http://elsewhere", "", None), 0.0)
        state.started = 50.0
        assert not has_restarted(state, Origin(replica.url, "", 49.0), 0.0), "start times are computed, and drift a little"
        assert has_restarted(state, Origin(replica.url, "", 40.0), 0.0)
        assert not has_restarted(state, Origin(replica.url, "a-pod", 50.0), 0.0), "of a member without one nothing is known"


# -- workers


async def test_workers_begin_with_a_snapshot_and_give_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with FakeReplica() as a, FakeReplica() as b:
        async with star(a, b) as (hub, (first, second)):
            for number in range(10):
                await first.run.post(body(number))
            await eventually(lambda: held(second.run) == held(first.run))
            known = held(first.run)
            snapshot = await hub.hub.snapshots.collect()
            assert snapshot
        async with star(a, b, workers=1) as (hub, (first,)):
            hub.hub.snapshots.first = [replace(snapshot, source="/a/file")]
            late = await hub.join()
            assert held(late.run) == known, "before it serves"
            assert told(caplog, "prefix index restored", "source") == ["/a/file"]
            assert held(first.run) == {}
            await hub.hub.snapshots.restore(snapshot)
            await eventually(lambda: held(first.run) == known)


# -- the file's place, and whole processes


def test_its_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def place(**config: Any) -> Path | None:
        file = file_of(config_over("http://a:1", **config))
        return file.path if file else None

    assert place(listen="127.0.0.1:8000") == tmp_path / "warmroute" / "index-127.0.0.1-8000.snapshot"
    assert place(listen="[::1]:9") == tmp_path / "warmroute" / "index---1-9.snapshot"
    assert place() is None, "any free port"
    assert place(listen="127.0.0.1:8000", snapshot={"file": "off"}) is None
    assert place(listen="127.0.0.1:8000", snapshot={"file": "/data/x"}) == Path("/data/x")


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_whole_gateway_is_restarted(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "index"
    async with FakeReplica() as a, FakeReplica() as b:
        config = {"workers": workers, "snapshot": {"file": str(file)}, "pools": [{"replicas": [a.url, b.url]}]}
        homes = []
        for _ in range(2):
            async with gateway_process(tmp_path, **config) as (url, process):
                homes.append([await _asked(url, number) for number in range(8)])
            assert process.returncode == 0
        assert [home for home, _ in homes[0]] == [home for home, _ in homes[1]]
        assert all(tokens > 0 for _, tokens in homes[1])
        assert read(file).size > 0


async def test_workers_that_all_die_leave_the_file_whole(tmp_path: Path) -> None:
    """Those that replace them begin with it, and what they keep is no fragment."""
    file = tmp_path / "index"
    async with FakeReplica() as a, FakeReplica() as b:
        config = {"workers": 2, "snapshot": {"file": str(file)}, "pools": [{"replicas": [a.url, b.url]}]}
        async with gateway_process(tmp_path, **config) as (url, _):
            for number in range(30):
                await _asked(url, number)
        before = read(file).size
        async with gateway_process(tmp_path, **config) as (url, process):
            workers = _children(process.pid)
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            async with asyncio.timeout(40):
                while not await _answers(url):  # noqa: ASYNC110  (a worker that begins has no event)
                    await asyncio.sleep(0.05)
        assert len(workers) == 2
        assert read(file).size >= before


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _answers(url: str) -> bool:
    try:
        return (await _asked(url, 0))[1] > 0
    except (aiohttp.ClientError, OSError):
        return False


async def _asked(url: str, number: int) -> tuple[str, int]:
    """(replica, predicted tokens) of a prompt."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body(number)) as answer:
        assert answer.status == 200
        return answer.headers["X-Warmroute-Replica"], int(answer.headers["X-Warmroute-Cached-Tokens"])
