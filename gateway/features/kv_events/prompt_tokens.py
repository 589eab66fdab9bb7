"""The token ids of prompts, as keys of blocks of any size."""

from __future__ import annotations

from typing import Final

from router import text_keys
from router.residency import ID_BYTES, PromptTokens
from router.types import KEY_BYTES

MAX_KINDS: Final = 64  # block sizes and scopes of one prompt


class KnownTokens(PromptTokens):
    """The token ids of a prompt of a pool, in the scope of a model's name and a cache salt. data, whole: as in PromptTokens.
    adapter: as in `Prompt`.
    """

    def __init__(self, data: bytes, pool: str, model: str, salt: str, *, whole: bool, adapter: str = "") -> None:
        super().__init__(data, whole)
        self.pool, self.model, self.salt, self.adapter = pool, model, salt, adapter
        self._keys: dict[tuple[int, int], list[bytes]] = {}

    def keys(self, size: int, root: int) -> list[bytes]:
        """The keys of the full blocks of `size` tokens, chained to `root`. O(tokens) the first time."""
        found = self._keys.get((size, root))
        if found is None:
            joined = text_keys(self.data, size * ID_BYTES, root)
            found = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
            if len(self._keys) < MAX_KINDS:
                self._keys[size, root] = found
        return found

    def __repr__(self) -> str:
        return f"<KnownTokens {self.count}{'' if self.whole else ' or more'} of {self.model}>"
