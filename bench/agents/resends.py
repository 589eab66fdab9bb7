"""Prompts that are sent again as soon as they are answered: what is cached then, and where it is not, why.

    python -m bench.agents.resends [--resends 1000] [--loads 1,2,4] [--kv-tokens A,B] [--report]

Each client sends a prompt of its own in Messages, reads the answer and sends the same once more, at once; clients come at
random at a fixed rate. Load 1 is --base of what the stand-ins can prefill, so the last loads are more than they can do. With
breakpoints: the last block has `cache_control`; automatic: the same requests without. Whether the prefix was cached is the
engine's own word, in the usage of the answer; the reason why not is `breakpoint` in the gateway's request log. A resend with
neither is unexplained.

Prints a table; --report writes resends.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.agents.__main__ import warmroute
from bench.agents.dialogues import Shape, head
from bench.agents.engine import Model
from bench.agents.reading import Failed, read
from bench.agents.run import ANSWER_S, Plan, standins
from bench.gateway.systems import Setting, System, started
from bench.measure.cpu import cores, pinned
from bench.measure.machine import REPORTS, command, versions

HIT_SHARE, HIT_SLACK = 0.9, 128  # of the prompt's tokens, less those of its last block: an engine caches whole blocks
REASONS = frozenset(["missed", "unreported", "busy", "gone", "lost", "failed"])  # docs/agents.md; "new" is none for a resend
SHARED_BYTES, OWN_BYTES = 4_000, 24_000  # of a prompt
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Resends:
    """What is sent. base: the share of the fleet's prefill that load 1 takes. caches: of a stand-in, in tokens, one after the
    other.
    """

    count: int = 1000
    loads: tuple[float, ...] = (1.0, 2.0, 4.0)
    caches: tuple[int, ...] = (100_000, 1_000_000)
    base: float = 0.4
    answer_tokens: int = 8
    seed: int = 0
    plan: Plan = field(default_factory=lambda: Plan(answer_tokens=8, model=Model(prefill_rate=80_000.0)))

    def rate(self, load: float) -> float:
        """Clients per second."""
        capacity = self.plan.replicas * self.plan.model.prefill_rate / (OWN_BYTES / BYTES_PER_TOKEN)
        return load * self.base * capacity


@dataclass(slots=True)
class Resend:
    """One. prompt, cached: tokens, as its engine reports them. first: seconds to its first token. error: "" without one."""

    id: str
    prompt: int = 0
    cached: int = 0
    first: float = 0.0
    error: str = ""

    @property
    def hit(self) -> bool:
        return not self.error and self.cached >= self.prompt * HIT_SHARE - HIT_SLACK


@dataclass(slots=True)
class Cell:
    """A cache and a load, with breakpoints or without. reasons: of the resends that were not hits, by the request log."""

    cache: int
    load: float
    marked: bool
    resends: list[Resend] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    unexplained: int = 0

    @property
    def hits(self) -> int:
        return sum(resend.hit for resend in self.resends)

    def explain(self, results: Mapping[str, str]) -> None:
        """results: `breakpoint` of the log's lines, by id."""
        for resend in self.resends:
            if not resend.hit:
                reason = results.get(resend.id, "")
                self.reasons[reason or "none logged"] += 1
                self.unexplained += self.marked and reason not in REASONS


def body_of(number: int, shared: str, plan: Resends, *, marked: bool) -> dict[str, Any]:
    chance = random.Random(f"{plan.seed}/resend {number}")
    own = f"[turn {number}.0]" + "".join(f" {chance.getrandbits(60):015x}" for _ in range(OWN_BYTES // 16))
    block: dict[str, Any] = {"type": "text", "text": own}
    if marked:
        block["cache_control"] = {"type": "ephemeral"}
    message = {"role": "user", "content": [block]}
    return {"model": "m", "max_tokens": plan.answer_tokens, "stream": True, "system": shared, "messages": [message]}


async def load(url: str, cell: Cell, plan: Resends) -> None:
    """All clients of a cell."""
    chance, texts = random.Random(f"{plan.seed}/{cell.load}"), head(Shape(0, SHARED_BYTES, 0), plan.seed).system
    shared, rate, now = "".join(texts), plan.rate(cell.load), asyncio.get_running_loop().time
    due = now()
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as clients:
        for number in range(plan.count):
            body = body_of(number, shared, plan, marked=cell.marked)
            clients.create_task(_client(session, f"{cell.load:g}-{int(cell.marked)}-{number}", body, cell))
            due += chance.expovariate(rate)  # whatever the clients before it do, and however late the timers are
            await asyncio.sleep(max(0.0, due - now()))


async def _client(session: aiohttp.ClientSession, name: str, body: dict[str, Any], cell: Cell) -> None:
    first = await _send(session, name, f"{name}-first", body)
    again = await _send(session, name, f"{name}-again", body)
    if first.error:
        again.error = again.error or f"the first one: {first.error}"
    cell.resends.append(again)


async def _send(session: aiohttp.ClientSession, name: str, id_: str, body: dict[str, Any]) -> Resend:
    sent, now = Resend(id_), asyncio.get_running_loop().time
    begun = now()
    try:
        headers = {"X-Request-Id": id_, "X-Claude-Code-Session-Id": name}
        async with session.post("/v1/messages", json=body, headers=headers) as response:
            reply = await read(response, now)
    except (Failed, aiohttp.ClientError, TimeoutError) as error:
        sent.error = str(error) or type(error).__name__
        return sent
    sent.first = reply.first - begun
    sent.prompt, sent.cached = reply.usage or (0, 0)
    if reply.usage is None:
        sent.error = "no usage"
    return sent


def logged(system: System, log: Path) -> System:
    """The same with its output in a file."""

    def to_file(at: Setting) -> list[str]:
        return ["sh", "-c", 'exec "$@" > "$0" 2>&1', str(log), *system.command(at)]

    return dataclasses.replace(system, command=to_file)


def results_in(log: Iterable[str]) -> dict[str, str]:
    """`breakpoint` of the request log's lines, by id."""
    found = dict[str, str]()
    for text in log:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "id" in line:
            found[line["id"]] = line.get("breakpoint", "")
    return found


def measured(plan: Resends, cell: Cell, folder: Path, system: System | None = None) -> Cell:
    """With fresh stand-ins and a fresh gateway. Raises NotStarted."""
    system_cores, load_cores = cores()
    log = folder / f"{cell.cache}-{cell.load:g}-{int(cell.marked)}.log"
    fleet = dataclasses.replace(plan.plan, model=dataclasses.replace(plan.plan.model, kv_tokens=cell.cache))
    with standins(fleet, load_cores) as urls:
        with started(logged(system or warmroute(), log), urls, folder, system_cores) as running, pinned(load_cores):
            asyncio.run(load(f"http://127.0.0.1:{running.port}", cell, plan))
        with log.open(encoding="utf-8", errors="replace") as lines:  # all of it: the gateway has ended
            cell.explain(results_in(lines))
    return cell


def table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "| cache, tokens | load | | resends | cached | not cached, by reason | unexplained | TTFT mean, ms | errors |"
    yield "|--:|--:|---|--:|--:|---|--:|--:|--:|"
    for cell in cells:
        count, errors = len(cell.resends), Counter(resend.error for resend in cell.resends if resend.error)
        name = "with breakpoints" if cell.marked else "automatic"
        times = [resend.first for resend in cell.resends if not resend.error]
        said = ", ".join(f"{reason} {number / count:.1%}" for reason, number in cell.reasons.most_common()) or "-"
        reasons = said if cell.marked else f"{count - cell.hits} resends" if count > cell.hits else "-"
        shown = [f"{cell.cache:,}", f"{cell.load:g}", name, str(count), f"{cell.hits / count:.1%}", reasons]
        shown.append(str(cell.unexplained) if cell.marked else "")
        shown.append(f"{statistics.fmean(times or [0]) * 1000:.0f}")
        yield f"| {' | '.join([*shown, str(errors.total())])} |"


def report(made_by: str, plan: Resends, cells: Sequence[Cell]) -> Iterator[str]:
    own, shared = (SHARED_BYTES + OWN_BYTES) // 1000, SHARED_BYTES // 1000
    fleet = plan.plan
    yield "# Resends: cached, or a reason why not\n"
    yield f"{made_by}\n"
    yield (
        f"{plan.count} clients for each row, each with a prompt of {own} kB (the first {shared} kB are the same in all), which"
        f" it sends again as soon as it is answered. {fleet.replicas} stand-ins, prefill {fleet.model.prefill_rate:,.0f}"
        f" tokens/s one after the other. Load 1: {plan.rate(1):.1f} clients a second, {plan.base:.0%} of what they can prefill."
        " Cached: at least 90 % of the prompt, less 128 tokens, by the engine's own usage. Reasons: `breakpoint` of the request"
        " log.\n"
    )
    yield from table(cells)


def parse(arguments: Sequence[str] | None) -> tuple[Resends, bool]:
    """And whether to write the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.agents.resends", description=(__doc__ or "").splitlines()[0])
    plan = Resends()
    parser.add_argument("--resends", type=int, default=plan.count, help="of each row")
    parser.add_argument("--loads", type=lambda text: tuple(map(float, text.split(","))), default=plan.loads, metavar="A,B")
    parser.add_argument("--kv-tokens", type=lambda text: tuple(map(int, text.split(","))), default=plan.caches, metavar="A,B")
    parser.add_argument("--base", type=float, default=plan.base, help="share of the fleet's prefill that load 1 takes")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--report", action="store_true", help="write resends.md")
    given = parser.parse_args(arguments)
    more = {"caches": given.kv_tokens, "base": given.base, "seed": given.seed}
    return dataclasses.replace(plan, count=given.resends, loads=given.loads, **more), given.report


def main(arguments: Sequence[str] | None = None) -> None:
    plan, kept = parse(arguments)
    cells = list[Cell]()
    with tempfile.TemporaryDirectory() as folder:
        for cache, share, marked in itertools.product(plan.caches, plan.loads, (True, False)):
            cells.append(measured(plan, Cell(cache, share, marked), Path(folder)))
            print(list(table(cells))[-1], file=sys.stderr, flush=True)
    made_by = f"Made by `{command('bench.agents.resends', arguments)}`: {versions()}."
    lines = "\n".join(report(made_by, plan, cells)) + "\n"
    print(lines)
    if kept:
        (REPORTS / "resends.md").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
