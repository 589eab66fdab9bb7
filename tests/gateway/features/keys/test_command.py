"""`warmroute keys`, beside a gateway that runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.commands.cli import main
from gateway.features.keys.file import read_keys
from gateway.features.keys.keys import Keys
from gateway.features.keys.record import Key
from gateway.features.keys.secret import SHAPE, digest_of
from gateway.features.keys.store import open_key_store
from tests.gateway.conftest import eventually
from tests.gateway.features.keys.conftest import bearer, keyed
from tests.support.fakes import FakeReplica, answers
from tests.support.tiers import gate


async def test_what_a_command_changes_a_running_gateway_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"

    async def command(*arguments: str) -> str:
        status = await asyncio.to_thread(main, ["keys", *arguments, "--url", url])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out.strip()

    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        keys = run.gateway[Keys]
        assert keys is not None
        key = await command("create", "--tenant", "acme", "--models", "m,n-*")
        assert SHAPE.fullmatch(key)
        await eventually(lambda: keys.ring.find(digest_of(key), 0))
        assert (await run.post(headers=bearer(key)))[0] == 200
        id_ = key.split("-")[1]
        other = await command("rotate", id_, "--grace", "0s")
        await eventually(lambda: keys.ring.find(digest_of(other), 0))
        assert [(await run.post(headers=bearer(each)))[0] for each in (key, other)] == [401, 200]
        shown = json.loads(await command("show", id_))
        assert (shown["tenant"], shown["models"], shown["revoked_at"]) == ("acme", ["m", "n-*"], None)
        poor = (await command("create", "--tenant", "acme", "--budget-usd-day", "1")).split("-")[1]
        await command("credit", poor, "0.5")
        assert list(json.loads(await command("show", poor))["credits_usd"].values()) == [0.5]
        await command("revoke", id_)
        await eventually(lambda: (found := keys.ring.find(digest_of(other), 0)) and found.revoked)
        assert (await run.post(headers=bearer(other)))[0] == 401
        assert "revoked" in await command("list")
        assert other not in await command("list", "--json")


def test_a_file_gets_an_entry_to_be_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    assert main(["keys", "create", "--url", str(file), "--tenant", "acme", "--budget-usd-day", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() not in err
    file.write_text(f"keys:\n{err.splitlines()[-1]}\n")
    (key,) = read_keys(file)
    assert key.digests == ((digest_of(out.strip()), 0.0),)
    assert main(["keys", "list", "--url", str(file)]) == 0
    assert key.id in capsys.readouterr().out
    assert main(["keys", "revoke", key.id, "--url", str(file)]) == 2
    assert "are in a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["create", "--tenant", "none"], "tenant"),
        (["create", "--tenant", "a", "--expires", "soon"], "expires_at"),
        (["create", "--tenant", "a", "--priority", "1000"], "priority"),
        (["create", "--tenant", "a", "--models", ""], "--models: at least one name"),
        (["create", "--tenant", "a", "--pools", ",,"], "--pools: at least one name"),
        (["create", "--tenant", "a", "--expires", ""], "--expires: a time is expected"),
        (["create", "--tenant", "a", "--expires", "2020-01-01"], "--expires: 2020-01-01 is in the past"),
        (
            ["create", "--tenant", "a", "--models", "b,a*b"],
            "models[1]: a name, or the beginning of names with a star at its end",
        ),
        (["revoke", "abcdefgh"], "There is no key"),
        (["show", "abcdefgh"], "There is no key"),
        (["rotate", "abcdefgh", "--grace", "0s"], "There is no key"),
        (["rotate", "abcdefgh", "--grace", "31d"], "31d is too long: at most 30d"),
    ],
)
def test_clear_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"
    assert main(["keys", "create", "--tenant", "acme", "--url", url]) == 0
    try:
        status = main(["keys", *arguments, "--url", url])
    except SystemExit as refused:
        status = int(refused.code or 0)
    assert status in (1, 2)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "rotate", "revoke"])
def test_a_whole_key_in_the_place_of_its_id_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"
    assert main(["keys", "create", "--tenant", "acme", "--url", url]) == 0
    key = capsys.readouterr().out.strip()
    for text in (key, "a-part-of-the-secret-alone"):
        assert main(["keys", action, text, "--url", url]) == 1
        out, err = capsys.readouterr()
        assert text[-10:] not in out + err
        assert err == "warmroute: This is not a key id. Give the id, the 8 characters after `wr-`, not the key.\n"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("off", "warmroute: --url: keys are off\n"),
        ("sqlite://x", "or off is expected, got 'sqlite://x'\n"),
        ("mysql://u:secret@h/n", "or off is expected, got 'mysql'\n"),
    ],
)
def test_what_is_no_url_of_keys(capsys: pytest.CaptureFixture[str], url: str, expected: str) -> None:
    assert main(["keys", "list", "--url", url]) == 2
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.parametrize(
    "action", [["list"], ["list", "--json"], ["show", "abcdefgh"], ["rotate", "abcdefgh"], ["revoke", "abcdefgh"]]
)
def test_only_create_makes_the_database(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]) -> None:
    path = tmp_path / "folder" / "keys.sqlite"
    assert main(["keys", *action, "--url", f"sqlite:///{path}"]) == 1
    wanted = f"warmroute: the database {path}: No such file or directory (is the path right?)\n"
    assert capsys.readouterr() == ("", wanted)
    assert not path.parent.exists()
    other = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(other)) as file, file:
        file.execute("create table mine (a)")
    before = other.read_bytes()
    assert main(["keys", *action, "--url", f"sqlite:///{other}"]) == 1
    assert "this database has no keys in it" in capsys.readouterr().err
    assert other.read_bytes() == before
    assert main(["keys", "create", "--tenant", "acme", "--url", f"sqlite:///{path}"]) == 0
    assert path.exists()


def test_no_command_takes_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments are in the list of processes."""
    options = set[str]()
    for action in ("create", "rotate", "revoke"):
        with pytest.raises(SystemExit):
            main(["keys", action, "--help"])
        options |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert not options & {"--key", "--secret", "--token", "--password"}


def test_files_that_are_refused(tmp_path: Path) -> None:
    from gateway.config.parse import ConfigError

    digest, file = "0" * 64, tmp_path / "keys.yaml"
    good: dict[str, Any] = {"id": "abcdefgh", "sha256": digest, "tenant": "a"}
    for keys, expected in (
        ([good, good], "another key has it already"),
        ([{**good, "id": "ABC"}], "8 of a-z"),
        ([{**good, "sha256": "wr-secret"}], "not the key itself"),
        ([{**good, "extra": 1}], "extra"),
        ("nonsense", "keys"),
    ):
        file.write_text(json.dumps({"keys": keys}))
        with pytest.raises(ConfigError) as refused:
            read_keys(file)
        assert expected in str(refused.value)
        assert "wr-secret" not in str(refused.value)


@pytest.mark.parametrize("to", ["2>/dev/full", "2>&-"])
@gate("2>&-", reason="a full disk: the next test")
def test_a_message_that_cannot_be_printed_costs_no_secret(tmp_path: Path, to: str) -> None:
    """Nor is it among what is printed."""
    url = f"sqlite:///{tmp_path}/keys.sqlite"

    def printed(*arguments: str) -> str:
        whole = ["bash", "-c", f'"$@" {to}', "_", sys.executable, "-m", "gateway", "keys", *arguments, "--url", url]
        return subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout

    first = printed("create", "--tenant", "acme")
    second = printed("rotate", first.split("-")[1], "--grace", "0s")
    whole = ["bash", "-c", f'"$@" {to}', "_", sys.executable, "-m", "gateway", "keys", "create", "--tenant", "a"]
    done = subprocess.run([*whole, "--url", "/none"], stdout=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, b""), "nobody could add its entry to the file"
    assert re.fullmatch(rf"wr-{first.split('-')[1]}-\S+\n", second)
    whole = ["bash", "-c", '"$@" >/dev/full 2>/dev/full', "_", sys.executable, "-m", "gateway", "keys", "create", "--url", url]
    assert subprocess.run([*whole, "--tenant", "lost"], check=False, timeout=60).returncode == 1
    [kept, lost] = sorted(json.loads(printed("list", "--json")), key=lambda key: str(key["tenant"]))
    assert (kept["id"], lost["tenant"]) == (first.split("-")[1], "lost")
    assert lost["revoked_at"]
    assert not kept.get("revoked_at")


@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
@gate(">/dev/full", reason="a closed descriptor: the test above")
def test_a_secret_that_cannot_be_printed_is_undone(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str) -> None:
    url = f"sqlite:///{tmp_path}/keys.sqlite"

    def command(*arguments: str) -> str:
        whole = ["bash", "-c", f'"$@" {to}', "_", sys.executable, "-m", "gateway", "keys", *arguments, "--url", url]
        done = subprocess.run(whole, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("warmroute: standard output ")
        return done.stderr

    assert main(["keys", "create", "--tenant", "acme", "--url", url]) == 0
    key = capsys.readouterr().out.strip()
    id_ = key.split("-")[1]
    assert "the rotation is undone; the old secret stays valid" in command("rotate", id_, "--grace", "0s")
    assert "it is revoked" in command("create", "--tenant", "lost")

    async def found() -> list[Key]:
        store = await open_key_store(url, time.time)
        try:
            return (await store.list_page("", 10))[0]
        finally:
            await store.close()

    keys = {each.settings.tenant: each for each in asyncio.run(found())}
    assert keys["acme"].digests == ((digest_of(key), 0.0),)
    assert keys["lost"].revoked_at > 0
