"""The command as a user runs it: processes, signals, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway import __version__
from gateway.cluster.process import memory_bytes
from gateway.commands.cli import main
from gateway.commands.demo.processes import Process, admin_url, listening_url, log_line, ready_url
from tests.support.compiled import COMPILED, documented
from tests.support.paths import ROOT
from tests.support.tiers import gate, nightly

COMMAND = [sys.executable, "-m", "gateway"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["demo", "--help"], ["check", "--help"], ["replica", "--help"]]
)
def test_every_command_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "usage: warmroute" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"warmroute {__version__}\n"
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"', project, re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_no_replica_is_a_clear_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_CONFIG", raising=False)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.endswith("--replica URL), or a source in `discovery`, is expected, got none\n")


def test_an_unknown_flag_is_answered_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["status", "--unknown"])
    assert caught.value.code == 2
    usage, *_, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: warmroute status ")
    assert error == "warmroute status: error: unrecognized arguments: --unknown"


@pytest.mark.parametrize("command", ["status", "replica"])
def test_an_unknown_flag_before_a_command_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--unknown", command])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --unknown\n")


def test_help_lists_the_commands_of_features(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert {"serve", "replica", "keys", "usage", "record", "doctor"} <= set(capsys.readouterr().out.split())


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "serve", "--replica", "http://127.0.0.1:9", "--port", port],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_address_for_operators_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "config.yaml"
        file.write_text(f"listen: 127.0.0.1:0\nadmin_listen: {address}\npools: [{{replicas: [http://a:1]}}]")
        done = subprocess.run(
            [*COMMAND, "serve", "--config", str(file)], capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert f"warmroute: cannot listen on {address} (admin_listen): Address already in use" in done.stderr


def test_serve_refuses_what_check_refuses_and_logs_what_check_warns_of(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    good = "listen: 127.0.0.1:0\npools: [{models: ['llama-*'], replicas: [http://127.0.0.1:9]}]"
    file.write_text(f"{good}\nworkers: 0\nlog_level: loud")
    done = subprocess.run([*COMMAND, "serve", "--config", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert [line.partition(": ")[2].partition(": ")[0] for line in done.stderr.splitlines()] == [f"{file}:3", f"{file}:4"]
    file.write_text(good)
    gateway = Process("gateway", ["serve", "--config", str(file)])
    try:

        def warned(line: str) -> str:
            return str(log_line(line).get("warning", ""))

        assert gateway.wait_for(warned).startswith(f"{file}:2: pools[0].models[0]: 'llama-*' is a prefix, not a pattern")
        listening = gateway.wait_for(lambda line: log_line(line) if listening_url(line) else None)
        assert (listening["inflight_limit_bytes"], listening["compiled"]) == (memory_bytes() // 4, COMPILED)
        file.write_text(f"{good}\nprices: {{gpt-: {{input: 1, output: 1}}}}")
        os.kill(gateway.pid, signal.SIGHUP)
        assert gateway.wait_for(lambda line: "prices.gpt-" in warned(line))
        file.write_text(f"{good}\nworkers: 0\nlog_level: loud")
        os.kill(gateway.pid, signal.SIGHUP)
        why = gateway.wait_for(lambda line: "not reloaded" in str(log_line(line).get("message")) and log_line(line)["error"])
        assert f"{file}:3: workers" in why
        assert f"{file}:4: log_level" in why
    finally:
        gateway.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("workers", [1, 2])
@gate("1-1", "2-15", reason="each signal, each number of workers")
def test_signals_that_come_until_the_last_moment_do_not_change_its_exit_status(workers: int, number: signal.Signals) -> None:
    options = ["--replica", "http://127.0.0.1:9", "--port", "0", "--host", "127.0.0.1", "--workers", str(workers)]
    with subprocess.Popen([*COMMAND, "serve", *options], stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr
        assert any(listening_url(line) for line in gateway.stderr)
        gateway.send_signal(signal.SIGTERM)
        while gateway.poll() is None:
            gateway.send_signal(number)
            time.sleep(0.005)
    assert gateway.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    gateway = Process("gateway", ["serve", "--replica", "http://127.0.0.1:9", "--port", "0", "--host", "127.0.0.1"])
    try:
        assert gateway.wait_for(listening_url).startswith("http://127.0.0.1:")
        assert gateway.wait_for(admin_url).startswith("http://127.0.0.1:")
        os.kill(gateway.pid, number)
        assert gateway.wait_for(lambda line: log_line(line).get("message") == "stopped")
        assert gateway.exit_status() == 0
    finally:
        gateway.stop()


@nightly(".ci/run runs the demo")
def test_the_demo_ends_with_0_when_every_later_turn_hit_the_cache() -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--once", "--engine", "sim"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 later turns hit the cache" in done.stdout
    rows = re.findall(r"^(lamp|fog) \d +(\S+) +(warm|cold|spill)", done.stdout, re.MULTILINE)
    assert len(rows) == 8
    assert len({replica for name, replica, _ in rows if name == "fog"}) == 1


def test_the_demo_leaves_no_process_behind_when_it_is_stopped() -> None:
    demo = subprocess.Popen([*COMMAND, "demo", "--engine", "sim"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert demo.stdout
        lines = iter(demo.stdout.readline, "")
        assert any("stays up until Ctrl-C" in line for line in lines)
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        assert len(children) == 3, "two replicas and a gateway"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        demo.kill()
        demo.wait()
        assert demo.stdout
        demo.stdout.close()


def test_ready_lines_are_understood() -> None:
    assert ready_url("replica sim (sim) ready on http://127.0.0.1:9001") == "http://127.0.0.1:9001"
    assert ready_url("not ready on time") == ""
    assert listening_url("not json") == listening_url("[]") == ""


def test_output_that_is_read_no_more_is_no_traceback() -> None:
    """`warmroute check --schema | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run([*COMMAND, "check", "--schema"], stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


SCHEMA = ["check", "--schema"]
SIMULATION = [["simulate", "gen:no_reuse", "--hours", "0.01"]]


@pytest.mark.parametrize("arguments", [SCHEMA, ["--help"], ["--version"], ["replica", "--help"], *SIMULATION])
@pytest.mark.parametrize(
    ("to", "reason"),
    [(">/dev/full", "cannot be written: No space left on device"), (">&-", "is closed")],
)
@gate(
    ">/dev/full*arguments0", ">/dev/full*arguments3", ">&-*arguments2", ">&-*arguments4", reason="each command or each reason"
)
def test_output_that_cannot_be_written_is_one_line_and_a_status(arguments: list[str], to: str, reason: str) -> None:
    command = ["bash", "-c", f'"$@" {to}', "_", *COMMAND, *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=False, text=True)
    assert (done.returncode, done.stderr) == (1, f"warmroute: standard output {reason}\n")


def test_a_gateway_without_standard_descriptors_ends_well(tmp_path: Path) -> None:
    """Its sockets would have their numbers."""
    config = tmp_path / "config.yaml"
    config.write_text('{pools: [{replicas: ["http://127.0.0.1:9"]}], listen: "127.0.0.1:0", admin_listen: "off"}')
    command = ["bash", "-c", 'exec "$@" <&- >&-', "_", *COMMAND, "serve", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any(listening_url(line) for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest


def test_a_command_that_prints_nothing_needs_no_output(tmp_path: Path) -> None:
    command = ["bash", "-c", '"$@" >&-', "_", *COMMAND, "check", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=False, text=True)
    assert (done.returncode, done.stderr) == (2, f"warmroute: {tmp_path}/none.yaml: No such file or directory\n")


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="one worker: test_logs_are_for_people_on_a_terminal_and_json_elsewhere")
def test_all_processes_log_in_the_configured_format(workers: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    pools = [{"replicas": ["http://127.0.0.1:9"]}]
    settings = {"pools": pools, "listen": "127.0.0.1:0", "admin_listen": "off", "workers": workers, "log_format": "console"}
    config.write_text(json.dumps(settings))
    with subprocess.Popen([*COMMAND, "serve", "--config", str(config)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines = list[str]()
        while not (lines and "replica down" in lines[-1]):  # a worker's own line
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.terminate()
        lines += process.stderr.read().splitlines()
    assert not [line for line in lines if line.startswith("{")]


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="one worker: test_logs_are_for_people_on_a_terminal_and_json_elsewhere")
def test_the_line_listening_has_the_replicas_that_were_found(workers: int, tmp_path: Path) -> None:
    found, config = tmp_path / "list.yaml", tmp_path / "config.yaml"
    found.write_text("replicas: [http://127.0.0.1:9, http://127.0.0.1:10]")
    discovery = [{"file": str(found)}]
    settings = {"discovery": discovery, "listen": "127.0.0.1:0", "admin_listen": "off", "workers": workers, "state": "off"}
    settings["limits"] = {"drain_accept_s": 0}
    config.write_text(json.dumps(settings))
    gateway = Process("gateway", ["serve", "--config", str(config)])
    try:
        replicas = gateway.wait_for(lambda line: log_line(line).get("replicas") if listening_url(line) else None)
        assert sorted(replicas) == ["http://127.0.0.1:10", "http://127.0.0.1:9"]
    finally:
        gateway.stop()


@pytest.mark.parametrize("terminal", [True, False])
def test_logs_are_for_people_on_a_terminal_and_json_elsewhere(terminal: bool, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    pools = [{"replicas": [{"url": "http://127.0.0.1:9", "name": "one"}]}]
    config.write_text(json.dumps({"pools": pools, "listen": "127.0.0.1:0", "admin_listen": "off", "state": "off"}))
    reading, writing = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config)], stderr=writing, env={**os.environ, "NO_COLOR": "1"}
    )
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as output, process:
        seen = b""
        while b"replica down" not in seen or not seen.endswith(b"\n"):
            more = output.read(4096)
            assert more, seen
            seen += more
        process.terminate()
        with contextlib.suppress(OSError):  # a terminal's other end is gone
            while output.read(4096):
                pass
    lines = seen.decode().splitlines()
    assert {line.startswith("{") for line in lines} == {not terminal}
    assert "\x1b" not in seen.decode()


@documented
def test_the_readme_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    listed = re.findall(r"^\| `warmroute (\w+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(commands) > 10
    assert set(listed) == set(commands)
