"""`warmroute workflow put` and `list` against a gateway in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.commands.test_operate import said
from tests.gateway.features.keys.conftest import made
from tests.gateway.features.workflows.stored.test_stored_workflows import ONE, TWO, served
from tests.gateway.features.workflows.test_door import SUPPORT

Capture = pytest.CaptureFixture[str]


def file(folder: Path, document: object, name: str = "mine.json") -> str:
    (folder / name).write_text(json.dumps(document))
    return str(folder / name)


async def test_a_workflow_is_stored_and_listed(tmp_path: Path, capsys: Capture) -> None:
    async with served(tmp_path) as (_, run):
        url = ("--url", run.url)
        one, two = file(tmp_path, ONE), file(tmp_path, TWO, "two.yaml")
        assert await said(capsys, "workflow", "put", one, *url) == (0, "mine: version 1\n", "")
        code, out, _ = await said(capsys, "workflow", "put", two, *url)
        assert (code, [line.split(": ")[:3] for line in out.splitlines()]) == (
            0,
            [
                ["mine", "version 2"],
                ["  warning", "inputs.who", "input_added_required"],
                ["  warning", "a", "output_removed"],
            ],
        )
        (tmp_path / "fresh.py").write_text(
            '@workflow(model="m")\ndef fresh(text: str = "x"):\n    answer = chat([user(text)])\n    yield {"answer": answer}\n'
        )
        assert (await said(capsys, "workflow", "put", str(tmp_path / "fresh.py"), *url))[:2] == (0, "fresh: version 1\n")
        code, out, _ = await said(capsys, "workflow", "put", one, *url, "--json")
        assert (code, json.loads(out)["version"]) == (0, 3)

        code, out, _ = await said(capsys, "workflow", "list", *url)
        assert code == 0
        assert [line.split() for line in out.splitlines()] == [
            ["workflow", "version", "source", "inputs", "description"],
            ["support", "operator", "messages?"],
            ["fresh", "1", "tenant", "text?"],
            ["mine", "3", "tenant", "messages?", "the", "first"],
        ]
        code, out, _ = await said(capsys, "workflow", "list", *url, "--json")
        assert [each["name"] for each in json.loads(out)] == ["support", "fresh", "mine"]


async def test_refusals(tmp_path: Path, capsys: Capture) -> None:
    async with served(tmp_path) as (_, run):
        url = ("--url", run.url)
        code, out, err = await said(capsys, "workflow", "put", file(tmp_path, {**ONE, "stepz": 1}), *url)
        assert (code, out) == (2, "")
        assert "mine.json: stepz: unknown key" in err
        code, _, err = await said(capsys, "workflow", "put", file(tmp_path, SUPPORT), *url)
        assert (code, err) == (
            1,
            f"warmroute: {run.url}: The operator of this gateway has a workflow 'support'; choose another name.\n",
        )
        description = "\x1b[31m red \n" + "long " * 30
        assert (await said(capsys, "workflow", "put", file(tmp_path, {**ONE, "description": description}), *url))[0] == 0
        out = (await said(capsys, "workflow", "list", *url))[1]
        assert "\x1b" not in out
        assert out.splitlines()[2].rstrip().endswith("...")
    code, _, err = await said(capsys, "workflow", "list", "--url", "http://127.0.0.1:1")
    assert (code, "Is the gateway running? Its log line `listening` has the URL as url" in err) == (1, True)


async def test_the_key_is_that_of_clients(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_API_KEY", raising=False)
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "not-this-one")
    async with served(tmp_path, keys=True) as (_, run):
        _, key = await made(run)
        arguments = ("workflow", "list", "--url", run.url, "--json")
        for value, text in (
            (None, "it asks for a key: set WARMROUTE_API_KEY to yours"),
            ("x", "WARMROUTE_API_KEY is none of its keys"),
        ):
            if value:
                monkeypatch.setenv("WARMROUTE_API_KEY", value)
            assert (await said(capsys, *arguments))[::2] == (1, f"warmroute: {run.url}: {text}\n")
        monkeypatch.setenv("WARMROUTE_API_KEY", key)
        code, out, _ = await said(capsys, *arguments)
        assert (code, [each["name"] for each in json.loads(out)]) == (0, ["support"])
