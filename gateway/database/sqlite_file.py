"""SQLite's file with its connections.

A file that is deleted or replaced stays open: SQLite would go on writing to a file without a name. `check_place` compares the
file at the path with the open one (device and inode). SQLite would also read the log (`-wal`) of the earlier file into its
replacement: `close` removes that log.

WAL mode with synchronous=FULL: an acknowledged write survives a crash, of the machine as well. Several processes may share the
file. The pool keeps its connections open, because SQLite removes the log with the last one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import URL, Connection, create_engine, event

from gateway.database.creation import check_version, make_tables
from gateway.database.driver import CONNECTIONS
from gateway.database.tables import Tables

_BUSY_MS: Final = 5000
_BUSY_PAUSE_S: Final = 0.01
_LOG: Final = "-wal"
_LOG_INDEX: Final = "-shm"

Identity = tuple[int, int]  # device, inode


class FileLostError(OSError):
    """The path leads to another file than the open one, or to none."""

    def __init__(self) -> None:
        super().__init__("its file was deleted or replaced while in use: it is not used until this process is restarted")


class SqliteFile:
    """SQLite's file (see the module). Opens the file, and creates it with its tables if it is missing. Several objects may have
    the same file open: the ledger's and that of keys. Methods may be called in any thread. read_only: neither the file nor its
    tables are created or changed.

    Raises OSError, errors of SQLAlchemy and StoreFailed.
    """

    def __init__(self, url: URL, tables: Tables, *, read_only: bool = False) -> None:
        self._path = os.fspath(url.database or "")
        self._read_only = read_only
        if read_only:
            _require(Path(self._path))
        else:
            _make_private(Path(self._path))
        self._identity = _identity(self._path)
        self._engine = create_engine(
            _existing(url, "ro" if read_only else "rw"),
            pool_size=CONNECTIONS,
            max_overflow=0,
            connect_args={"check_same_thread": False},
        )
        event.listen(self._engine, "connect", _tune_reader if read_only else _tune)
        try:
            if read_only:
                with self.reading() as connection:
                    check_version(connection, tables)
            else:
                with self.transaction() as connection:
                    make_tables(connection, tables)
        except BaseException:
            self._engine.dispose()
            raise
        self._log_identity = _identity(self._path + _LOG)

    def check_place(self) -> None:
        """Raises FileLostError if the file was deleted or replaced. O(1): one `stat`."""
        if _identity(self._path) != self._identity:
            raise FileLostError

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that writes; the end commits it. One at a time."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # else two transactions that read before they write would deadlock
            yield connection
            connection.commit()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection without a transaction, in which a read would wait for the writers of all gateways."""
        with self._engine.connect() as connection:
            try:
                yield connection
            except BaseException:
                connection.invalidate()  # unfetched rows would hold the read lock, which blocks the next write on it
                raise

    def close(self) -> None:
        """Close all connections. None may be in use."""
        self._engine.dispose()
        replaced = not self._read_only and _identity(self._path) not in (self._identity, None)
        if replaced and _identity(self._path + _LOG) == self._log_identity:
            for suffix in (_LOG, _LOG_INDEX):
                Path(self._path + suffix).unlink(missing_ok=True)


def _make_private(path: Path) -> None:
    """Creates the file with access for this user only: it will contain prompts, money and digests of keys.

    An existing file is not opened here: closing it would drop all locks that this process has on it, including locks of other
    objects' connections (POSIX). Another process that leaves the file would then remove its log.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        _require(path, os.R_OK | os.W_OK)


def _require(path: Path, mode: int = os.R_OK) -> None:
    """Raises OSError with the reason; SQLite says only that the file cannot be opened."""
    if stat.S_ISDIR(os.stat(path).st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not os.access(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def _existing(url: URL, mode: str) -> URL:
    """The URL for connections that create no file: SQLite's would be readable by all users."""
    path = quote(os.fsencode(os.path.abspath(url.database or "")))
    return url.set(database=f"file:{path}").update_query_dict({"mode": mode, "uri": "true"})


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _tune_reader(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin explicitly
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    cursor.close()


def _tune(connection: Any, record: object) -> None:
    _tune_reader(connection, record)
    cursor = connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _use_wal(cursor: Any) -> None:
    """Switch to WAL mode. While another process creates the file, this statement fails instead of waiting.

    Raises sqlite3.OperationalError if the file is busy for longer than _BUSY_MS.
    """
    until = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_BUSY_PAUSE_S)
        else:
            return
