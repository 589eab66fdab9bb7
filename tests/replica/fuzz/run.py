"""A replica in a process of its own, clients that send it random bodies, and what must hold of both.

What must hold: every answer is complete (`replies`), and no server's error (but the documented one, of a format that cannot be
followed any further); an error has its API's shape and is short. /health is never silent for `SILENT_S` of the replica's own
doing. At the end no block is held, all can be freed, and the memory is what it was after the first bodies, or little more: both
times when nothing runs and large bodies are forgotten, so that no leak can hide beside the memory of what is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.measure.cpu import rss_bytes
from bench.measure.machine import ROOT
from bench.soak.health import OK, Answer
from tests.replica.fuzz.bodies import Sent, request
from tests.replica.fuzz.replies import Reply, missing

SILENT_S: Final = 0.2
LONGEST_ERROR: Final = 2048  # bytes
ANSWER_S: Final = 120.0
READY_S: Final = 300.0
WARM_SHARE: Final = 0.5  # of the time; the memory after it is what the end is compared with
RETURNED_S: Final = 3.0  # a replica gives memory back 2 s after large bodies
MORE_MB: Final = 96  # what the allocators make of bodies of all sizes is a little more each time, for some minutes
_READY: Final = re.compile(rb" on http://127\.0\.0\.1:(\d+)")
DOCUMENTED: Final = "cannot follow this format any further"


@dataclass(slots=True)
class Found:
    """What came of the requests, and what is wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health: list[Answer] = field(default_factory=list)
    bytes: int = 0
    memory: list[float] = field(default_factory=list)  # MB, ten times a second
    warm_mb: float = 0.0
    end_mb: float = 0.0
    peak_mb: float = 0.0

    def blame(self, sent: Sent, message: str) -> None:
        self.wrong.append(f"{sent.kind} {sent.path} of {len(sent.body)} bytes {sent.body[:160]!r}: {message[:400]}")

    @property
    def silent_s(self) -> float:
        """The longest silence, without what other processes on the machine took."""
        return max((answer.took_s - answer.ready_s for answer in self.health), default=0.0)

    def _slowest(self) -> list[Answer]:
        return sorted(self.health, key=lambda answer: answer.ready_s - answer.took_s)[:5]

    def _tenths(self) -> list[float]:
        size = max(1, len(self.memory) // 10)
        return [min(self.memory[at : at + size]) for at in range(0, size * 10, size) if at < len(self.memory)]

    def report(self) -> str:
        late = sum(answer.took_s > SILENT_S for answer in self.health)
        took = max((answer.took_s for answer in self.health), default=0.0)
        rows = [
            f"{self.outcomes.total()} requests, {self.bytes / 1e6:.0f} MB",
            f"/health: asked {len(self.health)} times, silent for {self.silent_s * 1e3:.0f} ms at most "
            f"({took * 1e3:.0f} ms with what other processes took; {late} above {SILENT_S * 1e3:.0f} ms)",
            *(
                f"  took {one.took_s:.3f} s: the replica ran for {one.ran_s:.3f}, others for {one.ready_s:.3f}"
                for one in self._slowest()
            ),
            f"memory: {self.warm_mb:.0f} MB at rest after the first bodies, {self.peak_mb:.0f} MB at most, "
            f"{self.end_mb:.0f} MB at rest at the end",
            f"memory, the least in each tenth of the time: {', '.join(f'{mb:.0f}' for mb in self._tenths())}",
            *(f"  {count:>7}  {kind}" for kind, count in sorted(self.outcomes.items())),
            *(f"WRONG: {each}" for each in self.wrong),
        ]
        return "\n".join(rows)


@dataclass(slots=True)
class Replica:
    """A replica's process. log: the file of what it prints, with its stacks when it was late."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def mb(self) -> float:
        return rss_bytes(self.process.pid) / 1e6


@contextlib.contextmanager
def replica(log: Path, *options: str, module: str = "tests.replica.fuzz.server") -> Iterator[Replica]:
    """One that is ready; it is stopped at the end. module: what is started."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", module, "--port", "0", *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + READY_S
        while (ready := _READY.search(log.read_bytes())) is None:
            assert process.poll() is None, log.read_text("utf-8", "replace")[-2000:]
            assert time.monotonic() < until, "it does not become ready"
            time.sleep(0.1)
        yield Replica(process, int(ready[1]), log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(port: int, sent: Sent, *, get: bool = False, leave_s: float | None = None) -> Reply:
    """leave_s: the client leaves then."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    except OSError:
        return Reply(0, b"cannot connect")
    try:
        lines = [f"{'GET' if get else 'POST'} {sent.path} HTTP/1.1", "Host: a", "Connection: close"]
        head = "\r\n".join([*lines, f"Content-Length: {len(sent.body)}", "", ""])
        async with asyncio.timeout(leave_s or ANSWER_S):
            writer.write(head.encode() + sent.body)
            return Reply.of(await received(reader))
    except TimeoutError:
        return Reply(-1 if leave_s else 0, b"no answer in time")
    finally:
        writer.transport.abort()


async def received(reader: asyncio.StreamReader) -> bytes:
    """All that comes, also before a reset: a replica may refuse a body unread."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 20):
            data += part
    return bytes(data)


def judge(found: Found, sent: Sent, reply: Reply) -> None:
    status, body = reply.status, reply.body
    found.outcomes[f"{sent.kind}: {status if status > 0 else 'left'}"] += 1
    found.bytes += len(sent.body)
    if status == -1:
        return
    if status == 0:
        found.blame(sent, f"no answer: {body!r}")
    elif status >= 500 or b'"server_error"' in body or b'"api_error"' in body:
        if DOCUMENTED.encode() not in body and b"queue_full" not in body:
            found.blame(sent, f"{status} {body[:300]!r}")
    elif status >= 400:
        _judge_error(found, sent, reply)
    if status == 200 and (lacking := missing(sent.path, reply)):
        found.blame(sent, f"a 200 that lacks {lacking}")


def _judge_error(found: Found, sent: Sent, reply: Reply) -> None:
    status, body = reply.status, reply.body
    if len(body) > LONGEST_ERROR:
        found.blame(sent, f"an error of {len(body)} bytes: {body[:200]!r}")
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        found.blame(sent, f"{status} in no API's shape: {body[:200]!r}")
    else:
        wanted = {"type", "message"} if "/v1/messages" in sent.path else {"message", "type", "param", "code"}
        if set(error) != wanted:
            found.blame(sent, f"{status} in another API's shape: {body[:200]!r}")


async def fuzz(server: Replica, seconds: float, seed: int, clients: int = 4) -> Found:
    """seconds: for how long bodies are sent."""
    found, chances = Found(), [Random(f"{seed} {number}") for number in range(clients)]
    watching = [asyncio.create_task(_weigh(server, found)), asyncio.create_task(_watch(server, found))]
    try:
        await _send(server, found, chances, WARM_SHARE * seconds)
        if server.process.poll() is None:
            found.warm_mb = await _mb_at_rest(server)
        await _send(server, found, chances, (1 - WARM_SHARE) * seconds)
        await _settle(server, found)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    if found.silent_s > SILENT_S:
        found.wrong.append(f"/health was silent for {found.silent_s * 1e3:.0f} ms: {server.log} has the stacks")
    failed = Counter(answer.what for answer in found.health if answer.what != OK)
    if failed:
        found.wrong.append(f"/health answered {dict(failed)}")
    return found


async def _send(server: Replica, found: Found, chances: Sequence[Random], seconds: float) -> None:
    """Each client sends one body after the other, until time is up."""
    until = time.monotonic() + seconds

    async def client(chance: Random) -> None:
        while time.monotonic() < until and server.process.poll() is None:
            sent = await asyncio.to_thread(request, chance)
            leave_s = chance.choice([None, None, None, chance.uniform(0.01, 2), 20.0])
            if sent.leave_s is not None:
                leave_s = min(leave_s or sent.leave_s, sent.leave_s)
            judge(found, sent, await ask(server.port, sent, leave_s=leave_s))

    await asyncio.gather(*map(client, chances))


async def _weigh(server: Replica, found: Found) -> None:
    while server.process.poll() is None:
        found.memory.append(server.mb)
        found.peak_mb = max(found.peak_mb, found.memory[-1])
        await asyncio.sleep(0.1)


async def _watch(server: Replica, found: Found) -> None:
    """Read what the process that asks for /health prints."""
    command = (sys.executable, "-m", "tests.replica.fuzz.health", str(server.port), str(server.process.pid))
    asking = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert asking.stdout is not None
    try:
        async for line in asking.stdout:
            found.health.append(Answer.of(line.decode()))
    finally:
        asking.kill()
        await asking.wait()


async def _settle(server: Replica, found: Found) -> None:
    """All that was asked for ends; then nothing is held any more."""
    if server.process.poll() is not None:
        found.wrong.append(f"the process ended with {server.process.returncode}: {server.log}")
        return
    stats = await _idle(server)
    blocks = stats["cache"]["blocks"]
    if (
        stats["batch"]
        or stats["queue"]
        or stats["cache"]["usage"]
        or blocks["held"]
        or blocks["idle"] + blocks["free"] != blocks["total"]
    ):
        found.wrong.append(f"not idle at the end: {stats['batch']} run, {stats['queue']} wait, {stats['cache']}")
    found.end_mb = await _mb_at_rest(server, found.warm_mb + MORE_MB)
    if found.end_mb > found.warm_mb + MORE_MB:
        found.wrong.append(f"{found.end_mb:.0f} MB at the end, {found.warm_mb:.0f} MB after the first bodies")
    reset = (await ask(server.port, Sent("", "/reset_prefix_cache", b""))).body
    blocks = (await _stats(server))["cache"]["blocks"]
    if b"true" not in reset or blocks["free"] != blocks["total"]:
        found.wrong.append(f"blocks are lost: {reset!r} {blocks}")


async def _mb_at_rest(server: Replica, enough_mb: float = 0.0) -> float:
    """The least memory within RETURNED_S once nothing runs, or less than `enough_mb` earlier."""
    await _idle(server)
    until, least = time.monotonic() + RETURNED_S, math.inf
    while time.monotonic() < until and least > enough_mb:
        least = min(least, server.mb)
        await asyncio.sleep(0.1)
    return least


async def _idle(server: Replica) -> dict[str, Any]:
    """The statistics once nothing runs or waits, or after a minute."""
    until = time.monotonic() + 60
    while True:
        stats = await _stats(server)
        if not (stats["batch"] or stats["queue"] or stats["cache"]["usage"]) or time.monotonic() > until:
            return stats
        await asyncio.sleep(0.2)


async def _stats(server: Replica) -> dict[str, Any]:
    reply = await ask(server.port, Sent("", "/stats", b""), get=True)
    assert reply.status == 200, reply
    found: dict[str, Any] = json.loads(reply.body)
    return found


def options(engine: str, more: Sequence[str]) -> list[str]:
    if engine == "sim":
        # So fast that no answer has to wait long for others: one body can have 64 prompts that are as long as the context.
        return ["--engine", "sim", "--prefill-rate", "1000000", "--decode-rate", "10000", *more]
    # A small cache: its pages count as memory once they are written to, which should be in the first part of the time.
    return ["--threads", "1", "--kv-tokens", "4096", *more]
