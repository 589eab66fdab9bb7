"""What the replica's prefix cache saves: the time to the first token of a prompt that is new, and of the same one once more.

    python -m bench.replica.prefix [--sizes 512,2048,8000] [--rounds 3] [--tries 1000] [--replica "--threads 1"] [--quick]

Writes prefix.md, prefix.json and (with matplotlib) prefix.png. A real `warmroute replica` in a process of its own, asked over
HTTP, one request at a time; prompts are random tokens. --replica has further arguments for it, such as a model. A size must fit
into the model's context, of which SmolLM2 has 8,192.

The time to the first token is that from sending the request to the first event of its stream. Then --tries prompts of random
length are each sent three times: the second is the first again, the third has all of its sampling changed. Both have to
find all of the prompt's full blocks, but for the one of its last token, which is always computed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.measure.machine import REPORTS, command, versions
from gateway.commands.demo.processes import Process, ready_url

BLOCK, VOCABULARY, LONGEST_TRY = 16, 30_000, 96
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of a prompt; seconds to the first token, by round; how many of the tokens were cached the second time."""

    tokens: int
    cold_s: list[float]
    warm_s: list[float]
    cached: int

    @property
    def reduction(self) -> float:
        return 1 - statistics.median(self.warm_s) / statistics.median(self.cold_s)


@dataclass(frozen=True, slots=True)
class Tries:
    """Full blocks that the second and the third sending should have found, and those that they did; whole hits of `count`."""

    count: int
    blocks: int
    again: int
    resampled: int
    whole_again: int
    whole_resampled: int


@contextlib.contextmanager
def replica(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a real replica while it runs."""
    process = Process("the replica", ["replica", "--port", "0", "--block-size", str(BLOCK), *arguments])
    try:
        yield process.wait_for(ready_url), process.pid
    finally:
        process.stop()


@contextlib.contextmanager
def post(url: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """An answer to /v1/completions from its head on, over a connection of its own. Raises SystemExit if it is an error."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise SystemExit(f"{url} answers {response.status}: {response.read().decode(errors='replace')}")
            yield response


def first_token(url: str, prompt: Sequence[int], **sampling: object) -> tuple[float, int]:
    """Seconds to the first event of a stream, and how much of the prompt was cached."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    with post(url, {"prompt": prompt, "max_tokens": 1, **options, **sampling}) as response:
        response.readline()
        seconds = time.perf_counter() - begin
        usage = [json.loads(line[6:])["usage"] for line in response if line.startswith(b"data: {") and b'"usage":{' in line]
    return seconds, usage[-1]["prompt_tokens_details"]["cached_tokens"]


def measure(url: str, sizes: Sequence[int], rounds: int, chance: random.Random) -> list[Size]:
    """Sizes take turns, so that a slow minute of the machine affects all."""
    results = [Size(tokens, [], [], 0) for tokens in sizes]
    first_token(url, _prompt(chance, 64))  # what is only ever made once
    for _ in range(rounds):
        for at, size in enumerate(results):
            prompt = _prompt(chance, size.tokens)
            cold, found = first_token(url, prompt)
            if found:
                raise SystemExit(f"a new prompt of {size.tokens} tokens found {found} of them cached")
            warm, cached = first_token(url, prompt)
            results[at] = Size(size.tokens, [*size.cold_s, cold], [*size.warm_s, warm], cached)
    return results


def tried(url: str, count: int, chance: random.Random) -> Tries:
    blocks, found = 0, (list[tuple[int, int]](), list[tuple[int, int]]())
    for _ in range(count):
        prompt = _prompt(chance, chance.randrange(BLOCK, LONGEST_TRY))
        full = (len(prompt) - 1) // BLOCK
        blocks += full
        first_token(url, prompt)
        for sendings, sampling in zip(found, ({}, _sampling(chance)), strict=True):
            sendings.append((first_token(url, prompt, **sampling)[1] // BLOCK, full))
    hits = [sum(hit for hit, _ in sendings) for sendings in found]
    whole = [sum(hit == full for hit, full in sendings) for sendings in found]
    return Tries(count, blocks, *hits, *whole)


def _prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(1000, VOCABULARY) for _ in range(tokens)]


def _sampling(chance: random.Random) -> dict[str, object]:
    return {
        "temperature": chance.uniform(0.1, 2),
        "top_p": chance.uniform(0.1, 1),
        "top_k": chance.randrange(1, 100),
        "min_p": chance.uniform(0, 0.2),
        "presence_penalty": chance.uniform(-1, 1),
        "frequency_penalty": chance.uniform(-1, 1),
        "seed": chance.randrange(1 << 30),
        "stop": ["stop here"],
        "max_tokens": chance.randrange(1, 4),
    }


def report(made: str, sizes: Sequence[Size], tries: Tries) -> str:
    lines = [
        *(
            "# A new prompt and one that is cached",
            "",
            made,
            "",
            "Time to the first token over HTTP, seconds: the median (the least).",
            "",
        ),
        *("| prompt, tokens | cached | new | again | less by |", "|---|---|---|---|---|"),
    ]
    for size in sizes:
        times = " | ".join(f"{statistics.median(times):.3f} ({min(times):.3f})" for times in (size.cold_s, size.warm_s))
        lines.append(f"| {size.tokens:,} | {size.cached:,} | {times} | {100 * size.reduction:.1f}% |")
    share = [f"{100 * hits / tries.blocks:.2f}%" for hits in (tries.again, tries.resampled)]
    lines += [
        "",
        f"Of {tries.count:,} prompts of {BLOCK} to {LONGEST_TRY - 1} tokens, {tries.blocks:,} full blocks, sent again at once:",
        "",
        *("| | full blocks found | prompts with all of theirs |", "|---|---|---|"),
        f"| as it was | {share[0]} | {tries.whole_again:,} |",
        f"| all sampling parameters changed | {share[1]} | {tries.whole_resampled:,} |",
    ]
    return "\n".join([*lines, ""])


def draw(sizes: Sequence[Size], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    tokens = [size.tokens for size in sizes]
    axes.plot(tokens, [statistics.median(size.cold_s) for size in sizes], "o-", label="new")
    axes.plot(tokens, [statistics.median(size.warm_s) for size in sizes], "o-", label="again")
    for size in sizes:
        axes.annotate(
            f"-{100 * size.reduction:.1f}%",
            (size.tokens, statistics.median(size.warm_s)),
            (0, 8),
            textcoords="offset points",
            ha="center",
        )
    axes.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="time to the first token, s", xticks=tokens)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens], minor=False)
    axes.minorticks_off()
    axes.margins(0.1)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    tokens = max(32_768, 2 * max(sizes))
    chance = random.Random(options.seed)
    with replica(["--kv-tokens", str(tokens), *shlex.split(options.replica)]) as (url, _):
        measured = measure(url, sizes, options.rounds, chance)
        tries = tried(url, options.tries, chance)
    made = f"Made by `{command('bench.replica.prefix', arguments)}`: {versions()}."
    text = report(made, measured, tries)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prefix.md").write_text(text, "utf-8")
    results = {"made": made, "sizes": [asdict(size) for size in measured], "tries": asdict(tries)}
    (options.out / "prefix.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    with contextlib.suppress(ImportError):
        draw(measured, options.out / "prefix.png")
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replica.prefix", description=__doc__)
    parser.add_argument("--sizes", default="512,2048,8000", metavar="TOKENS", help="of prompts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument(
        "--replica", default="--threads 1", metavar="ARGUMENTS", help="of warmroute replica (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="512 and 2,048 tokens, two rounds, 50 tries")
    parser.add_argument("--out", type=Path, default=REPORTS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.rounds, options.tries = "512,2048", 2, 50
    return options


if __name__ == "__main__":
    raise SystemExit(main())
