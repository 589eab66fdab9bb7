"""Breakpoints: a prefix that a client has asked to be kept goes back to the replica that keeps it.

A client may mark places in its prompt (`cache_control`): up to there it wants the prompt to be cached, and it may pay for
that. For each such place this remembers which replica has computed the prompt, as long as the client wants it kept, which may
be longer than the index believes in it. When the same client (or session) comes with the same prefix, that replica is
chosen, also where another one would cost less, unless the queue before the request there is longer than a bound (WAIT_S). What
became of the promise is in the decision:

    ""      no place of this prompt was promised: it has no breakpoint, or its first one, or its time is over
    held    the replica of the longest promised prefix is chosen
    busy    its queue is too long
    gone    it is no candidate: it is down, drains, or has left
    lost    it has lost its cache since

A promise is made to its owner only: a system prompt that a thousand conversations share does not draw them to one replica.

Bounds: MAX_PROMISES, the least recently made or renewed are forgotten. MAX_PLACES of a prompt are looked up.
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
LEAST_TOKENS: Final = 1024  # shorter prefixes are not worth a promise, as with the providers
WAIT_S: Final = 2.0

NONE: Final = ""
HELD: Final = "held"
BUSY: Final = "busy"
GONE: Final = "gone"
LOST: Final = "lost"


class Promise:
    """replica: has computed the prompt up to this place, at `made`; it is to be kept until `until`. blocks: up to the place."""

    __slots__ = ("blocks", "made", "replica", "until")

    def __init__(self, replica: str, blocks: int, made: float, until: float) -> None:
        self.replica = replica
        self.blocks = blocks
        self.made = made
        self.until = until


class Promises:
    """See the top of this file. Operations are O(MAX_PLACES), but `lost`."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, Promise] = OrderedDict()
        self._losses = Losses()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, prompt: Prompt, least_blocks: int, now: float) -> Promise | None:
        """The promise of the longest prefix, None if there is none. least_blocks: of shorter ones there are none."""
        for blocks, _ in sorted(prompt.breakpoints[:MAX_PLACES], reverse=True):
            if blocks < least_blocks:
                return None
            promise = self._made.get(_number(prompt, blocks))
            if promise is not None and promise.until >= now:
                return promise
        return None

    def is_lost(self, promise: Promise) -> bool:
        """Whether the replica has lost its cache since."""
        return self._losses.after(promise.replica, promise.made)

    def make(self, prompt: Prompt, least_blocks: int, replica: str, now: float) -> None:
        """The replica has computed this prompt."""
        for blocks, seconds in prompt.breakpoints[:MAX_PLACES]:
            if seconds and blocks >= least_blocks:
                number = _number(prompt, blocks)
                self._made.pop(number, None)
                self._made[number] = Promise(replica, blocks, now, now + min(seconds, LONGEST_S))
                if len(self._made) > MAX_PROMISES:
                    self._made.popitem(last=False)

    def entries(self) -> Iterator[tuple[int, Promise]]:
        """For another router's `restore`. Promises may be made meanwhile. O(1) each, after one copy of their numbers."""
        for number in list(self._made):
            promise = self._made.get(number)
            if promise is not None:
                yield number, promise

    def restore(self, number: int, promise: Promise, now: float) -> None:
        """As another router made it; those that were made here stay."""
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
    """Of a place: its block key covers all before it; its owner is the session, else the client."""
    owner = prompt.session_key or prompt.client
    key = prompt.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
    return xxhash.xxh3_64_intdigest(key, seed=owner & 0xFFFF_FFFF_FFFF_FFFF)
