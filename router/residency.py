"""The prefixes that engines themselves report to hold, for prompts whose token ids are known.

The index believes in the prompts that were sent through routers. An engine with cache events reports its blocks, from any
source, and its evictions. `Residency` knows them; the router asks it for each prompt with tokens (`Quotes.know`). Without
tokens or events of a replica, the index alone decides. Prompts that are being computed are not in the events yet: they are
matched by the open leases.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.native import mypyc_attr

ID_BYTES: Final = 4  # of a token id: unsigned, little-endian


@mypyc_attr(allow_interpreted_subclasses=True)
class PromptTokens:
    """The token ids of a prompt, or of a leading part of it. data: ID_BYTES for each. whole: of the whole prompt."""

    def __init__(self, data: bytes, whole: bool) -> None:
        self.data = data
        self.whole = whole

    @property
    def count(self) -> int:
        return len(self.data) // ID_BYTES


class HeldPrefix(NamedTuple):
    """The tokens of a prompt that a replica holds. cached: the engine would report them as cached. saved: the tokens whose
    prefill takes as long as is saved: fewer, if some have to be loaded from slower memory. certain: the replica holds no more
    than that.
    """

    cached: int
    saved: int
    certain: bool


@mypyc_attr(allow_interpreted_subclasses=True)
class Residency:
    """Knows what replicas hold. Calls must not block."""

    def held(self, tokens: PromptTokens, replica: str) -> HeldPrefix | None:
        """The part of a prompt that a replica holds; None: unknown."""
        raise NotImplementedError
