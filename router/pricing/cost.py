"""The cost of sending a prompt to a replica: seconds until its first token, plus the delay that it causes for others.

    queue_r = booked_r / rate_r        work_r = uncached_r / rate_r

    cost(r) = queue_r + work_r
            + returns_r * (queue_r * work_r + work_r^2 / 2)
            + (w * duplicate_r + evicted_r) / rate_r
            + decode_r

booked_r: uncached prompt tokens of requests on r before their first token, by our own count, less the estimated progress of
the running prefill: the queue before us. uncached_r: prompt tokens that r would have to compute.

The second line is the delay of later requests on r, which arrive at returns_r per second: a conversation that r has just
answered returns to r with its next turn. A request that arrives while the queue before us is served waits for all of our work,
too; one that arrives during our own prefill waits for half of it on average. A short prompt delays others little; a cold prompt
of 100,000 tokens goes where the fewest requests are expected. The term needs no weight: it is in seconds, as our own waiting.

The third line is the price of cache space. duplicate_r: of the uncached tokens, those that another replica holds; a second
copy leaves less room for other prefixes. evicted_r: tokens that r must evict to make room, each weighted by its probability of
reuse (`reuse_chance`).

decode_r: running sequences take turns with our prefill; each is priced as DECODE_TOKENS tokens of prefill.

`discounted` subtracts the rent paid for a missing copy (`replication.py`). What a replica probably holds of the prompt's
session beyond its match is subtracted from its uncached tokens, and shown as session_s (`quotes.py`).

There are no thresholds or modes: an overloaded holder is expensive.
"""

from __future__ import annotations

import math
from typing import Final

from router.types import Cost

DUPLICATE_WEIGHT: Final = 1.0
DECODE_TOKENS: Final = 32.0


def cost(
    *,
    booked: int,
    uncached: int,
    duplicate: int,
    evicted: float,
    decoding: int,
    prefill_rate: float,
    return_rate: float,
) -> Cost:
    """Price one replica.

    Counts in tokens but `decoding` (sequences); prefill_rate in tokens per second, positive; return_rate in requests per
    second.
    """
    queue, work = booked / prefill_rate, uncached / prefill_rate
    parts = (
        queue,
        work,
        return_rate * (queue * work + work * work / 2),
        DUPLICATE_WEIGHT * duplicate / prefill_rate,
        evicted / prefill_rate,
        decoding * DECODE_TOKENS / prefill_rate,
        0.0,
        0.0,
    )
    return tuple.__new__(Cost, parts)  # half the time of calling it, and this is done for dozens of replicas a request


def reuse_chance(idle_s: float, lifetime_s: float) -> float:
    """The probability of reuse of a block that was idle for idle_s, where blocks are evicted after lifetime_s."""
    return math.exp(-idle_s / lifetime_s) if idle_s > 0 else 1.0


def discounted(full: Cost, rent_s: float) -> Cost:
    """The cost with the discount for a copy that rent_s was paid for, at most the price of the copy."""
    copy = full.prefill_s + full.others_s + full.duplicate_s + full.evicted_s
    return full._replace(rent_s=-min(copy, rent_s))
