"""Workers as processes: what ends is replaced, and all go down together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.commands.demo.processes import Process, admin_url, listening_url, log_line
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.source import ConfigSource
from gateway.features.snapshots.file import write
from gateway.features.snapshots.keeper import SnapshotFile
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.snapshot import Header, Snapshot
from gateway.features.workers.supervisor import BOOT, END_S, HEALTHY_S, Patience, StartError, Supervisor, WorkerSlot
from gateway.telemetry.exposition import unpacked_slices
from tests.gateway.conftest import BODY, eventually
from tests.support.configs import load
from tests.support.fakes import FakeReplica, answers, streams
from tests.support.paths import ROOT
from tests.support.tiers import gate

STREAM = {**BODY, "stream": True}
FAILS = "raise SystemExit(3)"


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@dataclass(slots=True)
class Boot:
    """What the next worker runs."""

    program: str = BOOT


@dataclass(slots=True)
class Run:
    """A supervisor in this process. hurry: do not wait for requests; over: it has ended."""

    made: Supervisor
    boot: Boot
    url: str
    session: aiohttp.ClientSession
    stop: asyncio.Event
    over: asyncio.Task[None]

    @property
    def pids(self) -> dict[int, int]:
        """Of the workers that serve, by their numbers."""
        serving = {who for who, state in self.made.hub.workers.items() if state.serving}
        return {slot.worker: slot.process.pid for slot in self.made.slots if slot.process and slot.worker in serving}

    async def post(self, body: Any = BODY) -> tuple[int, Any]:
        """On a connection of its own, so that any worker may get it."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers={"Connection": "close"}) as answer:
            return answer.status, await answer.json()

    async def streamed(self) -> bytes:
        """Likewise: the body of a stream."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=STREAM, headers={"Connection": "close"}) as answer:
            return await answer.read()

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics", headers={"Connection": "close"}) as answer:
            rows = (line.rpartition(" ") for line in (await answer.text()).splitlines() if not line.startswith("#"))
            return {name: float(value) for name, _, value in rows}

    async def replaced(self, who: int) -> None:
        await eventually(lambda: who not in self.made.hub.workers and len(self.pids) == 2)


def config_of(*replicas: FakeReplica, **more: Any) -> Config:
    raw = {"listen": "127.0.0.1:0", "workers": 2, "limits": {"drain_timeout_s": 60}, "log_level": "warning", **more}
    urls = [replica.url for replica in replicas] or ["http://127.0.0.1:9"]
    return load(None, {"pools": [{"replicas": urls}], **raw}, env={})


@contextlib.asynccontextmanager
async def supervised(*replicas: FakeReplica, source: ConfigSource | None = None, **options: Any) -> AsyncIterator[Run]:
    config = config_of(*replicas)
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    boot = Boot()
    made = Supervisor(config, source, boot=lambda: boot.program, **options)
    over = asyncio.create_task(made.run(stop, hurry, started.set_result))
    await asyncio.wait([over, started], return_when=asyncio.FIRST_COMPLETED, timeout=60)
    try:
        async with aiohttp.ClientSession() as session:
            yield Run(made, boot, started.result(), session, stop, over)
    finally:
        stop.set()
        hurry.set()
        await over


async def test_a_worker_that_is_killed_is_replaced_and_what_it_counted_stays() -> None:
    async with FakeReplica([answers()]) as one, supervised(one) as run:
        for _ in range(30):
            assert (await run.post())[0] == 200
        first, second = run.pids
        await eventually(lambda: sum(counted(state.counters) for state in run.made.hub.workers.values()) == 30)
        assert (await run.metrics())['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 30
        os.kill(run.pids[first], signal.SIGKILL)
        await run.replaced(first)
        assert second in run.pids
        for _ in range(30):
            assert (await run.post())[0] == 200
        page = await run.metrics()
        assert page["warmroute_workers"] == 2
        assert page["warmroute_worker_restarts_total"] == 1
        assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 60


def counted(counters: bytes) -> float:
    """Requests, in a worker's last snapshot."""
    parts = unpacked_slices(counters) if counters else iter(())
    return float(sum(sum(part.get("warmroute_requests_total", {}).values()) for part in parts))


async def test_a_connection_that_a_dead_worker_has_not_accepted_waits_for_its_successor() -> None:
    async with FakeReplica([answers()]) as one, supervised(one, patience=Patience(silent_s=1000.0)) as run:
        first = run.pids
        for pid in first.values():
            os.kill(pid, signal.SIGSTOP)  # so that nothing is accepted
        asked = [asyncio.create_task(run.post()) for _ in range(20)]
        await eventually(lambda: not any(task.done() for task in asked) and queued(run.url) == 20)
        await eventually(
            lambda: not any(run.made.hub.healthy(HEALTHY_S))
        )  # else the second to end gets them, and they end with it
        for pid in first.values():
            os.kill(pid, signal.SIGKILL)
        assert [(await task)[0] for task in asked] == [200] * 20
        assert not first.keys() & run.pids.keys()


async def test_a_connection_that_a_dead_worker_has_not_accepted_goes_to_another_at_once() -> None:
    patience = Patience(silent_s=1000.0)  # only because it has ended
    async with FakeReplica([answers()]) as one, supervised(one, patience=patience) as run:
        run.boot.program = "import time; time.sleep(1000)"  # a successor that does not serve
        first, second = run.pids
        os.kill(run.pids[first], signal.SIGSTOP)
        asked = [asyncio.create_task(run.post()) for _ in range(40)]
        await eventually(lambda: sum(task.done() for task in asked) + queued(run.url) == 40)
        assert queued(run.url)
        os.kill(run.pids[first], signal.SIGKILL)
        async with asyncio.timeout(30):
            assert [(await task)[0] for task in asked] == [200] * 40
            assert [(await run.post())[0] for _ in range(20)] == [200] * 20
        assert list(run.pids) == [second]


def queued(url: str) -> int:
    """Connections that no worker has accepted yet, by the kernel's account."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1] == f"0100007F:{port:04X}" and row[3] == "0A")


async def test_a_worker_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica([answers()]) as one, supervised(one, patience=Patience(hung_s=6.0)) as run:
        hung = next(iter(run.pids))
        os.kill(run.pids[hung], signal.SIGSTOP)
        async with asyncio.timeout(40):
            await run.replaced(hung)
        assert "worker hangs" in caplog.text
        assert (await run.post())[0] == 200


async def test_new_connections_of_a_worker_that_hangs_go_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica([answers()]) as one, supervised(one, patience=Patience(hung_s=1000.0)) as run:
        hung = next(iter(run.pids))
        pid = run.pids[hung]
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                statuses = await asyncio.gather(*(run.post() for _ in range(40)))
                assert [status for status, _ in statuses] == [200] * 40
                assert [(await run.post())[0] for _ in range(20)] == [200] * 20
            assert "worker is silent" in caplog.text
            assert run.pids[hung] == pid, "it may only be slow: it is not killed, and keeps its listener"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was replaced, which the assertions show better
                os.kill(pid, signal.SIGCONT)
        slot = next(slot for slot in run.made.slots if slot.worker == hung)
        await eventually(lambda: slot.handover is None)
        assert [(await run.post())[0] for _ in range(20)] == [200] * 20
        assert run.pids[hung] == pid


async def test_while_all_workers_are_silent_their_connections_wait_for_the_first_that_goes_on() -> None:
    patience = Patience(silent_s=5.0)  # of two that stop at once, one is not silent while the other still counts as well
    async with FakeReplica([answers()]) as one, supervised(one, patience=patience) as run:
        pids = dict(run.pids)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(run.post()) for _ in range(20)]
        try:
            await eventually(lambda: len(list(run.made.hub.unhealthy(patience.silent_s + 1.0))) == 2)
            assert not any(slot.handover for slot in run.made.slots)
            assert queued(run.url) == 20
            os.kill(next(iter(pids.values())), signal.SIGCONT)
            async with asyncio.timeout(15):
                assert [(await task)[0] for task in asked] == [200] * 20
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):  # it was replaced, which the assertions show better
                    os.kill(pid, signal.SIGCONT)
        assert run.pids == pids


async def test_streams_of_all_workers_finish_before_all_go_down() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as one, supervised(one) as run:
        pids = list(run.pids.values())
        open_streams = []
        for _ in range(20):
            answer = await run.session.post(f"{run.url}/v1/chat/completions", json=STREAM, headers={"Connection": "close"})
            assert b'"a"' in await answer.content.readany()
            open_streams.append(answer)
        run.stop.set()
        await eventually(lambda: refuses(run.url))
        assert not run.over.done()
        assert all(map(alive, pids))
        go_on.set()
        for answer in open_streams:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(40):
            await asyncio.shield(run.over)
        assert not any(map(alive, pids))


def refuses(url: str) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


async def test_a_successor_begins_with_the_configuration_that_the_others_have(caplog: pytest.LogCaptureFixture) -> None:
    """What needs a restart is not for it alone."""
    async with FakeReplica([answers()]) as one, FakeReplica([answers()]) as two:
        read: list[Any] = [ConfigError("pools: no"), config_of(two, workers=5, routing={"block_bytes": 999, "ttl_s": 7})]

        def next_one() -> Config:
            result = read.pop(0)
            if isinstance(result, Exception):
                raise result
            assert isinstance(result, Config)
            return result

        source = ConfigSource(None, next_one)
        async with supervised(one, source=source) as run:
            source.asked.set()
            await eventually(lambda: len(read) == 1)
            source.asked.set()
            await eventually(lambda: run.made.hub.config.pools[0].replicas[0].url == two.url)
            taken = run.made.hub.config
            assert (taken.workers, taken.routing.block_bytes, taken.routing.ttl_s) == (2, 256, 7)
            assert "these changes need a restart" in caplog.text
            first = next(iter(run.pids))
            os.kill(run.pids[first], signal.SIGKILL)
            await run.replaced(first)
            for _ in range(20):
                assert (await run.post())[0] == 200
            assert not one.requests
            page = await run.metrics()
            assert page['warmroute_config_reloads_total{result="invalid"}'] == 1


async def test_the_last_counts_of_workers_that_go_down_are_received() -> None:
    async with FakeReplica([answers()]) as one, supervised(one) as run:
        for _ in range(20):
            await run.post()
        run.stop.set()
        async with asyncio.timeout(40):
            await asyncio.shield(run.over)
        assert run.made.hub.ended.requests.values == {("m", "/v1/chat/completions", "200"): 20}


def content(file: Path) -> bytes:
    return file.read_bytes()


async def ended_early(file: Path, boot: Callable[[], str], ready: Callable[[Supervisor], bool], *replicas: FakeReplica) -> None:
    """A gateway with a snapshot file that is stopped once it is `ready`, before all its workers serve."""
    before = content(file)
    made = Supervisor(config_of(*replicas), None, snapshot=SnapshotFile(file, 60.0), boot=boot)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop, asyncio.Event(), lambda _: pytest.fail("it serves")))
    await eventually(lambda: ready(made))
    stop.set()
    async with asyncio.timeout(40):
        await running
    assert content(file) == before
    assert made.hub.ended.of(SnapshotMetrics).written.values == {("good",): 0, ("failed",): 0}


@pytest.fixture
def snapshot_file(tmp_path: Path) -> Path:
    file = tmp_path / "index"
    write(file, Snapshot(Header("1/256", {}), [b"what took days to learn"], 0.0))
    return file


async def test_a_gateway_that_is_stopped_while_it_looks_for_a_snapshot_starts_no_worker(
    snapshot_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = list[str]()

    def boot() -> str:
        started.append(FAILS)
        return FAILS

    await ended_early(snapshot_file, boot, lambda _: True)
    assert (started, caplog.records) == ([], [])


async def test_a_gateway_that_is_stopped_before_its_workers_serve_leaves_the_snapshot_as_it_is(
    snapshot_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await ended_early(snapshot_file, lambda: "import time; time.sleep(60)", lambda made: len(made.hub.workers) == 2)
    assert not caplog.records


async def test_what_the_first_worker_to_serve_knows_is_no_snapshot(snapshot_file: Path) -> None:
    """It may be a fragment, as long as another one is still taking in the file."""
    programs = [BOOT, "import time; time.sleep(60)"]
    async with FakeReplica([answers()]) as one:
        asked = list[asyncio.Task[int]]()

        async def ask(url: str) -> int:
            async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
                return answer.status

        def ready(made: Supervisor) -> bool:
            if not asked and any(state.serving for state in made.hub.workers.values()):
                host, port = made.slots[0].listeners[0].getsockname()
                asked.append(asyncio.create_task(ask(f"http://{host}:{port}")))
            return bool(asked) and asked[0].done()

        await ended_early(snapshot_file, lambda: programs.pop(0), ready, one)
        assert asked[0].result() == 200


async def test_a_stop_does_not_take_longer_than_the_grace_periods_allow(snapshot_file: Path) -> None:
    """Its workers hang: they give no snapshot, and do not end."""
    drain_s = 0.2
    config = config_of(limits={"drain_timeout_s": drain_s})
    made = Supervisor(config, None, snapshot=SnapshotFile(snapshot_file, 60.0))
    stop, started = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(made.run(stop, asyncio.Event(), lambda _: started.set()))
    await started.wait()
    for slot in made.slots:
        slot.send_signal(signal.SIGSTOP)
    stop.set()
    async with asyncio.timeout(drain_s + END_S):
        await running


@pytest.mark.skipif(not (ROOT / "helm").exists(), reason="the chart is not beside these tests")
def test_the_grace_period_of_the_chart_is_long_enough() -> None:
    needed = (
        f".Values.preStopSleepSeconds .Values.config.limits.drain_accept_s .Values.config.limits.drain_timeout_s {END_S:g} "
    )
    assert needed in (ROOT / "helm/templates/_helpers.tpl").read_text("utf-8")
    assert f"`drain_accept_s` + `drain_timeout_s` + {END_S:g} s" in (ROOT / "docs/operations.md").read_text("utf-8")


async def test_workers_that_cannot_start_are_given_up() -> None:
    with pytest.raises(StartError, match="3 times"):
        await Supervisor(config_of(), None, boot=lambda: FAILS).run(asyncio.Event(), asyncio.Event(), lambda _: None)


async def test_a_worker_that_gets_sigterm_by_mistake_costs_no_new_client_its_connection() -> None:
    """It drains, its listening socket goes to its successor, and others accept there in the meantime."""
    go_on = asyncio.Event()
    patience = Patience(silent_s=0.5)
    async with FakeReplica([streams("a", hold=go_on)]) as one, supervised(one, patience=patience) as run:
        held = [asyncio.create_task(run.streamed()) for _ in range(20)]  # so that both have streams
        await eventually(lambda: len(one.requests) == 20)
        one.script = [answers()]
        first, second = run.pids
        os.kill(run.pids[first], signal.SIGTERM)
        await eventually(lambda: first not in run.pids)
        async with asyncio.timeout(30):
            assert {(await run.post())[0] for _ in range(20)} == {200}, "while it drains"
        assert first in run.made.hub.workers
        go_on.set()
        assert all(stream.endswith(b"data: [DONE]\n\n") for stream in await asyncio.gather(*held)), "its own end as they would"
        await run.replaced(first)
        assert second in run.pids
        async with asyncio.timeout(30):
            assert {(await run.post())[0] for _ in range(20)} == {200}, "its successor accepts"


async def test_a_signal_to_a_worker_that_has_ended_is_dropped() -> None:
    """Its last messages are still being read: its slot has the process until then."""
    slot = WorkerSlot()
    slot.send_signal(signal.SIGTERM)
    slot.process = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.DEVNULL)
    await slot.process.wait()
    slot.send_signal(signal.SIGTERM)
    slot.send_signal(signal.SIGKILL)
    assert slot.process.returncode == 0, "it ended by itself"


async def test_a_worker_that_dies_again_and_again_does_not_keep_connections_waiting() -> None:
    patience = Patience(pause_s=(5.0, 5.0))  # long enough for 30 requests on a busy machine
    async with FakeReplica([answers()]) as one, supervised(one, patience=patience) as run:
        run.boot.program = FAILS
        first, second = run.pids
        slot = next(slot for slot in run.made.slots if slot.worker == first)
        os.kill(run.pids[first], signal.SIGKILL)
        await eventually(lambda: slot.short_lives >= 2 and not slot.listeners)
        for _ in range(30):
            assert (await run.post())[0] == 200
        assert list(run.pids) == [second]
        run.boot.program = BOOT
        await eventually(lambda: len(run.pids) == 2)
        assert slot.listeners


async def test_a_connection_to_a_worker_that_dies_again_is_passed_on_before_its_listener_closes() -> None:
    async with FakeReplica([answers()]) as one, supervised(one, patience=Patience(silent_s=1000.0, short_life_s=1000.0)) as run:
        run.boot.program = FAILS
        first, second = run.pids
        slot = next(slot for slot in run.made.slots if slot.worker == first)
        slot.short_lives = 1  # so that there is a pause at once
        os.kill(run.pids[first], signal.SIGSTOP)
        asked = [asyncio.create_task(run.post()) for _ in range(40)]
        await eventually(lambda: sum(task.done() for task in asked) + queued(run.url) == 40)
        assert queued(run.url)
        os.kill(run.pids[first], signal.SIGKILL)
        assert [(await task)[0] for task in asked] == [200] * 40
        await eventually(lambda: not slot.listeners)
        assert list(run.pids) == [second]


async def test_while_all_workers_die_again_connections_wait_for_their_successors() -> None:
    patience = Patience(silent_s=1000.0, short_life_s=1000.0, pause_s=(3.0, 3.0))
    async with FakeReplica([answers()]) as one, supervised(one, patience=patience) as run:
        slots, asked = run.made.slots, await all_die_again(run, [1, 1])
        await eventually(lambda: all(slot.short_lives == 2 for slot in slots) and not run.pids)
        asked += [asyncio.create_task(run.post()) for _ in range(20)]
        await eventually(lambda: queued(run.url) == 40)
        async with asyncio.timeout(40):
            assert [(await task)[0] for task in asked] == [200] * 40


async def test_a_connection_to_workers_that_die_again_goes_to_the_first_that_is_well() -> None:
    patience = Patience(silent_s=1000.0, short_life_s=1000.0, pause_s=(0.5, 1000.0))
    async with FakeReplica([answers()]) as one, supervised(one, patience=patience) as run:
        soon, late = run.made.slots
        asked = await all_die_again(run, [1, 30])  # the second one's pause is longer than any test
        async with asyncio.timeout(40):
            assert [(await task)[0] for task in asked] == [200] * 20
        await eventually(lambda: not late.listeners)
        assert list(run.pids) == [soon.worker]
        assert [(await run.post())[0] for _ in range(20)] == [200] * 20


async def all_die_again(run: Run, short_lives: list[int]) -> list[asyncio.Task[tuple[int, Any]]]:
    """Kill both workers, after this number of short lives each. Returns 20 requests that were waiting to be accepted."""
    pids = list(run.pids.values())
    for slot, lives in zip(run.made.slots, short_lives, strict=True):
        slot.short_lives = lives
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asked = [asyncio.create_task(run.post()) for _ in range(20)]
    await eventually(lambda: queued(run.url) == 20 and not any(run.made.hub.healthy(HEALTHY_S)))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return asked


# -- as a command


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    process = Process("gateway", ["serve", "--port", "0", "--workers", "2", *arguments])
    try:
        yield process
    finally:
        process.stop()


def worker_pid(line: str) -> int:
    event = log_line(line)
    return int(event["pid"]) if event.get("message") == "worker started" else 0


def message(text: str) -> Callable[[str], bool]:
    return lambda line: log_line(line).get("message") == text


async def test_the_command_takes_another_configuration_and_a_signal_to_end(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as one, FakeReplica([answers()]) as two:
        file = tmp_path / "config.yaml"
        file.write_text(f"pools: [{{replicas: [{one.url}]}}]\nlimits: {{drain_accept_s: 0}}")
        with serving("--config", str(file)) as process:
            url = await asyncio.to_thread(process.wait_for, listening_url)
            pid = await asyncio.to_thread(process.wait_for, worker_pid)
            file.write_text(f"pools: [{{replicas: [{two.url}]}}]\nlimits: {{drain_accept_s: 0}}")
            os.kill(process.pid, signal.SIGHUP)
            await asyncio.to_thread(process.wait_for, message("configuration reloaded"))
            async with aiohttp.ClientSession() as session, asyncio.timeout(40):
                for _ in range(10):
                    answer = await session.post(f"{url}/v1/chat/completions", json=BODY, headers={"Connection": "close"})
                    while answer.headers["X-Warmroute-Replica"] != two.name:  # the other worker is a moment behind
                        answer = await session.post(f"{url}/v1/chat/completions", json=BODY, headers={"Connection": "close"})
            assert alive(pid)
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.exit_status) == 0
            assert not alive(pid)


@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix"])
@gate("127.0.0.1:0", reason="a Unix socket: cluster/test_side_sockets.py")
async def test_operators_are_answered_by_any_worker_for_all(where: str, tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as one:
        file, path = tmp_path / "config.yaml", tmp_path / "admin.sock"
        listen = f"unix:{path}" if where == "unix" else where
        listeners = f"admin_listen: {listen}\nmetrics_listen: 127.0.0.1:0"
        file.write_text(f"pools: [{{replicas: [{one.url}]}}]\n{listeners}\nlimits: {{drain_accept_s: 0}}")
        with serving("--config", str(file)) as process:
            url = await asyncio.to_thread(process.wait_for, listening_url)
            admin = await asyncio.to_thread(process.wait_for, admin_url)
            metrics = await asyncio.to_thread(process.wait_for, lambda line: log_line(line).get("metrics_url"))
            connector = aiohttp.UnixConnector(str(path)) if where == "unix" else None
            base = "http://localhost" if where == "unix" else admin
            first = await asyncio.to_thread(process.wait_for, worker_pid)
            second = await asyncio.to_thread(process.wait_for, lambda line: worker_pid(line) not in (0, first))
            os.kill(first, signal.SIGKILL)  # its successor accepts on the same sockets
            await asyncio.to_thread(process.wait_for, lambda line: worker_pid(line) not in (0, first, second))
            alone = {"headers": {"Connection": "close"}}
            async with aiohttp.ClientSession(connector=connector) as operator, aiohttp.ClientSession() as session:
                async with asyncio.timeout(40):  # the successor has started, which is before it serves
                    while "warmroute_workers 2.0" not in await (await session.get(f"{metrics}/metrics", **alone)).text():  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                answer = await operator.post(f"{base}/warmroute/drain", json={"name": one.name}, **alone)
                assert answer.status == 200
                for _ in range(20):
                    rows = (await (await operator.get(f"{base}/warmroute/replicas", **alone)).json())["replicas"]
                    assert [row["draining"] for row in rows] == [True]
                    assert (await session.post(f"{url}/v1/chat/completions", json=BODY, **alone)).status == 503
                    assert "warmroute_workers 2.0" in await (await session.get(f"{metrics}/metrics", **alone)).text()
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.exit_status) == 0
        assert not path.exists()


async def test_workers_go_down_with_their_supervisor() -> None:
    async with FakeReplica([answers()]) as one:
        with serving("--replica", one.url) as process:
            await asyncio.to_thread(process.wait_for, listening_url)
            pid = await asyncio.to_thread(process.wait_for, worker_pid)
            assert alive(pid)
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: not alive(pid))
            assert not alive(pid)


async def test_an_address_that_is_taken_is_refused_even_where_it_could_be_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = Process(
            "gateway", ["serve", "--port", str(other.getsockname()[1]), "--workers", "2", "--replica", "http://a:1"]
        )
        try:
            line = await asyncio.to_thread(process.wait_for, lambda line: line if "cannot listen" in line else "")
            assert "address already in use" in line.lower()
            assert await asyncio.to_thread(process.exit_status) == 1
        finally:
            process.stop()
