"""Whole conversations beside delta uploads (`warmroute sync`), over a slow link.

    python -m bench.prompt_log [--calls 100] [--mbit 10] [--delay-ms 50] [--agents] [--only "openai, chat"] [--out FILE]

whole: official client ── link ── gateway with state ── engine.  delta: official client ── warmroute sync ── link ── the same.
The engine's answer is a digest of all that it was sent, so equal answers show equal conversations. The link is a proxy in user
space with a rate and a round trip; *upload* is the time for which it was in use upwards. CPU is user and system time of the
gateways' processes, of all calls. Every run has an empty store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import tempfile
from pathlib import Path

from bench.measure.machine import versions
from bench.prompt_log.agents import CODING_AGENTS, installed, measured_agent
from bench.prompt_log.clients import CLIENTS, FRAME_BYTES, TURN_BYTES, converse
from bench.prompt_log.engine import engine
from bench.prompt_log.run import Meter, Run, far_gateway, sidecar, warmed

REPORT = Path("bench/reports/prompt-log.md")
HEAD = """\
| client | calls | | uploaded MiB | upload s | whole run s | CPU s: gateway | CPU s: sidecar | answers |
|---|--:|---|--:|--:|--:|--:|--:|---|"""


async def measured(client: str, calls: int, bits_s: float, delay_s: float, *, delta: bool) -> Run:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        replica = await stack.enter_async_context(engine())
        far, link = await stack.enter_async_context(far_gateway(folder, replica, bits_s, delay_s))
        url, near = link.url, None
        if delta:
            url, near = await stack.enter_async_context(sidecar(link.url))
        await warmed(far.url)
        meter = Meter(link, far.pid, near)
        return meter.run(calls, await converse(client, url, calls))


async def report(options: argparse.Namespace) -> str:
    """The table."""
    lines = [HEAD]
    link = options.mbit * 1e6, options.delay_ms / 2000
    clients = dict.fromkeys(CODING_AGENTS, measured_agent) if options.agents else dict.fromkeys(CLIENTS, measured)
    for client in [options.only] if options.only else clients:
        whole = await clients[client](client, options.calls, *link, delta=False)
        part = await clients[client](client, options.calls, *link, delta=True)
        equal = (
            "equal" if (whole.answers == part.answers or options.agents) and part.faithful and whole.faithful else "DIFFERENT"
        )
        for name, run in (("whole", whole), ("delta", part)):
            figures = f"{run.up / 2**20:.2f} | {run.busy_s:.1f} | {run.wall_s:.1f} | {run.far_cpu_s:.2f} | {run.near_cpu_s:.2f}"
            lines.append(f"| {client} | {run.calls} | {name} | {figures} | {equal if name == 'delta' else ''} |")
        lines.append(f"| | | | **{whole.up / part.up:.0f} times fewer** | | {whole.wall_s / part.wall_s:.1f} times | | | |")
        print("\n".join(lines[-3:]), flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--mbit", type=float, default=10.0, help="of the link, in each direction")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="a round trip over the link")
    parser.add_argument(
        "--agents", action="store_true", help="real coding agents (scripts/clients.sh) in place of official clients"
    )
    parser.add_argument("--only", choices=[*CLIENTS, *CODING_AGENTS])
    parser.add_argument("--out", type=Path, default=REPORT, help="the other section of the file stays as it is")
    options = parser.parse_args()
    options.agents = options.agents or options.only in CODING_AGENTS
    if options.agents and not installed():
        parser.error("the agents are not here: scripts/clients.sh")
    if options.only and (options.only in CODING_AGENTS) != options.agents:
        parser.error(f"--only: {options.only} is no coding agent")
    table = asyncio.run(report(options))
    over = f"over a link of {options.mbit:g} Mbit/s with a round trip of {options.delay_ms:g} ms"
    if options.agents:
        title, more = "Coding agents", " --agents"
        about = f"Each is asked for {options.calls} calls of its shell that print {TURN_BYTES >> 10} KiB, {over}."
        about += " Equal: the engine got each conversation as the agent sent it (by its name), and the agent each answer,"
        about += " but for what gateways add (usage, `store`, `previous_response_id`)."
    else:
        title, more = "Official clients", ""
        about = f"An agent with {options.calls} calls of {TURN_BYTES >> 10} KiB"
        about += f" over {FRAME_BYTES >> 10} KiB of system text and tools, {over}."
    text = "\n\n".join([f"## {title}", f"{about} `python -m bench.prompt_log{more}`.", versions(), table])
    before = options.out.read_text(encoding="utf-8") if options.out.exists() else "# Delta uploads\n"
    options.out.write_text(with_section(before, title, text), encoding="utf-8")


def with_section(report: str, title: str, text: str) -> str:
    """The report with this section in place of the one with the title, or at its end."""
    head, *sections = re.split(r"(?m)^(?=## )", report)
    kept = [section.strip() for section in sections]
    at = next((place for place, section in enumerate(kept) if section.startswith(f"## {title}\n")), len(kept))
    return "\n\n".join([head.strip(), *kept[:at], text, *kept[at + 1 :]]) + "\n"


if __name__ == "__main__":
    main()
