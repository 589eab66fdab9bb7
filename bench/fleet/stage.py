"""The parts: simulated replicas, a store, gateways, and clients that send each request to any of the gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.fleet.loads import TOKENS, Session
from bench.measure.cpu import cpu_seconds
from bench.measure.cpu import tree as processes_of
from bench.measure.ports import free_ports

COMPILED = Path("build/compiled").resolve()  # `make compiled`; without it the gateways are plain Python
REPLICAS = 8
SIMULATED = ("--engine", "sim", "--kv-tokens", "60000", "--prefill-rate", "100000", "--decode-rate", "1000")


@dataclass(slots=True)
class Store:
    """A real server. `process` is None while it is stopped."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = (
            shutil.which("valkey-server") or shutil.which("redis-server") or str(Path(".tools/bin/redis-server").resolve())
        )
        self.process = subprocess.Popen(
            [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)],
            stdout=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self.process.pid) if self.process else 0.0


@dataclass(slots=True)
class GatewayProcess:
    """A gateway that can be restarted on its port. `process` is None while it is stopped."""

    port: int
    folder: Path
    config: Mapping[str, Any]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        file = self.folder / f"gateway-{self.port}.json"
        file.write_text(json.dumps({"listen": f"127.0.0.1:{self.port}", **self.config}))
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        tree = COMPILED if (COMPILED / ".made").exists() else Path.cwd()
        with (self.folder / "gateways.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=tree)

    def terminate(self) -> None:
        if self.process:
            self.process.terminate()

    def wait(self) -> None:
        """Until it has ended."""
        if self.process:
            self.process.wait()
            self.process = None

    async def ended(self, within_s: float) -> bool:
        """Likewise; else it is killed, and False returned."""
        assert self.process
        try:
            await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return False
        finally:
            self.wait()
        return True

    @property
    def cpu_s(self) -> float:
        return sum(map(cpu_seconds, processes_of(self.process.pid))) if self.process else 0.0


@dataclass(slots=True)
class Gateways:
    each: list[GatewayProcess]

    @property
    def urls(self) -> list[str]:
        return [each.url for each in self.each]

    @property
    def cpu_s(self) -> float:
        return sum(each.cpu_s for each in self.each)


@dataclass(slots=True)
class Sent:
    """Results of the requests. failed: counts by problem. hits: (time, prompt tokens, cached tokens)."""

    failed: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[float, int, int]] = field(default_factory=list)
    seconds: float = 0.0

    def share(self, begin: float = 0.0, end: float = float("inf")) -> float:
        """Cached tokens of all prompt tokens that were answered in that time."""
        part = [(prompt, cached) for at, prompt, cached in self.hits if begin <= at < end]
        return sum(cached for _, cached in part) / max(1, sum(prompt for prompt, _ in part))


@contextlib.contextmanager
def replicas(count: int, folder: Path, simulated: Sequence[str]) -> Iterator[list[str]]:
    """Cold ones. Yields their URLs."""
    ports = free_ports(count)
    program = shutil.which("warmroute") or str(Path(sys.executable).with_name("warmroute"))
    commands = [[program, "replica", *simulated, "--port", str(port)] for port in ports]
    with (folder / "replicas.log").open("ab") as log:
        running = [subprocess.Popen(each, stdout=log, stderr=log, stdin=subprocess.DEVNULL) for each in commands]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


@contextlib.contextmanager
def gateways(
    count: int, urls: Sequence[str], folder: Path, store: Store | None, changes: Mapping[str, Any]
) -> Iterator[Gateways]:
    """changes: of the configuration."""
    config = {
        "admin_listen": "off",
        "state": {"url": "off"},
        "snapshot": {"file": "off"},
        "limits": {"drain_accept_s": 0},  # here nobody comes later
        "log_level": "warning",
        "routing": {"block_bytes": 4 * TOKENS},
        "pools": [{"replicas": list(urls)}],
        **({"sharing": {"url": f"redis://127.0.0.1:{store.port}"}} if store else {}),
        **changes,
    }
    made = Gateways([GatewayProcess(port, folder, config) for port in free_ports(count)])
    try:
        for each in made.each:
            each.start()
        yield made
    finally:
        for each in made.each:
            each.terminate()
        for each in made.each:
            each.wait()


async def ready(urls: Sequence[str], path: str, within_s: float = 120.0) -> None:
    async with asyncio.timeout(within_s), aiohttp.ClientSession() as session:
        for url in urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url + path) as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def staged(
    count: int,
    folder: Path,
    *,
    shared: bool,
    fleet: int = REPLICAS,
    simulated: Sequence[str] = SIMULATED,
    **changes: Any,
) -> AsyncIterator[tuple[Gateways, Store | None]]:
    """Replicas, `fleet` of them, a store if the gateways share, and the gateways, all of them ready. changes: of the gateways'
    configuration.
    """
    store = Store(free_ports(1)[0], folder) if shared else None
    if store:
        store.start()
    try:
        with replicas(fleet, folder, simulated) as urls:
            await ready(urls, "/health")
            with gateways(count, urls, folder, store, changes) as made:
                await ready(made.urls, "/ready")
                yield made, store
    finally:
        if store:
            store.kill()


async def send(
    urls: Sequence[str],
    sessions: Sequence[Session],
    *,
    concurrent: int,
    think_s: float,
    seed: int,
    place: Callable[[Session], str] | None = None,
) -> Sent:
    """Each session's requests one after the other, each to any of `urls`, or all to that which `place` names; `concurrent`
    sessions at a time, in their order.
    """
    sent, chance, begun = Sent(), random.Random(seed), time.monotonic()
    waiting = iter(sessions)

    async def client(session: aiohttp.ClientSession) -> None:
        for bodies in waiting:
            pinned = place(bodies) if place else None
            for body in bodies:
                await _one(session, pinned or chance.choice(urls), body, sent, begun)
                await asyncio.sleep(think_s)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrent)))
    sent.seconds = time.monotonic() - begun
    return sent


async def _one(session: aiohttp.ClientSession, url: str, body: bytes, sent: Sent, begun: float) -> None:
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            if answer.status == 200:
                usage = (await answer.json())["usage"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                sent.hits.append((time.monotonic() - begun, usage["prompt_tokens"], cached))
            else:
                sent.failed[f"{answer.status} {(await answer.text())[:300]}"] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        sent.failed[f"{type(error).__name__}: {error}"[:300]] += 1
