"""Log lines reach their reader whole, or are counted; a reader that stalls stops nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import compose
from gateway.commands.streams import StandardError
from gateway.server.endpoints import clients_runner
from gateway.telemetry.log_output import LogOutput, Sink, sink_of
from gateway.telemetry.logs import Handler
from gateway.telemetry.request_log import RequestLog
from tests.gateway.conftest import eventually, serving_runner
from tests.support.configs import load
from tests.support.fakes import FakeReplica

WAIT_S = 60.0  # a thread that waited for ever would keep its event loop from ending, too


@dataclass(slots=True)
class Pipe:
    """Nobody reads it until `read`."""

    reading: int
    writing: int
    sink: Sink = field(init=False)

    def __post_init__(self) -> None:
        self.sink = lambda data: os.write(self.writing, data)

    def read(self, enough: Callable[[bytes], bool]) -> list[bytes]:
        """The lines that come until they are enough. Raises AssertionError if nothing comes any more."""
        data = b""
        while not (data.endswith(b"\n") and enough(data)):
            ready, _, _ = select.select((self.reading,), (), (), WAIT_S)
            assert ready, f"{len(data)} bytes came, the last are {data[-200:]!r}"
            data += os.read(self.reading, 1 << 16)
        return data.splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(*os.pipe())
    yield made
    for file in (made.reading, made.writing):
        with contextlib.suppress(OSError):
            os.close(file)


async def test_a_reader_that_stalls_costs_lines_and_nothing_else(pipe: Pipe) -> None:
    output = LogOutput(pipe.sink, buffer_bytes=200_000, fixed={"worker": 3})
    lines = [b"%06d" % number + b"x" * 494 for number in range(2000)]
    begun = time.monotonic()
    for line in lines:
        output.write(line)
    output.hand_over()
    assert time.monotonic() - begun < 5
    dropped = output.dropped
    assert len(lines) * 501 - 201_000 - (1 << 16) < dropped * 501 <= len(lines) * 501 - 200_000 + 501
    begun = time.monotonic()
    assert not output.flush(0.05)
    assert not output.flush(60), "once in vain is enough"
    assert time.monotonic() - begun < 5
    got = await asyncio.to_thread(pipe.read, lambda data: data.endswith(b'"dropped":%d}\n' % dropped))
    assert got[:-1] == lines[: len(lines) - dropped]
    report = json.loads(got[-1])
    assert (report["level"], report["logger"], report["worker"]) == ("warning", "warmroute.log", 3)
    output.write(b"more")
    assert output.flush(WAIT_S)
    assert os.read(pipe.reading, 100) == b"more\n"
    assert output.dropped == dropped


async def test_the_buffer_is_bounded_within_one_batch_and_for_records(pipe: Pipe) -> None:
    output = LogOutput(pipe.sink, buffer_bytes=1000)
    for _ in range(100):
        output.write(b"x" * 99)
    assert output.dropped == 90
    output.write_record(b"x" * 99, urgent=True)
    await asyncio.to_thread(output.write_record, b"x" * 1000, urgent=True)
    assert output.dropped == 92
    assert await asyncio.to_thread(output.flush, WAIT_S)


async def test_a_whole_gateway_answers_while_nobody_reads_its_log(pipe: Pipe) -> None:
    output = LogOutput(pipe.sink, buffer_bytes=20_000)
    async with FakeReplica() as replica:
        config = load(None, {"listen": "127.0.0.1:0", "pools": [{"replicas": [replica.url]}]}, env={})
        gateway = compose(config, RequestLog(output, logging.INFO))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            sent = 0
            while not output.dropped:
                assert (await run.post())[0] == 200
                sent += 1
                assert sent < 2000
            assert (await run.metrics())["warmroute_log_lines_dropped_total"] == output.dropped
    output.hand_over()

    def all_are_there(data: bytes) -> bool:  # the report on dropped lines comes before lines of the next batch
        return sum(json.loads(line).get("dropped", 1) for line in data.splitlines()) >= sent

    got = [json.loads(line) for line in await asyncio.to_thread(pipe.read, all_are_there)]
    reports = [line["dropped"] for line in got if "dropped" in line]
    assert sum(reports) == output.dropped > 0
    assert len(got) - len(reports) + output.dropped == sent


def test_lines_of_any_thread_go_out_without_an_event_loop() -> None:
    written: list[bytes] = []

    def sink(data: memoryview) -> int:
        written.append(bytes(data))
        return len(data)

    output = LogOutput(sink)
    handler = Handler(output)

    def log() -> None:
        for _ in range(100):
            handler.handle(logging.makeLogRecord({"msg": "m", "levelno": logging.INFO, "levelname": "INFO"}))

    threads = [threading.Thread(target=log) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.write(b"{}")
    assert output.flush(WAIT_S)
    assert len(b"".join(written).splitlines()) == 401


async def test_lines_wait_for_a_batch_and_warnings_do_not() -> None:
    written: list[bytes] = []
    output = LogOutput(lambda data: written.append(bytes(data)) or len(data))
    handler = Handler(output)
    output.write(b"1")
    handler.handle(logging.makeLogRecord({"msg": "m", "levelno": logging.INFO, "levelname": "INFO"}))
    assert repr(output).startswith("<Output, ")
    assert not output._queue_bytes, "nothing is handed over yet"
    assert not written
    handler.handle(logging.makeLogRecord({"msg": "w", "levelno": logging.WARNING, "levelname": "WARNING"}))
    await eventually(lambda: written)
    first, info, warning = b"".join(written).splitlines()
    assert (first, json.loads(info)["message"], json.loads(warning)["message"]) == (b"1", "m", "w")
    output.write(b"2")
    await eventually(lambda: written[-1] == b"2\n")  # by the timer


# -- errors of writing


async def test_lines_that_nobody_can_read_any_more_are_counted(pipe: Pipe) -> None:
    output = LogOutput(pipe.sink)
    os.close(pipe.reading)
    for _ in range(3):
        output.write(b"x")
    assert output.flush(WAIT_S)
    assert (output.dropped, output._queue_bytes) == (3, 0)


async def test_after_a_full_disk_a_line_has_the_number_of_missing_lines() -> None:
    full, written = True, bytearray()

    def sink(data: memoryview) -> int:
        if full and len(written) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: 5 - len(written)] if full else data
        written.extend(part)
        return len(part)

    output = LogOutput(sink)
    output.write(b"the first")
    assert output.flush(WAIT_S)
    output.write(b"the second")
    assert output.flush(WAIT_S)
    full = False
    output.write(b"the third")
    await eventually(lambda: output.flush(WAIT_S) and b"dropped" in written)
    torn, third, report = bytes(written).splitlines()
    assert (torn, third) == (b"the f", b"the third")
    assert json.loads(report)["dropped"] == output.dropped == 2


async def test_standard_error_that_another_process_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    with os.fdopen(pipe.writing, "w", closefd=False) as stream:
        output = LogOutput(sink_of(stream))
        for number in range(1000):
            output.write(b"%0500d" % number)
        output.hand_over()
        got = await asyncio.to_thread(pipe.read, lambda data: data.endswith(b"%0500d\n" % 999))
    assert got == [b"%0500d" % number for number in range(1000)]
    assert not output.dropped


@pytest.mark.parametrize("stream", [None, StandardError(None)], ids=["none", "of a command"])
def test_without_a_standard_error_lines_are_dropped(stream: Any) -> None:
    output = LogOutput(sink_of(stream))
    output.write(b"x")
    assert output.flush(WAIT_S)
    assert output.dropped == 1


@contextlib.contextmanager
def writing_to(sink: Sink, **options: Any) -> Iterator[LogOutput]:
    """For tests that make many."""
    output = LogOutput(sink, **options)
    try:
        yield output
    finally:
        output.close()


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=30),
    st.lists(st.integers(0, 5000), max_size=40),
    st.booleans(),
)
def test_whatever_writing_does_every_line_is_whole_or_counted(
    written: list[tuple[int, bool]], outcomes: list[int], shared: bool
) -> None:
    """written: the sizes of the lines, and whether all of them are out before the next. outcomes: how many bytes each call of
    the sink takes (0: it fails), then all.
    """
    taken, left = bytearray(), list(outcomes)

    def sink(data: memoryview) -> int:
        size = left.pop(0) if left else len(data)
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.extend(data[:size])
        return min(size, len(data))

    lines = [b"%d:" % number + b"x" * size for number, (size, _) in enumerate(written)]
    with writing_to(sink, shared=shared) as output:
        for line, (_, now) in zip(lines, written, strict=True):
            output.write(line)
            assert output.flush(WAIT_S) or not now
        assert output.flush(WAIT_S)
        output.write(b"the last")
        while not output.flush(WAIT_S) or b"the last" not in taken:  # the sink may still fail
            output.write(b"the last")
        assert output.flush(WAIT_S)
    got = [line for line in bytes(taken).split(b"\n") if line and line != b"the last" and b'"dropped"' not in line]
    whole = [line for line in got if line in lines]
    assert whole == [line for line in lines if line in whole], "in their order, each once"
    assert len(lines) - len(whole) <= output.dropped
    assert len(got) - len(whole) <= outcomes.count(0), "each failure tears one line at most"
    if not outcomes.count(0):
        assert (got, output.dropped) == (lines, 0)


@given(st.lists(st.integers(1, 3000), max_size=30))
def test_writes_to_a_shared_pipe_are_whole_lines_of_at_most_pipe_buf(sizes: list[int]) -> None:
    writes: list[bytes] = []

    def sink(data: memoryview) -> int:
        writes.append(bytes(data))
        return len(data)

    async def write() -> None:  # in one batch
        with writing_to(sink, shared=True) as output:
            for line in lines:
                output.write(line)
            assert output.flush(WAIT_S)

    lines = [b"x" * size for size in sizes]
    asyncio.run(write())
    assert b"".join(writes) == b"".join(line + b"\n" for line in lines)
    assert all(len(data) <= select.PIPE_BUF and data.endswith(b"\n") for data in writes)
    assert len(writes) <= 1 + 2 * sum(sizes + [1] * len(sizes)) // 4096


# -- a process


SCRIPT = """
import asyncio, logging, sys
from gateway.telemetry import logs
logs.configure("info")
log = logging.getLogger("warmroute.test")
log.info("before")
async def main():
    log.info("within")
asyncio.run(main())
log.info("after")
"""


def test_a_process_loses_no_line_at_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=60)
    assert {json.loads(line)["message"] for line in done.stderr.splitlines()} == {"before", "within", "after"}


def test_a_process_without_a_standard_error_runs() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, SCRIPT], check=False, timeout=60)
    assert done.returncode == 0


def test_a_process_whose_log_nobody_reads_ends_in_time(pipe: Pipe) -> None:
    """The pipe is full from the beginning."""
    os.set_blocking(pipe.writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe.writing, b"x" * 4096)
    os.set_blocking(pipe.writing, True)
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=pipe.writing, check=False, timeout=60)
    assert done.returncode == 0
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("before", ["", "logging.getLogger('a').error('early')"])
def test_what_is_logged_while_the_interpreter_ends_is_written_and_holds_up_no_end(before: str) -> None:
    """No thread begins any more then: a task whose error nobody has asked for says so when it is freed."""
    program = f"""
import logging
from gateway.telemetry.logs import configure
configure("warning")
class Late:
    def __del__(self):
        logging.getLogger("a").error("late")
late = Late()
late.itself = late
{before}
"""
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=40, check=True)
    messages = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert messages == [*(["early"] if before else []), "late"]
