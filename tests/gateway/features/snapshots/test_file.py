"""A snapshot in a file: whole, or refused."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.snapshots.file import MAGIC, MAX_FILE_BYTES, read, write
from gateway.features.snapshots.frames import Clocks
from gateway.features.snapshots.snapshot import Header, KnowledgeError, Origin, Snapshot

SNAPSHOT = Snapshot(
    Header("1/256", {"r1": Origin("http://r1", "pod-1", 17.5), "r2": Origin("http://r2", "", None)}),
    [b"first chunk", b"second" * 100],
    at=100.0,
)


def clocks(boot: str = "boot-1", monotonic: float = 100.0, wall: float = 1e9) -> Clocks:
    return Clocks(lambda: boot, lambda: monotonic, lambda: wall)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "index.snapshot"
    size = write(path, SNAPSHOT, clocks())
    assert size == path.stat().st_size
    assert read(path, clocks()) == SNAPSHOT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it is nobody else's business"
    write(path, Snapshot(SNAPSHOT.header, [], 100.0), clocks())
    assert read(path, clocks()).chunks == []
    assert os.listdir(path.parent) == ["index.snapshot"]


@pytest.mark.parametrize(
    ("later", "age_s"),
    [
        (clocks(monotonic=107.0, wall=5.0), 7.0),  # the wall clock was set: it does not matter
        (clocks(boot="boot-2", monotonic=3.0, wall=1e9 + 60), 60.0),
        (clocks(boot="boot-2", wall=1e9 - 300), 0.0),  # set back
        (clocks(boot="", wall=1e9 + 5), 5.0),
        (clocks(monotonic=50.0), 0.0),
    ],
)
def test_its_age(tmp_path: Path, later: Clocks, age_s: float) -> None:
    write(tmp_path / "s", SNAPSHOT, clocks())
    found = read(tmp_path / "s", later)
    assert later.monotonic() - found.at == age_s


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    write(path, SNAPSHOT, clocks())
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= flip
    path.write_bytes(data)
    with pytest.raises(KnowledgeError):
        read(path, clocks())


@given(st.integers(0, 10_000))
def test_a_cut_file_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    size = write(path, SNAPSHOT, clocks())
    path.write_bytes(path.read_bytes()[: at % size])
    with pytest.raises(KnowledgeError):
        read(path, clocks())


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    for beginning in (b"", MAGIC):
        path.write_bytes(beginning + data)
        with pytest.raises(KnowledgeError):
            read(path, clocks())


def test_what_is_behind_its_end_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "s", SNAPSHOT, clocks())
    with (tmp_path / "s").open("ab") as file:
        file.write(b"x")
    with pytest.raises(KnowledgeError, match="checksum"):
        read(tmp_path / "s", clocks())


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "s").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(KnowledgeError, match="bytes"):
        read(tmp_path / "s", clocks())


def test_what_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write(path, SNAPSHOT, clocks())
    broken = Snapshot(SNAPSHOT.header, [b"x", None], 0.0)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        write(path, broken, clocks())
    assert read(path, clocks()) == SNAPSHOT
    assert os.listdir(tmp_path) == ["s"]


def test_what_a_killed_gateway_has_left_half_written_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "s.new").write_bytes(b"half")
    write(tmp_path / "s", SNAPSHOT, clocks())
    assert os.listdir(tmp_path) == ["s"]


def test_its_moment_is_when_it_was_collected(tmp_path: Path) -> None:
    write(tmp_path / "s", SNAPSHOT, clocks(monotonic=130.0, wall=1e9 + 30))
    for later, age_s in ((clocks(monotonic=150.0), 50.0), (clocks(boot="boot-2", wall=1e9 + 60), 60.0)):
        assert later.monotonic() - read(tmp_path / "s", later).at == pytest.approx(age_s)


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "s", clocks())


def test_what_is_no_file_does_not_hold_the_start(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(KnowledgeError, match="it is not a regular file"):
        read(fifo)
    (tmp_path / "s").symlink_to(tmp_path)
    with pytest.raises((KnowledgeError, OSError)):
        read(tmp_path / "s")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path), lambda path: path.touch(0o400)])
def test_what_is_in_the_way_of_the_new_file_is_replaced(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "s.new")
    write(tmp_path / "s", SNAPSHOT, clocks())
    assert read(tmp_path / "s", clocks()) == SNAPSHOT
    assert os.listdir(tmp_path) == ["s"]


def test_what_is_no_file_stays_as_it_is(tmp_path: Path) -> None:
    """`snapshot.file: /dev/null`, perhaps."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        before = os.lstat(tmp_path / name)
        with pytest.raises(OSError, match="it is not a regular file, and stays unchanged"):
            write(tmp_path / name, SNAPSHOT, clocks())
        assert os.path.samestat(os.lstat(tmp_path / name), before)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "s").symlink_to(tmp_path / "disk" / "s")
    for _ in range(2):
        write(tmp_path / "s", SNAPSHOT, clocks())
        assert read(tmp_path / "disk" / "s", clocks()) == SNAPSHOT
    assert (tmp_path / "s").is_symlink()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path, new = tmp_path / "s", tmp_path / "s.new"
    write(path, SNAPSHOT, clocks())
    with new.open("wb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="each gateway needs its own file"):
            write(path, Snapshot(SNAPSHOT.header, [], 100.0), clocks())
        assert new.exists(), "it is theirs"
    write(path, Snapshot(SNAPSHOT.header, [], 100.0), clocks())
    assert read(path, clocks()).chunks == []
    assert os.listdir(tmp_path) == ["s"]


def test_what_a_killed_one_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "s.new").write_bytes(b"x" * 10_000)
    (tmp_path / "s.new").chmod(0o644)
    write(tmp_path / "s", SNAPSHOT, clocks())
    assert read(tmp_path / "s", clocks()) == SNAPSHOT
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
