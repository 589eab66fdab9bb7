"""The cost of sending a prompt to a replica: seconds until its first token, plus the delay that it causes for others.

    queue_r = booked_r / rate_r        work_r = uncached_r / rate_r

    cost(r) = queue_r + work_r
            + line_r * work_r
            + returns_r * (waits_r * queue_r * work_r + work_r^2 / 2) + busy_r * conversation
            + (w * duplicate_r + evicted_r) / rate_r
            + decode_r + start_r + adapter_r

booked_r: uncached prompt tokens of requests on r before their first token, by this router's own count, less the estimated
progress of the running prefill, and the ones of others by its engine's reports (`learning/foreign.py`): the queue in
front of this request. uncached_r: prompt tokens that r would have to compute.

line_r: requests that wait in the gateway for r and go after this one (`late.py`).

The third line is the delay of later requests on r, which arrive at returns_r per second: a conversation that r has just
answered returns to r with its next turn, as often as conversations of r's pool do. A request that arrives while the queue is
served waits for all of this request's work, too; a request that arrives during this request's own prefill waits for half of it
on average. Where the shortest goes first (`late.py`), of the requests behind it only the share waits_r with more work waits for
it. Prefills are taken as exponentially distributed: waits_r = exp(-work_r / mean work of a request); else it is 1. A short
prompt delays others little; a cold prompt of 100,000 tokens goes to the replica with the fewest expected requests. The term
needs no weight: it is in seconds, like this request's own waiting.

The conversation of the request brings its later turns to r, too. busy_r: the share of the last minutes in which r has computed
prompts, beyond FREE_SHARE: in a fleet with less work there is always an idle replica, and the term would only take the place
of better reasons. conversation: the mean work of a whole conversation in r's pool (`learning/conversations.py`). So
conversations that begin, or whose cache is lost or short, leave busy replicas before queues show it. A prompt without any match
has no such term: mostly it is no conversation, and the price of evictions alone finds the oldest blocks of the fleet.

The next line is the price of cache space. duplicate_r: uncached tokens that another replica holds; a second copy leaves less
room for other prefixes. evicted_r: tokens that r must evict to make room, each weighted by its probability of reuse
(`index/holds.py`).

decode_r: running sequences take turns with this request's prefill; each is priced as DECODE_TOKENS tokens of prefill.

start_r: a replica that has just come up computes slowly at first, and an idle one would get all new work at once. For START_S
its new work is priced as at a part of its rate, FIRST_SHARE at first (`starting`). Not on a holder of the longest match, or of
the session: another replica would have to compute all of it.

adapter_r: the time to load the adapter that the request names, where it is not loaded (`learning/adapters.py`).

`discounted` subtracts the rent paid for a missing copy (`replication.py`). Tokens that a replica probably holds of the prompt's
session beyond its match are subtracted from its uncached tokens, and shown as session_s (`quotes.py`).

There are no thresholds or modes: an overloaded holder is expensive.
"""

from __future__ import annotations

import math
from typing import Final

from router.types import Cost

DUPLICATE_WEIGHT: Final = 1.0
DECODE_TOKENS: Final = 32.0
FREE_SHARE: Final = 0.2
START_S: Final = 10.0
FIRST_SHARE: Final = 0.1


def cost(
    *,
    booked: int,
    uncached: int,
    duplicate: int,
    evicted: float,
    decoding: float,
    prefill_rate: float,
    others_s: float,
) -> Cost:
    """The cost on one replica.

    Counts in tokens except `decoding` (sequences); prefill_rate in tokens per second, positive. others_s: the second and third
    line of the formula.
    """
    parts = (
        booked / prefill_rate,
        uncached / prefill_rate,
        others_s,
        DUPLICATE_WEIGHT * duplicate / prefill_rate,
        evicted / prefill_rate,
        decoding * DECODE_TOKENS / prefill_rate,
        0.0,
        0.0,
        0.0,
        0.0,
    )
    return tuple.__new__(Cost, parts)  # twice as fast as a call, for dozens of replicas per request


def delay(queue_s: float, work_s: float, return_rate: float, mean_s: float) -> float:
    """The expected delay of requests that arrive at return_rate per second, by one with so much work behind such a queue.

    mean_s: of their work, where the shortest goes first; else infinite.
    """
    waits = math.exp(-work_s / mean_s) if 0.0 < mean_s < math.inf else 1.0
    return return_rate * (waits * queue_s * work_s + work_s * work_s / 2)


def starting(work_s: float, age_s: float) -> float:
    """The price of new work on a replica that came up age_s ago. work_s: at its full rate."""
    if age_s >= START_S:
        return 0.0
    share = FIRST_SHARE + (1 - FIRST_SHARE) * max(0.0, age_s) / START_S
    return work_s * max(0.0, 1 / share - 1)


def discounted(full: Cost, rent_s: float) -> Cost:
    """The cost with the discount for a copy for which rent_s was paid, at most the price of the copy."""
    copy = full.prefill_s + full.others_s + full.duplicate_s + full.evicted_s
    return full._replace(rent_s=-min(copy, rent_s))
