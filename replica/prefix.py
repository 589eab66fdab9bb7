"""Prompts as blocks: the names of what the prefix cache holds.

A full block's key is the chained hash of its tokens and of the key before it; the first one's is chained to the adapter
and the cache salt. So a key stands for a whole prefix of one tenant, and equal keys for equal rows of K and V. The hash is
cryptographic: a tenant who could make two prefixes with one key could read another's cache.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

Key = bytes
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose blocks: the same tokens under another adapter or cache salt are other blocks."""

    adapter: str | None = None
    salt: str | None = None

    def root(self) -> Key:
        """What the first block's key is chained to."""
        names = [b"" if name is None else b"=" + name.encode() for name in (self.adapter, self.salt)]
        return blake2b(b"".join(len(name).to_bytes(4, "big") + name for name in names), digest_size=KEY_BYTES).digest()


def chained(parent: Key, tokens: "array[int]") -> Key:
    """The key of a block: of its tokens, and of all before them."""
    return blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest()


class Prefix:
    """The tokens of one sequence as far as they are known, and the keys of their full blocks, each hashed once."""

    __slots__ = ("_root", "keys", "matchable", "scope", "size", "tokens")

    def __init__(self, tokens: Iterable[int], size: int, scope: Scope | None = None) -> None:
        """O(tokens). They are a prompt; what is generated comes in by `extend`."""
        self.size, self.scope = size, scope or Scope()
        self.tokens = array("I")
        self.keys: list[Key] = []
        self._root = self.scope.root()
        self.extend(tokens)
        # The last prompt token is always computed: its output is the first token. So its block cannot be a hit.
        self.matchable = max(0, len(self.tokens) - 1) // size

    def extend(self, tokens: Iterable[int]) -> None:
        """O(new tokens)."""
        self.tokens.extend(tokens)
        for end in range((len(self.keys) + 1) * self.size, len(self.tokens) + 1, self.size):
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(chained(parent, self.tokens[end - self.size : end]))

    def parent(self, at: int) -> Key | None:
        """The key before block `at`; None at the start."""
        return self.keys[at - 1] if at else None


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks, each the parent of the next, that are now cached. `tokens` are theirs alone."""

    keys: tuple[Key, ...]
    parent: Key | None
    tokens: "array[int]"
    scope: Scope
