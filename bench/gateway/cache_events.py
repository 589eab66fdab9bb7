"""The ingestion of engines' cache events: blocks a second on one core, and bytes of a held block.

    python -m bench.gateway.cache_events [--blocks 400000]

Batches as vLLM and SGLang publish them: each is a step that stores a prompt of PROMPT tokens, and removes as many blocks. They
are decoded and applied as by the receiving thread, without the network.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from gateway.features.kv_events.stream import EventStream, Source

PROMPT: Final = 4096  # tokens
HELD: Final = 50_000  # blocks
FORMS: Final = (
    ("vLLM, blocks of 16", 16, "map"),
    ("vLLM before 0.24, blocks of 16", 16, "array"),
    ("SGLang, pages of 1", 1, "array"),
)


def batches(blocks: int, size: int, form: str, seed: int = 0) -> Iterator[bytes]:
    """Batches that store so many blocks together; removals begin when HELD are stored."""
    chance, held, made = random.Random(seed), list[int](), 0
    per_prompt = PROMPT // size
    while made < blocks:
        tokens = [chance.randrange(150_000) for _ in range(per_prompt * size)]
        hashes = [chance.getrandbits(64) for _ in range(per_prompt)]
        events: list[Any] = [_event(form, hashes, tokens, size)]
        held += hashes
        made += per_prompt
        while len(held) > HELD:
            gone = held.pop(0)
            removed = {"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0}
            events.append(removed if form == "map" else list(removed.values()))
        yield msgspec.msgpack.encode([time.time(), events, 0])


def _event(form: str, hashes: Sequence[int], tokens: Sequence[int], size: int) -> Any:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if form == "map" else list(event.values())


def measure(payloads: Sequence[bytes]) -> tuple[float, EventStream]:
    """(CPU seconds, the stream afterwards)."""
    stream = EventStream(Source("r", 0, "", "", "", salted=True), lambda _number: None, lambda _source: None)
    stream.ordering.start(0.0)
    gc.collect()
    begin = time.process_time()
    for number, payload in enumerate(payloads):
        stream.ordering.live(number, payload, 0.0)
    return time.process_time() - begin, stream


def block_bytes(payloads: Sequence[bytes]) -> float:
    """Bytes of a held block."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        _, stream = measure(payloads)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / stream.holdings.blocks
    finally:
        tracemalloc.stop()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.cache_events", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=400_000, metavar="N", help="stored; default: %(default)s")
    options = parser.parse_args(arguments)
    print(f"pid {os.getpid()}; stored and removed blocks a second of CPU")
    for name, size, form in FORMS:
        payloads = list(batches(options.blocks, size, form))
        took_s, stream = measure(payloads)
        fewer = payloads[: len(payloads) // 8]
        print(f"{name}: {stream.blocks / took_s:,.0f} blocks/s, {block_bytes(fewer):.0f} bytes a block")


if __name__ == "__main__":
    main()
