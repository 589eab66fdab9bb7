"""From rows with keys and names to lines with numbers: what a trace says, and all that it says.

A conversation is known by its session, where its client names one. Else by its prompts: one that begins with all of an earlier
prompt's full blocks goes on with that one, once; its conversation is the same. What share of the conversations is kept is
decided when one is first seen, so that a sample has whole conversations, and their reuse. Of those with a session it goes by
the session's key, as in the gateway: all workers and gateways agree.

Everything that clients choose is bounded: blocks that are known, sessions, conversations, names. What is forgotten is new when
it comes again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar

from gateway.features.recording.command.rows import TraceRow
from router.simulation.block_tree import KNOWN_BLOCKS, MAX_PROMPT_BLOCKS, BlockNumbers
from router.types import KEY_BYTES, Random

KNOWN_CONVERSATIONS: Final = 500_000
KNOWN_NAMES: Final = 10_000  # of models, replicas, pools, tenants each; others are number 0
NAME_CHARS: Final = 200
UNSEEN: Final = 0  # of a conversation that is not in the sample
_WHOLE: Final = float(1 << 64)

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """Numbers by key, the most recently used ones: between `most` / 2 and `most` of them. O(1)."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
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
    """1, 2, 3 ... in the order of first sight; 0 once there are too many."""

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
    """Which conversation a row belongs to: ("session" or "chain", its number); UNSEEN: one that is not in the sample."""

    def __init__(self, share: float, chance: Random, most: int = KNOWN_CONVERSATIONS) -> None:
        self._share = share
        self._chance = chance
        self._sessions = Recent[int](most)
        self._ends = Recent[bytes](most)  # the last key of a conversation's latest prompt
        self.seen = 0  # in the sample

    def of(self, row: TraceRow) -> tuple[str, int]:
        if row.session_key:
            if self._share < 1 and row.session_key / _WHOLE >= self._share:
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
    """Makes a trace's lines. O(blocks of a prompt) each."""

    def __init__(self, share: float, chance: Random, *, known_blocks: int = KNOWN_BLOCKS) -> None:
        self.conversations = NumberedConversations(share, chance)
        self.blocks = BlockNumbers(known_blocks)
        self._clients = Recent[int](KNOWN_CONVERSATIONS)
        self._last_client = 0
        self.models, self.pools, self.replicas, self.tenants = (
            NumberedNames(),
            NumberedNames(),
            NumberedNames(),
            NumberedNames(),
        )

    def line(self, row: TraceRow, at: float) -> dict[str, Any] | None:
        """None: its conversation is not in the sample. at: when it came, in seconds of the recording."""
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
