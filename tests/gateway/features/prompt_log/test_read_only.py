"""A database that has become read-only: what is kept can be read, answers are whole, and nothing else is said to be done."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.features.histories.tables import schema
from gateway.features.prompt_log.once import tables
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import CHAT, NOW, SAID, USER, asked, called, kept_in
from tests.support.fakes import FakeReplica, answers
from tests.support.postgres import PASSWORD, Postgres

WRITES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "", {"form": "chat", "body": {"messages": [NOW]}}),
    ("DELETE", "refs/main", None),
    ("DELETE", "{head}", None),
    ("DELETE", "{head}?tree=true", None),
]


def make_read_only(path: Path) -> None:
    """Every write fails, as it does after the file system was mounted anew."""
    assert tables.once.metadata is schema
    with contextlib.closing(sqlite3.connect(path)) as file:
        for table in schema.sorted_tables:
            for event in ("insert", "update", "delete"):
                refusal = "select raise(fail, 'attempt to write a readonly database')"
                file.execute(f"create trigger {table.name}_{event} before {event} on {table.name} begin {refusal}; end")


def make_server_read_only(server: Postgres, name: str) -> None:
    """As a server that has become a standby."""
    server.execute(f"alter database {name} set default_transaction_read_only = on")
    server.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.tools)])
async def test_a_read_only_database_is_read(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, url = kept_in(tmp_path), ""
    server: Postgres | None = None
    if kind == "postgres":
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        server = request.getfixturevalue("server")
        url = server.new()
        state = {"state": {"url": url.replace(f":{PASSWORD}@", "@")}}
    async with FakeReplica([answers()]) as replica, running(replica, **state) as run:
        _, first, _ = await asked(run, CHAT, 'keep, ref="main"', [USER])
        assert (first["kept"], first["ref"]) == (True, True)
        _, once, _ = await asked(run, CHAT, 'once="token-of-mine"', [USER])
        if server:
            make_server_read_only(server, url.rpartition("/")[2])
            await called(run, "GET", "refs/main")  # finds its connection cut
        else:
            make_read_only(tmp_path / "state.db")
        code, told, _ = await asked(run, CHAT, f'keep, ref="main", base="{first["head"]}"', [NOW])
        assert (code, told["length"], told["kept"], told["ref"]) == (200, 4, False, False)
        assert replica.requests[-1].json["messages"] == [USER, SAID, NOW]
        generated = len(replica.requests)
        code, told, _ = await asked(run, CHAT, 'once="token-of-mine"', [USER])
        assert (code, told["repeated"], told["head"]) == (200, True, once["head"])
        code, error, _ = await asked(run, CHAT, 'once="another-token"', [USER])
        assert (code, error["code"]) == (503, "state_unavailable")
        for method, path, body in WRITES:
            code, error = await called(run, method, path.format(head=first["head"]), body=body)
            assert (code, error["code"]) == (503, "state_unavailable"), (method, path)
        assert len(replica.requests) == generated
        assert (await called(run, "GET", "refs/main"))[1]["head"] == first["head"]
        assert (await called(run, "GET", first["head"]))[1]["children"] == []
