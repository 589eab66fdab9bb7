"""What `warmroute check` says of this machine, beside the file."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gateway.commands.cli import main
from gateway.database.urls import LIBRARIES
from gateway.features.sharing.server.client import LIBRARY
from tests.support.paths import ROOT

GOOD = "pools: [{replicas: [http://a:1]}]\n"
WITHOUT = "import sys; sys.modules[{!r}] = None; from gateway.commands.cli import main; sys.exit(main(sys.argv[1:]))"


def without(library: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python that does not have the library."""
    command = [sys.executable, "-c", WITHOUT.format(library), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_missing_library_of_the_store_is_an_error_as_it_is_for_serve(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{GOOD}sharing: {{url: redis://valkey}}\n")
    checked, served = without("redis", "check", str(file)), without("redis", "serve", "--config", str(file))
    assert (checked.returncode, checked.stderr) == (served.returncode, served.stderr)
    wanted = f"warmroute: sharing.url needs a library that is not installed here: pip install '{LIBRARY}'\n"
    assert (checked.returncode, checked.stderr) == (2, wanted)


def test_a_missing_library_of_the_database_is_a_note(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{GOOD}state:\n  url: postgresql://u@h/n\n")
    done = without("asyncpg", "check", "--strict", str(file))
    where = f"warmroute: note: {file}:3: state.url: not on this machine: "
    assert done.stderr == f"{where}Postgres needs asyncpg, which is not installed here: pip install {LIBRARIES}\n"
    assert (done.returncode, ": good: " in done.stdout) == (0, True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert " ".join(f"'{each}'" for each in extras["postgres"]) == LIBRARIES


NEEDS = """\
pools:
  - replicas:
      - url: https://a:1
        key: {env: NOT_THERE}
      - url: https://b:1
        key: {env: THERE}
        tls: {ca_file: FOLDER/ca.pem}
discovery:
  - dns: {name: vllm, port: 8000}
    pool: default
    key: {file: FOLDER/key}
    tls: true
sharing: {url: "rediss://valkey", ca_file: FOLDER/valkey.pem}
"""


def test_variables_and_files_that_are_not_here_are_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    monkeypatch.setenv("THERE", "secret-one")
    file = tmp_path / "config.yaml"
    file.write_text(NEEDS.replace("FOLDER", str(tmp_path)))
    assert main(["check", "--strict", str(file)]) == 0
    out, err = capsys.readouterr()
    assert ": good: " in out
    assert [line.removeprefix(f"warmroute: note: {file}:") for line in err.splitlines()] == [
        "4: pools[0].replicas[0].key: not on this machine: its key is missing: the environment variable NOT_THERE is not set",
        f"7: pools[0].replicas[1].tls: not on this machine: the file {tmp_path}/ca.pem does not exist",
        f"11: discovery[0].key: not on this machine: the file {tmp_path}/key does not exist",
        f"13: sharing: not on this machine: the file {tmp_path}/valkey.pem does not exist",
    ]


def test_lists_of_replicas_that_are_not_here_or_are_invalid_are_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("good", "replicas: [http://a:1]"), ("bad", "replicas:\n- {url: x}")):
        (tmp_path / name).write_text(text)
    file = tmp_path / "config.yaml"
    file.write_text("discovery:\n" + "".join(f"- file: {tmp_path}/{name}\n" for name in ("good", "bad", "none")))
    assert main(["check", "--strict", str(file)]) == 0
    assert [line.removeprefix(f"warmroute: note: {file}:") for line in capsys.readouterr().err.splitlines()] == [
        f"3: discovery[1].file: not read on this machine: {tmp_path}/bad:2: "
        "replicas[0].url: 'x' is not a base URL such as http://127.0.0.1:9001",
        f"4: discovery[2].file: not read on this machine: {tmp_path}/none: No such file or directory",
    ]


def test_names_of_a_file_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + '"\\e[31m": 1\n')
    assert main(["check", str(file)]) == 2
    assert "\\x1b[31m" in capsys.readouterr().err
    file.write_text(GOOD + 'prices: {"\\e[31m*": {input: 1, output: 1}}\n')
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "[31m*" in said


def test_the_file_of_keys_is_checked_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, keys = tmp_path / "config.yaml", tmp_path / "keys.yaml"
    file.write_text(f"{GOOD}keys:\n  url: {keys}\n")

    def checked() -> tuple[int, str]:
        return main(["check", "--strict", str(file)]), capsys.readouterr().err

    missing = f"warmroute: note: {file}:3: keys.url: not on this machine: {keys}"
    assert checked() == (0, f"{missing}: No such file or directory\n")
    keys.write_text(f"keys:\n- {{id: abcdefgh, sha256: {'a' * 64}, tenant: acme}}\n- {{id: x}}\n")
    status, err = checked()
    assert status == 2
    wanted = [f"warmroute: {keys}:3: keys[1].{name}: " for name in ("id", "sha256", "tenant")]
    assert all(any(line.startswith(each) for line in err.splitlines()) for each in wanted), err
    keys.write_text(f"keys:\n- {{id: abcdefgh, sha256: {'a' * 64}, tenant: acme}}\n")
    assert checked() == (0, "")
    keys.write_text(f"keys:\n- {{id: abcdefgh, sha256: {'a' * 64}, tenant: acme, budget_usd_month: 5}}\n")
    assert "3: keys.url: 1 of its keys have a budget, and may use no model without a price" in checked()[1]
    priced = f"{GOOD}keys:\n  url: {keys}\nprices: {{default: {{input: 1, output: 1}}}}\n"
    file.write_text(priced)
    assert checked() == (0, "")
    file.write_text(priced.replace("{replicas", "{models: ['*'], replicas"))
    assert "'*' have a price: a key with a budget may not use the others" in checked()[1]
    file.write_text(f"{GOOD}keys:\n  url: {keys}\n")
    keys.unlink()
    os.mkfifo(keys)
    assert checked() == (0, f"{missing} is not a regular file\n")
