"""What is still cached when three times as much is used as fits: our ledger inside the real engine, an exact LRU, and what
transformers does on its own.

    python -m bench.replica.evictions [--blocks 512] [--requests 1000] [--at-once 1,8]

The engine is transformers' continuous batching with a tiny model of random weights: which blocks it finds does not depend
on what is in them. Each request is a prompt and four tokens of answer. The exact LRU is a simulation that shares no code with
the ledger: a list of blocks in order of use, a prompt's tail used before its head, and no memory for what is being computed.
It has one request at a time, and again ("looked up together") as many as the engine runs at once, none of which finds what
another one of them computes: the rest of the difference to our ledger is memory that requests need while they run.

    documents       one of a set of documents, each as likely, and a question of its own
    popular         the same, the n-th document 1/n as likely as the first
    conversations   one of a set of conversations goes on by a turn, or begins anew after eight; the earlier it was
                    touched, the less likely it is
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.measure.machine import command, versions
from replica.cache.prefix import Prefix
from replica.torch_engine.paged import Claim, PagedBlocks

SIZE, VOCABULARY, ANSWER, TIMES = 16, 30_000, 4, 3
DOCUMENT, QUESTION, TURN, TURNS = 20 * SIZE, 40, 50, 8


@dataclass(frozen=True, slots=True)
class Found:
    """Prompt tokens in all and those found in the cache, and how many blocks were evicted, where it is known."""

    tokens: int
    hits: int
    evicted: int | None

    @property
    def ratio(self) -> float:
        return self.hits / self.tokens


def documents(chance: random.Random, blocks: int, requests: int, *, popular: bool) -> Iterator[list[int]]:
    count = TIMES * blocks * SIZE // DOCUMENT
    texts = [_tokens(chance, DOCUMENT) for _ in range(count)]
    weights = [1 / (at + 1) if popular else 1.0 for at in range(count)]
    for text in chance.choices(texts, weights, k=requests):
        yield text + _tokens(chance, QUESTION)


def conversations(chance: random.Random, blocks: int, requests: int) -> Iterator[list[int]]:
    """On average a conversation is half as long as it gets."""
    count = TIMES * blocks * SIZE // (DOCUMENT // 2 + TURN * TURNS // 2)
    open_ones = [_tokens(chance, DOCUMENT // 2) for _ in range(count)]  # the one touched last at the end
    for _ in range(requests):
        text = open_ones.pop(int(count * chance.random() ** 0.5))
        if len(text) >= DOCUMENT // 2 + TURN * TURNS:
            text = _tokens(chance, DOCUMENT // 2)
        text = text + _tokens(chance, TURN)
        open_ones.append(text)
        yield text


WORKLOADS: Mapping[str, Callable[[random.Random, int, int], Iterator[list[int]]]] = {
    "documents": partial(documents, popular=False),
    "popular": partial(documents, popular=True),
    "conversations": conversations,
}


def exact_lru(prompts: Sequence[Sequence[int]], blocks: int, at_once: int = 1) -> Found:
    """at_once: prompts that are looked up before any of them is cached."""
    cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
    paths = [[hash(tuple(prompt[: at + SIZE])) for at in range(0, len(prompt) - SIZE + 1, SIZE)] for prompt in prompts]
    hits = evicted = 0
    for begin in range(0, len(prompts), at_once):
        together = range(begin, min(begin + at_once, len(prompts)))
        for number in together:
            found = itertools.takewhile(cached.__contains__, paths[number][: (len(prompts[number]) - 1) // SIZE])
            hits += SIZE * sum(1 for _ in found)
        for key in (key for number in together for key in reversed(paths[number])):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > blocks:
            cached.popitem(last=False)
            evicted += 1
    return Found(sum(map(len, prompts)), hits, evicted)


class Engine:
    """transformers' manager around the tiny model, with our blocks in it or as it is."""

    def __init__(self, blocks: int, at_once: int, *, ours: bool) -> None:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, **shape, num_key_value_heads=1, max_position_embeddings=8192)
        options = {"page_size": SIZE, "num_blocks": blocks, "max_batch_tokens": 512, "max_requests_per_batch": at_once}
        if ours:
            options["safety_margin"] = 0.0
        self._at_once = at_once
        self.manager: Any = (
            LlamaForCausalLM(config)
            .eval()
            .init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=ANSWER),
                continuous_batching_config=ContinuousBatchingConfig(**options, use_async_batching=False, use_cuda_graph=False),
            )
        )
        self.manager.warmup()
        cache = self.manager.batch_processor.cache
        self._blocks = PagedBlocks(cache, blocks) if ours else None
        if self._blocks:
            self._blocks.install(cache)
        self._hits: dict[str, int] = {}
        cache.search_prefix_match = partial(self._search, cache.search_prefix_match)

    def _search(self, search: Callable[[str, list[int]], int], request_id: str, tokens: list[int]) -> int:
        self._hits[request_id] = search(request_id, tokens)
        return self._hits[request_id]

    def run(self, prompts: Sequence[list[int]]) -> Found:
        self.manager.start()
        try:
            for begin in range(0, len(prompts), self._at_once):
                batch = prompts[begin : begin + self._at_once]
                for at, prompt in enumerate(batch, begin):
                    if self._blocks and not self._blocks.admit(f"r{at}", Claim(Prefix(prompt, SIZE), 0.0), _blocks(prompt)):
                        raise RuntimeError(f"{self._at_once} requests do not fit into the cache at once")
                    self.manager.add_request(prompt, request_id=f"r{at}")
                for _ in batch:
                    if self.manager.get_result() is None:
                        raise RuntimeError("the engine has stopped")
                if self._blocks:
                    self._blocks.unused.wait()
        finally:
            self.manager.stop(block=True)
        evicted = self._blocks.ledger.counts().evicted if self._blocks else None
        return Found(sum(map(len, prompts)), sum(self._hits.values()), evicted)


def _blocks(prompt: Sequence[int]) -> int:
    """That a request may need."""
    return -(-(len(prompt) + ANSWER) // SIZE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hit ratios with a working set of three times the cache.")
    parser.add_argument("--blocks", type=int, default=512, help=f"the cache, in blocks of {SIZE} tokens (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="of each workload (default: %(default)s)")
    parser.add_argument("--at-once", default="1,8", help="requests that run together, one row each (default: %(default)s)")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    print(f"`{command('bench.replica.evictions', arguments)}`\n")
    print(f"{versions((f'transformers {transformers.__version__}', f'torch {torch.__version__}'))}\n")
    size = f"a cache of {options.blocks} blocks of {SIZE} tokens, {TIMES} times as much in use"
    print(f"{options.requests} requests of each workload, {size}.\n")
    names = ("workload", "at once", "exact LRU", "looked up together", "our ledger", "difference", "transformers' own")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for name, make in WORKLOADS.items():
        prompts = list(make(random.Random(1), options.blocks, options.requests))
        exact = exact_lru(prompts, options.blocks)
        for at_once in map(int, options.at_once.split(",")):
            together = exact_lru(prompts, options.blocks, at_once)
            ours, theirs = (Engine(options.blocks, at_once, ours=ours).run(prompts) for ours in (True, False))
            difference = 100 * (ours.ratio - exact.ratio)
            cells = [name, str(at_once), f"{exact.ratio:.2%}", f"{together.ratio:.2%}", f"{ours.ratio:.2%}"]
            print(f"| {' | '.join([*cells, f'{difference:+.2f}', f'{theirs.ratio:.2%}'])} |", flush=True)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    main()
