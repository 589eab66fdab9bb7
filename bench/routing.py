"""What a decision costs: hash the prompt, choose, first token, close; in microseconds, by prompt size and fleet size.

    python -m bench.routing

The trie is filled first with as many blocks as a busy gateway believes in. Each timed prompt is a conversation's next turn
over a head that is shared with others, so that match, split and growth all happen.
"""

from __future__ import annotations

import random
import statistics
import time

from router import Outcome, Prompt, Replica, Router, seed, text_keys

BLOCK = 256
FILL_BLOCKS = 200_000
ROUNDS = 400


def filled(replicas: int, chance: random.Random) -> tuple[Router, list[str]]:
    router = Router(policy="cost", ttl_s=1e9, memory_bytes=1 << 30, chance=chance)
    names = [f"r{index}" for index in range(replicas)]
    for name in names:
        router.add(Replica(name), block_tokens=64)
    heads = [chance.randbytes(4096) for _ in range(50)]
    while router.trie.blocks < FILL_BLOCKS:
        text = chance.choice(heads) + chance.randbytes(chance.choice([2_000, 8_000, 32_000]))
        router.choose(prompt_of(text), names, 0.0).close(Outcome(True), 0.0)
    return router, names


def prompt_of(text: bytes) -> Prompt:
    return Prompt(text_keys(text, BLOCK, seed("m")), len(text), BLOCK, "m")


def measure(replicas: int, size: int) -> tuple[float, float]:
    """(p50, p99) in microseconds of one whole decision."""
    chance = random.Random(1)
    router, names = filled(replicas, chance)
    head, times = chance.randbytes(size // 2), []
    for turn in range(ROUNDS):
        text = head + chance.randbytes(size - len(head))
        begun = time.perf_counter()
        booking = router.choose(prompt_of(text), names, float(turn))
        booking.first_token(turn + 0.1)
        booking.close(Outcome(True, size // 4, size // 8), turn + 0.2)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    print(f"hash + choose + observe, trie of {FILL_BLOCKS:,} blocks, microseconds")
    print(f"{'prompt':>8} {'replicas':>9} {'p50':>8} {'p99':>8}")
    for size in (2_000, 32_000, 128_000):
        for replicas in (8, 64):
            p50, p99 = measure(replicas, size)
            print(f"{size // 1000:>5} kB {replicas:>9} {p50:>8.1f} {p99:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
