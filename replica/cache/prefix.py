"""Prompts as blocks, and the keys of the blocks.

A full block's key is the chained hash of its tokens and of the key before it; the first one is chained to the cache salt. So a
key stands for a whole prefix of one tenant, and equal keys mean equal rows of K and V. The hash is cryptographic: a tenant who
could make two prefixes with the same key could read another tenant's cache.
"""

from array import array
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

Key = bytes
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Scope:
    """Separates blocks: the same tokens under another cache salt are different blocks."""

    salt: str | None = None

    def root(self) -> Key:
        """The parent key of the first block. It is hashed in another way than block keys: no salt can be chosen so that its
        root is a block's key.
        """
        name = b"" if self.salt is None else b"=" + self.salt.encode()
        return blake2b(name, digest_size=KEY_BYTES, person=b"scope").digest()


def chained(parent: Key, tokens: "array[int]") -> Key:
    """The key of a block: a hash of its tokens and of its parent's key."""
    return blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest()


class Prefix:
    """The known tokens of one sequence, and the keys of their full blocks, each hashed once."""

    __slots__ = ("_copied", "_root", "keys", "matchable", "scope", "size", "tokens")

    def __init__(self, tokens: Iterable[int], size: int, scope: Scope | None = None) -> None:
        """`tokens` are the prompt; `extend` adds generated ones. O(tokens)."""
        self.size, self.scope = size, scope or Scope()
        self.tokens = array("I")
        self.keys: list[Key] = []
        self._root = self.scope.root()
        self._copied = False
        self.extend(tokens)
        # The last prompt token is always computed: its output is the first token. So its block cannot be a hit.
        self.matchable = max(0, len(self.tokens) - 1) // size

    def extend(self, tokens: Iterable[int]) -> None:
        """O(new tokens); of a copy, the first time, O(tokens)."""
        if self._copied:
            self.tokens, self.keys, self._copied = self.tokens[:], self.keys[:], False
        self.tokens.extend(tokens)
        for end in range((len(self.keys) + 1) * self.size, len(self.tokens) + 1, self.size):
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(chained(parent, self.tokens[end - self.size : end]))

    def copy(self) -> "Prefix":
        """A copy that can be extended; this prefix must not be extended afterwards. O(1)."""
        other = copy(self)
        other._copied = True
        return other

    def parent(self, at: int) -> Key | None:
        """The key before block `at`; None for the first block."""
        return self.keys[at - 1] if at else None


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Newly cached blocks, each the parent of the next. `tokens`: the tokens of these blocks only."""

    keys: tuple[Key, ...]
    parent: Key | None
    tokens: "array[int]"
    scope: Scope
