"""Converts rows with keys and names to lines with numbers, which are the only content of a trace.

A conversation is identified by its session, if its client names one. Otherwise it is identified by its prompts: a prompt that
begins with all full blocks of an earlier one continues that conversation; each prompt is continued at most once. A conversation
is sampled when it is first seen, so that a sample has whole conversations, with their reuse. For conversations with a session
the session's key decides, as in the gateway, so all workers and gateways agree.

All values from clients are bounded: known blocks, sessions, conversations, names. A forgotten value gets a new number.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar

from gateway.features.recording.command.rows import TraceRow
from router.simulation.block_tree import KNOWN_BLOCKS, MAX_PROMPT_BLOCKS, BlockNumbers
from router.types import KEY_BYTES, Random

KNOWN_CONVERSATIONS: Final = 500_000
KNOWN_NAMES: Final = 10_000  # each of models, replicas, pools, tenants; further ones get number 0
NAME_CHARS: Final = 200
UNSEEN: Final = 0  # number of conversations outside of the sample
_KEY_RANGE: Final = float(1 << 64)

K = TypeVar("K", bound=Hashable)


class RecentNumbers(Generic[K]):
    """Numbers by key, for the most recently used keys: between max_keys / 2 and max_keys. O(1)."""

    def __init__(self, max_keys: int) -> None:
        self._half = max(1, max_keys // 2)
        self._new: dict[K, int] = {}
        self._old: dict[K, int] = {}

    def get(self, key: K) -> int | None:
        number = self._new.get(key)
        if number is None and (number := self._old.get(key)) is not None:
            self.put(key, number)
        return number

    def put(self, key: K, number: int) -> None:
        if len(self._new) >= self._half and key not in self._new:
            self._new, self._old = {}, self._new
        self._new[key] = number

    def pop(self, key: K) -> int | None:
        number = self._new.pop(key, None)
        old = self._old.pop(key, None)
        return old if number is None else number

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())


class NumberedNames:
    """Numbers names 1, 2, 3 ... in the order of first use; 0 beyond KNOWN_NAMES."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self.known.get(name)
        if number is None:
            if len(self.known) >= KNOWN_NAMES:
                return 0
            number = self.known[name] = len(self.known) + 1
        return number

    def listed(self) -> dict[str, str]:
        return {str(number): name[:NAME_CHARS] for name, number in self.known.items()}


class NumberedConversations:
    """Finds the conversation of a row: ("session" or "chain", number). UNSEEN: outside of the sample."""

    def __init__(self, share: float, chance: Random, max_keys: int = KNOWN_CONVERSATIONS) -> None:
        self._share = share
        self._chance = chance
        self._sessions = RecentNumbers[int](max_keys)
        self._ends = RecentNumbers[bytes](max_keys)  # by the last key of a conversation's latest prompt
        self.seen = 0  # conversations in the sample

    def of(self, row: TraceRow) -> tuple[str, int]:
        if row.session_key:
            if self._share < 1 and row.session_key / _KEY_RANGE >= self._share:
                return "session", UNSEEN
            number = self._sessions.get(row.session_key)
            if number is None:
                number = self._next()
                self._sessions.put(row.session_key, number)
            return "session", number
        return "chain", self._chain(row.keys)

    def _chain(self, keys: bytes) -> int:
        number = None
        for at in range(len(keys) - KEY_BYTES, -1, -KEY_BYTES):
            if (number := self._ends.pop(keys[at : at + KEY_BYTES])) is not None:
                break
        if number is None:
            number = self._next() if self._share == 1 or self._chance.random() < self._share else UNSEEN
        if keys:
            self._ends.put(keys[-KEY_BYTES:], number)
        return number

    def _next(self) -> int:
        self.seen += 1
        return self.seen


class Anonymizer:
    """Makes the lines of a trace. O(blocks of the prompt) each."""

    def __init__(self, share: float, chance: Random, *, known_blocks: int = KNOWN_BLOCKS) -> None:
        self.conversations = NumberedConversations(share, chance)
        self.blocks = BlockNumbers(known_blocks)
        self._clients = RecentNumbers[int](KNOWN_CONVERSATIONS)
        self._last_client = 0
        self.models, self.pools, self.replicas, self.tenants = (
            NumberedNames(),
            NumberedNames(),
            NumberedNames(),
            NumberedNames(),
        )

    def line(self, row: TraceRow, at: float) -> dict[str, Any] | None:
        """The line of a row. None: its conversation is outside of the sample. at: arrival, in seconds of the recording."""
        kind, conversation = self.conversations.of(row)
        if conversation == UNSEEN:
            return None
        parent, new = self.blocks.add(row.keys[: MAX_PROMPT_BLOCKS * KEY_BYTES])
        tokens = row.prompt_tokens
        line: dict[str, Any] = {
            "t": round(at, 6),
            "seconds": round(max(0.0, row.seconds), 6),
            "ttft": None if row.ttft is None else round(max(0.0, row.ttft), 6),
            "in": row.estimated_tokens if tokens is None else tokens,
            "out": row.completion_tokens,
            "cached": None if row.cached is None or tokens is None else min(row.cached, tokens),
            "predicted": row.predicted,
            "units": row.units,
            "block": row.block,
            "parent": parent,
            "new": new,
            kind: conversation,
            "pool": self.pools.number(row.pool),
            "replica": self.replicas.number(row.replica),
            "model": self.models.number(row.model),
            "client": self._client(row.client),
            "tenant": self.tenants.number(row.tenant),
            "status": row.status,
        }
        if row.ids:
            line["ids"] = True
        if tokens is None:
            line["estimated"] = True
        return line

    def _client(self, key: int) -> int:
        number = self._clients.get(key)
        if number is None:
            self._last_client = number = self._last_client + 1
            self._clients.put(key, number)
        return number

    def names(self) -> dict[str, dict[str, str]]:
        found = {"pool": self.pools, "replica": self.replicas, "model": self.models, "tenant": self.tenants}
        return {kind: names.listed() for kind, names in found.items()}
