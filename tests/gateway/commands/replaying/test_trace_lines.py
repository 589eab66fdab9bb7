"""Lines of a trace: bounded, whatever the file holds. (What simulate says of broken files: test_simulate.py.)"""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from gateway.commands.replaying.trace_lines import trace_lines
from router.simulation.workloads import TraceError


def test_packed_or_not_and_with_empty_lines(tmp_path: Path) -> None:
    text = b'{"a": 1}\n\n  \n{"b": 2}'
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text[:9], mtime=0) + gzip.compress(text[9:], mtime=0))
    assert list(trace_lines(tmp_path / "plain")) == list(trace_lines(tmp_path / "packed")) == [{"a": 1}, {"b": 2}]


def test_the_line_of_an_error_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"a": 1}\n\n{"b": 2\n')
    lines = trace_lines(tmp_path / "a")
    assert next(lines) == {"a": 1}
    with pytest.raises(TraceError, match="row 3 is not JSON"):
        next(lines)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 17
    with pytest.raises(TraceError, match="row 1 has more than 65536 bytes"):
        list(trace_lines(path, max_line=1 << 16))
    with gzip.open(path, "wb") as file:
        for _ in range(20_000):
            file.write(b'{"a": ' + b" " * 100 + b"1}\n")
    taken = trace_lines(path, max_bytes=1 << 20)
    with pytest.raises(TraceError, match="it has more than 1048576 bytes, decompressed"):
        list(itertools.islice(taken, 10_000))


def test_a_line_of_many_values_is_not_parsed(tmp_path: Path) -> None:
    path, line = tmp_path / "a", '{"a": [' + "[]," * 1000 + '[]], "text": "' + "[," * 5000 + '"}\n'
    path.write_text('{"b": 1}\n' + line)
    assert len(list(trace_lines(path, max_values=2100))) == 2, "what is in a text is no value"
    taken = trace_lines(path, max_values=1900)
    assert next(taken) == {"b": 1}
    with pytest.raises(TraceError, match="row 2 has more than 1900 values"):
        next(taken)
