"""Prefixes that an earlier request had computed, and that this one did not get: why, by what is known of both.

Expected is what the earlier prompts of the stream have in common with this one, cached is what the engine has reported. An
engine caches whole blocks and our tokens are an estimate, so a difference counts from MIN_LOST tokens, and from a tenth,
upwards.

    spilled         the router chose another replica, for the one with the prefix had too much to do
    concurrent      the earlier request's answer had not begun yet: there was nothing in the cache
    replica_lost    its replica took no requests any more: it was down, drained or gone
    evicted         the same replica, or one that was believed to have it, had it no more
"""

from __future__ import annotations

from typing import Final

from gateway.features.doctor.causes import CONCURRENT, EVICTED, REPLICA_LOST, SPILLED
from gateway.features.doctor.observed import ObservedOutcome, ObservedRequest

MIN_LOST: Final = 256  # tokens
MIN_SHARE: Final = 0.1  # of what was expected
SPILL: Final = "spill"  # of the router's reasons


def undelivered(now: ObservedRequest, expected: int, before: ObservedRequest) -> tuple[str, int] | None:
    """(cause, tokens lost); None: delivered, or not known. expected: tokens. before: the earlier prompt that has them."""
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
    gone = outcome.available_tokens is not None and 2 * outcome.available_tokens < expected
    return EVICTED if gone else SPILLED
