"""What traces cost a gateway: CPU of its whole process for each request, and how long the client waits.

    python -m bench.tracing [--requests 2000] [--rounds 5] [--base TREE] [--out bench/reports]

Writes tracing.md. One client sends plain chats of 2 kB, one after the other, to a gateway before a mock replica. The cases take
turns in rounds, and each case's median counts. base: a folder with an earlier `gateway` and `router`, for comparison. The
gateway is the checkout: not compiled.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.gateway.systems import is_ready, mocks
from bench.measure.cpu import cpu_seconds
from bench.measure.machine import REPORTS, ROOT, command, versions
from bench.measure.ports import free_ports
from bench.measure.prompts import Requests

START_S = 60.0
WARM = 300  # requests that are not counted
SIZE = 2_000  # bytes of a body
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
_SPANS = re.compile(r'^warmroute_spans_(exported_total|dropped_total\{reason="\w+"\}) (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Case:
    """tracing: of the configuration, None: the section is left out. headers: of each request. tree: of the gateway."""

    name: str
    tracing: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tree: Path = ROOT


@dataclass(slots=True)
class Found:
    """One case: of each round the CPU per request and the client's median and 99th percentile, in microseconds. spans: of the
    last round, as the gateway counts them.
    """

    cpu: list[float] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    spans: Mapping[str, float] = field(default_factory=dict)


class _Taker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """The URL of one that takes everything."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taker)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def cases(url: str, dead: str, base: Path | None) -> list[Case]:
    found = [Case("before traces existed", tree=base)] if base else []
    unsampled = {"endpoint": url, "sample": 0}
    return [
        *found,
        Case("off"),
        Case("on, not drawn", unsampled),
        Case("on, a traceparent that is not sampled", unsampled, {"traceparent": f"00-{TRACE}-00"}),
        Case("on, each request traced", {"endpoint": url, "sample": 1}),
        Case("on, each request traced, the collector is gone", {"endpoint": dead, "sample": 1}),
    ]


def measure(case: Case, replica: str, requests: int, found: Found, folder: Path) -> None:
    """One round."""
    port, metrics = free_ports(2)
    config: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "metrics_listen": f"127.0.0.1:{metrics}", "log_level": "warning"}
    config |= {"admin_listen": "off", "pools": [{"replicas": [replica]}], "state": {"url": "off"}, "snapshot": {"file": "off"}}
    if case.tracing is not None:
        config["tracing"] = dict(case.tracing)
    file = folder / f"{port}.yaml"
    file.write_text(json.dumps(config), "utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "--config", str(file)],
        env={**os.environ, "PYTHONPATH": str(case.tree.resolve()), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await(lambda: is_ready(port))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        _send(connection, case, WARM)
        before = cpu_seconds(process.pid)
        waits = sorted(_send(connection, case, requests))
        time.sleep(1.5)  # what the exporter still does belongs to them
        found.cpu.append((cpu_seconds(process.pid) - before) / requests * 1e6)
        found.median.append(statistics.median(waits) * 1e6)
        found.late.append(waits[len(waits) * 99 // 100] * 1e6)
        found.spans = _spans(metrics)
        connection.close()
    finally:
        process.kill()
        process.wait()


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the gateway does not answer in {START_S:.0f} s")
        time.sleep(0.1)


def _send(connection: http.client.HTTPConnection, case: Case, requests: int) -> list[float]:
    """How long each took, in seconds."""
    waits, headers = list[float](), {"Content-Type": "application/json", **case.headers}
    for request in Requests(SIZE, 0):
        body = request.partition(b"\r\n\r\n")[2]
        begun = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read()
        waits.append(time.perf_counter() - begun)
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        if len(waits) == requests:
            break
    return waits


def _spans(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in _SPANS.findall(text)}


def report(rows: Mapping[str, Found], requests: int, rounds: int, how: str) -> str:
    lines = [
        "# What traces cost",
        "",
        f"`{how}`: {requests:,} plain chats of {SIZE:,} bytes, one after the other, {rounds} rounds of all cases; medians.",
        "CPU is that of the gateway's whole process, not compiled, the exporting thread included (of all rounds).",
        f"{versions()}.",
        "",
        "| traces | CPU, us a request | client, median us | client, p99 us | spans exported | spans dropped |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in rows.items():
        cpu = f"{statistics.median(found.cpu):,.0f} ({min(found.cpu):,.0f} to {max(found.cpu):,.0f})"
        waits = f"{statistics.median(found.median):,.0f} | {statistics.median(found.late):,.0f}"
        dropped = sum(value for key, value in found.spans.items() if key.startswith("dropped"))
        lines.append(f"| {name} | {cpu} | {waits} | {found.spans.get('exported_total', 0):,.0f} | {dropped:,.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tracing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--out", type=Path, default=REPORTS)
    options = parser.parse_args(arguments)
    (dead,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, mocks(1, 0.0, os.sched_getaffinity(0)) as urls, collector() as url:
        todo = cases(url, f"http://127.0.0.1:{dead}", options.base)
        rows = {case.name: Found() for case in todo}
        for _ in range(options.rounds):
            for case in todo:
                measure(case, urls[0], options.requests, rows[case.name], Path(folder))
    text = report(rows, options.requests, options.rounds, command("bench.tracing", arguments))
    (options.out / "tracing.md").write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
