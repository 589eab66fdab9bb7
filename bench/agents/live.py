"""Live llama.cpp servers behind the gateway: a coding agent's conversation with a billing line that is new in every turn.

    python -m bench.agents.live [--turns 6] [--report]

llama.cpp computes the billing line like any other text, so that nothing behind it is found in its cache. The same conversation
is sent three times, each with another task, through a gateway over two servers: without the line, with it, and with it through
a gateway that leaves it in (`strip_billing_header: false`). A last one begins as chat, goes on as Messages and ends as
Responses. Each turn's time to its first text and its cached tokens are the engine's and the client's. `scripts/peers.sh
.peers engines` installs the server and the model (SmolLM2-135M; two threads would share two cores: each server has one).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from bench.agents.__main__ import warmroute
from bench.agents.dialogues import Assistant, Dialogue, Head, Shape, words
from bench.agents.kinds import KINDS, Kind
from bench.agents.reading import Reply, read
from bench.gateway.systems import PEERS, ROOT, Setting, System, is_ready, started
from bench.measure.cpu import cores
from bench.measure.machine import REPORTS, command, versions
from bench.measure.ports import free_ports

PACKAGE = "xllamacpp"
SERVER = ROOT / "bench" / "replica" / "llama_cpp.py"
CONTEXT = 32_768  # tokens; a server divides them among its slots
START_S, ANSWER_S = 60.0, 300.0
SHAPE = Shape(tools=1_500, system=1_500, turn=300)
ANSWER_TOKENS = 16
MIX = ("chat", "messages", "responses")


@dataclass(frozen=True, slots=True)
class Turn:
    """seconds: to the first text. prompt, cached: tokens, as the engine reports them."""

    api: str
    seconds: float
    prompt: int
    cached: int


def gguf() -> Path | None:
    """The model's file, where it is installed."""
    return next((PEERS / PACKAGE).glob("lib/python*/site-packages/**/*.gguf"), None)


@contextlib.contextmanager
def servers(model: Path, folder: Path, count: int = 2) -> Iterator[list[str]]:
    """Their base URLs; they run while the context does. Raises TimeoutError."""
    python, ports = PEERS / PACKAGE / "bin" / "python", free_ports(count)
    with contextlib.ExitStack() as stack:
        for port in ports:
            out = stack.enter_context((folder / f"llama-{port}.log").open("wb"))
            words_ = [str(python), str(SERVER), str(model), str(port), "1", str(CONTEXT)]
            process = stack.enter_context(subprocess.Popen(words_, stdout=out, stderr=out))
            stack.callback(process.kill)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            _wait_for(url)
        yield urls


def _wait_for(url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"{url} does not come up")


def billed(kept: bool) -> System:
    """Ours. kept: with a configuration that leaves the billing line in."""
    ours = warmroute()
    if not kept:
        return ours

    def configured(at: Setting) -> list[str]:
        """The replicas of the command line, as a file: only a file has this key."""
        given = ours.command(at)
        urls = [value for flag, value in itertools.pairwise(given) if flag == "--replica"]
        file = at.folder / "kept.json"
        file.write_bytes(orjson.dumps({"pools": [{"replicas": urls, "strip_billing_header": False}]}))
        return [*given[: given.index("--replica")], "--config", str(file)]

    return dataclasses.replace(ours, name="warmroute, line left in", command=configured)


async def converse(url: str, kinds: Sequence[Kind], head: Head, number: int) -> list[Turn]:
    """One conversation; turn N is sent as kinds[N % their number]."""
    dialogue, chance, turns = Dialogue(number, SHAPE, seed=number), random.Random(number), list[Turn]()
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as listed:
            model = (await listed.json())["data"][0]["id"]
        for kind in kinds:
            dialogue.ask()
            body, headers = kind.write(dialogue, head, ANSWER_TOKENS, chance)
            begun = time.monotonic()
            async with session.post(url + kind.path, data=orjson.dumps(_greedy(body, model)), headers=_json(headers)) as answer:
                reply: Reply = await read(answer, time.monotonic)
            prompt, cached = reply.usage or (0, 0)
            turns.append(Turn(kind.name, (reply.first or time.monotonic()) - begun, prompt, cached))
            dialogue.answered(Assistant(reply.text, None), reply.identity)
    return turns


def _greedy(body: Mapping[str, object], model: str) -> dict[str, object]:
    """Without tools: a model of this size calls them at random, which is another prompt each time."""
    return {key: value for key, value in body.items() if key not in ("tools", "tool_choice", "parallel_tool_calls")} | {
        "model": model,
        "temperature": 0,
    }


def _json(headers: Mapping[str, str]) -> dict[str, str]:
    return {**headers, "Content-Type": "application/json"}


def measure(model: Path, turns: int, folder: Path) -> Iterator[tuple[str, list[Turn]]]:
    by_name = {kind.name: kind for kind in KINDS}
    plain, claude = by_name["messages"], by_name["messages-claude-code"]
    system_cores, _ = cores()
    with servers(model, folder) as urls:
        for number, (name, kinds, kept) in enumerate(
            (
                ("Messages without the line", [plain] * turns, False),
                ("as Claude Code sends them", [claude] * turns, False),
                ("the same, the line left in", [claude] * turns, True),
                ("chat, then Messages, then Responses", [by_name[each] for each in MIX for _ in range(2)], False),
            )
        ):
            own = folder / f"gateway-{number}"
            chance = random.Random(f"head {number}")
            head = Head((), ("You are an agent that works on source code.\n", words(chance, SHAPE.system + SHAPE.tools)))
            with started(billed(kept), urls, own, system_cores, is_ready) as running:
                yield name, asyncio.run(converse(f"http://127.0.0.1:{running.port}", kinds, head, number))


def report(made_by: str, found: Mapping[str, Sequence[Turn]]) -> str:
    lines = [
        "# Live llama.cpp: a billing line that changes with every turn",
        "",
        made_by,
        "",
        "Two servers (SmolLM2-135M, one thread each) behind one gateway; one conversation at a time, streamed, greedy.",
        "",
        "| conversation | first turn, s | later turns: s (mean) | worst | prompt tokens | cached | cached, worst turn |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, turns in found.items():
        later = turns[1:]
        seconds, prompt, cached = [t.seconds for t in later], sum(t.prompt for t in later), sum(t.cached for t in later)
        worst = min(t.cached / max(1, t.prompt) for t in later)
        lines.append(
            f"| {name} | {turns[0].seconds:.2f} | {sum(seconds) / len(seconds):.2f} | {max(seconds):.2f} "
            f"| {prompt:,} | {cached:,} ({cached / max(1, prompt):.1%}) | {worst:.1%} |"
        )
    lines += ["", "Turn by turn (API: seconds, cached of prompt tokens):", ""]
    for name, turns in found.items():
        each = "; ".join(f"{t.api}: {t.seconds:.2f}, {t.cached} of {t.prompt}" for t in turns)
        lines.append(f"- {name}: {each}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.live", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="of each conversation (default: 6)")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=REPORTS, metavar="DIR", help="write live.md (default: bench/reports)"
    )
    options = parser.parse_args(arguments)
    model = gguf()
    if model is None:
        raise SystemExit("llama.cpp's server or the model is not installed: scripts/peers.sh .peers engines")
    with tempfile.TemporaryDirectory() as folder:
        found = dict(measure(model, options.turns, Path(folder)))
    text = report(f"Made by `{command('bench.agents.live', arguments)}`: {versions([PACKAGE])}.", found)
    if options.report:
        (options.report / "live.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
