"""Whole conversations beside delta uploads (`warmroute sync`), over a slow link.

    python -m bench.prompt_log [--calls 100] [--mbit 10] [--delay-ms 50] [--only "openai, chat"] [--out FILE]

whole: official client ── link ── gateway with state ── engine.  delta: official client ── warmroute sync ── link ── the same.
The engine's answer is a digest of all that it was sent, so equal answers show equal conversations. The link is a proxy in user
space with a rate and a round trip; *upload* is the time for which it was in use upwards. CPU is user and system time of the
gateways' processes, of all calls. Every run has an empty store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.fleet.stage import ready
from bench.measure.cpu import cpu_seconds
from bench.measure.machine import versions
from bench.measure.ports import free_port
from bench.prompt_log.clients import CLIENTS, FRAME_BYTES, TURN_BYTES, converse
from bench.prompt_log.engine import engine
from bench.prompt_log.link import SlowLink

REPORT = Path("bench/reports/prompt-log.md")
HEAD = """\
| client | calls | | uploaded MiB | upload s | whole run s | CPU s: gateway | CPU s: sidecar | answers |
|---|--:|---|--:|--:|--:|--:|--:|---|"""


@dataclass(frozen=True, slots=True)
class Run:
    answers: list[str]
    up: int
    busy_s: float
    wall_s: float
    far_cpu_s: float
    near_cpu_s: float


@contextlib.asynccontextmanager
async def program(*arguments: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "gateway", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await ready([url], "/health")
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()


async def warmed(url: str) -> None:
    """Has the gateway open its store, of another key."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession(headers={"Prompt-Log": "keep", "Authorization": "Bearer w"}) as session:
        for _ in range(3):
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()


async def measured(client: str, calls: int, bits_s: float, delay_s: float, *, delta: bool) -> Run:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        replica = await stack.enter_async_context(engine())
        port, config = free_port(), folder / "gateway.yaml"
        state = {"url": f"sqlite:///{folder}/state.db"}
        pools = [{"replicas": [replica]}]
        listen = {"listen": f"127.0.0.1:{port}", "admin_listen": "off"}
        config.write_text(json.dumps({**listen, "pools": pools, "state": state, "log_level": "error"}))
        far = await stack.enter_async_context(program("serve", "--config", str(config), url=f"http://127.0.0.1:{port}"))
        link = await stack.enter_async_context(SlowLink("127.0.0.1", port, bits_s, delay_s).listening())
        url, near = link.url, None
        if delta:
            address = f"127.0.0.1:{free_port()}"
            url = f"http://{address}"
            arguments = ("sync", "--upstream", link.url, "--listen", address, "--log-level", "error")
            near = await stack.enter_async_context(program(*arguments, url=url))
        await warmed(f"http://127.0.0.1:{port}")
        begun, far_cpu, near_cpu = time.monotonic(), cpu_seconds(far.pid), cpu_seconds(near.pid) if near else 0.0
        up, busy_s = link.up, link.busy_s
        answers = await converse(client, url, calls)
        return Run(
            answers,
            link.up - up,
            link.busy_s - busy_s,
            time.monotonic() - begun,
            cpu_seconds(far.pid) - far_cpu,
            (cpu_seconds(near.pid) if near else 0.0) - near_cpu,
        )


async def report(options: argparse.Namespace) -> list[str]:
    lines = [HEAD]
    bits_s, delay_s = options.mbit * 1e6, options.delay_ms / 2000
    for client in [options.only] if options.only else CLIENTS:
        whole = await measured(client, options.calls, bits_s, delay_s, delta=False)
        part = await measured(client, options.calls, bits_s, delay_s, delta=True)
        equal = "equal" if whole.answers == part.answers else "DIFFERENT"
        for name, run in (("whole", whole), ("delta", part)):
            figures = f"{run.up / 2**20:.2f} | {run.busy_s:.1f} | {run.wall_s:.1f} | {run.far_cpu_s:.2f} | {run.near_cpu_s:.2f}"
            lines.append(f"| {client} | {options.calls} | {name} | {figures} | {equal if name == 'delta' else ''} |")
        lines.append(f"| | | | **{whole.up / part.up:.0f} times fewer** | | {whole.wall_s / part.wall_s:.1f} times | | | |")
        print("\n".join(lines[-3:]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--mbit", type=float, default=10.0, help="of the link, in each direction")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="a round trip over the link")
    parser.add_argument("--only", choices=list(CLIENTS))
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    lines = asyncio.run(report(options))
    about = (
        f"An agent with {options.calls} calls of {TURN_BYTES >> 10} KiB over {FRAME_BYTES >> 10} KiB of system text and tools,"
        f" over a link of {options.mbit:g} Mbit/s with a round trip of {options.delay_ms:g} ms. `python -m bench.prompt_log`."
    )
    options.out.write_text("\n\n".join(["# Delta uploads", about, versions(), "\n".join(lines)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
