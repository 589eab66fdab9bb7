"""The words of the decision core, as frozen values.

A `Prompt` comes in, a `Decision` (a ranking of `Candidate`s, and why) goes out, an `Outcome` comes back when the request
is over. Lengths are in units of the prompt: bytes of its canonical text, or token ids. Tokens are an estimate until the
engine reports them; the scale between the two is learned per `Prompt.scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 8  # one block key is an unsigned 64-bit hash, stored as its 8 bytes

BlockKeys = bytes
"""The keys of a prompt's full blocks, first to last: KEY_BYTES each. Key i identifies block i and everything before it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the router sees it.

    keys: the keys of its full blocks.
    units: its whole length (the partial last block included), in bytes of canonical text or in token ids.
    block_units: the length of one block, in the same units.
    scale: the name under which units per token are learned (a model); "" when a unit is a token.
    """

    keys: BlockKeys
    units: int
    block_units: int
    scale: str

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


@dataclass(frozen=True, slots=True)
class Replica:
    """One model server process. capacity_tokens: the size of its KV cache, None when unknown (not bounded by us)."""

    name: str
    capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of sending a prompt to a replica: seconds, lower is better. The parts add up to `total_s`."""

    queue_s: float  # prefill work booked before us
    prefill_s: float  # our own uncached tokens
    others_s: float  # what those who come after us will wait for our prefill
    duplicate_s: float  # the price of a second copy of what another replica holds already
    decode_s: float  # what the sequences that are already running take away

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.others_s + self.duplicate_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the router knew of one replica when it chose. Tokens are estimates; `inflight` and `decoding` are our own leases."""

    replica: str
    matched_blocks: int
    matched_tokens: int
    uncached_tokens: int
    booked_tokens: int
    inflight: int
    decoding: int
    prefill_rate: float  # tokens per second
    cost: Cost


@dataclass(frozen=True, slots=True)
class Decision:
    """A ranking, best first, and why its head was chosen.

    reason: "warm" (the head holds the longest match), "spill" (another holds more but costs more), "cold" (no candidate
    holds any of it), "blind" (the prompt has no full block to match).
    """

    ranking: tuple[Candidate, ...]
    reason: str
    prompt_tokens: int

    @property
    def best(self) -> Candidate:
        return self.ranking[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. prompt_tokens and cached_tokens are the engine's own count, None where it reports none."""

    ok: bool
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Random(Protocol):
    """The chance that the router is given (`random.Random` fits)."""

    def random(self) -> float: ...
