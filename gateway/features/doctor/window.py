"""The last prompts of a stream, and which of them a new one may have to do with.

    keys        block key -> the first prompt that had it: how much of a prompt any earlier one has computed (`reusable`)
    kin         by what a later prompt of the same conversation keeps whatever breaks: the last prompts of its session, of equal
                heads and turns but for volatile texts (chains of loose digests, from the first token and from the first turn
                behind the system prompt), and of equal turns anywhere

A chain's digest at a turn stands for all turns up to there, so the deepest one that is known is the best match. A prompt that
leaves the window takes its entries along. Bounds: prompts, and bytes of all of them. Synchronous, pure.
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
_ENTRY_BYTES: Final = 150  # of memory, for a new key
OF_SESSION: Final = 8  # last prompts of a session that are looked at
OF_TURNS: Final = 3  # prompts with an equal turn
_MIN_TURN: Final = 200  # bytes of a turn that is found again
_LAST_TURNS: Final = 64


class Window:
    """See the top of this file."""

    def __init__(self, most: int = MAX_PROMPTS, most_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._sizes = dict[int, int]()  # of each with its entries, in bytes, more or less
        self._prompts = OrderedDict[int, ObservedRequest]()
        self._keys = dict[bytes, int]()
        self._chains = dict[int, int]()
        self._turns = dict[int, int]()
        self._sessions = dict[tuple[str, str, str], deque[int]]()

    def longest(self, prompt: ObservedRequest) -> tuple[int, ObservedRequest | None]:
        """(blocks, whose): how many of its blocks an earlier prompt has, and the first that had the last of them. O(blocks)."""
        keys = prompt.keys
        for at in range(len(keys) - KEY, -1, -KEY):
            number = self._keys.get(keys[at : at + KEY])
            if number is not None:
                return at // KEY + 1, self._prompts[number]
        return 0, None

    def kin(self, prompt: ObservedRequest) -> list[ObservedRequest]:
        """Those that it may have to do with, the last first; a bounded number. O(segments)."""
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
                    if found == OF_TURNS:
                        break
        return [self._prompts[number] for number in sorted(numbers, reverse=True)]

    def add(self, prompt: ObservedRequest) -> None:
        """prompt.number: greater than that of all before."""
        number, keys = prompt.number, prompt.keys
        self._prompts[number] = prompt
        new = 0
        for at in range(len(keys) - KEY, -1, -KEY):
            if self._keys.setdefault(keys[at : at + KEY], number) != number:
                break  # those before it are known, too, or their prompts have left the window
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
            self._sessions.setdefault(_session(prompt), deque[int](maxlen=OF_SESSION)).append(number)
        while len(self._prompts) > self._most or (self._bytes > self._most_bytes and len(self._prompts) > 1):
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
        of_session = self._sessions.get(name)
        if of_session is not None:
            if of_session and of_session[0] == number:
                of_session.popleft()
            if not of_session:
                del self._sessions[name]

    def check(self) -> None:
        """For tests: raises AssertionError if its books are wrong."""
        assert self._bytes == sum(self._sizes.values())
        assert self._sizes.keys() == self._prompts.keys()
        known = self._prompts.keys()
        for index in (self._keys, self._chains, self._turns):
            assert set(index.values()) <= known
        assert {number for numbers in self._sessions.values() for number in numbers} <= known
        assert all(self._sessions.values())
        assert len(self._prompts) <= self._most

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
    """Loose digests, each with all before it: from the first token, whatever the order of tools; from the first turn."""
    if not prompt.outline:
        return
    tenant = prompt.tenant.encode("utf-8", "surrogatepass")
    at = xxhash.xxh3_64_intdigest(tenant, 1)
    for loose in [*sorted(each.loose for each in prompt.tools), *(each.loose for each in prompt.fields)]:
        at = _chained(loose, at)
    whole = [at]
    for turn in prompt.turns:
        whole.append(_chained(turn.loose, whole[-1]))
    yield whole
    body, at = list[int](), xxhash.xxh3_64_intdigest(tenant, 2)
    for turn in prompt.body:
        at = _chained(turn.loose, at)
        body.append(at)
    yield body
