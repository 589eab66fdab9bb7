"""`warmroute log`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.commands import cli
from gateway.features.prompt_log.naming.forms import form_of
from tests.gateway.features.prompt_log.test_vectors import VECTORS
from tests.support.paths import ROOT

HELLO = "pl1_Jqr9k6udzxfGHI0OnJnI3ivgd2dJZn-J9nF1Y_Bwzx8"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(name: str, body: Any) -> str:
        path = tmp_path / name
        path.write_text(body if isinstance(body, str) else json.dumps(body))
        return str(path)

    return write


def test_head_prints_the_names(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["log", "head", file("a.json", {"messages": [USER]})]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["length 1", f"head   {HELLO}"]
    assert cli.main(["log", "head", "--every", "--json", file("b.json", {"input": "Hello"})]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["head"], told["heads"], told["length"]) == (HELLO, [HELLO], 1)


def test_head_reads_the_standard_input() -> None:
    command = [sys.executable, "-m", "gateway", "log", "head", "-"]
    done = subprocess.run(command, input=b'{"messages":[]}', capture_output=True, check=True, cwd=ROOT)
    assert VECTORS["empty"].encode() in done.stdout


TWO_PARTS = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "x"}]
DIFFERENCES = [
    ({"messages": [USER]}, 0, "equal"),
    ({"input": "Hello"}, 0, "equal"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, 1, "entry 1 differs at content[0].text"),
    ({"messages": [USER, USER]}, 1, "one has 1 entries, the other 2; the first 1 are equal"),
    ({"messages": [{"role": "system", "content": "S"}, USER]}, 1, "the frames differ at system"),
    ({"messages": [{**USER, "name": "ann"}]}, 1, "entry 1 differs at name"),
    ({"messages": [{"role": "user", "content": TWO_PARTS}]}, 1, "entry 1 differs at content[1]"),
]


@pytest.mark.parametrize(("other", "status", "line"), DIFFERENCES)
def test_diff_names_the_first_difference(
    file: Any, capsys: pytest.CaptureFixture[str], other: Any, status: int, line: str
) -> None:
    one, two = file("a.json", {"messages": [USER]}), file("b.json", other)
    assert cli.main(["log", "diff", one, two]) == status
    assert capsys.readouterr().out == line + "\n"
    assert cli.main(["log", "diff", "--json", one, two]) == status
    assert json.loads(capsys.readouterr().out)["equal"] is (status == 0)


def test_diff_finds_a_head_in_a_file(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    longer = file("a.json", {"messages": [USER, {"role": "assistant", "content": "Hi!"}]})
    assert cli.main(["log", "diff", HELLO, longer]) == 1
    assert capsys.readouterr().out == "the head names the first 1 of 2 entries\n"
    assert cli.main(["log", "diff", longer, VECTORS["vectors"][0]["head"]]) == 1
    capsys.readouterr()
    assert cli.main(["log", "diff", HELLO, file("b.json", {"messages": [USER]})]) == 0
    assert cli.main(["log", "diff", HELLO, HELLO]) == 0
    assert cli.main(["log", "diff", HELLO, VECTORS["empty"]]) == 1


@pytest.mark.parametrize("body", ["{", "[]", '{"messages":[7]}', r'{"messages":[{"role":"user","content":"\ud83d"}]}'])
def test_a_body_without_a_name_is_an_error(file: Any, body: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("a.json", body)
    for arguments in (["head", path], ["diff", path, path]):
        assert cli.main(["log", *arguments]) == 2
        assert "has no name" in capsys.readouterr().err
    assert cli.main(["log", "head", path + ".none"]) == 2


@pytest.mark.parametrize("vector", [each for each in VECTORS["vectors"] if "bodies" in each], ids=lambda each: each["name"])
def test_the_form_of_a_body_is_seen_where_it_matters(
    vector: dict[str, Any], file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bodies of chat and Messages without a mark of either have one name."""
    for form, bodies in vector["bodies"].items():
        for body in bodies:
            assert form == form_of(body) or {form, form_of(body)} == {"chat", "messages"}
            assert cli.main(["log", "head", "--json", file("a.json", body)]) == 0
            assert json.loads(capsys.readouterr().out)["head"] == vector["head"]
