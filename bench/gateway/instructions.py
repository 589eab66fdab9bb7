"""Instructions per request and per streamed chunk, counted by valgrind's callgrind: to compare two versions on any machine.

    python -m bench.gateway.instructions --tree build/compiled [--tree OTHER] [--only plain-2k] [--requests 100 --windows 3]

A tree is a folder with `gateway` and `router` in it: compiled by `hatch_build.py`, or a checkout. A gateway is started under
callgrind and warmed up; then its counters are set to zero, some requests are sent, one after the other on one connection, and
the counters are read: that is a window. The least of the windows counts: garbage collection and the gateway's timers fall into
some of them, and the more of these the longer a window lasts. Only the gateway's own process is counted, not the kernel.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.systems import mocks
from bench.measure.ports import free_ports
from bench.measure.prompts import Requests

START_S = 300.0  # valgrind is some 50 times slower, and all modules are imported under it
PROBES_S = 600  # apart: they do not belong to a request
INTERVAL_S = 0.02  # between chunks: each has to be read by itself, also under valgrind
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ONE_CHUNK = "stream-1"
MANY_CHUNKS = "stream-101"
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """size: of the body, bytes. chunks: of each streamed answer; 0: not streamed. share: of the requests of a window. path: of
    the dialect; the body is the same for chat and Messages, and has its turns as `input` for Responses, not to be kept.
    as_chat: the replica speaks chat only, so that the request and its answer are translated.
    """

    name: str
    size: int
    chunks: int = 0
    share: float = 1.0
    path: str = CHAT
    as_chat: bool = False


def _works() -> Iterator[Work]:
    yield Work("plain-2k", 2_000)
    yield Work("plain-32k", 32_000)
    yield from _streams("", CHAT, as_chat=False)
    for path in (MESSAGES, RESPONSES):
        for as_chat in (False, True):
            name = path.rpartition("/")[2] + ("-as-chat" if as_chat else "")
            yield Work(f"{name}-2k", 2_000, path=path, as_chat=as_chat)
            yield Work(f"{name}-32k", 32_000, path=path, as_chat=as_chat)
            yield from _streams(f"{name}-", path, as_chat=as_chat)


def _streams(name: str, path: str, *, as_chat: bool) -> Iterator[Work]:
    yield Work(f"{name}{ONE_CHUNK}", 2_000, 1, path=path, as_chat=as_chat)
    yield Work(f"{name}{MANY_CHUNKS}", 2_000, 101, 0.1, path, as_chat)


WORKS = tuple(_works())


class CountFailed(Exception):
    """The gateway did not start, did not answer or was not counted."""


def per_request(tree: Path, work: Work, requests: int, windows: int, url: str) -> float:
    """Instructions of one request. Raises CountFailed."""
    requests = max(1, round(requests * work.share))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (port,) = free_ports(1)
        process = _start(tree, port, url, folder)
        try:
            _await_start(process, port)
            _control(process, "--instr=on")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
            bodies = bodies_of(work)
            _send(connection, work.path, bodies, requests)
            counts = [_window(process, connection, work.path, bodies, requests, folder / str(n)) for n in range(windows)]
            connection.close()
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            raise CountFailed(f"{tree}, {work.name}: {error}") from error
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return min(counts) / requests


def _start(tree: Path, port: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    config = {"listen": f"127.0.0.1:{port}", "pools": [{"replicas": [url]}], "health": {"interval_s": PROBES_S}}
    (folder / "config.yaml").write_text(json.dumps(config), "utf-8")
    count = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
    return subprocess.Popen(
        [*count, sys.executable, "-m", "gateway", "serve", "--config", str(folder / "config.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"},
    )


def _await_start(process: subprocess.Popen[bytes], port: int) -> None:
    """Until it knows its replica."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise CountFailed(f"the gateway ended with {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200 and process.poll() is None:  # no other program that took the port
                return
        except OSError:
            """It does not listen yet."""
        finally:
            connection.close()
        time.sleep(0.5)
    raise CountFailed(f"no answer in {START_S:.0f} s")


def _window(
    process: subprocess.Popen[bytes],
    connection: http.client.HTTPConnection,
    path: str,
    bodies: Iterator[bytes],
    requests: int,
    window: Path,
) -> int:
    """Instructions of `requests` requests. window: a name in the folder of callgrind's files."""
    _control(process, "--zero")
    _send(connection, path, bodies, requests)
    _control(process, f"--dump=window-{window.name}")
    for file in window.parent.glob("out.*"):
        text = file.read_text("utf-8")
        if f"window-{window.name}" in text and (found := _TOTAL.search(text)):
            return int(found[1])
    raise CountFailed("callgrind wrote no total")


def _control(process: subprocess.Popen[bytes], what: str) -> None:
    command = ["callgrind_control", what, str(process.pid)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=START_S)


def bodies_of(work: Work) -> Iterator[bytes]:
    for request in Requests(work.size, work.chunks):
        body = request.partition(b"\r\n\r\n")[2]
        if work.path == RESPONSES:
            body = body.replace(b'"messages":', b'"store":false,"input":', 1)
            body = body.replace(b'"max_tokens":', b'"max_output_tokens":', 1)
        yield body


def _send(connection: http.client.HTTPConnection, path: str, bodies: Iterator[bytes], requests: int) -> None:
    """One after the other. Raises CountFailed."""
    for _ in range(requests):
        connection.request("POST", path, next(bodies), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise CountFailed(f"status {response.status}")


def report(trees: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> Iterator[str]:
    """Thousands of instructions; with several trees also each one's difference from the first."""
    others = [f"{tree} | to the first" for tree in trees[1:]]
    yield f"| thousands of instructions | {' | '.join((trees[0], *others))} |"
    yield f"|---|{'--:|' * (2 * len(trees) - 1)}"
    for name, counts in rows:
        first, *rest = counts
        cells = [f"{first / 1000:,.1f}", *(f"{each / 1000:,.1f} | {each / first - 1:+.1%}" for each in rest)]
        yield f"| {name} | {' | '.join(cells)} |"


def with_chunks(rows: Sequence[tuple[str, Sequence[float]]]) -> Iterator[tuple[str, Sequence[float]]]:
    """Two lengths of stream become one chunk: their difference, by the chunks between them."""
    known = dict(rows)
    for name, counts in rows:
        if not name.endswith((ONE_CHUNK, MANY_CHUNKS)):
            yield f"a request, {name}", counts
        elif name.endswith(MANY_CHUNKS) and (short := known.get(name.removesuffix(MANY_CHUNKS) + ONE_CHUNK)):
            kind = f", {name}".removesuffix(MANY_CHUNKS).rstrip("-, ")
            yield f"a request{kind}, streamed, one chunk", short
            yield f"a further chunk{kind}", [(long - one) / 100 for one, long in zip(short, counts, strict=True)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [work.name for work in WORKS]
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.instructions", description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", required=True, metavar="FOLDER", help="once for each version")
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="in a window; default: 100")
    parser.add_argument("--windows", type=int, default=3, metavar="N", help="of which the least counts; default: 3")
    options = parser.parse_args(arguments)
    for tree in options.tree:
        if not (tree / "gateway").is_dir():  # else the installed gateway would be counted
            parser.error(f"{tree} has no gateway")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows, cores = [], os.sched_getaffinity(0)
    with mocks(1, INTERVAL_S, cores) as (url,), mocks(1, INTERVAL_S, cores, chat_only=True) as (chat_only,):
        for work in WORKS:
            if not options.only or work.name in options.only:
                replica = chat_only if work.as_chat else url
                counts = [per_request(tree, work, options.requests, options.windows, replica) for tree in options.tree]
                print(f"{work.name}: {', '.join(f'{each:,.0f}' for each in counts)}", file=sys.stderr, flush=True)
                rows.append((work.name, counts))
    print("\n".join(report([str(tree) for tree in options.tree], list(with_chunks(rows)))))


if __name__ == "__main__":
    main()
