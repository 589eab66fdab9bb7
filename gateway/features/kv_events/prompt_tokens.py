"""The token ids of prompts, as keys of blocks of any size."""

from __future__ import annotations

from typing import Final

from router import text_keys
from router.residency import ID_BYTES, PromptTokens
from router.types import KEY_BYTES

MAX_KINDS: Final = 64  # block sizes and scopes of one prompt
CHUNK: Final = 256  # keys that are computed at once


class PromptKeys:
    """The keys of a prompt's full blocks, computed as far as they are looked at: a block may be a token. count: of blocks."""

    __slots__ = ("_data", "_keys", "_last", "_step", "count")

    def __init__(self, data: bytes, step: int, root: int) -> None:
        """step: bytes of a block."""
        self._data, self._step, self._last = data, step, root
        self._keys: list[bytes] = []
        self.count = len(data) // step

    def part(self, start: int) -> list[bytes]:
        """The keys from `start` on, at most CHUNK; empty at the end. O(CHUNK), if those before were looked at."""
        keys = self._keys
        while len(keys) < min(self.count, start + CHUNK):
            at = len(keys) * self._step
            joined = text_keys(self._data[at : at + CHUNK * self._step], self._step, self._last)
            keys += [joined[each : each + KEY_BYTES] for each in range(0, len(joined), KEY_BYTES)]
            self._last = int.from_bytes(keys[-1], "little")
        return keys[start : start + CHUNK]

    def __repr__(self) -> str:
        return f"<PromptKeys {len(self._keys)} of {self.count}>"


class KnownTokens(PromptTokens):
    """The token ids of a prompt of a pool, in the scope of a model's name and a cache salt. data, whole: as in PromptTokens.
    adapter: as in `Prompt`.
    """

    def __init__(self, data: bytes, pool: str, model: str, salt: str, *, whole: bool, adapter: str = "") -> None:
        super().__init__(data, whole)
        self.pool, self.model, self.salt, self.adapter = pool, model, salt, adapter
        self._keys: dict[tuple[int, int], PromptKeys] = {}

    def keys(self, size: int, root: int) -> PromptKeys:
        """The keys of the full blocks of `size` tokens, chained to `root`. O(1)."""
        found = self._keys.get((size, root))
        if found is None:
            found = PromptKeys(self.data, size * ID_BYTES, root)
            if len(self._keys) < MAX_KINDS:
                self._keys[size, root] = found
        return found

    def __repr__(self) -> str:
        return f"<KnownTokens {self.count}{'' if self.whole else ' or more'} of {self.model}>"
