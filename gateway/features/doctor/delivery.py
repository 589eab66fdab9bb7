"""Delivery: prefixes that an earlier request had computed, but that this request did not find cached, and the reason.

Expected are the tokens that earlier prompts of the stream share with this one; cached are the tokens reported by the engine.
Engines cache whole blocks, and our token counts are estimates, so a difference counts if it has at least MIN_LOST tokens and a
tenth of the expected ones.

    spilled         the router chose another replica, because the one with the prefix was too busy
    concurrent      the earlier request's answer had not begun, so the cache was empty
    replica_lost    the earlier replica accepted no requests: it was down, drained or removed
    evicted         this replica, or another expected holder of the prefix, had evicted it
"""

from __future__ import annotations

from typing import Final

from gateway.features.doctor.causes import CONCURRENT, EVICTED, REPLICA_LOST, SPILLED
from gateway.features.doctor.observed import ObservedOutcome, ObservedRequest

MIN_LOST: Final = 256  # tokens
MIN_SHARE: Final = 0.1  # of the expected tokens
SPILL: Final = "spill"  # a reason of the router


def undelivered(now: ObservedRequest, expected: int, before: ObservedRequest) -> tuple[str, int] | None:
    """(cause, lost tokens). None: delivered, or unknown. expected: tokens. before: the earlier prompt with these tokens."""
    outcome = now.outcome
    if outcome is None or outcome.cached_tokens is None:
        return None
    lost = expected - outcome.cached_tokens
    if lost < MIN_LOST or lost < MIN_SHARE * expected:
        return None
    return _cause(now, outcome, before, expected), lost


def _cause(now: ObservedRequest, outcome: ObservedOutcome, before: ObservedRequest, expected: int) -> str:
    earlier = before.outcome
    if earlier is None:
        return SPILLED if outcome.reason == SPILL else EVICTED
    if before.time <= now.time and (earlier.first_byte is not None and earlier.first_byte > now.time):
        return CONCURRENT
    if outcome.up is not None and earlier.replica not in outcome.up and earlier.replica != outcome.replica:
        return REPLICA_LOST
    if outcome.reason == SPILL:
        return SPILLED
    if outcome.replica == earlier.replica:
        return EVICTED
    evicted = outcome.available_tokens is not None and 2 * outcome.available_tokens < expected
    return EVICTED if evicted else SPILLED
