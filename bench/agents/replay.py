"""Recorded coding agents through a real gateway, as Claude Code sends them, beside what the simulator says of the same sample.

    python -m bench.agents --replay [--hours 0.25] [--speed 20] [--only warmroute,round-robin]

The workload is `warmroute simulate`'s: the same sessions, users, think times and horizon, in a closed loop. It is looked for in
$WARMROUTE_TRACES, else in ../shared/traces beside the checkout; without it, the generator `agents` makes one. Time passes
`speed` times as fast. All sizes are SHRINK times smaller, on both sides of a gateway alike: a token of the trace is a byte
here, its block a block of the stand-ins. Prompts become Messages with a new billing header each, moving markers, and the
session's id in header and metadata; sub-agents run under their session's id; where a session is compacted, its messages are cut
off and new ones follow. --kinds messages: the same without header, markers and session.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.agents.engine import BLOCK, Model
from bench.agents.kinds import MODEL, Body, as_claude_code
from bench.agents.reading import Failed, read
from bench.agents.rendering import TOKEN_BYTES
from bench.agents.run import ANSWER_S, Plan, rows, standins
from bench.gateway.systems import Setting, System, started
from bench.measure.cpu import cores, pinned
from bench.measure.machine import trace_folder
from gateway.commands import simulate
from gateway.config.schema import RoutingConfig
from router.simulation.fleet import FleetSpec, Result
from router.simulation.generators import GENERATORS
from router.simulation.workloads import AGENT_BLOCK, SimulatedRequest, WorkloadSource
from router.types import KEY_BYTES

TRACE = "claude_code_agentic.jsonl.gz"
GENERATED = "agents"
REPLICAS = 8
SHRINK = TOKEN_BYTES
PLAIN, CLAUDE_CODE = "messages", "messages-claude-code"
TAG = "replay"  # by which the stand-ins know our requests
LANES = 8  # prompts of a session that are remembered, to know what continues which
_TEXT_OF_KEY = AGENT_BLOCK // (2 * KEY_BYTES)  # times that its digits are repeated

assert AGENT_BLOCK == BLOCK * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Sample:
    """A part of a workload. heads: of a session's requests, in their order, the blocks of tools and system prompt."""

    name: str
    workload: simulate.Workload
    spec: FleetSpec
    seed: int
    heads: Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Replayed:
    """One run over HTTP. ttft: seconds of the trace's time. late: the same, by which requests were sent too late."""

    system: str
    kind: str
    requests: int = 0
    hit_ratio: float = 0.0
    ttft: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def sample(hours: float, seed: int) -> Sample:
    """Raises TraceError."""
    path = trace_folder() / TRACE
    name = str(path) if path.exists() else simulate.GENERATED + GENERATED
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    words = [name, "--hours", str(hours), "--seed", str(seed), "--replicas", str(REPLICAS)]
    heads = _heads_of_file(path) if path.exists() else {}
    return Sample(
        path.name if path.exists() else name, simulate.load(parser.parse_args(words)), FleetSpec(REPLICAS), seed, heads
    )


def _heads_of_file(path: Path) -> dict[str, list[int]]:
    with gzip.open(path) as lines:
        return {str(number): list(_heads(json.loads(line))) for number, line in enumerate(lines, 1)}


def _heads(row: Mapping[str, Any]) -> Iterator[int]:
    """In the order in which the workload sends them."""
    own = (row.get("tool_tokens", 0) + row.get("system_tokens", 0)) // AGENT_BLOCK
    for request in row["requests"]:
        if "requests" in request:
            yield from _heads(request)
        else:
            yield own


def simulated(given: Sample, policy: str) -> Result:
    result, _ = simulate.replay(policy, given.spec, given.workload, given.seed)
    return result


# -- from prompts to messages


@dataclass(slots=True)
class Session:
    """What one has sent: its last prompts, each with the blocks at which its messages begin. A user's message is first, then
    they alternate.
    """

    sent: int = 0
    lanes: list[tuple[bytes, list[int]]] = field(default_factory=list)

    def bounds(self, keys: bytes, head: int) -> list[int]:
        """Where the messages of this prompt begin: as in the prompt that it goes on from, then two new ones."""
        blocks = len(keys) // KEY_BYTES
        common, before = max(((_common(known, keys), places) for known, places in self.lanes), default=(0, []))
        places = [place for place in before if place < common]
        if not places:
            places = [min(head, blocks - 1)]
        elif len(places) % 2 == 0:
            places.append(common)  # cut within an answer: a user's message follows what is left of it
        elif blocks - common > 1:
            places += [common, (common + blocks + 1) // 2]
        self.lanes = [*self.lanes[1 - LANES :], (keys, places)]
        return list(places)


def _common(one: bytes, other: bytes) -> int:
    """The leading blocks that two prompts share. O(bytes), in a few comparisons of memory."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * KEY_BYTES] == other[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def text(keys: bytes) -> str:
    return "".join(keys[at : at + KEY_BYTES].hex() * _TEXT_OF_KEY for at in range(0, len(keys), KEY_BYTES))


def message(number: int, said: str) -> dict[str, Any]:
    """Of a user with the result of the call before it, or of an assistant with a call."""
    if number % 2:
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash", "input": {}}
        return {"role": "assistant", "content": [{"type": "text", "text": said}, use]}
    block = (
        {"type": "tool_result", "tool_use_id": f"toolu_{number - 1}", "content": said}
        if number
        else {"type": "text", "text": said}
    )
    return {"role": "user", "content": [block]}


def request_body(request: SimulatedRequest, places: Sequence[int]) -> dict[str, Any]:
    """Its prompt as Messages."""
    keys = request.prompt.keys
    ends = [*(place * KEY_BYTES for place in places[1:]), len(keys)]
    pieces = [keys[begin * KEY_BYTES : end] for begin, end in zip(places, ends, strict=True)]
    return {
        "model": MODEL,
        "max_tokens": max(1, request.output_tokens // SHRINK),
        "stream": True,
        "system": [{"type": "text", "text": f"[turn {TAG}] {text(keys[: places[0] * KEY_BYTES])}"}],
        "messages": [message(number, text(piece)) for number, piece in enumerate(pieces)],
    }


# -- over HTTP


class Replay:
    """The users."""

    def __init__(self, url: str, given: Sample, speed: float, result: Replayed) -> None:
        self._url = f"{url}/v1/messages"
        self._sample = given
        self._speed = speed
        self._result = result
        self._sessions: dict[str, Session] = {}
        self._chance = random.Random(given.seed)

    async def run(self) -> None:
        source, loop = self._sample.workload.source(), asyncio.get_running_loop()
        begun = loop.time()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            users = (self._user(http, source, begun, at, request) for at, request in source.begin())
            await asyncio.gather(*users)

    async def _user(
        self, http: aiohttp.ClientSession, source: WorkloadSource, begun: float, at: float, request: SimulatedRequest
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, begun + at / self._speed - loop.time()))
            body, headers = self._write(request)
            raw = orjson.dumps(body)
            self._result.late.append((loop.time() - begun) * self._speed - at)
            try:
                await self._send(http, raw, headers)
            except (Failed, aiohttp.ClientError, TimeoutError) as error:
                self._result.errors[str(error) or type(error).__name__] += 1
            following = source.after(request, (loop.time() - begun) * self._speed)
            if following is None:
                return
            at, request = following

    def _write(self, request: SimulatedRequest) -> Body:
        session = self._sessions.setdefault(request.session, Session())
        heads = self._sample.heads.get(request.session) or [GENERATORS[GENERATED].head // AGENT_BLOCK]  # type: ignore[attr-defined]
        head = heads[min(session.sent, len(heads) - 1)]
        session.sent += 1
        body = request_body(request, session.bounds(request.prompt.keys, head))
        headers = {"anthropic-version": "2023-06-01"}
        if self._result.kind == PLAIN:
            return body, headers
        return as_claude_code(body, headers, f"session-{request.session}", self._chance)

    async def _send(self, http: aiohttp.ClientSession, raw: bytes, headers: Mapping[str, str]) -> None:
        """Raises Failed."""
        now = asyncio.get_running_loop().time
        begun = now()
        async with http.post(self._url, data=raw, headers={**headers, "Content-Type": "application/json"}) as response:
            reply = await read(response, now)
        self._result.ttft.append((reply.first - begun) * self._speed)


def replayed(system: System, kind: str, given: Sample, speed: float, folder: Path) -> Replayed:
    """One system in front of stand-ins as large and fast as the simulator's. Raises NotStarted."""
    system_cores, load_cores = cores()
    spec, result = given.spec, Replayed(system.name, kind)
    rates = (spec.prefill_rate * speed / SHRINK, spec.decode_rate * speed / SHRINK)
    model = Model(spec.kv_tokens // SHRINK, *rates, batch=spec.batch_limit)
    plan = Plan(replicas=spec.replicas, model=model, answer_tokens=0)
    with standins(plan, load_cores) as urls, started(_shrunk(system, speed), urls, folder, system_cores) as running:
        with pinned(load_cores):
            asyncio.run(Replay(f"http://127.0.0.1:{running.port}", given, speed, result).run())
        found = [row for row in rows(urls[0]) if row.tag == TAG]
    result.requests = len(found)
    result.hit_ratio = sum(row.cached for row in found) / max(1, sum(row.prompt for row in found))
    return result


def _shrunk(system: System, speed: float) -> System:
    """Ours, with blocks of as many tokens as the simulator's, and a memory that fades as fast as time passes."""
    if system.package != "warmroute":
        return system
    routing = RoutingConfig()

    def command(at: Setting) -> list[str]:
        file = at.folder / "replay.yaml"
        smaller = f"block_bytes: {routing.block_bytes // SHRINK}, ttl_s: {math.ceil(routing.ttl_s / speed)}"
        file.write_text(f"routing: {{{smaller}}}\n", "utf-8")
        return [*system.command(at), "--config", str(file)]

    return dataclasses.replace(system, command=command)


def report(made_by: str, given: Sample, speed: float, bounds: Sequence[Result], found: Sequence[Replayed]) -> Iterator[str]:
    spec = given.spec
    yield "# Coding agents, replayed over HTTP\n"
    yield f"{made_by}\n"
    yield (
        f"{given.name}, {given.workload.horizon_s / 3600:g} h of it, as Messages, {speed:g} times as fast;"
        f" {spec.replicas} stand-ins of {spec.kv_tokens:,} KV tokens (all sizes {SHRINK} times smaller). Times are the"
        " trace's.\n"
    )
    yield "| | requests | tokens cached | TTFT mean, s | p50 | p99 | sent late, mean s | errors |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for one in bounds:
        times = f"{one.ttft_mean_s:.2f} | {one.ttft_p50_s:.2f} | {one.ttft_p99_s:.2f}"
        yield f"| simulator, {one.policy} | {one.requests} | {one.hit_ratio:.1%} | {times} | | |"
    for run in found:
        ttft = sorted(run.ttft) or [math.nan]
        times = f"{sum(ttft) / len(ttft):.2f} | {ttft[len(ttft) // 2]:.2f} | {ttft[int(0.99 * len(ttft))]:.2f}"
        late = sum(run.late) / max(1, len(run.late))
        hits = f"{run.requests} | {run.hit_ratio:.1%}"
        yield f"| {run.system}, {run.kind} | {hits} | {times} | {late:.2f} | {run.errors.total()} |"
    for run in found:
        for reason, count in run.errors.most_common(3):
            yield f"\n- {run.system}: {count} × {reason}"
