"""A trace on disk is valid at every moment."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.features.recording.command.trace_file import LAST_BYTES, PIECE_BYTES, TraceFile, TraceFull


def lines_of(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]


def fill(trace: TraceFile) -> None:
    for number in itertools.count(1):
        trace.add({"n": number, "text": str(number**200)})
        if number % 50 == 0:
            trace.flush()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_come_back(name: str, tmp_path: Path) -> None:
    path, lines = tmp_path / name, [{"n": number} for number in range(5)]
    trace = TraceFile(path, 1 << 20)
    for line in lines[:3]:
        trace.add(line)
        trace.flush()
        assert lines_of(path)[-1] == line
    trace.add(lines[3])
    trace.close(lines[4])
    assert lines_of(path) == lines
    assert path.stat().st_size == trace.size
    assert path.stat().st_mode & 0o077 == 0, "it is nobody else's business"


def test_much_is_written_without_being_asked(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "a.jsonl", 1 << 30)
    trace.add({"text": "x" * PIECE_BYTES})
    assert trace.size > PIECE_BYTES
    trace.close({})


def test_a_pipe_has_a_reader_or_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        TraceFile(path, 1 << 20, replace=True)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        TraceFile(path, 1 << 20, replace=True).close({"end": 1})
        assert os.read(reading, 100) == b'{"end":1}\n'
    finally:
        os.close(reading)


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        TraceFile(path, 1 << 20)
    assert path.read_text() == "precious"
    path.chmod(0o644)
    TraceFile(path, 1 << 20, replace=True).close({"end": 1})
    assert lines_of(path) == [{"end": 1}]
    assert path.stat().st_mode & 0o777 == 0o600, "it is its owner's only, whatever the former one was"


def test_a_device_that_is_full_is_an_error_like_a_disk() -> None:
    trace = TraceFile(Path("/dev/full"), 1 << 20, replace=True)
    trace.add({"n": 1})
    for write in (trace.flush, lambda: trace.close({"end": 1})):
        with pytest.raises(TraceFull, match="/dev/full cannot be written: No space left on device"):
            write()
    assert (trace.size, trace.dropped) == (0, 2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_bound_leaves_room_for_the_last_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    trace = TraceFile(path, 1 << 20)
    with pytest.raises(TraceFull, match="--max-mb"):
        fill(trace)
    trace.close({"end": 1.0, "why": "x" * 1000})
    lines = lines_of(path)
    assert lines[-1]["end"] == 1.0
    assert [line["n"] for line in lines[:-1]] == list(range(1, len(lines)))
    assert (1 << 20) - LAST_BYTES - PIECE_BYTES < path.stat().st_size <= 1 << 20


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process can have more bytes, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_full_disk_ends_it_with_whole_lines(name: str, small_files: int, tmp_path: Path) -> None:
    path = tmp_path / name
    trace = TraceFile(path, 1 << 30)
    with pytest.raises(TraceFull, match="cannot be written: File too large"):
        fill(trace)
    numbers = [line["n"] for line in lines_of(path)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 50
    assert trace.dropped == 50
    assert path.stat().st_size == trace.size <= small_files
    trace.close({"end": 1.0})
    assert lines_of(path)[-1] == {"end": 1.0}, "there was room for that"
