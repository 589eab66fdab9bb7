"""`warmroute doctor` as a user runs it."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.agents.kinds import KINDS
from gateway.commands.cli import main
from gateway.features.doctor import causes
from gateway.features.doctor.command.lines import MAX_LINE
from tests.support.streams import KINDS_OF_STREAMS, lines, stream

CHAT = KINDS[0]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["doctor", *arguments])
    return status, *capsys.readouterr()


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *arguments, "--json")[1])
    return found


def test_a_report_has_causes_examples_and_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", lines(stream(CHAT, causes.TIMESTAMP)))
    status, out, err = told(capsys, file, "--price", "0.5,0.05")
    assert (status, err) == (1, "")
    assert "18 requests" in out
    assert "timestamp" in out
    assert "system prompt, at" in out
    assert "What to change\n  timestamp: Move the time" in out
    assert "USD" in out
    assert "2026-11-27" not in out, "no text unless it is wanted"
    assert "2026-11-27" in told(capsys, file, "--text")[1]


def test_clean_requests_end_with_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(stream(CHAT))))
    status, out, err = told(capsys, file)
    assert (status, err) == (0, "")
    assert "No prefix is broken." in out


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input_may_be_gzipped_as_well(packed: bool) -> None:
    raw = lines(stream(CHAT, causes.TIMESTAMP))
    command = [sys.executable, "-m", "gateway", "doctor"]
    sent = gzip.compress(raw) if packed else raw
    done = subprocess.run([*command, "-"], input=sent, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"18 requests" in done.stdout
    closed = subprocess.run(["bash", "-c", '"$@" <&-', "_", *command, "-"], capture_output=True, timeout=60, check=False)
    assert (closed.returncode, closed.stderr) == (2, b"warmroute: -: standard input is closed\n")


@pytest.mark.parametrize("kind", KINDS_OF_STREAMS, ids=lambda kind: kind.name)
def test_the_api_of_a_bare_body_is_recognised(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = list(stream(kind, causes.TIMESTAMP))
    whole = as_json(capsys, write(tmp_path / "a.jsonl", lines(requests)))
    bare = as_json(capsys, write(tmp_path / "b.jsonl", lines([request["body"] for request in requests])))
    assert [each["cause"] for each in bare["causes"]] == [each["cause"] for each in whole["causes"]] == [causes.TIMESTAMP]
    assert bare["prompt_tokens"] == whole["prompt_tokens"]


def test_money_is_tokens_times_the_difference_of_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", lines(stream(CHAT, causes.NONCE)))
    config = tmp_path / "c.yaml"
    config.write_text(
        "pools: [{replicas: ['http://a:1']}]\nprices: {m: {input: 2, cached_input: 0.5, output: 1}, '*': {input: 9, output: 9}}"
    )
    found = as_json(capsys, file, "--config", str(config))
    assert found["lost_usd"] == pytest.approx(found["lost_tokens"] * 1.5 / 1e6)
    assert found["causes"][0]["lost_usd"] == pytest.approx(found["lost_usd"])
    assert as_json(capsys, file, "--price", "1,0")["lost_usd"] == pytest.approx(found["lost_tokens"] / 1e6)


def test_a_session_is_looked_at_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = list(stream(KINDS[2], causes.TIMESTAMP))
    file, session = write(tmp_path / "a.jsonl", lines(requests)), requests[0]["headers"]["x-claude-code-session-id"]
    found = as_json(capsys, file, "--session", session)
    assert (found["requests"], found["sessions"]) == (6, 1)
    assert told(capsys, file, "--session", "none")[0] == 2


BROKEN = [
    (b"{", "not JSON"),
    (b'{"model": NaN}', "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    (b"[1, 2]", "not a JSON object"),
    (b"[" * 100_000, "not JSON"),
    (b'{"model": "m", "messages": ' + b"[" * 2000 + b"]" * 2000 + b"}", "not JSON"),
    (b'{"x": 1}', "neither a request"),
    (b'{"body": 7}', "'body' must be an object"),
    (b'{"body": {"model": "m", "messages": []}}', "'messages' must be a list"),
    (b'{"body": {"model": "m", "prompt": "x"}, "path": 7}', "'path' must be a string"),
    (b'{"body": {"model": "m", "prompt": "x"}, "path": "/nope"}', "'path' must be one of"),
    (b'{"body": {"model": "m", "prompt": "x"}, "headers": []}', "'headers' must be an object"),
    (b'{"body": {"model": "m", "prompt": "x"}, "time": "yesterday"}', "'time' is not in ISO 8601: "),
    (b'{"body": {"model": "m", "prompt": "x"}, "time": true}', "'time' must be"),
    (b'{"body": {"model": "m", "prompt": "x"}, "outcome": {"cached_tokens": "many"}}', "'outcome'"),
    (b'{"body": {"model": "m", "prompt": "x"}, "outcome": {"cached_tokens": -1}}', "'outcome'"),
    (b'{"hash_ids": [1], "timestamp": "soon", "input_length": 512, "output_length": 1}', "is not as its format says"),
    (b'{"requests": [{"in": 64, "out": 1, "keep": 7, "new": []}], "block_size": 64}', "is not as its format says"),
    (b'{"requests": 7}', "is not as its format says"),
    (b'{"model": "m", "messages": [' + b"{}," * 600_000 + b"{}]}", "too many values"),
]


@pytest.mark.parametrize(("line", "why"), BROKEN, ids=[why for _, why in BROKEN])
def test_a_broken_line_is_named_and_the_others_are_read(
    line: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = lines(list(stream(CHAT))[:2])
    file = write(tmp_path / "a.jsonl", good + line + b"\n\n" + good)
    status, out, err = told(capsys, file)
    assert status == 0
    assert "4 requests" in out
    assert f"{file}, line 3: " in err
    assert why in err
    assert err.count("\n") == 1
    assert as_json(capsys, file)["skipped_lines"] == 1


def test_many_broken_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", b"nonsense\n" * 1000 + lines(list(stream(CHAT))[:1]))
    status, _, err = told(capsys, file)
    assert status == 0
    assert "995 more lines" in err
    assert err.count("\n") == 6


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no request"),
        (b"\n \n", "no request"),
        (bytes(range(256)) * 10, "no request"),
        (gzip.compress(lines(stream(CHAT)))[:-50], "damaged gzip"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
    ],
)
def test_files_without_requests_are_an_error(data: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, write(tmp_path / "a", data))
    assert (status, out) == (2, "")
    assert why in err


def test_a_line_without_end_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is small as long as it is zipped."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"model": "m", "prompt": "')
        for _ in range(MAX_LINE >> 20):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + lines(list(stream(CHAT))[:1]))
    status, out, err = told(capsys, str(path))
    assert status == 0
    assert "1 requests" in out
    assert "line 1: longer than 64 MiB" in err


def test_missing_files_and_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, str(tmp_path / "none"))[0] == 2
    assert told(capsys, str(tmp_path))[0] == 2
    for wrong in (["--price", "1"], ["--price", "nan,1"], ["--seconds", "x"], []):
        with pytest.raises(SystemExit) as error:
            main(["doctor", *([str(tmp_path)] if wrong else []), *wrong])
        assert error.value.code == 2
    assert told(capsys, "--live", "--text")[0] == 2


@pytest.fixture
def canned() -> Iterator[Callable[[Any], str]]:
    """The URL of a server that gives one answer, whatever it is asked."""
    answer = b""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    def url(body: Any) -> str:
        nonlocal answer
        answer = json.dumps(body).encode()
        return f"http://127.0.0.1:{server.server_port}"

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield url
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("body", [{"causes": []}, {"causes": 5}, {"causes": [{}]}, [], "causes"])
def test_what_answers_without_a_report_is_no_gateway(
    canned: Callable[[Any], str], capsys: pytest.CaptureFixture[str], body: Any
) -> None:
    status, out, err = told(capsys, "--live", "--seconds", "0", "--admin", canned(body))
    assert (status, out) == (2, "")
    assert "is no admin listener of a gateway of this release" in err


def test_what_answers_cannot_steer_a_terminal(
    tmp_path: Path, canned: Callable[[Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, write(tmp_path / "a.jsonl", lines(stream(CHAT, causes.TIMESTAMP))))
    found["notes"] = ["\x1b[2J\ud800"]
    found["causes"][0] |= {"cause": "\x1b]0;x\x07", "remedy": "\x1b[31m"}
    status, out, _ = told(capsys, "--live", "--seconds", "0", "--admin", canned(found))
    assert status == 1
    assert "What to change" in out
    assert "\x1b" not in out


def test_what_is_nested_deep_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = b'{"model": "m", "messages": [{"role": "user", "content": ' + b"[" * 300 + b"]" * 300 + b"}]}\n"
    file = write(tmp_path / "a.jsonl", deep + b'{"body": ' + deep.strip() + b"}\n" + lines(list(stream(CHAT))))
    status, out, err = told(capsys, file)
    assert status == 0
    assert "18 requests" in out
    assert err.count("nested too deep") == 2


def test_names_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = list(stream(CHAT, causes.MODEL_CHANGED))
    for request in requests:
        request["headers"] = {"X-Session-Id": "\x1b[2J\u202e<script>"}
        if request["body"]["model"] != "m":
            request["body"]["model"] = "\x1b]0;x\x07"
    status, out, _ = told(capsys, write(tmp_path / "a.jsonl", lines(requests)))
    assert status == 1
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b" in out


def test_standard_input() -> None:
    """As in `zcat requests.jsonl.gz | warmroute doctor -`."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "doctor", "-", "--json"], input=lines(stream(CHAT)), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.load(io.BytesIO(done.stdout))["requests"] == 18


def test_what_is_not_in_the_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (previous,) = (kind for kind in KINDS if kind.name == "responses-previous")
    referring = [request | {"body": request["body"] | {"previous_response_id": "resp_1"}} for request in stream(previous)]
    claude = list(stream(KINDS[2]))
    found = as_json(capsys, write(tmp_path / "a.jsonl", lines([*referring, *claude])))
    assert found["requests"] == 18
    assert any("18 requests continue objects" in note for note in found["notes"])
    assert any("18 requests of Messages begin with" in note for note in found["notes"])
