"""The cost of sending a prompt to a replica: seconds until its first token, plus what it takes from others.

    queue_r = booked_r / rate_r        work_r = uncached_r / rate_r

    cost(r) = queue_r + work_r
            + returns_r * (queue_r * work_r + work_r^2 / 2)
            + (w * duplicate_r + evicted_r) / rate_r
            + decode_r

booked_r: uncached prompt tokens of requests on r that wait for their first token, by our own count, less what the prefill
that runs must have done by now: the queue before us. uncached_r: prompt tokens that r would have to compute.

The second line is what our work costs later requests on r, returns_r of them in a second: a conversation that r has just
answered returns to r with its next turn. A request that arrives while the queue before us is served waits for all of our work,
too; one that arrives during our own prefill waits for half of it on average. A short prompt delays nobody; a cold prompt of
100,000 tokens goes where the fewest requests are expected. The term needs no weight: it is in seconds, as our own waiting.

The third line is what it costs the fleet's memory. duplicate_r: of the uncached tokens, those that another replica holds;
computing them again leaves less room for everything else, so they are priced on top. evicted_r: tokens that r must forget to
make room, each times the chance that somebody would have asked for it again (`reuse_chance`).

decode_r: running sequences take turns with our prefill; each is priced as DECODE_TOKENS tokens of prefill.

`discounted` takes off what waiting for want of a copy has cost before (`replication.py`).

There is no threshold and no mode: an overloaded holder is simply expensive.
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
    )
    return tuple.__new__(Cost, parts)  # half the time of calling it, and this is done for dozens of replicas a request


def reuse_chance(idle_s: float, lifetime_s: float) -> float:
    """The chance that a block that nobody used for idle_s will be asked for again, where blocks are evicted at lifetime_s."""
    return math.exp(-idle_s / lifetime_s) if idle_s > 0 else 1.0


def discounted(full: Cost, rent_s: float) -> Cost:
    """The cost where computing the prompt makes a copy that others paid rent_s for: off its price, but no more than that."""
    copy = full.prefill_s + full.others_s + full.duplicate_s + full.evicted_s
    return full._replace(rent_s=-min(copy, rent_s))
