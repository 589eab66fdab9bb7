"""The processes of a soak: a gateway, its replicas, the reader of its log; and the events that affect them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure.cpu import cores, pinned
from bench.measure.machine import ROOT
from gateway.commands.demo.processes import listening_url
from tests.chaos.hostile import FAULTS, MODEL
from tests.chaos.stage import Child, Replica, Stage, start_replica, until
from tests.chaos.wire import port_of
from tests.deploy.processes import stop

BYSTANDERS = "bystanders"  # the model of the pool that gets poisoned prompts
SIMULATED = 2
FROZEN_S = 4.0  # longer than a probe may take
# Short, so that a soak of half a minute meets them all.
SETTINGS: Mapping[str, Any] = {
    "timeouts": {"first_byte_s": 20, "idle_s": 10},
    "limits": {"client_idle_s": 10, "body_s": 10},
    "health": {"interval_s": 1, "timeout_s": 2},
    "routing": {"memory_mb": 32},
}


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of the gateway. program: the folder with its code, the checkout or its compiled copy."""

    program: Path
    workers: int
    budget_mb: int


class Gateway(Child):
    """The gateway's process; its log is read by another one, and of that its lines but those of requests are in `log`."""

    def __init__(self, log: Path, ends: contextlib.ExitStack, program: Path, config: Path, on: set[int]) -> None:
        """on: the cores that it may use."""
        self.log = log
        log.touch()
        self._reader = subprocess.Popen(
            [sys.executable, "-m", "bench.soak.log", str(log)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        ends.callback(self._close_reader)
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(program), "XDG_STATE_HOME": str(log.parent)}  # not the user's store
        with pinned(on):
            self.process = subprocess.Popen(
                command, cwd=program, env=environment, stdin=subprocess.DEVNULL, stderr=self._reader.stdin
            )
        ends.callback(stop, self.process)
        assert self._reader.stdin
        self._reader.stdin.close()

    def _close_reader(self) -> None:
        stop(self._reader)
        assert self._reader.stdout
        self._reader.stdout.close()

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Stop it; returns its exit status and the counts of its log."""
        stop(self.process, grace_s=60)
        assert self._reader.stdout
        counts = json.loads(self._reader.stdout.read())
        return self.process.returncode, counts


@dataclass(slots=True)
class Fleet:
    """stage: the gateway and all replicas. The first `SIMULATED` are simulated, the next one fails, the others are bystanders.

    done: what was done to them, by name.
    """

    stage: Stage
    folder: Path
    gateway: Gateway
    chance: random.Random
    setup: Setup
    done: Counter[str] = field(default_factory=Counter)
    prices: int = 0

    def events(self) -> Sequence[Callable[[], Awaitable[None]]]:
        workers = (self.kill_worker,) if self.setup.workers > 1 else ()
        return (self.kill_replica, self.freeze_replica, self.change_failure, self.change_failure, self.reload, *workers)

    async def inject_events(self, every_s: float, over: asyncio.Event) -> None:
        """One event after the other, each to its end, until `over`; every kind comes once before any comes again."""
        while True:
            events = list(self.events())
            self.chance.shuffle(events)
            for event in events:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await over.wait()
                        return
                await event()

    def last_words(self) -> str:
        status = self.gateway.process.poll()
        lines = self.gateway.log.read_text("utf-8").splitlines()[-8:]
        of_gateway = [f"the gateway's exit status: {'none, it runs' if status is None else status}; its log:", *lines]
        return "\n".join([*of_gateway, "the log of the replica that fails:", *self.failing.child.lines[-40:]])

    @property
    def failing(self) -> Replica:
        return self.stage.replicas[SIMULATED]

    async def kill_replica(self) -> None:
        replica = self.chance.choice(self.stage.replicas[:SIMULATED])
        replica.child.signal(signal.SIGKILL)
        replica.child.process.wait()
        self.done["replica killed and started again"] += 1
        replica.child = (await self._a_replica(port_of(replica.url))).child

    async def _a_replica(self, port: int) -> Replica:
        return await start_replica(self.folder / "simulated.log", self.stage.ends, simulated=True, port=port)

    async def freeze_replica(self) -> None:
        replica = self.chance.choice(self.stage.replicas[:SIMULATED])
        replica.child.signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        replica.child.signal(signal.SIGCONT)
        self.done["replica stopped and continued"] += 1

    async def change_failure(self) -> None:
        behaviour = self.chance.choice(FAULTS)
        await self.failing.command(behaviour)
        self.done["failure of a replica changed"] += 1

    async def kill_worker(self) -> None:
        """Another one takes its place."""
        _supervisor, *workers = self.stage.pids
        if len(workers) == self.setup.workers:
            os.kill(self.chance.choice(workers), signal.SIGKILL)
            self.done["worker killed"] += 1

    async def reload(self) -> None:
        self.prices += 1
        write(self.stage.config, self.stage.replicas, self.setup, self.prices)
        self.gateway.signal(signal.SIGHUP)
        self.done["configuration reloaded"] += 1

    async def recover(self) -> None:
        """End of all events: all replicas are healthy, and up at the gateway."""
        await self.failing.command("healthy")
        for replica in self.stage.replicas:
            await until(
                lambda replica=replica: self.stage.is_up(replica, True), lambda replica=replica: f"{replica.name} is up"
            )

        async def complete() -> bool:
            return len(self.stage.pids) == self.setup.workers + 1

        if self.setup.workers > 1:
            await until(complete, lambda: "all workers run")


def write(file: Path, replicas: Sequence[Replica], setup: Setup, prices: int = 0) -> None:
    urls = [replica.url for replica in replicas]
    pools = [
        {"models": [MODEL], "replicas": urls[: SIMULATED + 1], "resume_streams": True},
        {"models": [BYSTANDERS], "replicas": urls[SIMULATED + 1 :]},
    ]
    table = {model: {"input": 1 + prices, "output": 2 + prices} for model in (MODEL, BYSTANDERS)}
    limits = {**SETTINGS["limits"], "inflight_mb": setup.budget_mb}
    whole = {"listen": "127.0.0.1:0", "workers": setup.workers, "pools": pools, "prices": table, **SETTINGS, "limits": limits}
    file.write_text(json.dumps(whole), "utf-8")


@contextlib.asynccontextmanager
async def fleet(folder: Path, setup: Setup, seed: int) -> AsyncIterator[Fleet]:
    with contextlib.ExitStack() as ends:
        on = os.sched_getaffinity(0)
        if setup.workers == 1:  # it has a core of its own, so that what is seen of it is due to it
            on, others = cores()
            ends.enter_context(pinned(others))
        replicas = list(
            await asyncio.gather(
                *(start_replica(folder / f"simulated{number}.log", ends, simulated=True) for number in range(SIMULATED)),
                start_replica(folder / "failing.log", ends),
                *(start_replica(folder / f"bystander{number}.log", ends, model=BYSTANDERS) for number in range(2)),
            )
        )
        config = folder / "config.yaml"
        write(config, replicas, setup)
        gateway = Gateway(folder / "gateway.log", ends, setup.program, config, on)
        made = Stage(gateway, await gateway.wait_for_line(listening_url), replicas, config, ends)
        yield Fleet(made, folder, gateway, random.Random(seed), setup)
