"""A snapshot in a file.

    MAGIC, then each frame of the snapshot (`frames.py`) after its length (4 bytes, little-endian)

The file is written beside its place and then moved there, so that there is a whole one at any time; its owner alone may read
it. What is not such a file, or was cut off, changed or made too large, is a KnowledgeError.
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
    """Returns its size in bytes. Blocks. Raises OSError, and leaves what was there before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        raise OSError("it is no file: it stays as it is")
    new = path.with_name(path.name + ".new")
    with os.fdopen(_ours(new), "wb") as file:
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


def _ours(new: Path) -> int:
    """Open the file that is written, which another process may be writing, or have left when it was killed. Raises OSError."""
    try:
        left = os.lstat(new)
        if not stat.S_ISREG(left.st_mode) or left.st_uid != os.geteuid() or not os.access(new, os.W_OK):
            new.unlink()  # another user has left it, or it is something else
    except FileNotFoundError:
        pass
    while True:
        # Readable and writable for its owner only.
        number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            _lock(number)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), os.lstat(new)):  # else the other one has just moved it to its place
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
        raise OSError("another process writes it: each gateway needs a file of its own (snapshot.file)") from error
    except OSError:  # there are file systems without locks
        log.debug("the file of snapshots cannot be locked")


def _write(file: BinaryIO, snapshot: Snapshot, clocks: Clocks) -> int:
    size = file.write(MAGIC)
    for frame in frames_of(snapshot, clocks):
        size += file.write(_LENGTH.pack(len(frame)))
        size += file.write(frame)
    return size


def read(path: Path, clocks: Clocks = CLOCKS) -> Snapshot:
    """Blocks. Raises FileNotFoundError, OSError or KnowledgeError."""
    with open(path, "rb", opener=_at_once) as file:
        about_file = os.fstat(file.fileno())
        if not stat.S_ISREG(about_file.st_mode):
            raise KnowledgeError("it is no file")
        if about_file.st_size > MAX_FILE_BYTES:
            raise KnowledgeError(f"it has more than {MAX_FILE_BYTES} bytes")
        if _exactly(file, len(MAGIC)) != MAGIC:
            raise KnowledgeError("it is no snapshot")
        frames, found = Frames(clocks, MAX_FILE_BYTES), None
        while found is None:
            found = frames.add(_frame(file))
        if file.read(1):
            raise KnowledgeError("its checksum is wrong: there is more behind its end")
    return replace(found, source=str(path))


def _at_once(path: str, flags: int) -> int:
    """A FIFO would wait for its writer."""
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
