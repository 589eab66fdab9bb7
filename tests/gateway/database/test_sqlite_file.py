"""A file that two parts of one gateway have open, and other processes open and leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from gateway.database.sqlite_file import SqliteFile
from gateway.features.keys import tables as keys
from gateway.features.ledger import tables as ledger

LEAVES = (
    "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT 1 FROM warmroute_usage').fetchall(); c.close()"
)


def test_a_process_that_leaves_the_file_does_not_take_its_log(tmp_path: Path) -> None:
    """A backup, or a command: it would, if it took itself for the last one that has the file open."""
    path = tmp_path / "one.sqlite"
    files = [SqliteFile(make_url(f"sqlite:///{path}"), tables) for tables in (ledger.TABLES, keys.TABLES)]
    try:
        for _ in range(3):
            subprocess.run([sys.executable, "-c", LEAVES, str(path)], check=True, timeout=60)
            for file in files:
                with file.transaction() as connection:
                    connection.exec_driver_sql("UPDATE warmroute_keys_revision SET revision = revision + 1")
                file.check_place()
    finally:
        for file in files:
            file.close()


def test_what_cannot_be_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        SqliteFile(make_url(f"sqlite:///{tmp_path}/folder"), keys.TABLES)
    with pytest.raises(FileNotFoundError):
        SqliteFile(make_url(f"sqlite:///{tmp_path}/none"), keys.TABLES, read_only=True)
