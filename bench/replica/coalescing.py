"""What `--coalesce-ms` saves and what it costs: packets, the replica's CPU, and how evenly tokens come.

    python -m bench.replica.coalescing [--quick] [--out bench/reports]

Writes coalescing.md. Simulated replicas (50 tokens a second and answer) stream answers of 200 tokens to 16 and to 64 clients at
once. Packets: TCP segments with data, counted by the clients' kernel. The time from token to token is the clients': 0 for those
that come in one event. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure.cpu import cores, cpu_seconds, pinned
from bench.measure.machine import REPORTS, command, versions
from bench.measure.ports import free_ports

WAITS_MS, STREAMS, TOKENS = (0, 20, 50, 100), (16, 64), 200
DATA_SEGMENTS_IN = 152  # of Linux' struct tcp_info
ROUNDS = 3
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: replica\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """By all clients together. gaps: seconds."""

    packets: int = 0
    events: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


async def client(port: int, number: int, seen: Seen) -> None:
    body = {"prompt": f"stream {number} {time.time_ns()}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    text = json.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.perf_counter()
    writer.write((HEAD.format(len(text)) + text).encode())
    last, line = 0.0, b""
    while line != b"data: [DONE]\n":
        line = await reader.readline()
        if line.startswith(b"data: {"):
            now, words = time.perf_counter(), len(json.loads(line[6:])["choices"][0]["text"].split())
            if not words:
                continue  # the end, and why
            seen.events += 1
            seen.tokens += words
            if last:
                seen.gaps += [now - last, *[0.0] * (words - 1)]
            else:
                seen.firsts.append(now - begun)
            last = now
    connection: socket.socket = writer.get_extra_info("socket")
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    seen.packets += struct.unpack_from("I", info, DATA_SEGMENTS_IN)[0]
    writer.close()


async def load(port: int, streams: int, seen: Seen) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(client(port, number, seen))
            await asyncio.sleep(0.02 / streams)  # so that steps of different answers do not fall together


def measure(wait_ms: int, streams: int, rounds: int) -> Seen:
    ours, theirs = cores()
    (port,) = free_ports(1)
    flags = ["--engine", "sim", "--port", str(port), "--coalesce-ms", str(wait_ms)]
    with pinned(ours):
        replica = subprocess.Popen([sys.executable, "-m", "gateway", "replica", *flags], stderr=subprocess.PIPE, text=True)
    assert replica.stderr is not None
    with replica, pinned(theirs):
        try:
            replica.stderr.readline()  # it is ready
            asyncio.run(load(port, streams, Seen()))  # warms up
            seen = Seen()
            spent = cpu_seconds(replica.pid)
            for _ in range(rounds):
                asyncio.run(load(port, streams, seen))
            seen.cpu_s = cpu_seconds(replica.pid) - spent
        finally:
            replica.terminate()
    return seen


def report(found: Sequence[tuple[int, int, Seen]], made_by: str) -> Iterator[str]:
    yield "# Streams, gathered\n"
    yield f"{made_by}\n"
    yield "50 tokens a second and answer; per 1,000 tokens, and what a client sees.\n"
    yield "| streams | `--coalesce-ms` | packets | events | CPU ms | TTFT mean ms | from token to token mean ms | p99 ms |"
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|"
    for streams, wait_ms, seen in found:
        thousands = seen.tokens / 1000
        counts = f"{seen.packets / thousands:,.0f} | {seen.events / thousands:,.0f} | {seen.cpu_s * 1000 / thousands:.0f}"
        late = sorted(seen.gaps)[int(0.99 * len(seen.gaps))]
        times = (statistics.fmean(seen.firsts), statistics.fmean(seen.gaps), late)
        yield f"| {streams} | {wait_ms} | {counts} | {' | '.join(f'{each * 1000:.1f}' for each in times)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replica.coalescing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round in the place of three")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else ROUNDS
    found = [(streams, wait_ms, measure(wait_ms, streams, rounds)) for streams in STREAMS for wait_ms in WAITS_MS]
    text = "\n".join(report(found, f"Made by `{command('bench.replica.coalescing', arguments)}`: {versions()}.")) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "coalescing.md").write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
