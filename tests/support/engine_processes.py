"""Stand-ins of engines as real processes: started, observed, and stopped by their own pids."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.support.paths import ROOT


@dataclass(slots=True)
class DistributedLlama:
    """`distributed_llama.py` in a process. Use as an async context manager. events: its output so far."""

    token_ms: float = 0.0
    prefill_ms: float = 0.0
    port: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a replica."""
        return {"url": self.url, "engine": "distributed-llama"}

    @property
    def alive(self) -> bool:
        assert self._process
        return self._process.returncode is None and not any("died" in event for event in self.events)

    @property
    def served(self) -> list[dict[str, Any]]:
        """Its chat requests."""
        return [event for event in self.events if "messages" in event]

    async def __aenter__(self) -> DistributedLlama:
        command = [sys.executable, "-m", "tests.support.distributed_llama"]
        command += ["--prefill-ms", str(self.prefill_ms), "--token-ms", str(self.token_ms)]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout
        self.port = json.loads(await self._process.stdout.readline())["port"]
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._reading:
            await self._reading

    def kill(self) -> None:
        assert self._process
        self._process.kill()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            async with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        async with self._changed:
            self._changed.notify_all()

    async def prefills(self) -> None:
        """Waits for the beginning of a prefill."""
        async with asyncio.timeout(40), self._changed:
            await self._changed.wait_for(lambda: any("prefill" in event for event in self.events) or not self.alive)

    async def says(self, count: int) -> list[dict[str, Any]]:
        """Waits for this number of chat requests, and returns them."""
        async with asyncio.timeout(40), self._changed:
            await self._changed.wait_for(lambda: len(self.served) >= count or not self.alive)
        return self.served
