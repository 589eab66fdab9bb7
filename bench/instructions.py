"""Instructions per request and per streamed chunk, counted by valgrind's callgrind: to compare two versions on any machine.

    python -m bench.instructions --tree build/compiled [--tree OTHER] [--only plain-2k] [--few 100 --many 300]

A tree is a folder with `gateway` and `router` in it: compiled by `hatch_build.py`, or a checkout. Each run starts a gateway
under callgrind, sends it some requests, one after the other on one connection, and ends it. Two runs that differ only in the
number of requests differ in instructions by that number of requests; what starting and ending costs cancels out. Garbage
collection, health probes and log lines are in it. Only the gateway's own process is counted, not the kernel.
"""

from __future__ import annotations

import argparse
import http.client
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

from bench.prompts import Requests
from bench.systems import free_ports, mocks

START_S = 300.0  # valgrind is some 50 times slower, and all modules are imported under it
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """size: of the body, bytes. chunks: of each streamed answer; 0: not streamed."""

    name: str
    size: int
    chunks: int = 0


WORKS = (Work("plain-2k", 2_000), Work("plain-32k", 32_000), Work("stream-1", 2_000, 1), Work("stream-101", 2_000, 101))


class CountFailed(Exception):
    """The gateway did not start, did not answer or was not counted."""


def count(tree: Path, work: Work, requests: int, url: str) -> int:
    """Instructions of a gateway that starts, answers so many requests and ends. Raises CountFailed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        (port,) = free_ports(1)
        process = subprocess.Popen(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--combine-dumps=yes"),
                *(sys.executable, "-m", "gateway.cli", "serve", "--host", "127.0.0.1", "--port", str(port), "--replica", url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"},
        )
        try:
            _await_start(process, port)
            _send(port, work, requests)
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)
        except (OSError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
            raise CountFailed(f"{tree}, {work.name}: {error}") from error
        finally:
            process.kill()
            process.wait()
        found = _TOTAL.findall(out.read_text("utf-8")) if out.exists() else []
        if not found:
            raise CountFailed(f"{tree}, {work.name}: callgrind wrote no total")
        return int(found[-1])


def _await_start(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise CountFailed(f"the gateway ended with {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        try:
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    raise CountFailed(f"no answer in {START_S:.0f} s")


def _send(port: int, work: Work, requests: int) -> None:
    """One after the other, on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    bodies = (request.partition(b"\r\n\r\n")[2] for request in Requests(work.size, work.chunks))
    for _, body in zip(range(requests), bodies, strict=False):
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise CountFailed(f"status {response.status}")
    connection.close()


def per_request(tree: Path, work: Work, few: int, many: int, url: str) -> float:
    """Instructions of one request."""
    return (count(tree, work, many, url) - count(tree, work, few, url)) / (many - few)


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
        if not name.startswith("stream"):
            yield f"a request, {name}", counts
    if "stream-1" in known and "stream-101" in known:
        yield "a request, streamed, one chunk", known["stream-1"]
        pairs = zip(known["stream-1"], known["stream-101"], strict=True)
        yield "a further chunk", [(long - short) / 100 for short, long in pairs]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [work.name for work in WORKS]
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", required=True, metavar="FOLDER", help="once for each version")
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--few", type=int, default=100, metavar="N", help="requests of the shorter run; default: 100")
    parser.add_argument("--many", type=int, default=300, metavar="N", help="requests of the longer run; default: 300")
    options = parser.parse_args(arguments)
    if not options.few < options.many:
        parser.error("--many must be more than --few")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = []
    with mocks(1, 0.001, os.sched_getaffinity(0)) as (url,):
        for work in WORKS:
            if not options.only or work.name in options.only:
                counts = [per_request(tree, work, options.few, options.many, url) for tree in options.tree]
                print(f"{work.name}: {', '.join(f'{each:,.0f}' for each in counts)}", file=sys.stderr, flush=True)
                rows.append((work.name, counts))
    print("\n".join(report([str(tree) for tree in options.tree], list(with_chunks(rows)))))


if __name__ == "__main__":
    main()
