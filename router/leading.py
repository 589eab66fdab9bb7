"""Leaders: of prompts with one head that nothing has computed yet, one computes it, and the others wait for it.

A prompt is matched by the credit of an earlier one still in prefill (`router.py`). An engine that does not share
prefixes in flight (`learning/inflight.py`) would compute the common part again. So the later request waits for the first token
of the earlier one, its lead. At an engine with slots it waits on until its lead has ended, but there at most as long as its own
prefill would take in another slot.

The lead is the nearest lease ahead in the replica's queue whose prompt has the end of the match, and computes a part of the
match. Waiting leases are in the queue like all others, so the price of the replica contains their work. A lease waits only for
leases ahead of it: there are no cycles, and the first one of a replica never waits. Its own blocks are credited when it is
sent: until then no replica computes them, and it may have to choose again. With slots the waiters form a chain, because one
request at a time finds the prefix: each waits for the end of the one before it. A moved lease follows no follower, which may be
its own. A warm prefix is not waited for: other slots may hold it, too.

Waiting has to pay. Beside its lead, at half of the engine's speed, a prompt with s tokens that are being computed and o others
is prefilled after 2 (s + o), behind it after L + o; L: tokens that the lead computes. So it waits if L < 2 s + o, and if s
takes at least LEAST_S. With slots L does not count.

The wait is bounded (`Lead.most_s`): by twice the estimated work ahead, once a rate is known, and by MAX_S. A silent lease shows
no first token: it counts as computed at the estimated end of its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.load import Lease, ReplicaLoad
from router.types import KEY_BYTES, BlockKeys

LEAST_S: Final = 0.05  # of prefill that waiting saves
MAX_S: Final = 60.0  # a CPU computes some thousand tokens meanwhile
MARGIN: Final = 2.0  # of the estimated work ahead, because rates are estimates
LOOK: Final = 64  # leases that are looked at; a waiting one shows its own leader


class Lead:
    """The lease for which another one waits, as it was then. most_s: limit for its first token. after_s: limit from its first
    token to its end, for engines with slots; else 0. tokens: of the match, that it computes. awaited: the other one was sent at
    its first token.
    """

    __slots__ = ("_moves", "after_s", "awaited", "lease", "most_s", "tokens")

    def __init__(self, lease: Lease, tokens: int, most_s: float, after_s: float) -> None:
        self.lease = lease
        self._moves = lease.moves
        self.tokens = tokens
        self.most_s = most_s
        self.after_s = after_s
        self.awaited = False

    @property
    def lost(self) -> bool:
        """True if it computes the prefix no longer: it has failed, was cancelled, or moved to another replica."""
        lease = self.lease
        return lease.moves != self._moves or (lease.closed and not lease.decoding)

    @property
    def computed(self) -> bool:
        """True once it has its first token."""
        return self.lease.decoding and not self.lost

    @property
    def over(self) -> bool:
        """True once nothing more is to be waited for."""
        return self.lost or (self.lease.closed if self.after_s else self.lease.decoding)

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called at the lease's first token, move and end, until `unwatch`."""
        if self.lease.watchers is None:
            self.lease.watchers = []
        self.lease.watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        if self.lease.watchers is not None and changed in self.lease.watchers:
            self.lease.watchers.remove(changed)

    def __repr__(self) -> str:
        return f"<Lead of {self.tokens} tokens, {self.lease!r}>"


def lead_of(lease: Lease, prefix: BlockKeys, end: int, tokens: int, now: float, *, slots: bool) -> Lead | None:
    """The lead for a lease that has just been booked; None: no lease ahead computes a part of its match, or waiting
    does not pay.

    prefix: the key of the last block of its match, which ends at `end` in its keys. tokens: of the match. O(LOOK).
    """
    load, other, left = lease.load, lease.ahead, LOOK
    least = LEAST_S * load.rate.value
    while other is not None and left:
        if other.keys[end - KEY_BYTES : end] == prefix:
            if slots and other.lead is not None and not lease.moves:
                return _lead(lease, other, tokens, tokens, now, slots=True)
            for found in (other, other.lead):
                if found is None or found is lease or (lease.moves and found.follows):
                    continue
                if (missing := _missing(found, load, prefix, end, tokens)) >= least:
                    return _lead(lease, found, missing, tokens, now, slots=slots)
        other, left = other.ahead, left - 1
    return None


def _missing(lease: Lease, load: ReplicaLoad, prefix: BlockKeys, end: int, tokens: int) -> int:
    """Tokens of a match that a lease of this load computes; 0: nothing any more."""
    if lease.load is not load or lease.decoding or lease.closed or lease.keys[end - KEY_BYTES : end] != prefix:
        return 0
    return tokens - (lease.prompt_tokens - lease.uncached_tokens)


def _lead(lease: Lease, found: Lease, missing: int, tokens: int, now: float, *, slots: bool) -> Lead | None:
    """The lead, if waiting for it pays. missing: tokens of the match that it computes."""
    own, rate = lease.uncached_tokens, lease.load.rate
    if not slots and found.uncached_tokens >= 2 * missing + own:
        return None
    most_s = MAX_S
    if rate.pool.known or found.silent:
        most_s = min(most_s, MARGIN * lease.load.remaining_tokens(now) / rate.value + LEAST_S)
    return Lead(found, missing, most_s, min(MAX_S, (tokens + own) / rate.value) if slots else 0.0)
