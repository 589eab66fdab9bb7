"""The processes of a scenario, and the invariants of the gateway at its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.measure.cpu import tree
from bench.measure.ports import free_port
from gateway.commands.demo.processes import listening_url, ready_url
from tests.chaos.hostile import MODEL, REFUSES
from tests.chaos.load import ANSWERED, CUT, REFUSED, Load
from tests.chaos.wire import fetch, port_of
from tests.deploy.processes import stop

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
    """Poll until the first true answer: another process has no event for it."""
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
        ends.callback(stop, self.process, number=signal.SIGINT)  # after SIGTERM a gateway accepts connections for 2 s more

    @property
    def lines(self) -> list[str]:
        return self.log.read_text("utf-8").splitlines()

    async def wait_for_line(self, find: Callable[[str], T]) -> T:
        """The first true result of `find` for a line of its log."""

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
    """A simulated replica, or a hostile one. control: base URL for its commands."""

    child: Child
    url: str
    control: str = ""

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    async def command(self, name: str) -> Counter[str]:
        """Send a command; returns the counts of what it has done so far, by behaviour."""
        return Counter((await fetch(self.control, f"/{name}")).json)


@dataclass(slots=True)
class Stage:
    """A gateway in front of its replicas. start: its sockets and files at the beginning."""

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
        """Whether the gateway considers it up, or down."""
        return await self.total("replica_up", replica.name) == up

    async def is_idle_at(self, replica: Replica) -> bool:
        """Whether the replica has no request in flight."""
        return not await self.total("replica_inflight", replica.name)

    async def inject(self, replica: Replica, behaviour: str) -> None:
        """Set a behaviour until some requests were affected, or the gateway's breaker opens (it is closed before)."""

        async def spared() -> bool:
            return await self.total("replica_circuit_open", replica.name) == 1

        async def trusted() -> bool:
            return await self.is_up(replica, True) and not await spared()

        await until(trusted, lambda: f"{replica.name} is considered healthy")
        before = (await replica.command(behaviour))[behaviour]

        async def enough() -> bool:
            if behaviour == REFUSES:
                return await self.is_up(replica, False)
            felt = (await replica.command("status"))[behaviour] - before
            return felt >= 5 or (felt > 0 and await spared())

        await until(enough, lambda: f"{replica.name} {behaviour}")
        await replica.command("healthy")

    async def assert_consistent(self, load: Load) -> None:
        """Assert that the clients' results, the gateway's metrics, sockets and log agree, and that nothing is left."""
        assert load.lost == []
        assert load.sent == load.fates[ANSWERED] + load.fates[CUT] + load.fates[REFUSED]

        async def idle() -> bool:
            names = ("replica_inflight", "pool_inflight", "pool_slots_taken")
            return not sum([await self.total(name) for name in names])

        await until(idle, lambda: "no lease is open")
        assert await self.total("pool_waiting") == 0
        assert await self.total("requests_total") == load.sent
        assert await self.total("requests_total", 'code="200"') == load.fates[ANSWERED] + load.fates[CUT]
        await self.assert_sockets_closed()
        await self.assert_log_clean(load.sent)

    async def assert_sockets_closed(self) -> None:
        """Its sockets and files are those of the start. Simulated replicas keep idle connections: one per process."""
        patient = sum(not replica.control for replica in self.replicas)

        async def at_start() -> bool:
            for replica in self.replicas:
                if replica.control:
                    await replica.command("close_idle")
            now = self.sockets()
            same = {**now, "replicas": 0} == {**self.start, "replicas": 0}
            return now["replicas"] <= patient * len(self.pids) and same

        await until(at_start, lambda: f"{self.sockets()}, not {self.start}")

    def sockets(self) -> Counter[str]:
        """Sockets by purpose, and other open files, of all its processes, including parser processes."""
        return sum((open_files(pid, port_of(self.url)) for pid in tree(self.gateway.process.pid)), Counter[str]())

    @property
    def pids(self) -> list[int]:
        """Of the gateway and its workers."""
        pid = self.gateway.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split())]

    async def assert_log_clean(self, sent: int, *but: str) -> None:
        """Only JSON objects, no traceback, no error but these, one line per request."""

        async def all_are_there() -> bool:
            return sum('"message":"request"' in line for line in self.gateway.lines) >= sent

        await until(all_are_there, lambda: f"{sent} requests in the log")
        lines = [json.loads(line) for line in self.gateway.lines]
        errors = [line for line in lines if line["level"] == "error" and line["message"] not in but]
        assert errors + [line for line in lines if "traceback" in line] == []
        asked = [line["id"] for line in lines if line["message"] == "request"]
        assert len(asked) == len(set(asked)) == sent


def open_files(pid: int, port: int) -> Counter[str]:
    """A gateway's sockets by kind: listening, to clients, to replicas, internal, reset by the peer and not closed yet; and its
    other files.
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


async def start_replica(
    log: Path, ends: contextlib.ExitStack, *, simulated: bool = False, port: int = 0, model: str = MODEL
) -> Replica:
    port = port or free_port()  # it is taken again after a restart
    if simulated:
        child = Child(log, ends, *SIMULATED, "--decode-rate", "100", "--port", str(port))
        return Replica(child, await child.wait_for_line(ready_url))
    child = Child(log, ends, *HOSTILE, "--port", str(port), "--model", model)
    return Replica(child, **json.loads(await child.wait_for_line(lambda line: line if line.startswith("{") else "")))


def configured(replicas: Sequence[Replica], *, resume: bool = True, **more: Any) -> str:
    pool = {"replicas": [replica.url for replica in replicas], "resume_streams": resume}
    return json.dumps({"listen": "127.0.0.1:0", "pools": [pool], **more})  # JSON is YAML


@contextlib.asynccontextmanager
async def stage(folder: Path, *, replicas: int = 3, simulated: bool = False, **config: Any) -> AsyncIterator[Stage]:
    """config: as `configured` takes it."""
    with contextlib.ExitStack() as ends:
        making = [start_replica(folder / f"replica{number}.log", ends, simulated=simulated) for number in range(replicas)]
        fleet = await asyncio.gather(*making)
        file = folder / "config.yaml"
        file.write_text(configured(fleet, **config), "utf-8")
        gateway = Child(folder / "gateway.log", ends, "-m", "gateway", "serve", "--config", str(file))
        made = Stage(gateway, await gateway.wait_for_line(listening_url), fleet, file, ends)
        made.start = made.sockets()
        yield made
