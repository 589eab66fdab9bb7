"""A snapshot in a file.

    MAGIC, frame(about), frame(header), frame(chunk) ..., frame of no bytes, xxh3-128 digest of all before it
    frame: length (4 bytes, little-endian), bytes

The file is written beside its place and then moved there, so that there is a whole one at any time; its owner alone may read
it. Its age is the difference of the machine's monotonic clock where it was written since the last boot, else that of the wall
clock, which may have been set meanwhile: an age below zero counts as zero.

What is not such a file, or was cut off, changed or made too large, is a KnowledgeError.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import xxhash
from msgspec import Struct

from gateway.cluster.messages import MessageError, decode
from gateway.features.snapshots.snapshot import (
    MAX_CHUNK_BYTES,
    KnowledgeError,
    Snapshot,
    decode_header,
    encode_header,
)

log = logging.getLogger("warmroute.snapshots")

MAGIC: Final = b"warmroute snapshot\n"
MAX_FILE_BYTES: Final = 512 << 20
_LENGTH: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Clocks:
    """boot: an id of the machine's boot, "" where there is none. monotonic: since that boot, wall: Unix time; in seconds."""

    boot: Callable[[], str]
    monotonic: Callable[[], float]
    wall: Callable[[], float]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


CLOCKS: Final = Clocks(_boot_id, lambda: time.clock_gettime(time.CLOCK_MONOTONIC), time.time)


class _About(Struct, frozen=True, array_like=True):
    """When it was written, by both clocks."""

    boot: str
    monotonic: float
    wall: float


_ABOUT: Final = msgspec.msgpack.Decoder(_About)


def write(path: Path, snapshot: Snapshot, clocks: Clocks = CLOCKS) -> int:
    """Returns its size in bytes. Blocks. Raises OSError, and leaves what was there before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        raise OSError("it is no file: it stays as it is")
    new = path.with_name(path.name + ".new")
    age_s = clocks.monotonic() - snapshot.at
    about = _About(clocks.boot(), snapshot.at, clocks.wall() - age_s)
    with os.fdopen(_ours(new), "wb") as file:
        try:
            size = _write(file, snapshot, about)
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


def _write(file: BinaryIO, snapshot: Snapshot, about: _About) -> int:
    hasher, size = xxhash.xxh3_128(), 0

    def put(data: bytes) -> None:
        nonlocal size
        hasher.update(data)
        size += file.write(data)

    put(MAGIC)
    for frame in (msgspec.msgpack.encode(about), encode_header(snapshot.header), *snapshot.chunks, b""):
        put(_LENGTH.pack(len(frame)))
        put(frame)
    put(hasher.digest())
    return size


def read(path: Path, clocks: Clocks = CLOCKS) -> Snapshot:
    """Blocks. Raises FileNotFoundError, OSError or KnowledgeError."""
    with open(path, "rb", opener=_at_once) as file:
        about_file = os.fstat(file.fileno())
        if not stat.S_ISREG(about_file.st_mode):
            raise KnowledgeError("it is no file")
        if about_file.st_size > MAX_FILE_BYTES:
            raise KnowledgeError(f"it has more than {MAX_FILE_BYTES} bytes")
        hasher = xxhash.xxh3_128()
        if _exactly(file, len(MAGIC), hasher) != MAGIC:
            raise KnowledgeError("it is no snapshot")
        frames = []
        while frame := _frame(file, hasher):
            frames.append(frame)
        digest = hasher.digest()
        if file.read(_DIGEST_BYTES + 1) != digest:
            raise KnowledgeError("its checksum is wrong: it was changed, or cut off")
    if len(frames) < 2:
        raise KnowledgeError("it has no header")
    try:
        about: _About = decode(_ABOUT, frames[0])
        header = decode_header(frames[1])
    except MessageError as error:
        raise KnowledgeError(f"its header is not of this version ({error})") from error
    return Snapshot(header, frames[2:], clocks.monotonic() - _age_s(about, clocks), str(path))


def _at_once(path: str, flags: int) -> int:
    """A FIFO would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _age_s(about: _About, clocks: Clocks) -> float:
    if about.boot and about.boot == clocks.boot():
        return max(0.0, clocks.monotonic() - about.monotonic)
    return max(0.0, clocks.wall() - about.wall)


def _frame(file: BinaryIO, hasher: xxhash.xxh3_128) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size, hasher))
    if length > MAX_CHUNK_BYTES:
        raise KnowledgeError("it is damaged")
    return _exactly(file, length, hasher)


def _exactly(file: BinaryIO, size: int, hasher: xxhash.xxh3_128) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise KnowledgeError("it is cut off")
    hasher.update(data)
    return data
