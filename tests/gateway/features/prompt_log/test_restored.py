"""A store that is restored from an old backup: what it has forgotten is unknown, and comes again under the same names."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.features.histories.tables import schema
from gateway.features.prompt_log.once import tables
from tests.gateway.conftest import Running, running
from tests.gateway.features.histories.conftest import file_url, opened
from tests.gateway.features.histories.test_sizes import agrees
from tests.gateway.features.prompt_log.delta.two_gateways import delta_config
from tests.gateway.features.prompt_log.kept import CHAT, SAID, USER, asked, called, kept_in
from tests.gateway.request.test_dialects import LONG
from tests.support.fakes import FakeReplica, answers
from tests.support.postgres import PASSWORD, Postgres

Turns = list[dict[str, Any]]
BEFORE, AFTER = 3, 3  # turns of a conversation before and after the backup


class Client:
    """A client that keeps its messages. told: the names of each answer."""

    def __init__(self) -> None:
        self.messages: Turns = []
        self.told: list[dict[str, Any]] = []

    async def say(self, run: Running, turns: int) -> None:
        """Goes on from the last head, with a ref."""
        for _ in range(turns):
            base = f', base="{self.told[-1]["head"]}"' if self.told else ""
            said = {"role": "user", "content": f"turn {len(self.told)}"}
            code, told, _ = await asked(run, CHAT, f'keep, ref="main"{base}', [said])
            assert (code, told["kept"], told["ref"]) == (200, True, True)
            self.messages += [said, SAID]
            self.told.append(told)


async def filled(run: Running) -> Client:
    client = Client()
    await client.say(run, BEFORE)
    await once(run, "before", repeated=False)
    return client


async def changed(run: Running, client: Client) -> None:
    """What happens after the backup."""
    await client.say(run, AFTER)
    await once(run, "after", repeated=False)
    status, _ = await called(run, "DELETE", f"{client.told[0]['head']}?tree=true")
    assert status == 200


async def once(run: Running, name: str, *, repeated: bool) -> None:
    code, told, _ = await asked(run, CHAT, f'once="token-{name}"', [{"role": "user", "content": name}])
    assert (code, told["kept"], told.get("repeated", False)) == (200, True, repeated)


async def replayed(run: Running, client: Client, replica: FakeReplica) -> None:
    """Heads since the backup are unknown, the whole has them again, and a ref goes on from where it was."""
    last, next_ = client.told[-1], {"role": "user", "content": "next"}
    code, error, _ = await asked(run, CHAT, f'keep, base="{last["head"]}"', [next_])
    assert (code, error["code"]) == (404, "prompt_log_not_found")
    found = await called(run, "GET", "refs/main")
    assert found[1]["head"] == client.told[BEFORE - 1]["head"]
    whole = [*client.messages[:-1]]
    wishes = f'keep, ref="main", expect="{last["input"]}"'
    code, told, _ = await asked(run, CHAT, wishes, whole)
    assert (code, told["head"], told["kept"], told["ref"]) == (200, last["head"], True, True)
    code, told, _ = await asked(run, CHAT, f'keep, base="{last["head"]}"', [next_])
    assert (code, told["length"]) == (200, last["length"] + 2)
    assert replica.requests[-1].json["messages"] == [*client.messages, next_]
    code, told, _ = await asked(run, CHAT, f'keep, base="{client.told[BEFORE - 1]["head"]}"', [next_])
    assert (code, told["length"]) == (200, 2 * BEFORE + 2)
    await once(run, "before", repeated=True)
    await once(run, "after", repeated=False)
    await once(run, "after", repeated=True)


def restored(path: Path, backup: Path) -> None:
    """SQLite's own way, while others have the file open."""
    with contextlib.closing(sqlite3.connect(backup)) as source, contextlib.closing(sqlite3.connect(path)) as target:
        source.backup(target)


def replace(path: Path, backup: Path) -> None:
    """While nobody has the file open."""
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(backup, path)


async def test_a_file_that_is_restored_between_two_runs(tmp_path: Path) -> None:
    path, backup = tmp_path / "state.db", tmp_path / "backup.db"
    async with FakeReplica([answers()]) as replica:
        async with running(replica, **kept_in(tmp_path)) as run:
            client = await filled(run)
            restored(backup, path)
            await changed(run, client)
        replace(path, backup)
        async with running(replica, **kept_in(tmp_path)) as run:
            await replayed(run, client, replica)
        async with opened(file_url(path)) as store:
            await agrees(store)


Restore = Callable[[], None]


def sqlite_backup(path: Path) -> Restore:
    backup = path.with_suffix(".backup")
    restored(backup, path)
    return lambda: restored(path, backup)


def postgres_backup(server: Postgres, name: str) -> Restore:
    assert tables.once.metadata is schema
    names = [table.name for table in schema.sorted_tables]
    server.execute("create schema backup; " + "".join(f"create table backup.{each} as table {each}; " for each in names), name)
    back = "".join(f"insert into {each} select * from backup.{each}; " for each in names)
    return lambda: server.execute(f"begin; truncate {', '.join(names)}; {back} commit", name)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.tools)])
async def test_a_database_that_is_restored_beneath_a_gateway(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, path = kept_in(tmp_path), tmp_path / "state.db"
    server: Postgres | None = None
    url = ""
    if kind == "postgres":
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        server = request.getfixturevalue("server")
        url = server.new()
        state = {"state": {"url": url.replace(f":{PASSWORD}@", "@")}}
    async with (
        FakeReplica([answers()]) as replica,
        running(replica, **state) as far,
        running(**delta_config(far.url)) as near,
    ):
        client, turns = await filled(far), [{**USER, "content": LONG}]
        restore = postgres_backup(server, url.rpartition("/")[2]) if server else sqlite_backup(path)
        await changed(far, client)
        for expected in ("whole", "delta"):
            await sidecar(near, replica, turns, expected)
        restore()
        for expected in ("replayed", "delta"):
            await sidecar(near, replica, turns, expected)
        await replayed(far, client, replica)


async def sidecar(near: Running, replica: FakeReplica, turns: Turns, expected: str) -> None:
    """A client without the header, behind a gateway that uploads deltas, goes on. expected: how its request went."""
    name = f'warmroute_delta_requests_total{{result="{expected}"}}'
    before = (await near.metrics()).get(name, 0)
    code, _, _ = await asked(near, CHAT, None, turns)
    assert code == 200
    assert replica.requests[-1].json["messages"] == turns
    assert (await near.metrics())[name] == before + 1
    turns += [SAID, USER]
