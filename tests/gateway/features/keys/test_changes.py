"""Changes of keys: settings of a key that is in use."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.commands.cli import main
from gateway.features.keys.file import read_keys
from gateway.features.keys.keys import MAX_ACTIONS, Keys
from gateway.features.keys.store import open_key_store
from gateway.server.actions import OperatorAction
from tests.gateway.conftest import eventually
from tests.gateway.features.keys.conftest import PRICES, asked, bearer, keyed, made
from tests.gateway.features.keys.test_keys import gateway
from tests.support.fakes import FakeReplica, answers


async def test_an_operator_changes_a_key_and_it_holds_at_once(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        id_, key = await made(run, models=["other"], requests_per_minute=1, name="ci")
        assert (await run.post(headers=bearer(key)))[0] == 403
        changes = {"models": ["m"], "budget_usd_day": 5, "name": None}
        status, answer = await asked(run, "PATCH", f"/warmroute/keys/{id_}", changes)
        assert (status, answer["models"], answer["budget_usd_day"], answer["name"]) == (200, ["m"], 5, "")
        assert (answer["tenant"], answer["requests_per_minute"]) == ("acme", 1), "other settings stay"
        assert [(await run.post(headers=bearer(key)))[0] for _ in range(2)] == [200, 429]
        await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"requests_per_minute": None})
        assert (await run.post(headers=bearer(key)))[0] == 200
        await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"expires_at": "2020-01-01"})
        assert (await run.post(headers=bearer(key)))[0] == 401
        await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"expires_at": None})
        assert (await run.post(headers=bearer(key)))[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "at least one setting"),
        ({"tenant": "other"}, 400, "the tenant of a key is fixed"),
        ({"budget_usd_day": -1}, 400, "budget_usd_day"),
        ({"models": []}, 400, "models"),
        ({"budget": 1}, 400, "unknown key"),
        ({"tenant": None}, 400, "tenant"),
        ([1], 400, "JSON object"),
    ],
)
async def test_changes_that_are_refused(tmp_path: Path, body: Any, status: int, text: str) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, _ = await made(run, budget_usd_day=3)
        found, answer = await asked(run, "PATCH", f"/warmroute/keys/{id_}", body)
        assert (found, text in answer["error"]["message"]) == (status, True), answer
        rows = json.loads((await run.get("/warmroute/keys"))[2])["keys"]
        assert [row["budget_usd_day"] for row in rows] == [3]


async def test_a_revoked_key_and_an_unknown_one_are_not_changed(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, _ = await made(run)
        await asked(run, "DELETE", f"/warmroute/keys/{id_}")
        assert (await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"name": "x"}))[0] == 409
        assert (await asked(run, "PATCH", "/warmroute/keys/abcdefgh", {"name": "x"}))[0] == 404


async def test_a_command_changes_a_key_of_a_running_gateway_and_lists_its_spending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"

    async def command(*arguments: str) -> str:
        status = await asyncio.to_thread(main, ["keys", *arguments, "--url", url])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out.strip()

    prices = {"m": {"input": 100_000.0, "output": 100_000.0, "cached_input": 100_000.0}}
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=prices) as run:
        keys = run.gateway[Keys]
        limited, key = await made(run, budget_usd_day=1000, requests_per_minute=7)
        free, other = await made(run)
        for each in (key, other):
            assert (await run.post(headers=bearer(each)))[0] == 200
        await eventually(lambda: keys.limiter.account(free) is not None)  # the spending of a key without limits counts, too
        await eventually(lambda: (account := keys.limiter.account(limited)) is not None and not account.open)
        await keys.poll()
        rows = {row["id"]: row for row in json.loads(await command("list", "--json"))}
        spent = rows[limited]["spent_usd"]
        assert spent["day"] == spent["month"] == rows[free]["spent_usd"]["day"] > 0
        table = await command("list")
        assert f"{spent['day']:.2f} of 1000" in table
        assert "USD today" in table
        assert json.loads(await command("show", free))["spent_usd"] == spent
        arguments = ["--budget-usd-day", "none", "--budget-usd-month", "0.000001", "--models", "m,n-*", "--priority", "3"]
        await command("update", limited, *arguments)
        shown = json.loads(await command("show", limited))
        assert (shown["budget_usd_day"], shown["budget_usd_month"], shown["priority"]) == (None, 0.000001, 3)
        assert (shown["requests_per_minute"], shown["models"]) == (7, ["m", "n-*"])
        await eventually(lambda: (grant := keys.ring.grant(limited)) is not None and grant.priority == 3)
        assert (await run.post(headers=bearer(key)))[0] == 429


def test_a_change_of_a_key_in_a_file_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    assert main(["keys", "create", "--url", str(file), "--tenant", "acme", "--budget-usd-day", "2", "--name", "ci"]) == 0
    file.write_text(f"keys:\n{capsys.readouterr().err.splitlines()[-1]}\n")
    (before,) = read_keys(file)
    assert main(["keys", "update", before.id, "--url", str(file), "--budget-usd-day", "none", "--models", "m"]) == 0
    file.write_text(f"keys:\n{capsys.readouterr().err.splitlines()[-1]}\n")
    (after,) = read_keys(file)
    assert (after.id, after.digests) == (before.id, before.digests)
    settings = after.settings
    assert (settings.tenant, settings.name, settings.models, settings.budget_usd_day) == ("acme", "ci", ("m",), None)
    assert main(["keys", "list", "--url", str(file)]) == 0
    assert before.id in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "at least one setting"),
        (["--models", ""], "--models: at least one name"),
        (["--expires", "2020-01-01"], "is in the past"),
        (["--budget-usd-day", "much"], "invalid float value"),
        (["--requests-per-minute", "0"], "requests_per_minute"),
        (["--name", 'a"b'], "name"),
        (["--tenant", "b"], "unrecognized arguments"),
    ],
)
@pytest.mark.parametrize("where", ["database", "file"])
def test_clear_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str, where: str
) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite" if where == "database" else f"{tmp_path}/keys.yaml"
    assert main(["keys", "create", "--tenant", "acme", "--url", url]) == 0
    out, err = capsys.readouterr()
    if where == "file":
        Path(url).write_text(f"keys:\n{err.splitlines()[-1]}\n")
    try:
        status = main(["keys", "update", out.split("-")[1], *arguments, "--url", url])
    except SystemExit as refused:
        status = int(refused.code or 0)
    assert status in (1, 2)
    assert expected in capsys.readouterr().err


async def test_the_spending_of_a_month_is_that_of_all_processes(tmp_path: Path) -> None:
    store = await open_key_store(f"sqlite:///{tmp_path}/keys.sqlite", time.time)
    try:
        month = (2026 * 12 + 10) * 31
        for process, amount in (("a", 1), ("b", 20)):
            days = ((month - 1, 7000), (month, amount), (month + 30, 100 * amount), (month + 31, 9000))
            await store.write_spending(process, [("k", 1, 1, 0, days)])
        assert await store.spent_by_key(month) == {"k": (21, 2121)}
        assert await store.spent_by_key(month + 5) == {"k": (0, 2121)}
    finally:
        await store.close()


async def test_the_database_keeps_what_operators_do_by_endpoint_and_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        keys = run.gateway[Keys]
        name = next(iter(run.gateway.fleet.replicas)).name
        id_, key = await made(run, budget_usd_day=1)
        await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"budget_usd_day": 2})
        await asked(run, "POST", f"/warmroute/keys/{id_}/credit", {"usd": 3})
        await asked(run, "POST", f"/warmroute/keys/{id_}/rotate", {"grace_s": 60})
        await asked(run, "POST", "/warmroute/drain", {"name": name})
        await asked(run, "POST", "/warmroute/undrain", {"name": name})
        limits = msgspec.structs.replace(run.gateway.config.limits, keepalive_s=3.0)
        await run.gateway.local.reload.take(msgspec.structs.replace(run.gateway.config, limits=limits))
        await asked(run, "DELETE", f"/warmroute/keys/{id_}")
        assert await asyncio.to_thread(main, ["keys", "create", "--tenant", "acme", "--budget-usd-day", "4", "--url", url]) == 0
        other = capsys.readouterr().out
        await keys.poll()
        _, found = await asked(run, "GET", "/warmroute/actions")
        rows = list(reversed(found["actions"]))
        assert [row["action"] for row in rows] == [
            "POST /warmroute/keys",
            f"PATCH /warmroute/keys/{id_}",
            f"POST /warmroute/keys/{id_}/credit",
            f"POST /warmroute/keys/{id_}/rotate",
            "POST /warmroute/drain",
            "POST /warmroute/undrain",
            "configuration read again",
            f"DELETE /warmroute/keys/{id_}",
            "warmroute keys create",
        ]
        assert rows[0]["details"] == {"body": {"tenant": "acme", "budget_usd_day": 1}, "id": id_}
        assert (rows[4]["details"], rows[4]["by"], rows[4]["client"]) == ({"body": {"name": name}}, "this machine", "127.0.0.1")
        assert rows[6]["details"] == {"changed": ["limits.keepalive_s"]}
        assert (rows[8]["details"]["id"], "@" in rows[8]["by"]) == (other.split("-")[1], True)
        for secret in (key, other.strip()):
            assert secret.split("-", 2)[2] not in json.dumps(found)
        status, part = await asked(run, "GET", f"/warmroute/actions?before={rows[1]['time']!r}")
        assert (status, [row["action"] for row in part["actions"]]) == (200, ["POST /warmroute/keys"])
        assert (await asked(run, "GET", "/warmroute/actions?before=x"))[0] == 400
    assert await asyncio.to_thread(main, ["keys", "list", "--url", url]) == 0
    assert " of 5 " in capsys.readouterr().out, "today's budget, and what was credited"
    assert await asyncio.to_thread(main, ["keys", "actions", "--url", url]) == 0
    table = capsys.readouterr().out
    assert all(row["action"] in table for row in rows)
    assert await asyncio.to_thread(main, ["keys", "actions", "--json", "--url", url]) == 0
    assert [row["action"] for row in json.loads(capsys.readouterr().out)] == [row["action"] for row in found["actions"]]


async def test_actions_wait_for_a_database_that_does_not_answer_and_are_bounded(tmp_path: Path) -> None:
    keys, _ = gateway(tmp_path / "keys.sqlite")
    for number in range(MAX_ACTIONS + 5):
        keys.keep_action(OperatorAction(float(number), "POST /x", "admin key"))
    await keys.refresh()
    await keys.poll()
    store = await keys.store()
    assert [action.at for action in await store.latest_actions(2)] == [MAX_ACTIONS + 4.0, MAX_ACTIONS + 3.0]
    assert len(await store.latest_actions(2 * MAX_ACTIONS)) == MAX_ACTIONS
    await keys.close()
