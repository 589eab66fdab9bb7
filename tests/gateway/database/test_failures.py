"""What the errors of databases say: which one, what failed, what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from gateway.database.database import Database
from gateway.database.failures import MAX_REASON, StoreFailed, reason_of
from gateway.database.urls import parsed, shown
from gateway.features.keys.tables import TABLES


async def test_a_server_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(StoreFailed) as refused:
        await Database("postgresql://u:secret-one@127.0.0.1:1/x?password=secret-two", TABLES).open()
    wanted = "the database postgresql://u@127.0.0.1:1/x: Connection refused (is it running, and are host and port right?)"
    assert str(refused.value) == wanted


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("postgresql://u:p@h:5433/n?sslmode=require", "postgresql://u@h:5433/n"),
        ("postgresql:///n?host=/run/postgresql", "postgresql:///n?host=%2Frun%2Fpostgresql"),
        ("sqlite:////a/b.sqlite", "/a/b.sqlite"),
    ],
)
def test_databases_as_people_read_them(url: str, wanted: str) -> None:
    assert shown(parsed(url, "keys.url")) == wanted


async def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"no database at all" * 100)
    for path, wanted in (
        (bad, f"the database {bad}: file is not a database (it is no SQLite database, or damaged:"),
        (tmp_path, f"the database {tmp_path}: Is a directory (name a file)"),
        (bad / "a.sqlite", f"the database {bad}/a.sqlite: File exists: {bad} (is the path right?)"),
    ):
        with pytest.raises(StoreFailed) as refused:
            await Database(f"sqlite:///{path}", TABLES).open()
        assert str(refused.value).startswith(wanted)


def test_reasons_are_one_short_line_without_the_statement() -> None:
    class Original(Exception):
        pass

    error = OperationalError("INSERT INTO a", {"prompt": "a secret"}, Original("it\nfailed " + "x" * 1000))
    assert reason_of(error).startswith("it failed xxx")
    assert len(reason_of(error)) == MAX_REASON
    assert reason_of(OSError()) == "OSError"
    assert reason_of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "No space left on device (make room there)"
