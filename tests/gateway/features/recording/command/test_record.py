"""`warmroute record` against gateways in this process, over real sockets: what is recorded is what was sent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.commands.cli import main
from gateway.core import Surroundings
from gateway.features.recording.command import record
from gateway.features.recording.recording import QUIET_S, Recording
from gateway.server.endpoints import ADMIN, clients_runner, side_runner
from router.simulation.recorded import RecordedTraffic, read
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, listening, running, serving_runner
from tests.gateway.features.workers.conftest import star
from tests.support.fakes import FakeReplica, answers, status, streams
from tests.support.tiers import gate

TEXTS = ["the quick brown fox " * 60, "jumps over the lazy dog " * 60, "and does it again " * 60]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **more}


def lines_of(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]


def options_of(admin: str, path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    return parser.parse_args(["--admin", admin, "--output", str(path), *more])


@asynccontextmanager
async def recording(admin: str, path: Path, *more: str, status: int = 0) -> AsyncIterator[None]:
    """From when the gateway keeps rows until the file is complete."""
    stop, opened = threading.Event(), threading.Event()

    class Watched(record.Recorder):
        def announce(self) -> None:
            opened.set()

    running = asyncio.create_task(asyncio.to_thread(Watched(options_of(admin, path, *more), time.monotonic, stop).run))
    try:
        await asyncio.wait_for(asyncio.to_thread(opened.wait), 40)
        yield
    finally:
        stop.set()
        assert await asyncio.wait_for(running, 60) == status


def prefixes(found: RecordedTraffic) -> list[list[bool]]:
    """Which prompt begins with which."""
    keys = [found.tree.keys(one.last) for one in found.requests]
    return [[other.startswith(one) for other in keys] for one in keys]


async def test_what_is_recorded_is_what_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl.gz"
    async with FakeReplica([answers()]) as one, running(one) as run:
        await run.post(chat("before the recording " * 100))
        async with recording(run.admin_url, path):
            await run.post(chat(TEXTS[0]))
            await run.post(chat(*TEXTS))
            await run.post(chat(TEXTS[1]), headers={"X-Session-Id": "secret-session", "X-Tenant-Id": "secret-tenant"})
        header, *rows, last = lines_of(path)
    assert (header["format"], header["version"], header["sample"], header["policy"]) == ("warmroute-trace", 1, 1.0, "cost")
    assert [(each["replica"], each["pool"]) for each in header["fleet"]] == [(1, 1)]
    assert (last["lost"], last["skipped"]) == (0, 0)
    assert [(row["pool"], row["replica"], row["status"]) for row in rows] == [(1, 1, 200)] * 3
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)
    assert 0 <= rows[0]["t"] < rows[-1]["t"]
    assert last["end"] > 0
    found = read([header, *rows, last])
    assert prefixes(found) == [[True, True, False], [False, True, False], [False, False, True]]
    assert [one.session for one in found.requests] == [1, 1, 2]
    assert [one.named for one in found.requests] == [False, False, True]
    raw = gzip.decompress(path.read_bytes()).decode()
    for secret in ("secret", "fox", "lazy", "127.0.0.1", '"m"', "default"):
        assert secret not in raw


async def test_streams_have_the_time_to_their_first_token(tmp_path: Path) -> None:
    async with FakeReplica([streams("a")]) as one, running(one) as run:
        async with recording(run.admin_url, tmp_path / "a.jsonl"):
            answer = await run.session.post(run.url + "/v1/chat/completions", json=chat(TEXTS[0], stream=True))
            await answer.read()
        [row] = lines_of(tmp_path / "a.jsonl")[1:-1]
    assert 0 < row["ttft"] <= row["seconds"]
    assert row["in"] > 0
    assert row["out"] is not None


async def test_requests_that_reached_no_replica_are_counted(tmp_path: Path) -> None:
    async with FakeReplica([status(500)]) as one, running(one) as run:
        async with recording(run.admin_url, tmp_path / "a.jsonl"):
            assert (await run.post(b"{"))[0] == 400
            assert (await run.post(chat(TEXTS[0], n=2)))[0] >= 500
            assert (await run.post(chat(TEXTS[0])))[0] >= 500
        _, row, last = lines_of(tmp_path / "a.jsonl")
    assert last["skipped"] == 2, "a broken body, and one whose answers are several"
    assert row["status"] >= 500
    assert not read([lines_of(tmp_path / "a.jsonl")[0], row]).requests[0].replayable


async def test_two_workers_are_one_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    async with FakeReplica() as one, FakeReplica() as two, star(one, two) as (_, (first, second)):
        async with recording(first.run.admin_url, path):
            for at in range(6):
                worker = (first, second)[at % 2]
                await worker.run.post(chat(*TEXTS[: at % 3 + 1], TEXTS[0] * (at % 2)))
        found = read(lines_of(path))
    assert len(found.requests) == 6
    assert lines_of(path)[-1]["lost"] == 0
    sent = [tuple(filter(None, (*TEXTS[: at % 3 + 1], TEXTS[0] * (at % 2)))) for at in range(6)]
    starts = [[other[: len(one)] == one for other in sent] for one in sent]
    assert prefixes(found) == starts, "whichever worker had them"
    assert ["3 rows" in repr(worker.gateway[Recording]) for worker in (first, second)] == [True, True]


async def test_two_gateways_are_on_one_time_line(tmp_path: Path) -> None:
    """Whatever their clocks say."""
    path = tmp_path / "a.jsonl"
    async with FakeReplica() as one, running(one) as run:
        gateway = compose(config_over(one), LOGGED, Surroundings(clock=lambda: time.monotonic() + 1e6))
        async with (
            serving_runner(gateway, clients_runner(gateway.served)) as other,
            recording(f"{run.admin_url},{other.admin_url}", path),
        ):
            for at in range(4):
                await (run, other)[at % 2].post(chat(TEXTS[0] * (at + 1)))
        header, *rows, last = lines_of(path)
    found = read([header, *rows, last])
    assert header["gateways"] == 2
    assert len(found.requests) == 4
    assert all(0 <= one.at < 40 for one in found.requests), "not a million seconds, the difference of their clocks"
    assert len({one.model for one in found.requests}) == 1


async def test_nothing_is_kept_unless_somebody_asks_and_it_ends_by_itself(tmp_path: Path) -> None:
    now = 0.0
    async with FakeReplica() as one:
        gateway = compose(config_over(one), LOGGED, Surroundings(clock=lambda: time.monotonic() + now))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            observers, kept = gateway.observers, gateway[Recording]
            before = list(observers)
            await run.post()
            async with recording(run.admin_url, tmp_path / "a.jsonl"):
                await run.post()
                assert len(observers) == len(before) + 1
                assert "1 rows" in repr(kept)
            now = QUIET_S + 1
            await eventually(lambda: observers == before)
            assert repr(kept) == "<Recording off, 0 rows, 0 bytes>"


@asynccontextmanager
async def operators_at(path: Path, replica: FakeReplica, ahead_s: float = 0.0) -> AsyncIterator[Running]:
    """A gateway whose operators' listener is at a path, where another one was before. ahead_s: its clock, of ours."""
    gateway = compose(config_over(replica), LOGGED, Surroundings(clock=lambda: time.monotonic() + ahead_s))
    async with (
        serving_runner(gateway, clients_runner(gateway.served)) as run,
        listening(side_runner(gateway.served, ADMIN), str(path)),
    ):
        yield run


@pytest.mark.parametrize("ahead_s", [0.0, 1e5, -100.0])
@gate("-100.0", reason="times that go back are the hardest for the reader")
async def test_a_gateway_that_is_restarted_is_recorded_again(tmp_path: Path, ahead_s: float) -> None:
    """Also on another machine, whose clock began at another time."""
    path, socket = tmp_path / "a.jsonl", tmp_path / "socket"
    async with FakeReplica() as one, contextlib.AsyncExitStack() as stack:
        async with operators_at(socket, one) as run:
            await stack.enter_async_context(recording(f"unix:{socket}", path))
            await run.post(chat(TEXTS[0]))
            asked = run.gateway[Recording].asked
            await eventually(lambda: run.gateway[Recording].asked > asked + 1)
        async with operators_at(socket, one, ahead_s) as again:
            await eventually(lambda: again.gateway[Recording].ring)
            await again.post(chat(*TEXTS))
            await stack.aclose()
    found = read(lines_of(path))
    assert prefixes(found) == [[True, True], [False, True]]
    assert all(0 <= one.at < 60 for one in found.requests)


async def test_the_bound_of_the_file_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeReplica() as one, running(one) as run:
        options = options_of(run.admin_url, tmp_path / "a.jsonl", "--max-mb", "1")
        options.max_mb = 0  # not even a header
        assert await asyncio.to_thread(record.run, options) == 1
    assert "has reached --max-mb; nothing is recorded" in capsys.readouterr().err


async def test_a_full_disk_is_said_and_what_it_lacks_is_counted(tmp_path: Path) -> None:
    """A limit on files' sizes that the header and the last line fit into, and the requests do not."""
    path = tmp_path / "a.jsonl"
    async with FakeReplica() as one, running(one) as run:
        command = [sys.executable, "-m", "gateway", "record", "--admin", run.admin_url, "--output", str(path)]
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", 'ulimit -f 1; exec "$@"', "_", *command, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        assert b"recording to" in await asyncio.wait_for(process.stderr.readline(), 40)
        for _ in range(10):
            await run.post(chat(TEXTS[0]))
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 1
    full = f"warmroute: {path} cannot be written: File too large"
    assert err.decode().splitlines() == [
        f"0 requests in {path}, 0.0 MB",
        f"{full}; the last 10 requests are missing; the file is valid up to there",
    ]
    header, last = lines_of(path)
    assert header["format"] == "warmroute-trace"
    assert (last["lost"], last["stopped"]) == (10, full.removeprefix("warmroute: "))


async def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return await asyncio.to_thread(main, ["record", *arguments]), capsys.readouterr().err


async def test_what_cannot_be_recorded_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    code, text = await said(capsys, "--admin", "http://127.0.0.1:9", "--output", str(path))
    assert (code, path.exists()) == (1, False)
    assert "cannot be reached" in text
    async with FakeReplica() as one, running(one) as run:
        admin = "--admin", run.admin_url
        path.write_text("precious")
        assert "exists: choose another file, or use --replace" in (await said(capsys, *admin, "--output", str(path)))[1]
        assert path.read_text() == "precious"
        assert "cannot be written" in (await said(capsys, *admin, "--output", str(tmp_path / "no" / "a")))[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--for", "0s"), "is not a time of at least 1s, such as 30s, 10m, 24h or 7d"),
        (("--for", "soon"), "is not a time"),
        (("--for", "nan"), "is not a time"),
        (("--for", "1e300d"), "is not a time"),
        (("--sample", "0"), "is not a share from 0.0001 to 1"),
        (("--sample", "1.5"), "is not a share"),
        (("--sample", "nan"), "is not a share"),
        (("--max-mb", "0"), "is not a whole number from 1"),
        (("--max-mb", "1e3"), "is not a whole number"),
    ],
)
def test_wrong_values_are_refused(flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["record", "--output", "a", *flags])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("30s", 30), ("1.5m", 90), ("24h", 86400), ("7d", 604800)])
def test_times_have_units(text: str, seconds: float, tmp_path: Path) -> None:
    assert options_of("x", tmp_path, "--for", text).seconds == seconds


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_with_a_whole_file(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    async with FakeReplica() as one, running(one) as run:
        command = [sys.executable, "-m", "gateway", "record", "--admin", run.admin_url, "--output", str(path)]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert b"recording to" in await asyncio.wait_for(process.stderr.readline(), 40)
        await run.post(chat(TEXTS[0]))
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), 40)
    assert (process.returncode, b"Traceback" in err) == (0, False)
    assert b"1 requests of 1 conversations" in err
    assert len(lines_of(path)) == 3


@pytest.mark.parametrize(
    "query",
    [
        "after=x",
        "after=a:-1",
        "after=a:1,",
        "after=" + ",".join(["a:1"] * 257),
        "sample=0",
        "sample=2",
        "sample=nan",
        "sample=x",
    ],
)
async def test_a_question_that_makes_no_sense_is_a_400_and_begins_nothing(query: str) -> None:
    async with FakeReplica() as one, running(one) as run:
        code, _, body = await run.get(f"/warmroute/recording?{query}")
        assert code == 400
        assert json.loads(body)["error"]["param"] == query.partition("=")[0]
        assert not run.gateway[Recording].ring


async def test_a_recorder_that_is_late_finds_a_gap(tmp_path: Path) -> None:
    async with FakeReplica() as one, running(one) as run:
        [first] = json.loads((await run.get("/warmroute/recording"))[2])["pages"]
        await run.post()
        await run.post()
        [page] = json.loads((await run.get(f"/warmroute/recording?after={first['ring']}:1"))[2])["pages"]
        assert (page["first"], page["last"], len(page["rows"])) == (2, 2, 1)
        [page] = json.loads((await run.get("/warmroute/recording?after=abc:1"))[2])["pages"]
        assert (page["first"], page["last"]) == (1, 2)
