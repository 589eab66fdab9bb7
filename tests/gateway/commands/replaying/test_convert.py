"""`warmroute convert`: published sessions of coding agents, as lines that `simulate` reads."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.cli import main
from gateway.commands.replaying.convert import session_lines
from router.simulation.workloads import agents
from router.types import KEY_BYTES

SUB = {"t": 3.0, "type": "subagent", "requests": [{"in": 128, "out": 5, "hash_ids": [1, 9]}]}
SESSION: dict[str, Any] = {
    "id": "trace_0001",
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "system_tokens": 0,
    "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 200, "out": 10, "hash_ids": [1, 2, 3], "think_time": 0.0},
        SUB,
        {"t": 9.0, "type": "n", "model": "m", "in": 300, "out": 20, "hash_ids": [1, 2, 7, 8], "think_time": 2.5},
    ],
}


def written(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def lines_of(path: Path) -> list[Any]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]


def converted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return main(["convert", *arguments]), capsys.readouterr().err


def test_a_session_keeps_all_but_the_lists_of_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl.gz"
    code, said = converted(capsys, written(tmp_path / "a.json", SESSION), "--output", str(out))
    assert (code, said) == (0, f"1 sessions with 3 requests in {out}\n")
    [session] = lines_of(out)
    first, sub, last = session.pop("requests")
    assert session == {name: value for name, value in SESSION.items() if name != "requests"}
    assert first == {"t": 0.0, "type": "n", "model": "m", "in": 200, "out": 10, "think_time": 0.0, "keep": 0, "new": [[1, 3]]}
    assert sub == {"t": 3.0, "type": "subagent", "requests": [{"in": 128, "out": 5, "keep": 0, "new": [[1, 1], [9, 1]]}]}
    assert (last["keep"], last["new"], last["think_time"]) == (2, [[7, 2]], 2.5)
    assert main(["simulate", str(out), "--replicas", "2", "--json"]) == 0


def test_what_could_not_be_written_whole_is_not_left(tmp_path: Path) -> None:
    """A disk that is full, as a limit on the size of files."""
    sessions = tmp_path / "s.jsonl"
    sessions.write_text("".join(json.dumps({**SESSION, "id": f"{number:0500}"}) + "\n" for number in range(2000)))
    for name, kib in (("out.jsonl", 100), ("out.jsonl.gz", 1)):
        out = tmp_path / name
        command = ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "_", sys.executable, "-m", "gateway", "convert"]
        done = subprocess.run([*command, str(sessions), "--output", str(out)], stderr=subprocess.PIPE, check=False, timeout=60)
        assert done.returncode == 2
        assert b"File too large" in done.stderr
        assert not out.exists()


def test_folders_lines_and_indented_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    written(folder / "b.json", {**SESSION, "id": "b"})
    (folder / "a.json").write_text(json.dumps({**SESSION, "id": "a"}, indent=2))
    (folder / "notes.txt").write_text("no trace")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"\n".join(json.dumps({**SESSION, "id": x}).encode() for x in "cd")))
    out = tmp_path / "out.jsonl"
    assert converted(capsys, str(folder), str(tmp_path / "c.jsonl.gz"), "--output", str(out))[0] == 0
    assert [session["id"] for session in lines_of(out)] == ["a", "b", "c", "d"]


IDS = st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=8)


@given(IDS)
def test_the_prompts_are_the_same(lists: list[list[int]]) -> None:
    """Two prompts of a session begin alike exactly as far as their lists do, where equal ids mean an equal beginning."""
    chained = [[hash(tuple(ids[: at + 1])) & 0xFFFF_FFFF_FFFF for at in range(len(ids))] for ids in lists]
    requests = [{"in": 64 * len(ids) + 1, "out": 1, "hash_ids": ids} for ids in chained]
    [turns] = agents([session_lines({"id": "s", "requests": requests})], 10**9)
    keys = [request.prompt.keys for _, request in turns]
    for one, its in zip(chained, keys, strict=True):
        assert len(its) == KEY_BYTES * len(one)
        for other, others in zip(chained, keys, strict=True):
            assert (one == other[: len(one)]) == others.startswith(its)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"timestamp": 1, "hash_ids": [1]}', "'requests', a list, is expected"),
        ('{"requests": [3]}', "request 0 is not an object"),
        ('{"requests": [{"in": 1, "out": 1, "keep": 0, "new": []}]}', "already"),
        ('{"requests": [{"in": 64, "out": 1, "hash_ids": 7}]}', "'hash_ids' of request 0"),
        ('{"requests": [{"in": 64, "out": 1, "hash_ids": [-1]}]}', "'hash_ids' of request 0"),
        ('{"requests": [{"in": 64, "out": 1, "hash_ids": [true]}]}', "'hash_ids' of request 0"),
        ('{"requests": [{"in": 64, "out": 1, "hash_ids": [1%s]}]}' % ("0" * 400), "'hash_ids' of request 0"),
        ('{"requests": [{"in": 64, "out": 1, "hash_ids": [1, 2, 3, 4]}]}', "do not make the 1 blocks"),
        ('{"requests": [{"in": -64, "out": 1, "hash_ids": []}]}', "row 1"),
        ('{"requests": ' * 25 + "[]" + "}" * 25, "'requests', a list"),
        ('{"requests": [' * 25 + "]}" * 25, "nested more than 20 deep"),
        ("[" * 100_000, "is not JSON"),
        ("{\n" + "[" * 100_000, "is not JSON"),
        ("[1]", "JSON objects, one a line"),
        ("{\n}", "'requests', a list"),
        ("", "has no session"),
    ],
)
def test_what_is_no_session_is_refused_and_leaves_no_file(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "a.json", tmp_path / "out.jsonl"
    path.write_text(content)
    code, said = converted(capsys, str(path), "--output", str(out))
    assert code == 2
    assert said.startswith(f"warmroute: {path}: ")
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_files_that_are_not_there_or_there_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written(tmp_path / "a.json", SESSION), tmp_path / "out.jsonl"
    assert "No such file" in converted(capsys, str(tmp_path / "no.json"), "--output", str(out))[1]
    (tmp_path / "empty").mkdir()
    assert "no *.json in this folder" in converted(capsys, str(tmp_path / "empty"), "--output", str(out))[1]
    assert "No such file" in converted(capsys, source, "--output", str(tmp_path / "no" / "out"))[1]
    out.write_text("precious")
    assert "exists already" in converted(capsys, source, "--output", str(out))[1]
    assert out.read_text() == "precious"
