"""`warmroute replica fit` against a simulated replica on a socket, and against servers that it cannot measure."""

import contextlib
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import pytest

from replica.fit.command import main
from replica.flags import parser
from tests.replica.test_process import running

FAST = (
    "--speed",
    "10",  # much faster, and a busy machine does not see streams beside each other
    "--prefill-chunk",
    "128",
    "--step-ms",
    "30",
    "--attention-ms",
    "900",
    "--max-batch",
    "4",
    "--kv-tokens",
    "1600",
)


def test_a_simulated_replica_is_measured_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """In one of three tries: on a busy machine streams may arrive in one piece, which is refused, or one after the other."""
    expected = ("sim", 1600, 16, 4)
    found = []
    with running(1, *FAST) as (_, urls):
        while expected not in found and len(found) < 3:
            status = main([urls[0] + "/", "--json"])
            out, err = capsys.readouterr()
            if status:
                found.append(err)
                continue
            body = json.loads(out)
            command = shlex.split(body["command"])
            assert command[:2] == ["warmroute", "replica"]
            options = parser().parse_args(command[2:])
            found.append((options.engine, options.kv_tokens, options.block_size, options.max_batch))
    assert found[-1] == expected, found
    assert {sample["kind"] for sample in body["samples"]} >= {"cold", "resent", "decoding"}
    assert all(sample["measured_s"] > 0 for sample in body["samples"])
    assert "a new prompt of 64 tokens, and again" in err
    assert re.search(r"^round 1 of 3 took \d+ s\n(.+\n)+round 3 of 3 took \d+ s$", err, re.MULTILINE)


USAGE: Mapping[str, Any] = MappingProxyType(
    {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
)


class Server(BaseHTTPRequestHandler):
    """A replica that answers each prompt with two pieces; tests change its answers."""

    usage: Mapping[str, Any] | None = USAGE
    status = 200
    models = json.dumps({"data": [{"id": "m", "max_model_len": 2048}]})

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._answer(200 if found else 404, self.models)

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        pieces: list[dict[str, Any]] = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
        if self.usage is not None:
            tokens = min(len(prompt.split()), self.usage["prompt_tokens"])
            pieces.append({"choices": [], "usage": dict(self.usage) | {"prompt_tokens": tokens}})
        self._answer(self.status, "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        body = text.encode(errors="surrogateescape")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(kind: type[Server] = Server, **changes: object) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ChangedServer", (kind,), changes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"usage": {"prompt_tokens": 64, "completion_tokens": 2}},
            "does not report cached tokens .*--enable-prompt-tokens-details",
        ),
        ({"usage": None}, "sent no usage"),
        ({"models": "<html>\nwelcome"}, "is not in OpenAI's format: <html> welcome"),
        ({"models": '{"data": []}'}, "it has no model"),
        ({"status": 503}, "answered 503"),
        ({"usage": USAGE}, "truncates: it took 64 tokens of a prompt of about 96"),
        ({"usage": USAGE | {"prompt_tokens": 4096}}, "had none of 128 tokens of a repeated prompt cached"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    changes: dict[str, object], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(**changes) as url:
        assert main([url]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith(f"warmroute replica fit: {url}")
    assert re.search(error, last), last
    assert not out


EVENTS: list[object] = [[1], 5, None, {"choices": 5}, {"usage": {"prompt_tokens": "x"}}, {"usage": [1]}, {"error": ["no"]}]


@pytest.mark.parametrize("event", [*map(json.dumps, EVENTS), "{nope", "[" * 100_000, "\udcff"])
def test_odd_events_are_an_error_in_one_line(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(Server):
        def do_POST(self) -> None:
            self._answer(200, f"data: {event}\n\n")

    with serving(Odd) as url:
        assert main([url]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "model", [{"id": 5}, {"id": None}, {"id": "m", "max_model_len": "4k"}, {"id": "m", "max_model_len": -1}, 7]
)
def test_odd_models_are_an_error_in_one_line(model: object, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(models=json.dumps({"data": [model]})) as url:
        assert main([url]) == 1
    assert "is not in OpenAI's format" in capsys.readouterr().err


def test_an_answer_without_end_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    class Endless(Server):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')

    with serving(Endless) as url:
        assert main([url]) == 1
    assert "does not honour max_tokens" in capsys.readouterr().err


def test_an_address_without_its_scheme_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:9001"]) == 1
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        assert main([url, "--model", "other"]) == 1
    assert "does not serve 'other': it has m" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        pass
    assert main([url]) == 1
    assert f"{url} does not answer" in capsys.readouterr().err
