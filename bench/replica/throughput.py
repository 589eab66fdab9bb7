"""The real engine's speed beside vLLM's and transformers': decoding at several batch sizes, and a prompt's prefill.

    python -m bench.replica.throughput [--batches 1,4,16] [--prompt 1500] [--tokens 72] [--rounds 3] [--threads 1] [--quick]

Writes throughput.md and throughput.json. Each contestant is a process of its own with the same model, type (bfloat16) and
threads, all of them on one core if it is one thread; those that are not measured are stopped (SIGSTOP):

    warmroute replica      as its users run it
    vLLM                   its CPU build (`scripts/peers.sh .peers engines`; without that it is left out)
    transformers serve     its own server, with continuous batching, and the block size, blocks and step size of ours
                           (pip install 'transformers[serving]'; without that it is left out)
    model.generate         one batch of prompts of equal length, no server

All are measured in the same way, from outside: the seconds that requests at once take with FEW tokens of answer each
and with --tokens; the difference is decoding alone. A prompt's prefill is the time of a request with one token of answer, its
server and all. Contestants take turns, round after round; ratios are of a round, and the report has their median. Answers are
greedy, or sampled (SAMPLED). No answer ends before its length: the end of text is ignored, or the model's configuration, which
is a copy, has none. No prompt comes twice.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure.cpu import cores, pinned, rss_bytes, tree
from bench.measure.machine import REPORTS, command, versions
from bench.measure.ports import free_ports
from bench.replica.engines import ENGINES, NAME, vllm_arguments
from bench.replica.prefix import BLOCK, post, replica
from replica.torch_engine.model import cache_folder, prepared_smollm2

FEW, BLOCKS, STEP, START_S = 8, 2048, 512, 180.0
KV_BYTES = 512 << 20  # of vLLM
GREEDY: Mapping[str, float] = {"temperature": 0.0}
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.95}
NEVER = 49_000  # a token that no answer has, as the end of text
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Reads a line (prompt, how many, tokens of each, sampling) and writes one when it is done.
GENERATE = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
torch.set_num_threads(int(sys.argv[2]))
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
print("ready", flush=True)
for line in sys.stdin:
    text, count, tokens, sampling = json.loads(line)
    ids = torch.tensor([tokenizer(text)["input_ids"]] * count)
    how = dict(sampling, do_sample=True, top_k=0) if sampling["temperature"] else dict(do_sample=False)
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=tokens, **how)
    print(ids.shape[1], flush=True)
"""

Sampling = Mapping[str, float]
Ask = Callable[[Sequence[str], int, Sampling], int]  # prompts, tokens of each answer -> tokens of the first prompt
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    ask: Ask
    pid: int

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Else it is stopped."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for each in tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one contestant, by what was measured, by round; memory after the last."""

    name: str
    rates: dict[str, list[float]]
    rss_mb: int


def over_http(url: str, **also: object) -> Ask:
    """All prompts at once, each on a connection of its own. also: in each body."""

    def one(prompt: str, tokens: int, sampling: Sampling) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, **sampling, **also}
        with post(url, body) as response:
            usage = json.load(response)["usage"]
        if usage["completion_tokens"] != tokens:
            raise SystemExit(f"an answer of {usage['completion_tokens']} tokens and not of {tokens}")
        return int(usage["prompt_tokens"])

    def ask(prompts: Sequence[str], tokens: int, sampling: Sampling) -> int:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return next(iter(list(threads.map(lambda prompt: one(prompt, tokens, sampling), prompts))))

    return ask


@contextlib.contextmanager
def ours(folder: Path, threads: int) -> Iterator[Contestant]:
    with replica(["--model", str(folder), "--threads", str(threads)]) as (url, pid):
        yield Contestant("warmroute replica", over_http(url, ignore_eos=True), pid)


@contextlib.contextmanager
def transformers_serve(folder: Path, threads: int) -> Iterator[Contestant]:
    port = free_ports(1)[0]
    size = [f"--cb-block-size={BLOCK}", f"--cb-num-blocks={BLOCKS}", f"--cb-max-batch-tokens={STEP}"]
    model = ["--continuous-batching", "--device=cpu", "--dtype=bfloat16", "--attn-implementation=sdpa"]
    run = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    arguments = [sys.executable, "-c", run, "serve", str(folder), *model, *size, "--host=127.0.0.1", f"--port={port}"]
    ask = over_http(f"http://127.0.0.1:{port}", model=str(folder))  # it takes no field that it does not know
    with _served("transformers serve", arguments, threads, ask) as one:
        yield one


@contextlib.contextmanager
def vllm(folder: Path, threads: int) -> Iterator[Contestant]:
    port = free_ports(1)[0]
    engine = next(each for each in ENGINES if each.name == "vllm")
    arguments = [str(engine.python), *vllm_arguments(folder, port, kv_bytes=KV_BYTES, sequences=16)]
    ask = over_http(f"http://127.0.0.1:{port}", model=NAME, ignore_eos=True)
    with _served("vLLM", arguments, threads, ask, engine.environment) as one:
        yield one


@contextlib.contextmanager
def _served(
    name: str, arguments: Sequence[str], threads: int, ask: Ask, environment: Mapping[str, str] | None = None
) -> Iterator[Contestant]:
    with _process(arguments, threads, environment or {}) as process:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                ask(["one two three one two three"], FEW, GREEDY)
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{name} does not start")
            time.sleep(0.5)
        yield Contestant(name, ask, process.pid)


@contextlib.contextmanager
def generate(folder: Path, threads: int) -> Iterator[Contestant]:
    with _process([sys.executable, "-c", GENERATE, str(folder), str(threads)], threads) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin, process.stdout
        if out.readline() != "ready\n":
            raise SystemExit("model.generate does not start")

        def ask(prompts: Sequence[str], tokens: int, sampling: Sampling) -> int:
            into.write(json.dumps([prompts[0], len(prompts), tokens, dict(sampling)]) + "\n")
            into.flush()
            return int(out.readline())

        yield Contestant("model.generate", ask, process.pid)


CONTESTANTS = {"warmroute": ours, "vllm": vllm, "serve": transformers_serve, "generate": generate}


def measure(asked: Sequence[Contestant], options: argparse.Namespace, clock: Clock = time.perf_counter) -> list[Rates]:
    results = [Rates(one.name, {}, 0) for one in asked]
    kinds = [("decode", GREEDY), ("sampled", SAMPLED)]
    number = 0
    for _ in range(options.rounds):
        for batch, kind, sampling in [(0, "prefill", GREEDY), *((each, *kind) for kind in kinds for each in options.batches)]:
            for one, result in zip(asked, results, strict=True):
                number += 1
                with one.awake():
                    one.ask([f"{number}. Wake up"], FEW, GREEDY)
                    if batch:
                        rate = _decoding(one.ask, number, batch, options.tokens, sampling, clock)
                    else:
                        rate = _prefill(one.ask, number, options.prompt, clock)
                result.rates.setdefault(f"{kind}, {batch} at once" if batch else kind, []).append(rate)
    return [
        Rates(one.name, result.rates, sum(map(rss_bytes, tree(one.pid))) >> 20)
        for one, result in zip(asked, results, strict=True)
    ]


def _decoding(ask: Ask, number: int, batch: int, tokens: int, sampling: Sampling, clock: Clock) -> float:
    seconds = []
    for part, length in enumerate((FEW, tokens)):
        prompts = [f"{number}.{part}.{at}: " + "one two three " * 30 for at in range(batch)]
        seconds.append(_timed(partial(ask, prompts, length, sampling), clock)[0])
    return batch * (tokens - FEW) / (seconds[1] - seconds[0])


def _prefill(ask: Ask, number: int, words: int, clock: Clock) -> float:
    prompt = f"{number}. " + " ".join(WORDS[at * at % 10] for at in range(words))
    seconds, tokens = _timed(partial(ask, [prompt], 1, GREEDY), clock)
    return tokens / seconds


def _timed(ask: Callable[[], int], clock: Clock) -> tuple[float, int]:
    begin = clock()
    length = ask()
    return clock() - begin, length


@contextlib.contextmanager
def _process(
    arguments: Sequence[str], threads: int, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(variables or {})}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(arguments, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            for each in tree(process.pid):  # some of them are stopped, and end their own processes only if they run
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)
            process.terminate()


def endless(folder: Path, copy: Path) -> Path:
    """The model without an end of text."""
    shutil.copytree(folder, copy, copy_function=os.symlink)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            (copy / name).unlink()
            (copy / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"eos_token_id": NEVER}))
    return copy


def report(made: str, results: Sequence[Rates]) -> str:
    first = results[0]
    lines = [
        "# The engine's speed",
        "",
        made,
        "",
        "Tokens a second, the median of the rounds; below, our rate over theirs.",
        "",
    ]
    lines += ["| | " + " | ".join(first.rates) + " | memory, MB |", "|---" * (len(first.rates) + 2) + "|"]
    for result in results:
        medians = (f"{statistics.median(rates):,.1f}" for rates in result.rates.values())
        lines.append(f"| {result.name} | {' | '.join(medians)} | {result.rss_mb:,} |")
    for other in results[1:]:
        ratios = (_ratio(first.rates[what], rates) for what, rates in other.rates.items())
        lines.append(f"| over {other.name} | {' | '.join(ratios)} | |")
    return "\n".join([*lines, ""])


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the rounds' ratios, the least and the most."""
    ratios = [one / two for one, two in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = endless(prepared_smollm2(cache_folder()), temporary / "model")
        with pinned(cores()[0]) if options.threads == 1 else contextlib.nullcontext():
            asked = []
            for name in options.only:
                asked.append(stack.enter_context(CONTESTANTS[name](folder, options.threads)))
                asked[-1].signal(signal.SIGSTOP)
        results = measure(asked, options)
    import torch
    import transformers

    made = f"Made by `{command('bench.replica.throughput', arguments)}`: "
    made += versions([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]) + "."
    text = report(made, results)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "throughput.md").write_text(text, "utf-8")
    raw: Mapping[str, Any] = {"made": made, "contestants": {one.name: [one.rates, one.rss_mb] for one in results}}
    (options.out / "throughput.json").write_text(json.dumps(raw, indent=1) + "\n", "utf-8")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m bench.replica.throughput", description=__doc__)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], metavar="N,...", help="default: 1,4,16")
    parser.add_argument("--prompt", type=int, default=1500, metavar="WORDS", help="of the prefill (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=72, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each (default: %(default)s)")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two rounds, answers of 40 tokens")
    parser.add_argument("--out", type=Path, default=REPORTS)
    options = parser.parse_args(arguments)
    there = {
        "serve": all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")),
        "vllm": any(engine.name == "vllm" and engine.python.exists() for engine in ENGINES),
    }
    options.only = [name for name in options.only.split(",") if there.get(name, True)]
    if options.quick:
        options.rounds, options.tokens = 2, 40
    return options


if __name__ == "__main__":
    raise SystemExit(main())
