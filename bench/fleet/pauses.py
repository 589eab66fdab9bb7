"""How long the event loop stands still while a snapshot is made, and while it is taken in: the longest steps of each.

    python -m bench.fleet.pauses [--prompts 300000]     # in an index of 214 MiB

In plain Python the garbage collector's pauses are among those of taking it in, and so are those in which the index's largest
dictionary grows, as they are among those of requests.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence

from gateway.cluster.process import relax_garbage_collection
from router import Replica, Router
from router.index import trie
from router.learning.objects import MAX_OBJECTS
from router.learning.sessions import MAX_NEW
from router.snapshot.collect import collect
from router.snapshot.records import Record, decode, encode
from router.snapshot.restore import Restorer
from router.types import KEY_BYTES

REPLICAS, LATE = 8, 2
BLOCKS = 10  # of a prompt
NOW = 1e6


def router_of(replicas: int) -> Router:
    router = Router(policy="cost", ttl_s=NOW, memory_bytes=256 << 20, chance=random.Random(1))
    for number in range(replicas):
        router.add(Replica(f"r{number}"))
    return router


def used(prompts: int) -> Router:
    router, chance = router_of(REPLICAS), random.Random(1)
    for number in range(prompts):
        router.trie.insert(f"r{number % REPLICAS}", chance.randbytes(BLOCKS * KEY_BYTES), NOW / 2 + number / 1000)
    for number in range(min(prompts, MAX_OBJECTS)):
        router.objects.put(number, "r1", "m", NOW / 2)
    for number in range(min(prompts, MAX_NEW)):
        router.sessions.answered(number + 1, "r1", BLOCKS, NOW / 2)
    return router


def rows(prompts: int) -> Iterator[str]:
    router = used(prompts)
    kind = "plain Python" if trie.__file__.endswith(".py") else "compiled"
    yield f"{prompts} prompts, {router.trie.needed_bytes >> 20} MiB of index, {kind}"
    yield f"{'':24} {'steps':>7}  {'seconds':>7}  longest ms (the five longest)"
    chunks: list[bytes] = []
    yield row("collect", timed(encoded(collect(router, NOW), chunks)))
    copy = router_of(REPLICAS - LATE)
    restorer = Restorer(copy, NOW, NOW)
    yield row("read", timed(read(restorer, chunks)))
    yield row("take in", timed(restorer.steps(lambda _: False)))
    for number in range(REPLICAS - LATE, REPLICAS):
        copy.add(Replica(f"r{number}"))
        yield row("for one that joins late", timed(restorer.steps(lambda _: False)))


def encoded(slices: Iterator[list[Record]], chunks: list[bytes]) -> Iterator[None]:
    for records in slices:
        if records:
            chunks.append(encode(records))
        yield None


def read(restorer: Restorer, chunks: list[bytes]) -> Iterator[None]:
    for chunk in chunks:
        restorer.add(decode(chunk))
        yield None


def timed(steps: Iterator[None]) -> list[float]:
    """Seconds of CPU of each step: other processes do not count."""
    took, more = list[float](), True
    while more:
        begun = time.thread_time()
        more = next(steps, took) is not took
        took.append(time.thread_time() - begun)
    return took


def row(name: str, took: list[float]) -> str:
    longest = "  ".join(f"{seconds * 1000:.1f}" for seconds in sorted(took, reverse=True)[:5])
    return f"{name:24} {len(took):>7}  {sum(took):>7.2f}  {longest}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.pauses", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=300_000, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    relax_garbage_collection()
    for line in rows(options.prompts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
