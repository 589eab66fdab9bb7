"""An engine's prefix cache as a plain model, with the cache events that it publishes, and a publisher that loses messages.

The oracle for `gateway/features/kv_events/`: what the cache holds is a list of physical blocks.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Form = Literal["map", "array"]
SIZE = 4


def chain(tokens: Sequence[int], size: int, salt: str = "") -> list[int]:
    """The engine's own hashes of the full blocks."""
    found, before = list[int](), salt.encode()
    for at in range(0, len(tokens) - size + 1, size):
        before = hashlib.sha256(before + repr(tokens[at : at + size]).encode()).digest()
        found.append(int.from_bytes(before[-8:], "big"))
    return found


class ModelEngine:
    """GPU blocks of several groups, evicted at random, and a host tier that keeps what they held.

    groups: of layers that read all tokens; each block is in all of them, under one hash. window: there is also a group of
    layers that read a window, whose events must not count. copies: the last block of a prompt is computed anew each time.
    """

    def __init__(
        self, chance: random.Random, *, room: int = 24, groups: int = 1, window: bool = False, host: int = 0, form: Form = "map"
    ) -> None:
        self._chance, self._room, self._groups, self._window, self._form = chance, room, groups, window, form
        self._host_room = host
        self.gpu: list[dict[int, list[int]]] = [{} for _ in range(groups)]  # hash -> physical blocks
        self.host: dict[int, bool] = {}
        self._next = 0
        self.events: list[Any] = []

    # -- truth

    def held(self, tokens: Sequence[int], salt: str = "") -> tuple[int, int]:
        """Leading blocks of a prompt (in GPU memory, in GPU and then host memory)."""
        hashes = chain(tokens, SIZE, salt)
        fast = 0
        while fast < len(hashes) and all(hashes[fast] in group for group in self.gpu):
            fast += 1
        both = fast
        while self.host and both < len(hashes) and (hashes[both] in self.host or hashes[both] in self.gpu[0]):
            both += 1
        return fast, both

    # -- what happens

    def compute(self, tokens: Sequence[int], salt: str = "", *, again: bool = False) -> None:
        """Compute a prompt; its cached blocks are reused. again: its last block is computed again, as a copy."""
        hashes = chain(tokens, SIZE, salt)
        for index, group in enumerate(self.gpu):
            missing = [at for at, number in enumerate(hashes) if number not in group or (again and at == len(hashes) - 1)]
            at = 0
            while at < len(missing):  # runs of consecutive blocks, one event each
                end = at + 1
                while end < len(missing) and missing[end] == missing[end - 1] + 1:
                    end += 1
                self._make_room(index, end - at, hashes)
                self._store(index, tokens, hashes, missing[at], missing[end - 1] + 1, salt)
                at = end
        if self._window and hashes:  # a sparse block
            event = self._stored([hashes[-1] ^ 1], None, list(tokens[: SIZE * len(hashes)]), "GPU", 9, salt)
            event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"] = "sliding_window", 128
            self._emit(event)
        if self._window and len(tokens) % SIZE:  # the partial last block
            rest = list(tokens[len(hashes) * SIZE :])
            self._emit(self._stored([12345], hashes[-1] if hashes else None, rest, "GPU", 0, salt))

    def clear(self) -> None:
        """Its cache is reset."""
        self.gpu, self.host = [{} for _ in range(self._groups)], {}
        self._emit({"type": "AllBlocksCleared"})

    def drain(self) -> bytes:
        """The batch of events since the last one; b"" without any."""
        events, self.events = self.events, []
        if not events:
            return b""
        if self._form == "array":
            events = [list(event.values()) for event in events]
        return msgspec.msgpack.encode([0.5, events, 0])

    # -- parts

    def _make_room(self, index: int, blocks: int, keep: Sequence[int]) -> None:
        group = self.gpu[index]
        while sum(map(len, group.values())) + blocks > self._room:
            known = [number for number in group if number not in keep]
            if not known:
                return
            number = self._chance.choice(known)
            copies = group[number]
            copies.pop(self._chance.randrange(len(copies)))
            if not copies:
                del group[number]
            self._emit({"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": index})

    def _store(self, index: int, tokens: Sequence[int], hashes: Sequence[int], first: int, last: int, salt: str) -> None:
        for number in hashes[first:last]:
            self._next += 1
            self.gpu[index].setdefault(number, []).append(self._next)
        parent = hashes[first - 1] if first else None
        run = list(tokens[first * SIZE : last * SIZE])
        self._emit(self._stored(list(hashes[first:last]), parent, run, "GPU", index, salt if not first else ""))
        if self._host_room and not index:
            for number in hashes[first:last]:
                if number in self.host:
                    continue
                if len(self.host) >= self._host_room:
                    gone = self._chance.choice(list(self.host))
                    del self.host[gone]
                    self._emit({"type": "BlockRemoved", "block_hashes": [gone], "medium": "CPU", "group_idx": 0})
                self.host[number] = True
                self._emit(self._stored([number], None, [], "CPU", 0, ""))  # hashes only, as offloading connectors do

    def _stored(
        self, hashes: list[int], parent: int | None, tokens: list[int], medium: str, group: int, salt: str
    ) -> dict[str, Any]:
        extra = [[salt], *[None] * (len(hashes) - 1)] if salt else [None] * len(hashes)
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": SIZE if tokens else 0,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention",
            "kv_cache_spec_sliding_window": None,
        }

    def _emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class ModelPublisher:
    """Numbers an engine's batches, and keeps the last ones for replay."""

    def __init__(self, kept: int) -> None:
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.number = 0

    def publish(self, payload: bytes) -> tuple[int, bytes] | None:
        """The message of a batch; None: there is nothing to publish."""
        if not payload:
            return None
        message = self.number, payload
        self.batches.append(message)
        self.number += 1
        return message

    def replay(self, number: int) -> list[tuple[int, bytes]]:
        return [each for each in self.batches if each[0] >= number]
