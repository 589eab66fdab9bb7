"""Several replicas in one process, as a client meets them: ports, caches and lives of their own."""

import asyncio
import contextlib
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from replica.cli import main
from replica.engine import SetupError
from replica.process import COLLECT_AFTER, INTERRUPTED, SWITCH_S, ReplicaSpec, bind, favour_event_loop, serve
from replica.sim.cost import SimConfig
from tests.replica.fakes import WatchedEngine
from tests.support.paths import ROOT

COMMAND = (sys.executable, "-c", "import sys; from replica.cli import main; sys.exit(main(sys.argv[1:]))", "--engine", "sim")
PROMPT = {"prompt": [7] * 100, "max_tokens": 4, "ignore_eos": True}


@contextlib.contextmanager
def running(count: int, *args: str) -> "Iterator[tuple[subprocess.Popen[str], list[str]]]":
    """A process with `count` replicas, and their URLs."""
    command = [*COMMAND, "--port", "0", "--count", str(count), *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline() for _ in range(count)]
            assert all(re.fullmatch(r"replica sim \(sim\) ready on http://127\.0\.0\.1:\d+\n", line) for line in lines), lines
            yield process, [line.split()[-1] for line in lines]
        finally:
            process.kill()


def get(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read(), "utf-8")


def cached(url: str) -> int:
    with urllib.request.urlopen(url + "/v1/completions", json.dumps(PROMPT).encode()) as response:
        return int(json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(url: str, name: str) -> float:
    (line,) = [line for line in get(url + "/metrics").splitlines() if line.startswith((name + " ", name + "{"))]
    return float(line.rpartition(" ")[2])


def test_each_has_a_port_a_cache_and_metrics_of_its_own_and_all_end_together() -> None:
    with running(3, "--decode-rate", "1000") as (process, urls):
        assert len(set(urls)) == 3
        assert [cached(url) for url in (*urls, urls[1])] == [0, 0, 0, 96]
        assert [metric(url, "vllm:prompt_tokens_total") for url in urls] == [100, 200, 100]
        assert [metric(url, "vllm:prefix_cache_hits_total") for url in urls] == [0, 96, 0]
        assert [json.loads(get(url + "/stats"))["cache"]["blocks"]["idle"] for url in urls] == [6, 6, 6]
        assert len({metric(url, "process_start_time_seconds") for url in urls}) == 1
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_sixty_four_serve_in_less_than_300_megabytes() -> None:
    with running(64) as (_, urls):
        assert len(set(urls)) == 64
        assert all(get(url + "/health") == "" for url in urls)
        assert metric(urls[0], "process_resident_memory_bytes") < 300e6


def free_run(count: int) -> int:
    """The first of `count` ports in a row that are free at this moment."""
    for start in range(32_000, 32_760, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(SetupError):
            for port in range(start, start + count):
                stack.enter_context(bind("127.0.0.1", port))
            return start
    raise AssertionError("no free ports")


def test_ports_follow_each_other() -> None:
    port = str(free_run(3))
    with running(3, "--port", port) as (_, urls):
        assert sorted(urls) == [f"http://127.0.0.1:{int(port) + at}" for at in range(3)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--count", "2"], "add --engine sim"),
        (["--speed", "2"], "add --engine sim"),
        (["--fault-errors", "0.1"], "add --engine sim"),
        (["--engine", "sim", "--port", "65535", "--count", "2"], "there is no port 65536: choose a smaller --port or --count"),
    ],
)
def test_impossible_flags_are_an_error_of_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_events_of_each_have_an_endpoint_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    endpoint = f"ipc://{tmp_path}/events"
    replay = f"ipc://{tmp_path}/replay"
    with running(2, "--kv-events", endpoint, "--kv-events-replay", replay) as (process, urls):
        sources = [json.loads(get(url + "/kv_event_sources"))["0"] for url in urls]
        assert {source["endpoint"] for source in sources} == {endpoint, endpoint + "-1"}
        assert {source["replay_endpoint"] for source in sources} == {replay, replay + "-1"}
        process.terminate()
        assert process.wait(60) == 0


def test_injected_errors_reach_clients() -> None:
    with running(1, "--fault-errors", "1", "--fault-latency", "0.01", "--speed", "10") as (_, urls):
        with pytest.raises(urllib.error.HTTPError) as caught:
            cached(urls[0])
        assert caught.value.code == 500
        assert "--fault-errors" in json.load(caught.value)["error"]["message"]
    with running(1, "--fault-breaks", "1", "--speed", "10") as (_, urls):
        body = json.dumps(PROMPT | {"stream": True}).encode()
        with urllib.request.urlopen(urls[0] + "/v1/completions", body) as response:
            frames = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        assert frames[0]["choices"][0]["text"]
        assert "--fault-breaks" in frames[-1]["error"]["message"]


def test_a_process_ends_with_its_last_replica() -> None:
    with running(2, "--fault-death", "40", "--speed", "400") as (process, urls):
        assert process.wait(60) == 1
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert sorted(lines) == sorted(f"replica sim (sim) died on {url} (--fault-death)" for url in urls)


async def test_a_death_cuts_connections_and_leaves_the_others() -> None:
    """The mortal one dies while it answers one request and has just got another; its neighbour is asked afterwards."""
    closed: list[str] = []
    engines, specs, due, over = [], [], asyncio.Event(), asyncio.Event()
    for name, lifetime_s in (("mortal", 60.0), ("other", None)):
        engines.append(WatchedEngine(SimConfig()))
        specs.append(ReplicaSpec(engines[-1], name, bind("127.0.0.1", 0), lifetime_s=lifetime_s))
        specs[-1].resources.callback(over.set)
        specs[-1].resources.callback(closed.append, name)
    lives: list[float] = []

    async def sleep(seconds: float) -> None:
        lives.append(seconds)
        await due.wait()

    addresses = {spec.model: spec.listener.getsockname() for spec in specs}
    lines: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    def report(line: str) -> None:
        """The line, and whether that replica can be reached at this moment."""
        with socket.socket() as client:
            lines.put_nowait((line, client.connect_ex(addresses[line.split()[1]]) == 0))

    serving = asyncio.create_task(serve(specs, report, sleep, started=list))
    ready = sorted([await lines.get(), await lines.get()])
    mortal, other = (line.split()[-1] for line, reachable in ready if reachable)
    asked = PROMPT | {"max_tokens": 90, "stream": True}  # less than what a replica that goes down lets its clients wait
    async with aiohttp.ClientSession() as http:
        response = await http.post(mortal + "/v1/completions", json=asked)
        engines[0].submitted.clear()
        waiting = asyncio.create_task(http.post(mortal + "/v1/completions", json=asked | {"prompt": [1] * 90_000}))
        await engines[0].submitted.wait()
        due.set()
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await response.read()
        with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
            await waiting
        assert await lines.get() == (f"replica mortal (sim) died on {mortal} (--fault-death)", False)
        assert lives == [60.0]
        await over.wait()
        assert closed == ["mortal"]
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(mortal + "/health")
        async with http.get(other + "/health") as alive:
            assert alive.status == 200
    assert "0 waiting, 0 in prefill, 0 decoding" in repr(engines[0])
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert closed == ["mortal", "other"]


async def test_the_collector_is_told_of_an_engine_that_has_started() -> None:
    """Not before: a model is made of a million objects at the start."""
    seen: list[str] = []
    ready = asyncio.Event()

    class Loading(WatchedEngine):
        async def start(self) -> None:
            await super().start()
            seen.append("loaded")

    def report(line: str) -> None:
        seen.append("ready")
        ready.set()

    specs = [ReplicaSpec(Loading(SimConfig()), "m", bind("127.0.0.1", 0))]
    serving = asyncio.create_task(serve(specs, report, started=lambda: seen.append("told")))
    await ready.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert seen == ["loaded", "told", "ready"]


class Starting(WatchedEngine):
    """Its start takes for ever."""

    def __init__(self) -> None:
        super().__init__(SimConfig())
        self.starting = asyncio.Event()

    async def start(self) -> None:
        self.starting.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_before_all_are_ready_is_no_success(number: signal.Signals) -> None:
    lines: list[str] = []
    closed: list[str] = []
    ends: list[int] = []
    starting = Starting()
    specs = [ReplicaSpec(engine, "m", bind("127.0.0.1", 0)) for engine in (starting, WatchedEngine(SimConfig()))]
    for spec in specs:
        spec.resources.enter_context(spec.listener)
        spec.resources.callback(closed.append, spec.engine.info.kind)
    serving = asyncio.create_task(serve(specs, lines.append, end=ends.append, started=list))
    await starting.starting.wait()
    signal.raise_signal(number)
    await serving
    assert ends == [INTERRUPTED]
    assert closed == ["sim", "sim"]
    assert len(lines) == 1, "one of them was ready"


HANGING = """
import asyncio, functools, sys, threading
from replica.process import ReplicaSpec, bind, serve
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine

say = functools.partial(print, file=sys.stderr, flush=True)

def hang():
    say("hangs")
    threading.Event().wait()

class Hanging(SimEngine):
    async def {phase}(self):
        await asyncio.to_thread(hang)

spec = ReplicaSpec(Hanging(SimConfig()), "m", bind("127.0.0.1", 0))
spec.resources.callback(say, "closed")
asyncio.run(serve([spec], lambda line: say("ready")))
"""


@contextlib.contextmanager
def hanging(phase: str) -> "Iterator[subprocess.Popen[str]]":
    """A process whose engine's start or close is in a thread that does not end."""
    command = [sys.executable, "-c", HANGING.format(phase=phase)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_the_threads_of_a_start(number: signal.Signals) -> None:
    with hanging("start") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "hangs\n"
        process.send_signal(number)
        assert process.wait(60) == INTERRUPTED
        assert process.stderr.read() == "closed\n"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_after_a_stop_waits_for_nothing(first: signal.Signals) -> None:
    with hanging("close") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(first)
        assert process.stderr.readline() == "hangs\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == INTERRUPTED


def test_a_socket_that_is_bound_does_not_listen_yet() -> None:
    with bind("127.0.0.1", 0) as bound, socket.socket() as client:
        assert client.connect_ex(bound.getsockname()) != 0


def test_what_an_engine_consists_of_is_no_longer_looked_at_by_the_collector() -> None:
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        favour_event_loop()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == COLLECT_AFTER
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:  # the objects stay frozen: else each collection of later tests would go through all tests
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_compressed_bodies_are_refused_unread(path: str) -> None:
    """A few kilobytes can be a gigabyte."""
    with running(1) as (_, urls):
        body = b"no gzip, which nobody notices"
        request = urllib.request.Request(urls[0] + path, body, {"Content-Encoding": "gzip"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        with caught.value as answer:
            assert answer.code == 415
            assert "without Content-Encoding" in json.load(answer)["error"]["message"]
