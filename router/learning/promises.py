"""Promises: a prefix that a client has asked to be cached goes back to the replica that caches it.

A client may mark places in its prompt (`cache_control`) up to which it wants the prompt to be cached, and it may pay for that.
For each such place the router remembers the replica that has computed the prompt, for as long as the client wants, which may be
longer than the index believes in it. When the same client (or session) sends the same prefix again, that replica is chosen even
if another one would cost less, unless its queue is longer than a bound (WAIT_S). The decision has the outcome of the promise:

    ""      no place of this prompt was promised: it has no breakpoint, or its first one, or its time is over
    held    the replica of the longest promised prefix is chosen
    busy    its queue is too long
    gone    it is no candidate: it is down, drains, or has left
    lost    it has lost its cache since the promise

A promise is made to its owner only: a system prompt that a thousand conversations share does not draw them to one replica.

Bounds: beyond MAX_PROMISES the ones least recently made or renewed are forgotten. MAX_PLACES of a prompt are looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import xxhash

from router.learning.losses import Losses
from router.types import KEY_BYTES, Prompt

MAX_PROMISES: Final = 65_536
MAX_PLACES: Final = 32
LONGEST_S: Final = 3600
LEAST_TOKENS: Final = 1024  # shorter prefixes get no promise, as at the providers
WAIT_S: Final = 2.0

NONE: Final = ""
HELD: Final = "held"
BUSY: Final = "busy"
GONE: Final = "gone"
LOST: Final = "lost"


class Promise:
    """replica: has computed the prompt up to this place, at `made`. until: end of the promise. blocks: up to the place."""

    __slots__ = ("blocks", "made", "replica", "until")

    def __init__(self, replica: str, blocks: int, made: float, until: float) -> None:
        self.replica = replica
        self.blocks = blocks
        self.made = made
        self.until = until


class Promises:
    """The promises (see the module). Operations are O(MAX_PLACES), except `lost`."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, Promise] = OrderedDict()
        self._losses = Losses()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, prompt: Prompt, least_blocks: int, now: float) -> Promise | None:
        """The promise of the longest prefix, or None. least_blocks: shorter prefixes have none."""
        for blocks, _ in sorted(prompt.breakpoints[:MAX_PLACES], reverse=True):
            if blocks < least_blocks:
                return None
            promise = self._made.get(_number(prompt, blocks))
            if promise is not None and promise.until >= now:
                return promise
        return None

    def is_lost(self, promise: Promise) -> bool:
        """True if the replica has lost its cache since the promise."""
        return self._losses.after(promise.replica, promise.made)

    def make(self, prompt: Prompt, least_blocks: int, replica: str, now: float) -> None:
        """Promise the prompt's places: the replica has computed it."""
        for blocks, seconds in prompt.breakpoints[:MAX_PLACES]:
            if seconds and blocks >= least_blocks:
                number = _number(prompt, blocks)
                self._made.pop(number, None)
                self._made[number] = Promise(replica, blocks, now, now + min(seconds, LONGEST_S))
                if len(self._made) > MAX_PROMISES:
                    self._made.popitem(last=False)

    def entries(self) -> Iterator[tuple[int, Promise]]:
        """All promises, for another router's `restore`. Promises may be made meanwhile. O(1) each, after one copy of their
        numbers.
        """
        for number in list(self._made):
            promise = self._made.get(number)
            if promise is not None:
                yield number, promise

    def restore(self, number: int, promise: Promise, now: float) -> None:
        """Add a promise of another router, unless it is known here."""
        if number not in self._made and len(self._made) < MAX_PROMISES and promise.until > now:
            promise.until = min(promise.until, now + LONGEST_S)
            self._made[number] = promise

    def lost(self, replica: str, now: float) -> None:
        """The replica has lost its cache. O(replicas that lost theirs within LONGEST_S)."""
        self._losses.add(replica, now, LONGEST_S)

    def check(self) -> None:
        """Raises AssertionError if a bound is broken. O(promises)."""
        assert len(self._made) <= MAX_PROMISES
        assert all(promise.blocks > 0 and promise.made <= promise.until for promise in self._made.values())

    def __repr__(self) -> str:
        return f"<Promises: {len(self)}>"


def _number(prompt: Prompt, blocks: int) -> int:
    """The number of a place: its block key covers all blocks before it; its owner is the session, else the client."""
    owner = prompt.family_key or prompt.client
    key = prompt.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
    return xxhash.xxh3_64_intdigest(key, seed=owner & 0xFFFF_FFFF_FFFF_FFFF)
