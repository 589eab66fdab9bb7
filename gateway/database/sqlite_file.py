"""SQLite's file as it was when it was opened, with its connections.

A file that is deleted, or replaced by another one, stays open: SQLite would go on writing into what nobody can find again. So
the file of that name is compared with the one that is open (device and inode), and so is its log (`-wal`), where commits go
first. A connection stays open all the time, for the log goes with the last one. SQLite would also read the log of a file that
is gone into the one that has its name now: that log is removed before.

WAL mode with synchronous=FULL: what was acknowledged survives a crash, of the machine as well. Several processes may share the
file.
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
from sqlalchemy.pool import NullPool

from gateway.database.creation import check_version, make_tables
from gateway.database.failures import StoreError
from gateway.database.tables import Tables

_BUSY_MS: Final = 5000
_BUSY_PAUSE_S: Final = 0.01
_LOG: Final = "-wal"
_INDEX: Final = "-shm"  # of the log

Identity = tuple[int, int]  # device, inode


class SqliteFile:
    """See the top of this file. Opens it, made anew if it is missing, with its tables. Several objects may have the same file
    open: the ledger's and that of keys. Methods may be called in any thread. read_only: neither the file nor its tables are
    made, and none of them is changed.

    Raises OSError, errors of SQLAlchemy and StoreFailed.
    """

    def __init__(self, url: URL, tables: Tables, *, read_only: bool = False) -> None:
        self._path = os.fspath(url.database or "")
        self._read_only = read_only
        if read_only:
            _require(Path(self._path))
        else:
            _private(Path(self._path))
        self._identity = _identity(self._path)  # before it is opened: what is replaced meanwhile is noticed
        mode = "ro" if read_only else "rw"
        self._engine = create_engine(_existing(url, mode), poolclass=NullPool, connect_args={"check_same_thread": False})
        event.listen(self._engine, "connect", _tune_reader if read_only else _tune)
        self._free = list[Connection]()  # for reads
        self.writer = self._engine.connect()
        try:
            if read_only:
                with self.reading() as connection:
                    check_version(connection, tables)
            else:
                with self.transaction() as connection:
                    make_tables(connection, tables)
        except BaseException:
            self.close()
            raise
        self._log_identity = _identity(self._path + _LOG)

    def is_lost(self) -> bool:
        """Whether its name is another file's by now, or nobody's."""
        return _identity(self._path) != self._identity or _identity(self._path + _LOG) != self._log_identity

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One at a time. Its end is the commit."""
        connection = self.writer
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # else two that read before they write cannot both go on
            yield connection
            connection.commit()
        except BaseException:
            connection.rollback()
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Without a transaction: a read would wait for the writers of all gateways."""
        connection = self._taken()
        whole = False
        try:
            yield connection
            whole = True
        except StoreError:  # of the work, between two statements
            whole = True
            raise
        finally:
            if whole:
                connection.rollback()  # of SQLAlchemy's own transaction: SQLite has none
                self._free.append(connection)
            else:
                connection.close()

    def _taken(self) -> Connection:
        try:
            return self._free.pop()
        except IndexError:  # to look first would be a race of threads
            return self._engine.connect()

    def close(self) -> None:
        """While nothing of it is in use."""
        for connection in (*self._free, self.writer):
            connection.close()
        self._free.clear()

    def abandon(self) -> None:
        """Close it, lost as it is."""
        replaced = not self._read_only and _identity(self._path) != self._identity
        self.close()
        if replaced and _identity(self._path + _LOG) == self._log_identity:
            for suffix in (_LOG, _INDEX):
                Path(self._path + suffix).unlink(missing_ok=True)


def handle_of(connection: Connection) -> Any:
    """SQLite's own."""
    return connection.connection.dbapi_connection


def _private(path: Path) -> None:
    """What it holds are prompts, money and keys' digests: nobody else reads them.

    A file that is there is not opened here: to close it would drop all locks that this process has on it, those of other
    objects' connections as well (POSIX), and then another process that leaves it takes it for unused and removes its log.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        _require(path, os.R_OK | os.W_OK)


def _require(path: Path, mode: int = os.R_OK) -> None:
    """Raises OSError. SQLite says only that it cannot be opened, and waits for whoever writes into a pipe."""
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    if not os.access(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def _existing(url: URL, mode: str) -> URL:
    """For connections that make no file: one that is deleted just before would come back empty, with everybody's rights."""
    path = quote(os.fsencode(os.path.abspath(url.database or "")))
    return url.set(database=f"file:{path}").update_query_dict({"mode": mode, "uri": "true"})


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _tune_reader(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so
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
    """SQLite does not wait with this statement, of all, while another process writes: one that makes the file at this moment.

    Raises sqlite3.OperationalError if it is busy for longer than _BUSY_MS.
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
