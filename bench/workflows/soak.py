"""Many small runs of workflows with kills and failures of every kind, and a conservation law at their end.

    python -m bench.workflows.soak [--runs 100000] [--clients 48] [--minutes M] [--kill-s 20] [--out FILE]

One gateway, three simulated replicas that fail a share of their requests, a service for connectors that fails, answers garbage
or stays silent. Every --kill-s seconds one replica gets SIGKILL and starts again. Clients run documents (KINDS), leave in the
middle, cancel and delete. The exit status is 1 if the law is broken (`violations`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from bench.fleet.stage import GatewayProcess, ready
from bench.measure.cpu import rss_bytes
from bench.measure.machine import command, versions
from bench.measure.ports import free_ports
from bench.workflows.programs import prose

RUNS: Final = "/v1/workflows/runs"
REPLICAS: Final = 3
START_S: Final = 900.0  # a machine may be busy
CLIENT_S: Final = 900.0  # longer than a run may take (workflows.max_s)
SETTLE_S: Final = 420.0  # events of runs in the background are in memory for 300 s after their end
SAMPLES: Final = 20  # of memory
WARM: Final = 0.2  # the share of the runs after which memory is to be flat
GROW_MB: Final = 24.0
AT_REST: Final = {  # gauges at the end, at most: the question for them is a client's
    "workflow_running": 0,
    "replica_inflight": 0,
    "replica_booked_tokens": 0,
    "pool_inflight": 0,
    "pool_waiting": 0,
    "inflight_bytes": 256,
    "client_connections": 1,
}
ENDED: Final = ("completed", "failed", "cancelled", "incomplete", "deleted")
SIMULATED: Final = (
    *("--engine", "sim", "--served-model-name", "m", "--kv-tokens", "20000", "--prefill-rate", "10000", "--speed", "50"),
    *("--fault-errors", "0.01", "--fault-breaks", "0.01"),
)
INPUTS: Final = {"messages": {"type": "messages", "required": True}}
ASK: Final = {"from": "${inputs.messages}", "max_tokens": 8}


def _asked(text: str) -> dict[str, Any]:
    return {"chat": {**ASK, "append": [{"role": "user", "content": text}]}}


def _document(name: str, steps: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"workflow": 1, "name": name, "inputs": INPUTS, "defaults": {"model": "m"}, "steps": steps, **more}


KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "panel": _document(
        "panel",
        {
            "three": {"each": {"in": [1, 2, 3], "as": "n", "steps": {"one": _asked("answer ${n}")}, "value": "${one.text}"}},
            "judge": {**_asked("best of: ${join(three.values)}"), "yield": {"as": "judge", "stream": "delta"}},
        },
        primary="judge",
    ),
    "hedge": _document(
        "hedge",
        {
            "one": {"chat": {**ASK, "max_tokens": 200}},
            "other": _asked("other"),
            "first": {
                "let": "${coalesce(one.text, other.text)}",
                "needs_any": ["one", "other"],
                "kill": ["one", "other"],
                "yield": "first",
            },
        },
    ),
    "speculation": _document(
        "speculation",
        {
            "guess": {"chat": {**ASK, "max_tokens": 60}, "yield": "guess"},
            "judge": _asked("judge"),
            "taken": {
                "switch": [
                    {"when": "${len(judge.text) % 2 == 0}", "kill": ["guess"], "value": "${judge.text}"},
                    {"else": True, "value": "${guess.text}"},
                ],
                "yield": "taken",
            },
        },
    ),
    "connector": _document(
        "connector",
        {
            "found": {"call": {"use": "service", "with": {"q": 1}}, "timeout_s": 1, "on_error": "skip"},
            "answer": {**_asked("${coalesce(found.value.x, 'nothing')}"), "needs_any": ["found", "beside"], "yield": "answer"},
            "beside": {"chat": ASK},
        },
    ),
    "expression": _document("expression", {"a": {"chat": ASK}, "b": {"let": "${a.text + 1}", "yield": "b"}}),
    "too late": _document("late", {"a": {"chat": {**ASK, "max_tokens": 1000}, "yield": "a"}}, limits={"seconds": 0.05}),
}
"""Documents that runs have in their bodies, but for `panel`, which is also a model."""


@dataclass(slots=True)
class Tally:
    """begun: runs that clients know of. statuses: by kind and end. samples: (runs, MB). until: time.monotonic() of the end."""

    begun: int = 0
    asked: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: list[tuple[int, float]] = field(default_factory=list)
    killed: int = 0
    until: float = float("inf")

    def ended(self, kind: str, status: str, *, begun: bool = True) -> None:
        self.begun += begun
        self.statuses[kind, status] += 1


class Crowd:
    """Clients that run one workflow after another. chance: of the kinds and of what clients do."""

    def __init__(self, http: aiohttp.ClientSession, url: str, tally: Tally, seed: int) -> None:
        self._http, self._url, self._tally, self._chance = http, url, tally, random.Random(seed)
        self._kinds = (
            self._plain,
            self._streamed,
            self._left,
            self._as_model,
            self._model_left,
            self._background,
            self._refused,
        )

    async def run(self, most: int) -> None:
        while self._tally.asked < most and time.monotonic() < self._tally.until:
            self._tally.asked += 1
            kind = self._chance.choices(self._kinds, (8, 4, 3, 3, 2, 3, 1))[0]
            try:
                await kind()
            except (aiohttp.ClientError, TimeoutError) as error:
                what = f"{kind.__name__.strip('_')} lost: {type(error).__name__} {error}"
                self._tally.ended("client", what, begun=False)

    def _body(self, name: str, **more: Any) -> dict[str, Any]:
        return {"workflow": KINDS[name], "inputs": {"messages": self._messages()}, **more}

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": prose(60, str(self._chance.random()))}]

    async def _plain(self) -> None:
        name = self._chance.choice([*KINDS])
        async with self._http.post(self._url + RUNS, json=self._body(name)) as answer:
            found = await answer.json()
        self._tally.ended(name, _status(answer.status, found), begun="status" in found)

    async def _streamed(self) -> None:
        name, last = self._chance.choice([*KINDS]), {}
        async with self._http.post(self._url + RUNS, json=self._body(name, stream=True)) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
        status = _status(answer.status, last) if answer.status == 200 else str(answer.status)
        self._tally.ended(f"{name}, streamed", status, begun=answer.status == 200)

    async def _left(self) -> None:
        name = self._chance.choice([*KINDS])
        lines = self._chance.randrange(1, 40)
        async with self._http.post(self._url + RUNS, json=self._body(name, stream=True)) as answer:
            async for _ in answer.content:
                lines -= 1
                if not lines:
                    break
            answer.close()
        status = ("ended before" if lines else "left") if answer.status == 200 else str(answer.status)
        self._tally.ended("client left", status, begun=answer.status == 200)

    async def _as_model(self) -> None:
        body = {"model": "workflow:panel", "messages": self._messages(), "stream": True}
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            raw = await answer.read()
        done = answer.status == 200 and raw.endswith(b"data: [DONE]\n\n") and b'"error"' not in raw
        self._tally.ended("model", "completed" if done else "failed", begun=done or answer.status != 503)

    async def _model_left(self) -> None:
        body = {"model": "workflow:panel", "messages": self._messages(), "stream": True}
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
            answer.close()
        self._tally.ended(
            "model, client left", "left" if answer.status == 200 else str(answer.status), begun=answer.status == 200
        )

    async def _background(self) -> None:
        name = self._chance.choice(["panel", "hedge", "speculation", "connector"])
        async with self._http.post(self._url + RUNS, json=self._body(name, background=True)) as answer:
            found = await answer.json()
        if answer.status != 202:
            return self._tally.ended("background", f"{answer.status} {found['error']['code']}", begun=False)
        run = f"{self._url}{RUNS}/{found['id']}"
        end = self._chance.choice(("followed", "cancelled", "deleted"))
        if end == "followed":
            async with self._http.get(f"{run}?stream=true") as answer:
                await answer.read()
            async with self._http.get(run) as answer:
                end = _status(answer.status, await answer.json())
        elif end == "cancelled":
            async with self._http.post(f"{run}/cancel") as answer:
                end = _status(answer.status, await answer.json())
        else:
            async with self._http.delete(run) as answer:
                end = f"deleted: {answer.status}"
        return self._tally.ended("background", end)

    async def _refused(self) -> None:
        async with self._http.post(self._url + RUNS, json={"workflow": {**KINDS["panel"], "steps": {}}}) as answer:
            await answer.read()
        self._tally.ended("refused", str(answer.status), begun=False)


def _status(status: int, found: Mapping[str, Any]) -> str:
    """Of a run, with the limit that ended it, or of an error with this status."""
    if "status" not in found:
        return f"{status} {found.get('error', {}).get('code', found)}"
    reason = found.get("incomplete_details", {}).get("reason")
    return f"{found['status']}: {reason}" if reason else str(found["status"])


@contextlib.asynccontextmanager
async def service(chance: random.Random) -> AsyncIterator[str]:
    """A connector that answers, fails, answers garbage, or does not answer for two seconds."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        kind = chance.choices(("good", "error", "garbage", "silent"), (80, 10, 9, 1))[0]
        if kind == "silent":
            await asyncio.sleep(2)
        if kind == "garbage":
            return web.Response(text="{", content_type="application/json")
        return web.json_response({"x": "found"}, status=500 if kind == "error" else 200)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        await runner.cleanup()


class Replicas:
    """Simulated replicas as processes, on their ports."""

    def __init__(self, log: Path) -> None:
        self._log, self._running = log, dict[int, subprocess.Popen[bytes]]()
        self.ports = free_ports(REPLICAS)
        for port in self.ports:
            self.start(port)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, port: int) -> None:
        with self._log.open("ab") as log:
            self._running[port] = subprocess.Popen(
                [sys.executable, "-m", "gateway", "replica", *SIMULATED, "--port", str(port)], stdout=log, stderr=log
            )

    def kill(self, port: int) -> None:
        process = self._running.pop(port)
        process.kill()
        process.wait()

    async def kill_again_and_again(self, every_s: float, chance: random.Random, tally: Tally) -> None:
        while True:
            await asyncio.sleep(every_s)
            port = chance.choice(self.ports)
            self.kill(port)
            tally.killed += 1
            await asyncio.sleep(every_s / 4)
            self.start(port)

    def stop(self) -> None:
        for port in [*self._running]:
            self.kill(port)


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Sums over all labels, by name without a prefix."""
    found = Counter[str]()
    async with http.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                found[key.partition("{")[0].removeprefix("warmroute_").removeprefix("vllm:")] += float(value)
    return found


async def sample(gateway: GatewayProcess, tally: Tally, most: int) -> None:
    """Resident memory of the gateway and its parser process, each time that a further part of the runs has been asked for."""
    assert gateway.process
    while True:
        if tally.asked >= len(tally.samples) * most / SAMPLES:
            tally.samples.append((tally.asked, rss_bytes(gateway.process.pid) / 2**20))
            print(f"{tally.asked:,} runs, {tally.samples[-1][1]:.0f} MB, {tally.killed} kills", file=sys.stderr, flush=True)
        await asyncio.sleep(0.2)


def stored_runs(file: Path) -> Counter[str]:
    with contextlib.closing(sqlite3.connect(file)) as database:
        return Counter(
            dict(database.execute("select status, count(*) from warmroute_workflow_runs group by status").fetchall())
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """The state at the end. gauges: of AT_REST. counted: runs that ended, by the gateway. stored: background runs by status.

    running: requests on replicas, by their own gauges. errors: tracebacks in the log.
    """

    gauges: Mapping[str, float]
    counted: float
    stored: Mapping[str, int]
    running: float
    errors: Sequence[str]


async def at_rest(http: aiohttp.ClientSession, gateway: str, replicas: Sequence[str], folder: Path) -> Rest:
    """When the gauges have come to rest, or after SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while True:
        found = await metrics(http, gateway)
        gauges = {name: found[name] for name in AT_REST}
        stored = stored_runs(folder / "state.sqlite")
        rests = all(value <= AT_REST[name] for name, value in gauges.items()) and stored.keys() <= set(ENDED)
        if rests or time.monotonic() > end:
            break
        await asyncio.sleep(0.5)
    running = sum([(await metrics(http, url))["num_requests_running"] for url in replicas])
    errors = [
        line for line in (folder / "gateways.log").read_text().splitlines() if '"traceback"' in line or "Traceback" in line
    ]
    return Rest(gauges, found["workflow_runs_total"], stored, running, errors)


def violations(tally: Tally, rest: Rest) -> Iterator[str]:
    for name, value in rest.gauges.items():
        if value > AT_REST[name]:
            yield f"{name} is {value:g} at the end, {AT_REST[name]} at most"
    if rest.running:
        yield f"the replicas have {rest.running:g} running requests"
    if unfinished := {status: count for status, count in rest.stored.items() if status not in ENDED}:
        yield f"runs in the background are unfinished: {unfinished}"
    if not tally.begun <= rest.counted <= tally.asked:
        yield f"the gateway has ended {rest.counted:,.0f} runs; clients know of {tally.begun:,}"
    if lost := [status for (kind, status), _ in tally.statuses.items() if kind == "client"]:
        yield f"clients have lost answers: {lost[:3]}"
    if rest.errors:
        yield f"the log has {len(rest.errors)} tracebacks: {rest.errors[0][:300]}"
    after = [mb for runs, mb in tally.samples if runs >= WARM * tally.asked]
    if after and after[-1] - after[0] > GROW_MB:
        yield f"memory has grown by {after[-1] - after[0]:.0f} MB after the first {WARM:.0%} of the runs, {GROW_MB:g} at most"


def page(tally: Tally, rest: Rest, seconds: float, broken: Sequence[str]) -> Iterator[str]:
    yield f"# Soak of workflows\n\n`{command('bench.workflows.soak', None)}`\n\n{versions()}\n"
    yield (
        "**The law is broken:** " + "; ".join(broken)
        if broken
        else "**The law holds**: no run is unfinished, no lease is open, memory is flat."
    )
    counted = f"the gateway ended {rest.counted:,.0f} runs. {tally.killed} replicas were killed."
    yield f"\n{tally.asked:,} requests in {seconds / 60:.0f} minutes; {counted}\n"
    yield "| at the end | |\n|---|--:|"
    yield from (f"| `{name}` | {value:g} |" for name, value in rest.gauges.items())
    yield f"| running requests of the replicas | {rest.running:g} |"
    yield from (f"| stored runs: {status} | {count:,} |" for status, count in sorted(rest.stored.items()))
    yield "\n| kind | ends |\n|---|---|"
    for kind in sorted({kind for kind, _ in tally.statuses}):
        ends = sorted((status, count) for (each, status), count in tally.statuses.items() if each == kind)
        yield f"| {kind} | {', '.join(f'{status}: {count:,}' for status, count in ends)} |"
    yield "\n| runs | resident MB |\n|--:|--:|"
    yield from (f"| {runs:,} | {mb:.1f} |" for runs, mb in tally.samples)


async def soak(options: argparse.Namespace, folder: Path) -> tuple[list[str], list[str]]:
    """The lines of the report, and how the law is broken."""
    documents = folder / "workflows"
    documents.mkdir()
    (documents / "panel.yaml").write_text(json.dumps(KINDS["panel"]))
    chance, tally = random.Random(options.seed), Tally()
    replicas = Replicas(folder / "replicas.log")
    (port,) = free_ports(1)
    async with service(chance) as url, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CLIENT_S)) as http:
        config = {
            "pools": [{"replicas": replicas.urls}],
            "log_level": "warning",
            "state": {"url": f"sqlite:///{folder / 'state.sqlite'}", "ttl_s": 300},
            "workflows": {"directory": str(documents), "connectors": {"service": {"url": url}}},
        }
        gateway = GatewayProcess(port, folder, config)
        try:
            gateway.start()
            await ready(replicas.urls, "/health", START_S)
            await ready([gateway.url], "/ready", START_S)
            begun = time.monotonic()
            tally.until = begun + options.minutes * 60
            beside = [
                asyncio.create_task(replicas.kill_again_and_again(options.kill_s, chance, tally)),
                asyncio.create_task(sample(gateway, tally, options.runs)),
            ]
            crowds = [Crowd(http, gateway.url, tally, options.seed + at) for at in range(options.clients)]
            await asyncio.gather(*(each.run(options.runs) for each in crowds))
            seconds = time.monotonic() - begun
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            alive = [url for at, url in enumerate(replicas.urls) if replicas.ports[at] in replicas._running]
            await http.close()
            await ready(alive, "/health", START_S)
            async with aiohttp.ClientSession() as asking:
                rest = await at_rest(asking, gateway.url, alive, folder)
        finally:
            gateway.terminate()
            gateway.wait()
            replicas.stop()
    broken = [*violations(tally, rest)]
    return [*page(tally, rest, seconds, broken)], broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.workflows.soak", description="A soak of workflows.")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=48, help="at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most (default: until all runs have ended)")
    parser.add_argument("--kill-s", type=float, default=20.0, help="seconds between two kills of replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the report is written (default: standard output)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and what it has started ends
    with tempfile.TemporaryDirectory(prefix="warmroute-soak-") as folder:
        lines, broken = asyncio.run(soak(options, Path(folder)))
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(text, "utf-8")
    else:
        print(text)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
