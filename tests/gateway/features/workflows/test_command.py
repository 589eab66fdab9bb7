"""`warmroute workflow` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.commands.cli import main
from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.reading import read_yaml
from tests.support.canonical_document import canonical_document
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "workflow-language.md").read_text("utf-8")
DOCUMENT = re.findall(r"```yaml\n(workflow: 1\n.*?)```", PAGE, re.DOTALL)[0]
PROGRAM = re.findall(r"```python\n(@workflow.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example of the page, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WARMROUTE_CONFIG", raising=False)
    (tmp_path / "support.yaml").write_text(DOCUMENT)
    (tmp_path / "support.py").write_text(PROGRAM)
    (tmp_path / "bad.yaml").write_text(
        DOCUMENT.replace("from: check", "from: chek").replace("max_tokens: 4\n", "max_token: 4\n")
    )
    (tmp_path / "bad.py").write_text(PROGRAM.replace("check.value", "check.values"))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["workflow", *arguments])
    return status, *capsys.readouterr()


def test_a_good_file_has_its_plan(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, "check", "support.yaml", "support.py")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "support.yaml: good: support, 4 steps, at most 3 calls, 1 at once, 804 output tokens"
    assert lines[1] == "  shared by 3 calls (reply, check, rewrite; qwen3-8b): inputs.conversation"
    assert "support.py: good" in out


def test_all_errors_have_file_line_and_path(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, "check", "bad.yaml", "bad.py", "missing.yaml", "support.yaml")
    assert status == 2
    assert err.splitlines() == [
        "warmroute: bad.yaml:15: steps.check.chat.max_token: unknown key; did you mean 'max_tokens'?",
        "warmroute: bad.yaml:23: steps.safe_reply.switch[0].steps.rewrite.chat.from: there is no step 'chek';"
        " did you mean 'check'?",
        "warmroute: bad.py:6: steps.safe_reply.switch[0].when: a chat step has no .values; it has check.text, check.value,"
        " check.message, check.messages, check.calls, check.finish_reason, check.usage, check.status",
        "warmroute: missing.yaml: the file cannot be read: No such file or directory",
    ]
    assert "support.yaml: good" in out


def test_check_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, "check", "support.yaml", "bad.yaml", "--json")
    good, bad = json.loads(out)
    assert (status, err) == (2, "")
    assert (good["file"], good["valid"], good["name"], good["plan"]["calls"], good["errors"]) == (
        "support.yaml",
        True,
        "support",
        3,
        [],
    )
    assert (bad["valid"], bad["plan"], bad["errors"][0]["line"], bad["errors"][0]["code"]) == (
        False,
        None,
        15,
        "workflow_invalid",
    )


def test_bounds_are_those_of_the_configuration(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "gateway.yaml").write_text(
        "pools: [{replicas: [http://r:1]}]\nworkflows: {max_calls: 2, max_output_tokens: 900}\n"
    )
    expected = "warmroute: support.yaml: a run could have 3 calls; workflows.max_calls is 2\n"
    assert told(capsys, "check", "support.yaml", "--config", "gateway.yaml") == (2, "", expected)
    monkeypatch.setenv("WARMROUTE_CONFIG", "gateway.yaml")
    assert told(capsys, "check", "support.yaml") == (2, "", expected)


def test_warnings_are_printed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "w.yaml").write_text(DOCUMENT.replace("from: check", "from: check\n              model: other"))
    status, out, _ = told(capsys, "check", "w.yaml")
    assert status == 0
    text = "it continues 'check' with another model, so that their prompts share nothing"
    assert f"  warning: steps.safe_reply.switch[0].steps.rewrite.chat.from: {text}" in out.splitlines()


def canonical(source: Any) -> dict[str, Any]:
    return canonical_document(compile_document(source))


def test_a_program_is_compiled_to_its_document(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, as_yaml, err = told(capsys, "compile", "support.py")
    assert (status, err) == (0, "")
    _, as_json, _ = told(capsys, "compile", "support.py", "--json")
    expected = canonical(read_yaml(DOCUMENT).value)
    assert canonical(read_yaml(as_yaml).value) == canonical(json.loads(as_json)) == expected
    status, out, err = told(capsys, "compile", "bad.py")
    assert (status, out) == (2, "")
    assert err.startswith("warmroute: bad.py:6: ")


@pytest.mark.parametrize(
    "text", ["1e3", "nULL", "Null", "Yes", "1_0", "0x1", "2026-01-01", "", "~", "- a", "a: b", "a\n b\n", "#", "*a", "12"]
)
def test_texts_stay_texts_in_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = tmp_path / "w.py"
    file.write_text(f"@workflow()\ndef w():\n    a = {[text, text]!r}\n")
    assert told(capsys, "compile", str(file))[0] == 0
    main(["workflow", "compile", str(file)])
    assert read_yaml(capsys.readouterr().out).value["steps"]["a"]["let"] == [text, text]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("x.yaml", b"\xff", "the file is not UTF-8"),
        ("x.yaml", b"a" * 300_000, "a document has at most 256 KiB"),
        (
            "x.json",
            b'{"workflow": 1, "workflow": 1, "name": "w", "steps": {"a": {"let": 1}}}',
            "workflow: the key is given twice",
        ),
        ("x.py", b"import os", "x.py:1: a program is one function"),
        ("x\n.yaml", b"", "a document is an object"),
    ],
)
def test_files_that_are_none(files: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, why: str) -> None:
    (files / name).write_bytes(data)
    status, _, err = told(capsys, "check", name)
    assert status == 2
    assert why in err
    assert err.count("\n") == 1
