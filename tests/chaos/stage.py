"""The processes of a scenario, and what has to be true of the gateway when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.measure.cpu import tree
from gateway.commands.demo.processes import listening_url, ready_url
from tests.chaos.hostile import MODEL, REFUSES
from tests.chaos.load import ANSWERED, CUT, REFUSED, Load
from tests.chaos.wire import fetch, port_of
from tests.deploy.processes import free_port, stop

T = TypeVar("T")

DEADLINE_S = 120.0
LISTEN = "0A"  # as /proc/net/tcp has it
HOSTILE = ("-m", "tests.chaos.hostile")
SIMULATED = (
    "-m",
    "gateway.commands.cli",
    "replica",
    "--engine",
    "sim",
    "--served-model-name",
    MODEL,
    "--prefill-rate",
    "50000",
)


async def until(condition: Callable[[], Awaitable[T]], what: Callable[[], object]) -> T:
    """The first true answer; what it waits for is in another process, which has no event for it."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (answer := await condition()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return answer
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what()}") from None


class Child:
    """A process of this checkout's Python, which ends with the scenario; its standard error goes to a file."""

    def __init__(self, log: Path, ends: contextlib.ExitStack, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, stderr=output)
        ends.callback(stop, self.process)

    @property
    def lines(self) -> list[str]:
        return self.log.read_text("utf-8").splitlines()

    async def says(self, find: Callable[[str], T]) -> T:
        """The first true answer for a line of its log."""

        async def found() -> T | None:
            assert self.process.poll() is None, self.lines[-8:]
            return next((answer for line in self.lines if (answer := find(line))), None)

        answer = await until(found, lambda: self.lines[-8:])
        assert answer
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def exit_status(self) -> int:
        async def ended() -> bool:
            return self.process.poll() is not None

        await until(ended, lambda: f"{self.process.args!r} ends")
        return int(self.process.returncode)


@dataclass(slots=True)
class Replica:
    """A simulated one, or a hostile one, which takes orders."""

    child: Child
    url: str
    orders: str = ""

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    async def is_to(self, order: str) -> Counter[str]:
        """Order it; returns what it has done so far, by mood."""
        return Counter((await fetch(self.orders, f"/{order}")).json)


@dataclass(slots=True)
class Stage:
    """A gateway before its replicas. start: its sockets and files when nothing had happened yet."""

    gateway: Child
    url: str
    replicas: Sequence[Replica]
    config: Path
    ends: contextlib.ExitStack
    start: Counter[str] = field(default_factory=Counter)

    async def metrics(self) -> dict[str, float]:
        text = (await fetch(self.url, "/metrics")).body.decode()
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    async def total(self, name: str, *labels: str) -> float:
        """The sum over all samples with these labels."""
        return sum(
            value
            for key, value in (await self.metrics()).items()
            if key.partition("{")[0] == f"warmroute_{name}" and all(label in key for label in labels)
        )

    async def is_up(self, replica: Replica, up: bool) -> bool:
        """Whether the gateway takes it for up, or for down."""
        return await self.total("replica_up", replica.name) == up

    async def has_none(self, replica: Replica) -> bool:
        """Whether no request is there."""
        return not await self.total("replica_inflight", replica.name)

    async def feel(self, replica: Replica, mood: str) -> None:
        """Let it be in this mood until some requests have felt it, or the gateway spares them that (which it does not yet)."""

        async def spared() -> bool:
            return await self.total("replica_circuit_open", replica.name) == 1

        async def trusted() -> bool:
            return await self.is_up(replica, True) and not await spared()

        await until(trusted, lambda: f"{replica.name} is taken for well")
        before = (await replica.is_to(mood))[mood]

        async def enough() -> bool:
            if mood == REFUSES:
                return await self.is_up(replica, False)
            felt = (await replica.is_to("look"))[mood] - before
            return felt >= 5 or (felt > 0 and await spared())

        await until(enough, lambda: f"{replica.name} {mood}")
        await replica.is_to("well")

    async def counts(self, load: Load) -> None:
        """Assert that what the clients saw, the gateway's numbers, its sockets and its log agree, and that nothing is left."""
        assert load.lost == []
        assert load.sent == load.fates[ANSWERED] + load.fates[CUT] + load.fates[REFUSED]

        async def idle() -> bool:
            return not (await self.total("replica_inflight") + await self.total("pool_inflight"))

        await until(idle, lambda: "no lease is open")
        assert await self.total("pool_waiting") == 0
        assert await self.total("requests_total") == load.sent
        assert await self.total("requests_total", 'code="200"') == load.fates[ANSWERED] + load.fates[CUT]
        await self.closes_all()
        await self.log_is_clean(load.sent)

    async def closes_all(self) -> None:
        """Its sockets and files are those of the start. Engines close what is idle; who does not keeps a probe's connection."""
        patient = sum(not replica.orders for replica in self.replicas)

        async def at_start() -> bool:
            for replica in self.replicas:
                if replica.orders:
                    await replica.is_to("hang_up")
            now = self.sockets()
            extra = now["files"] - self.start["files"]  # each process opens one epoll when a client half-closes, and keeps it
            same = {**now, "replicas": 0, "files": 0} == {**self.start, "replicas": 0, "files": 0}
            return now["replicas"] <= patient * len(self.pids) and extra <= len(self.pids) and same

        await until(at_start, lambda: f"{self.sockets()}, not {self.start}")

    def sockets(self) -> Counter[str]:
        """By what they are for, and other open files, of all its processes: also of the workers' parser processes."""
        return sum((open_files(pid, port_of(self.url)) for pid in tree(self.gateway.process.pid)), Counter[str]())

    @property
    def pids(self) -> list[int]:
        """Of the gateway, and of its workers if it has some."""
        pid = self.gateway.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split())]

    async def log_is_clean(self, sent: int, *but: str) -> None:
        """Nothing but objects, no traceback, no error but these, one line for each request."""

        async def all_are_there() -> bool:
            return sum('"message":"request"' in line for line in self.gateway.lines) >= sent

        await until(all_are_there, lambda: f"{sent} requests in the log")
        lines = [json.loads(line) for line in self.gateway.lines]
        errors = [line for line in lines if line["level"] == "error" and line["message"] not in but]
        assert errors + [line for line in lines if "traceback" in line] == []
        asked = [line["id"] for line in lines if line["message"] == "request"]
        assert len(asked) == len(set(asked)) == sent


def open_files(pid: int, port: int) -> Counter[str]:
    """A gateway's sockets: listening ones, those to clients, to replicas, the loop's own, those that the other end has reset
    and it has not closed yet; and its other files. By name.
    """
    kinds = dict[str, str]()
    for row in Path(f"/proc/{pid}/net/tcp").read_text("ascii").splitlines()[1:]:
        fields = row.split()
        ours = int(fields[1].rpartition(":")[2], 16) == port
        kinds[f"socket:[{fields[9]}]"] = "listening" if fields[3] == LISTEN else "clients" if ours else "replicas"
    for row in Path(f"/proc/{pid}/net/unix").read_text("ascii").splitlines()[1:]:
        kinds[f"socket:[{row.split()[6]}]"] = "other sockets"
    found = Counter[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            name = os.readlink(file)
            found[kinds.get(name, "closed" if name.startswith("socket:") else "files")] += 1
    return found


async def a_replica(
    log: Path, ends: contextlib.ExitStack, *, simulated: bool = False, port: int = 0, model: str = MODEL
) -> Replica:
    port = port or free_port()  # it is taken again after a restart
    if simulated:
        child = Child(log, ends, *SIMULATED, "--decode-rate", "100", "--port", str(port))
        return Replica(child, await child.says(ready_url))
    child = Child(log, ends, *HOSTILE, "--port", str(port), "--model", model)
    return Replica(child, **json.loads(await child.says(lambda line: line if line.startswith("{") else "")))


def configured(replicas: Sequence[Replica], *, resume: bool = True, **more: Any) -> str:
    pool = {"replicas": [replica.url for replica in replicas], "resume_streams": resume}
    return json.dumps({"listen": "127.0.0.1:0", "pools": [pool], **more})  # JSON is YAML


@contextlib.asynccontextmanager
async def stage(folder: Path, *, replicas: int = 3, simulated: bool = False, **config: Any) -> AsyncIterator[Stage]:
    """config: as `configured` takes it."""
    with contextlib.ExitStack() as ends:
        making = [a_replica(folder / f"replica{number}.log", ends, simulated=simulated) for number in range(replicas)]
        fleet = await asyncio.gather(*making)
        file = folder / "config.yaml"
        file.write_text(configured(fleet, **config), "utf-8")
        gateway = Child(folder / "gateway.log", ends, "-m", "gateway", "serve", "--config", str(file))
        made = Stage(gateway, await gateway.says(listening_url), fleet, file, ends)
        made.start = made.sockets()
        yield made
