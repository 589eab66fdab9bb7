"""Stores a snapshot in a file.

    MAGIC, then each frame of the snapshot (`frames.py`) after its length (4 bytes, little-endian)

The file is written under another name and then moved, so that there is always a complete one. Only its owner may read it. Other
files, and incomplete, changed or too large ones, raise KnowledgeError.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from gateway.features.snapshots.frames import CLOCKS, Clocks, Frames, frames_of
from gateway.features.snapshots.snapshot import MAX_CHUNK_BYTES, KnowledgeError, Snapshot

log = logging.getLogger("warmroute.snapshots")

MAGIC: Final = b"warmroute snapshot\n"
MAX_FILE_BYTES: Final = 512 << 20
_LENGTH: Final = struct.Struct("<I")


def write(path: Path, snapshot: Snapshot, clocks: Clocks = CLOCKS) -> int:
    """Writes a snapshot and returns its size in bytes. Blocks. Raises OSError, and then leaves the earlier file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # a symbolic link stays one
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file, and stays unchanged")
    new = path.with_name(path.name + ".new")
    with os.fdopen(_open_new(new), "wb") as file:
        try:
            size = _write(file, snapshot, clocks)
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
    return size


def _open_new(new: Path) -> int:
    """Opens the file to be written. Another process may be writing it, or may have left it when it was killed. Raises
    OSError.
    """
    try:
        left = os.lstat(new)
        if not stat.S_ISREG(left.st_mode) or left.st_uid != os.geteuid() or not os.access(new, os.W_OK):
            new.unlink()  # it belongs to another user, or is not a regular file
    except FileNotFoundError:
        pass
    while True:
        # Only its owner may read and write it.
        number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            _lock(number)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), os.lstat(new)):  # otherwise the other process has just moved it
                    os.fchmod(number, 0o600)
                    os.ftruncate(number, 0)
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _lock(number: int) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError("another process writes it: each gateway needs its own file (snapshot.file)") from error
    except OSError:  # some file systems have no locks
        log.debug("the file of snapshots cannot be locked")


def _write(file: BinaryIO, snapshot: Snapshot, clocks: Clocks) -> int:
    size = file.write(MAGIC)
    for frame in frames_of(snapshot, clocks):
        size += file.write(_LENGTH.pack(len(frame)))
        size += file.write(frame)
    return size


def read(path: Path, clocks: Clocks = CLOCKS) -> Snapshot:
    """Reads a snapshot. Blocks. Raises FileNotFoundError, OSError or KnowledgeError."""
    with open(path, "rb", opener=_open_nonblocking) as file:
        about_file = os.fstat(file.fileno())
        if not stat.S_ISREG(about_file.st_mode):
            raise KnowledgeError("it is not a regular file")
        if about_file.st_size > MAX_FILE_BYTES:
            raise KnowledgeError(f"it has more than {MAX_FILE_BYTES} bytes")
        if _exactly(file, len(MAGIC)) != MAGIC:
            raise KnowledgeError("it is not a snapshot")
        frames, found = Frames(clocks, MAX_FILE_BYTES), None
        while found is None:
            found = frames.add(_frame(file))
        if file.read(1):
            raise KnowledgeError("its checksum is wrong: data follows its end")
    return replace(found, source=str(path))


def _open_nonblocking(path: str, flags: int) -> int:
    """A FIFO would otherwise block until it has a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _frame(file: BinaryIO) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    if length > MAX_CHUNK_BYTES:
        raise KnowledgeError("it is damaged")
    return _exactly(file, length)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise KnowledgeError("it is cut off")
    return data
