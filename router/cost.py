"""The cost of sending a prompt to a replica: seconds until its first token, plus what it takes from others.

    queue_r = booked_r / rate_r        work_r = uncached_r / rate_r

    cost(r) = queue_r + work_r
            + arrivals_r * (queue_r * work_r + work_r^2 / 2)
            + w * duplicate_r / rate_r
            + decode_r

booked_r: uncached prompt tokens of requests on r that wait for their first token, by our own count, less what the prefill
that runs must have done by now: the queue before us. uncached_r: prompt tokens that r would have to compute.

The second line is what our work costs those who come to r after us, arrivals_r of them in a second. Whoever comes while the
queue before us is served waits for all of our work, too; whoever comes during our own prefill waits for half of it on average.
A short prompt takes nothing from anybody; a cold prompt of 100,000 tokens goes where the fewest are about to ask. It needs no
weight: it is in the same seconds as our own waiting.

duplicate_r: of the uncached tokens, those that another replica holds. Computing them again evicts something else from the
fleet's memory, so they are priced on top. decode_r: running sequences take turns with our prefill; each is priced as
DECODE_TOKENS tokens of prefill.

There is no threshold and no mode: an overloaded holder is simply expensive.
"""

from __future__ import annotations

from router.types import Cost

DUPLICATE_WEIGHT = 1.0
DECODE_TOKENS = 32.0


def cost(*, booked: int, uncached: int, duplicate: int, decoding: int, prefill_rate: float, arrival_rate: float) -> Cost:
    """Price one replica.

    Counts in tokens but `decoding` (sequences); prefill_rate in tokens per second, positive; arrival_rate in requests per
    second.
    """
    queue, work = booked / prefill_rate, uncached / prefill_rate
    return Cost(
        queue_s=queue,
        prefill_s=work,
        others_s=arrival_rate * (queue * work + work * work / 2),
        duplicate_s=DUPLICATE_WEIGHT * duplicate / prefill_rate,
        decode_s=decoding * DECODE_TOKENS / prefill_rate,
    )
