"""The command as a user meets it: a process, its ready line, its mistakes in one line each."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from replica.api.server import ServerConfig
from replica.cli import continuous_config, main, random_of, served_name, server_config, sim_config
from replica.flags import parser
from replica.process import INTERRUPTED
from replica.sim.cost import SimConfig
from tests.support.paths import ROOT

# None in sys.modules makes an import fail, as if the package were not installed.
HIDE = "import sys; sys.modules |= dict.fromkeys({!r}); "
RUN = "import sys; from replica.cli import main; sys.exit(main(sys.argv[1:]))"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command in a process without torch; ends what is still running."""
    running: list[subprocess.Popen[str]] = []

    def run(*args: str, hide: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        command = [*before, sys.executable, "-c", HIDE.format(("torch", "transformers", *hide)) + RUN, *args]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        running.append(process)
        return process

    yield run
    for process in running:
        with process:
            process.kill()


def ready_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("replica sim (sim) ready on http://127.0.0.1:"), line
    return line.split()[-1]


SWALLOWING = """
import signal, sys
print("begun", file=sys.stderr, flush=True)
try:
    signal.pause()
except BaseException:
    print("lost", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_not_lost_in_what_is_imported(tmp_path: Path, number: signal.Signals) -> None:
    """A library may swallow whatever happens while it is loaded: numpy does."""
    (tmp_path / "zmq.py").write_text(SWALLOWING, "utf-8")
    command = [sys.executable, "-m", "gateway", "replica", "--engine", "sim", "--port", "0", "--kv-events", "tcp://*:5557"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(60) == INTERRUPTED
        assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_torch_and_stops_cleanly(start: Start, number: signal.Signals) -> None:
    process = start("--engine", "sim", "--port", "0")
    url = ready_url(process)
    with urllib.request.urlopen(url + "/health") as response:
        assert response.status == 200
    process.send_signal(number)
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_more_signals_change_nothing_until_the_process_has_ended(start: Start) -> None:
    process = start("--engine", "sim", "--port", "0")
    ready_url(process)
    for _ in range(10_000):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.004)
            break
    assert process.returncode == 0


def test_a_stream_that_is_open_does_not_keep_it_from_stopping(start: Start) -> None:
    process = start("--engine", "sim", "--port", "0", "--decode-rate", "1")
    body = b'{"prompt": "Hi", "stream": true, "max_tokens": 9}'
    with urllib.request.urlopen(ready_url(process) + "/v1/completions", body) as response:
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


class _Client(asyncio.Protocol):
    """One connection, one request."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(error)


async def _crowd(url: str, count: int) -> list[bytes]:
    """What `count` connections that are open at once get, each for a request of its own."""
    body = b'{"prompt": "Hi", "max_tokens": 9}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])
    clients = await asyncio.gather(*(loop.create_connection(_Client, "127.0.0.1", port) for _ in range(count)))
    for transport, _ in clients:
        transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await asyncio.gather(*(client.over for _, client in clients))
    return [bytes(client.got) for _, client in clients]


def test_thousands_of_connections_at_once_are_all_answered(start: Start) -> None:
    """10,000 were too; this many take two seconds."""
    count = 3000
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < count + 500:
        pytest.skip("too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit = ("sh", "-c", 'ulimit -S -n 1024 && exec "$@"', "sh")  # as on most systems
    process = start("--engine", "sim", "--port", "0", "--max-queue", "100", "--speed", "100", before=limit)
    url = ready_url(process)
    answers = asyncio.run(_crowd(url, count))
    full = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert all(b"\r\nRetry-After: " in answer for answer in full)
    assert sum(answer.startswith(b"HTTP/1.1 200 ") for answer in answers) == count - len(full) >= 100
    memory = Path(f"/proc/{process.pid}/status").read_text("utf-8")
    assert int(memory.partition("VmHWM:")[2].split()[0]) < 300_000  # kB; 165,000 were seen with 10,000
    with urllib.request.urlopen(url + "/health") as response:
        assert response.status == 200


def test_without_torch_a_real_model_is_refused_with_advice(start: Start) -> None:
    process = start("--port", "0")
    assert process.wait(60) == 1
    assert process.stderr is not None
    assert process.stderr.read() == (
        "warmroute replica: torch, transformers not installed: pip install '.[replica]' in the checkout (or use --engine sim)\n"
    )


def test_without_zmq_events_are_refused_with_advice(start: Start) -> None:
    process = start("--engine", "sim", "--port", "0", "--kv-events", "tcp://*:0", hide=("msgpack", "zmq"))
    assert process.wait(60) == 1
    assert process.stderr is not None
    advice = "pip install '.[events]' in the checkout (or leave out --kv-events)"
    assert process.stderr.read() == f"warmroute replica: msgpack, zmq not installed: {advice}\n"


def test_kv_events_of_a_process_and_where_they_come_from(start: Start, tmp_path: Path) -> None:
    zmq, msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgpack")
    endpoint = f"ipc://{tmp_path}/events"
    process = start(
        "--engine", "sim", "--port", "0", "--block-size", "8", "--kv-events", endpoint, "--kv-events-topic", "kv@me"
    )
    url = ready_url(process)
    with urllib.request.urlopen(url + "/kv_event_sources") as response:
        assert json.load(response)["0"]["endpoint"] == endpoint
    with zmq.Context() as context, context.socket(zmq.SUB) as follower:
        follower.setsockopt(zmq.SUBSCRIBE, b"kv@")
        follower.connect(endpoint)
        prompt = 0
        while not follower.poll(20):  # until the subscription is in place
            prompt += 1
            body = json.dumps({"prompt": [prompt] * 30, "max_tokens": 1}).encode()
            urllib.request.urlopen(url + "/v1/completions", body).close()
        _, number, payload = follower.recv_multipart()
    assert int.from_bytes(number, "big") < prompt
    (event,) = msgpack.unpackb(payload)[1]
    assert (event["type"], event["block_size"], len(event["token_ids"])) == ("BlockStored", 8, 24)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--engine", "sim", "--port", str(port)]) == 1
    advice = "choose another --port, or 0 for any"
    expected = f"warmroute replica: cannot listen on 127.0.0.1:{port}: Address already in use; {advice}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "sim", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--engine", "sim", "--prepare-only"], "--prepare-only: the engine sim does not have that: leave that out"),
        (["--engine", "sim", "--model", "x", "--threads", "999"], "--model, --threads: the engine sim"),
        (["--engine", "sim", "--random-weights", "x"], "--random-weights: the engine sim"),
        (["--decode-rate", "9"], "--decode-rate: the engine transformers does not have that: add --engine sim"),
        (["--port", "0", "--block-size", "2"], "--block-size must be at least 4"),
        (["--port", "0", "--kv-tokens", "60"], "at least four blocks"),
        (["--port", "0", "--cache-file", "/no/such/folder/cache"], "there is no folder /no/such/folder"),
        (["--engine", "sim", "--port", "0", "--cache-file", "cache"], "--cache-file: the engine sim"),
        (["--engine", "sim", "--port", "0", "--chat-template", "x.jinja"], "--chat-template: the engine sim"),
        (["--engine", "sim", "--port", "0", "--kv-events-replay", "tcp://*:1"], "give both"),
        (["--engine", "sim", "--port", "0", "--kv-events-topic", "kv"], "begins the messages of --kv-events: give both"),
        (["--engine", "sim", "--port", "0", "--ranks", "2", "--kv-events", "tcp://*:65535"], "choose both ports 2 apart"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_models_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    for model, message in ((tmp_path / "none", "there is no model folder"), (tmp_path, "has no config.json")):
        assert main(["--port", "0", "--model", str(model)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--model", "org/name"], ["--random-weights", "config.json"]])
def test_only_the_bundled_model_is_prepared(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An image that is built with a model of the Hub would have none."""
    with pytest.raises(SystemExit) as caught:
        main(["--prepare-only", *flags])
    assert caught.value.code == 2
    assert f"argument {flags[0]}: not allowed with argument --prepare-only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"), [("llama-3.1-8b", "llama-3.1-8b"), ("llama-3.1-8b/config.json", "llama-3.1-8b"), ("8b.json", "8b")]
)
def test_random_weights_are_served_under_the_name_of_their_shape(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / "llama-3.1-8b").mkdir()
    assert served_name(parser().parse_args(["--random-weights", str(tmp_path / path)])) == name


def test_random_weights_need_a_shape_and_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["--port", "0", "--random-weights", str(tmp_path)]) == 1
    assert f"--random-weights: there is no {tmp_path / 'config.json'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--random-weights", str(tmp_path), "--model", str(tmp_path)])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_api_flags_reach_the_server(start: Start) -> None:
    process = start("--engine", "sim", "--port", "0", "--max-queue", "7")
    with urllib.request.urlopen(ready_url(process) + "/stats") as response:
        assert json.load(response)["max_queue"] == 7


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], ServerConfig()),
        (["--max-queue", "7", "--coalesce-ms", "20"], ServerConfig(max_queue=7, coalesce_s=0.02)),
        (["--coalesce-ms", "0", "--send-timeout", "5"], ServerConfig(send_timeout_s=5.0)),
        (["--trust-request-chat-template"], ServerConfig(trust_templates=True)),
    ],
)
def test_each_api_flag_is_a_field(flags: list[str], config: ServerConfig) -> None:
    assert server_config(parser().parse_args(flags), []) == config


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], SimConfig(64, max_batch=2)),
        (["--prefill-rate", "7", "--decode-rate", "8"], SimConfig(64, 7.0, 8.0, 2)),
        (
            ["--prefill-chunk", "9", "--decode-slowdown", "0.1"],
            SimConfig(64, max_batch=2, prefill_chunk=9, decode_slowdown=0.1),
        ),
        (["--block-size", "8", "--speed", "20"], SimConfig(64, max_batch=2, block_size=8, speed=20.0)),
        (
            ["--step-ms", "30", "--context-ms", "8", "--attention-ms", "900", "--attention-dense", "0.5"],
            SimConfig(64, max_batch=2, step_s=0.03, context_s=8e-6, attention_s=9e-7, attention_dense=0.5),
        ),
    ],
)
def test_each_flag_of_the_simulation_is_a_field(flags: list[str], config: SimConfig) -> None:
    assert sim_config(parser().parse_args(flags), 64, 2) == config


REAL: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--device", "cpu", "--dtype", "float32"], {"device": "cpu", "dtype": "float32"}),
    (["--block-size", "8", "--batch-tokens", "9"], {"block_size": 8, "batch_tokens": 9}),
    (["--max-model-len", "10", "--threads", "11"], {"max_model_len": 10, "threads": 11}),
    (["--cache-file", "folder/cache"], {"cache_file": Path("folder/cache")}),
    (["--chat-template", str(ROOT / "LICENSE")], {"chat_template": (ROOT / "LICENSE").read_text("utf-8")}),
]


@pytest.mark.parametrize(("flags", "given"), REAL)
def test_each_flag_of_the_real_engine_is_a_field(flags: list[str], given: dict[str, Any]) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    from replica.torch_engine.continuous import ContinuousConfig

    known = {name for _, each in REAL for name in each} | {"kv_tokens", "max_batch"}
    assert known == {field.name for field in fields(ContinuousConfig)}
    args = parser().parse_args(flags)
    default = {"kv_tokens": 64, "max_batch": 2, "threads": parser().get_default("threads")}
    assert continuous_config(args, 64, 2) == ContinuousConfig(**default | given)


def test_each_replica_has_chances_of_its_own_and_the_same_in_every_run() -> None:
    def first(index: int, *flags: str, what: str = "faults") -> float:
        return random_of(parser().parse_args(flags), index, what).random()

    assert first(0) == first(0, "--seed", "0")
    assert len({first(0), first(1), first(0, "--seed", "1"), first(0, what="death")}) == 4
