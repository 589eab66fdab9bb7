"""The cost of sending a prompt to a replica: seconds until its first token, plus a price for memory.

    cost(r) = booked_r / rate_r  +  uncached_r / rate_r  +  decode_r  +  w * duplicate_r / rate_r

booked_r: uncached prompt tokens of requests on r that wait for their first token, by our own count, less what the prefill
that runs must have done by now: the queue before us.
uncached_r: prompt tokens that r would have to compute.
decode_r: running sequences take turns with our prefill; each is priced as DECODE_TOKENS tokens of prefill.
duplicate_r: of the uncached tokens, those that another replica holds. Computing them again also evicts something else from
the fleet's memory, so they are priced DUPLICATE_WEIGHT times on top. With w = 0 hot prefixes spread at the first queue and
everybody's cache fills with the same blocks; simulations on real traces put w at 2 to 4 (flat in between).

There is no threshold and no mode: an overloaded holder is simply expensive.
"""

from __future__ import annotations

from router.types import Cost

DUPLICATE_WEIGHT = 3.0
DECODE_TOKENS = 32.0


def cost(*, booked: int, uncached: int, duplicate: int, decoding: int, prefill_rate: float) -> Cost:
    """Price one replica. All counts in tokens but `decoding` (sequences); prefill_rate in tokens per second, positive."""
    return Cost(
        queue_s=booked / prefill_rate,
        prefill_s=uncached / prefill_rate,
        decode_s=decoding * DECODE_TOKENS / prefill_rate,
        duplicate_s=DUPLICATE_WEIGHT * duplicate / prefill_rate,
    )
