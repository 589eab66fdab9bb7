"""The blocks that one engine holds, by its own events.

Hashes of engines are opaque, so a block's key is computed here from its token ids and the key before it, as for prompts
(`router.token_keys`); the first one is chained to the adapter and the cache salt. The key of an engine's hash is known for each
layer: a tier of memory, and in GPU memory a group of the model's layers, because groups with blocks of other sizes may have
equal hashes.

    layer (gpu, group 0):  hash ─► key ─► copies          layer (cpu):  hash ─► key ─► copies

- A block is held until its last copy is removed: engines store and remove each copy.
- A prompt is held in GPU memory as far as all groups hold it; only groups whose layers read all tokens have events here
  (`wire.py`). It goes on in slower memory where it ends there: an engine loads no block behind a missing one.
- Blocks without token ids (of offloading connectors) are found by their hashes. A block whose parent is unknown has no key, and
  is not believed.
- Blocks in slower memory whose publisher never reports removals are forgotten after a time (`expire`).

One thread changes it; others may call `held` and read counts meanwhile: they see the state before or after each change of a
dictionary.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Final

import xxhash

from gateway.features.kv_events.prompt_tokens import KnownTokens, PromptKeys
from gateway.features.kv_events.wire import DISK, GPU, HOST, TIERS, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from router import seed, text_keys
from router.residency import ID_BYTES, HeldPrefix
from router.types import KEY_BYTES

HOST_SHARE: Final = 0.8  # of a prefill that loading from host memory saves; as llm-d weights it
DISK_SHARE: Final = 0.4  # likewise, from disks and network storage; as llm-d weights shared storage
MAX_ADAPTERS: Final = 256  # whose names are known
MAX_SIZES: Final = 8  # of blocks of a layer


class Layer:
    """The blocks of one layer. keys: by the engine's hash. copies: by key. sizes: blocks stored so far, by their size."""

    __slots__ = ("_removes", "_stored", "copies", "keys", "sizes")

    def __init__(self) -> None:
        self.keys: dict[int, bytes] = {}
        self.copies: dict[bytes, int] = {}
        self.sizes: dict[int, int] = {}
        self._stored: dict[int, float] = {}  # time at which a hash was last stored, in this order; if none is ever removed
        self._removes = False

    @property
    def size(self) -> int:
        """Tokens of a block: the usual size; others are parts of blocks. 0: none is known."""
        sizes = self.sizes
        return max(sizes, key=sizes.__getitem__) if sizes else 0

    def add(self, number: int, key: bytes) -> bool:
        """Add a copy of a block. False: its hash stands for another block, or another hash for it."""
        known = self.keys.get(number)
        if known == key:
            self.copies[key] += 1
            return True
        if known is not None or key in self.copies:
            return False
        self.keys[number] = key
        self.copies[key] = 1
        return True

    def remove(self, number: int, left: int | None) -> None:
        """Remove a copy of a block. left: copies that remain, if the engine counts them. Unknown hashes are ignored."""
        self._removes = True
        key = self.keys.get(number)
        if key is None:
            return
        left = self.copies[key] - 1 if left is None else left
        if left > 0:
            self.copies[key] = left
        else:
            del self.keys[number], self.copies[key]

    def age(self, numbers: list[int], now: float) -> None:
        """These blocks were stored in slower memory."""
        if self._removes:
            self._stored = {}
            return
        for number in numbers:
            if number in self.keys:
                self._stored.pop(number, None)
                self._stored[number] = now

    def expire(self, before: float) -> None:
        """Forget blocks last stored before, unless the publisher reports removals. O(forgotten)."""
        while self._stored and not self._removes and self._stored[number := next(iter(self._stored))] < before:
            del self._stored[number]
            del self.copies[self.keys.pop(number)]

    @property
    def dictionaries(self) -> tuple[dict[Any, Any], ...]:
        """All that grows with the blocks."""
        return self.keys, self.copies, self._stored

    def run(self, keys: PromptKeys, start: int = 0, *, faster: Layer | None = None) -> int:
        """Number of blocks from `start` on without a missing one, here or in a faster layer. O(them)."""
        here, there, at = self.copies, faster.copies if faster is not None else {}, start
        while part := keys.part(at):
            if there:
                held = len(list(takewhile(lambda key: key in here or key in there, part)))
            else:
                held = len(list(takewhile(here.__contains__, part)))
            at += held
            if held < len(part):
                break
        return at - start


class Holdings:
    """The blocks of one engine, or of one rank of it (see the module).

    salted: the engine separates prefixes by cache salts. complete: everything is known that it holds; False: it may hold more,
    from before the first known event. orphans: stored blocks without a known parent, so far. conflicts: stored blocks whose
    hash stands for another block.
    """

    def __init__(self, *, salted: bool = True) -> None:
        self._salted = salted
        self._layers: dict[tuple[int, int], Layer] = {}
        self._forgotten: list[dict[Any, Any]] = []
        self._adapters: set[str] = set()
        self.complete = False
        self.orphans = 0
        self.conflicts = 0

    # -- reading

    @property
    def blocks(self) -> int:
        """Blocks of all layers. O(layers)."""
        return sum(len(layer.keys) for layer in list(self._layers.values()))

    def blocks_in(self, tier: int) -> int:
        """Blocks in a tier; of several groups, in the largest one. O(layers)."""
        return max((len(layer.keys) for (each, _), layer in list(self._layers.items()) if each == tier), default=0)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block in GPU memory; 0: unknown."""
        return next((layer.size for (tier, _), layer in list(self._layers.items()) if tier == GPU), 0)

    def held(self, tokens: KnownTokens) -> HeldPrefix | None:
        """The part of a prompt that the engine holds; None: nothing is known. O(held blocks of the prompt)."""
        layers = dict(self._layers)
        if not layers and not self.complete:
            return None
        if tokens.adapter and tokens.adapter not in self._adapters:
            return None  # its blocks may be among those without a name
        adapter = tokens.adapter or (tokens.model if tokens.model in self._adapters else "")
        root = seed((adapter, tokens.salt if self._salted else ""))
        fast = [layer for (tier, _), layer in layers.items() if tier == GPU]
        size = next((layer.size for layer in (*fast, *layers.values()) if layer.size), 0)
        if not size:
            return HeldPrefix(0, 0, certain=self.complete)
        gpu = min((layer.run(tokens.keys(layer.size, root)) * layer.size for layer in fast if layer.size), default=0)
        keys = tokens.keys(size, root)
        first, host, disk = (fast[0] if fast else None), layers.get((HOST, 0)), layers.get((DISK, 0))
        loaded = gpu + (host.run(keys, gpu // size, faster=first) * size if host is not None else 0)
        fetched = loaded + (disk.run(keys, loaded // size, faster=host) * size if disk is not None else 0)
        most = keys.count * size
        # The last token is always computed: its output is the first token of the answer.
        cached = min(fetched, (tokens.count - 1) // size * size) if tokens.whole else fetched
        saved = min(gpu, cached) + HOST_SHARE * max(0, min(loaded, cached) - gpu) + DISK_SHARE * max(0, cached - loaded)
        return HeldPrefix(cached, int(saved), certain=self.complete and (tokens.whole or fetched < most))

    # -- changes

    def apply(self, event: CacheEvent, now: float) -> None:
        """Take in an event. now: seconds. O(its blocks)."""
        if isinstance(event, BlocksStored):
            self._store(event, now)
        elif isinstance(event, BlocksRemoved):
            layer = self._layers.get((event.tier, event.group if event.tier == GPU else 0))
            if layer is not None:
                for at, number in enumerate(event.hashes):
                    layer.remove(number, event.left[at] if event.left is not None else None)
        elif isinstance(event, CacheCleared):
            self.clear(complete=True)

    def clear(self, *, complete: bool) -> None:
        """Forget all blocks; `free` frees their memory. complete: it is known that the engine holds nothing now. O(layers)."""
        layers, self._layers = self._layers, {}
        self.complete = complete
        for layer in layers.values():
            self._forgotten += layer.dictionaries

    def free(self, most: int) -> bool:
        """Free at most so many entries of forgotten blocks: freed at once, a million blocks would keep the interpreter from
        other threads for 0.1 s. True if there are more. O(most).
        """
        while self._forgotten:
            entries = self._forgotten[-1]
            for _ in range(min(most, len(entries))):
                entries.popitem()
                most -= 1
            if entries:
                return True
            self._forgotten.pop()
        return False

    def expire(self, before: float) -> None:
        """Forget blocks in slower memory stored before, if their publisher never reports removals."""
        for (tier, _), layer in self._layers.items():
            if tier != GPU:
                layer.expire(before)

    def _store(self, event: BlocksStored, now: float) -> None:
        place = (event.tier, event.group if event.tier == GPU else 0)
        layer = self._layers.get(place)
        if layer is None:
            layer = self._layers[place] = Layer()
        numbers = event.hashes
        if not event.data:
            for number in numbers:
                if (key := self._key_of(number, layer, event.group)) is None:
                    self.orphans += 1
                else:
                    layer.add(number, key)
        elif (keys := self._keys_of(event, layer)) is None:
            self.orphans += len(numbers)
        elif event.size in layer.sizes or len(layer.sizes) < MAX_SIZES:
            layer.sizes[event.size] = layer.sizes.get(event.size, 0) + len(numbers)
            add, at = layer.add, 0
            for number in numbers:
                if not add(number, keys[at : at + KEY_BYTES]):
                    self.conflicts += 1
                at += KEY_BYTES
        if event.tier != GPU:
            layer.age(numbers, now)

    def _keys_of(self, event: BlocksStored, layer: Layer) -> bytes | None:
        """The keys of stored blocks, one after another; None: their parent is unknown."""
        if event.parent is None:
            if event.adapter and len(self._adapters) < MAX_ADAPTERS:
                self._adapters.add(event.adapter)
            first = seed((event.adapter, event.salt))
        else:
            parent = self._key_of(event.parent, layer, event.group)
            if parent is None:
                return None
            first = int.from_bytes(parent, "little")
        step = event.size * ID_BYTES
        if event.extras is None:
            return text_keys(event.data, step, first)
        found = b""
        for at in range(len(event.hashes)):
            if (extra := event.extras.get(at)) is not None:
                first ^= xxhash.xxh3_64_intdigest(extra)
            key = text_keys(event.data[at * step : (at + 1) * step], step, first)
            found, first = found + key, int.from_bytes(key, "little")
        return found

    def _key_of(self, number: int, layer: Layer, group: int) -> bytes | None:
        """The key of a known block: in this layer, else in its group's, else in any other one. O(layers)."""
        key = layer.keys.get(number)
        if key is None and len(self._layers) > 1:
            own = self._layers.get((GPU, group))
            layers = (own, *self._layers.values()) if own is not None else tuple(self._layers.values())
            for other in layers:
                if (key := other.keys.get(number)) is not None:
                    break
        return key

    # -- invariants

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. O(blocks)."""
        for layer in self._layers.values():
            assert set(layer.keys.values()) == layer.copies.keys()
            assert all(copies > 0 for copies in layer.copies.values())
            assert len(layer.sizes) <= MAX_SIZES

    def __repr__(self) -> str:
        tiers = ", ".join(f"{self.blocks_in(tier)} {name}" for tier, name in enumerate(TIERS))
        return f"<Holdings {tiers}{'' if self.complete else ', incomplete'}>"
