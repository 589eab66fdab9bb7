"""The latest prompts of a stream, and the search for prompts related to a new one.

    keys        block key -> the first prompt with it: the part of a prompt that an earlier one has computed (`longest`)
    sessions    session -> its latest prompts
    chains      digest of a head and its turns, equal if only volatile texts differ (from the first token, and from the first
                turn after the system prompt) -> the latest prompt with it
    turns       digest of a turn -> the latest prompt with it; only prompts without a session are looked up here

A chain's digest at a turn represents all turns up to it, so the last known digest is the best match. A prompt's entries are
removed with it. Bounds: prompts, and their bytes. Synchronous, pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

import xxhash

from gateway.dialects.prompt.segments import Segment
from gateway.features.doctor.observed import KEY, ObservedRequest

MAX_PROMPTS: Final = 20_000
MAX_BYTES: Final = 128 << 20
_ENTRY_BYTES: Final = 150  # memory of a new key
PROMPTS_PER_SESSION: Final = 8  # latest prompts of a session that are compared
PROMPTS_PER_TURN: Final = 3  # compared prompts with an equal turn
_MIN_TURN: Final = 200  # bytes of a turn that is indexed
_LAST_TURNS: Final = 64


class Window:
    """The index of the latest prompts."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sizes = dict[int, int]()  # estimated bytes of each prompt with its entries
        self._prompts = OrderedDict[int, ObservedRequest]()
        self._keys = dict[bytes, int]()
        self._chains = dict[int, int]()
        self._turns = dict[int, int]()
        self._sessions = dict[tuple[str, str, str], deque[int]]()

    def longest(self, prompt: ObservedRequest) -> tuple[int, ObservedRequest | None]:
        """(number of its blocks that an earlier prompt has, the first prompt with the last of them). O(blocks)."""
        keys = prompt.keys
        for at in range(len(keys) - KEY, -1, -KEY):
            number = self._keys.get(keys[at : at + KEY])
            if number is not None:
                return at // KEY + 1, self._prompts[number]
        return 0, None

    def related(self, prompt: ObservedRequest) -> list[ObservedRequest]:
        """The related prompts, the latest first; a bounded number. O(segments)."""
        numbers = set(self._sessions.get(_session(prompt), ()))
        for chain in _chains(prompt):
            for digest in reversed(chain):
                number = self._chains.get(digest)
                if number is not None:
                    numbers.add(number)
                    break
        if not prompt.session:
            found = 0
            for turn in reversed(prompt.body[-_LAST_TURNS:]):
                number = self._turns.get(_turn(prompt, turn)) if turn.size >= _MIN_TURN else None
                if number is not None and number not in numbers:
                    numbers.add(number)
                    found += 1
                    if found == PROMPTS_PER_TURN:
                        break
        return [self._prompts[number] for number in sorted(numbers, reverse=True)]

    def add(self, prompt: ObservedRequest) -> None:
        """Adds a prompt, and removes the oldest ones beyond the bounds. prompt.number: greater than all earlier numbers."""
        number, keys = prompt.number, prompt.keys
        self._prompts[number] = prompt
        new = 0
        for at in range(len(keys) - KEY, -1, -KEY):
            if self._keys.setdefault(keys[at : at + KEY], number) != number:
                break  # earlier keys are known, too, or their prompts have left the window
            new += 1
        self._sizes[number] = prompt.size + _ENTRY_BYTES * new
        self._bytes += self._sizes[number]
        for chain in _chains(prompt):
            for digest in chain:
                self._chains[digest] = number
        for turn in prompt.body[-_LAST_TURNS:]:
            if turn.size >= _MIN_TURN:
                self._turns[_turn(prompt, turn)] = number
        if prompt.session:
            self._sessions.setdefault(_session(prompt), deque[int](maxlen=PROMPTS_PER_SESSION)).append(number)
        while len(self._prompts) > self._max_prompts or (self._bytes > self._max_bytes and len(self._prompts) > 1):
            self._forget()

    def _forget(self) -> None:
        number, prompt = self._prompts.popitem(last=False)
        self._bytes -= self._sizes.pop(number)
        for at in range(0, len(prompt.keys), KEY):
            key = prompt.keys[at : at + KEY]
            if self._keys.get(key) == number:
                del self._keys[key]
        for chain in _chains(prompt):
            for digest in chain:
                if self._chains.get(digest) == number:
                    del self._chains[digest]
        for turn in prompt.body[-_LAST_TURNS:]:
            if self._turns.get(_turn(prompt, turn)) == number:
                del self._turns[_turn(prompt, turn)]
        name = _session(prompt)
        session_prompts = self._sessions.get(name)
        if session_prompts is not None:
            if session_prompts and session_prompts[0] == number:
                session_prompts.popleft()
            if not session_prompts:
                del self._sessions[name]

    def check(self) -> None:
        """For tests. Raises AssertionError if an invariant is broken."""
        assert self._bytes == sum(self._sizes.values())
        assert self._sizes.keys() == self._prompts.keys()
        known = self._prompts.keys()
        for index in (self._keys, self._chains, self._turns):
            assert set(index.values()) <= known
        assert {number for numbers in self._sessions.values() for number in numbers} <= known
        assert all(self._sessions.values())
        assert len(self._prompts) <= self._max_prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __repr__(self) -> str:
        return f"<Window of {len(self)} prompts, {self._bytes} bytes>"


def _session(prompt: ObservedRequest) -> tuple[str, str, str]:
    return prompt.tenant, prompt.session, prompt.thread


def _turn(prompt: ObservedRequest, turn: Segment) -> int:
    return _chained(turn.digest, xxhash.xxh3_64_intdigest(prompt.tenant.encode("utf-8", "surrogatepass"), 3))


def _chained(digest: int, before: int) -> int:
    return xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), before)


def _chains(prompt: ObservedRequest) -> Iterator[list[int]]:
    """Chained loose digests: from the first token, independent of the order of tools; and from the first turn."""
    if not prompt.outline:
        return
    tenant = prompt.tenant.encode("utf-8", "surrogatepass")
    at = xxhash.xxh3_64_intdigest(tenant, 1)
    for loose in [*sorted(each.loose for each in prompt.tools), *(each.loose for each in prompt.fields)]:
        at = _chained(loose, at)
    chain = [at]
    for turn in prompt.turns:
        chain.append(_chained(turn.loose, chain[-1]))
    yield chain
    body, at = list[int](), xxhash.xxh3_64_intdigest(tenant, 2)
    for turn in prompt.body:
        at = _chained(turn.loose, at)
        body.append(at)
    yield body
