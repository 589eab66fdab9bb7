"""A request in the form that the doctor examines: digests of its prompt, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.dialects.prompt.segments import FIELDS, TEXT, TOOL, TURNS, Outline, Segment
from router import DEFAULT_UNITS_PER_TOKEN

KEY: Final = 8  # bytes of a block key
MAX_KEYS: Final = 1 << 17  # bytes of block keys per prompt: 4 MiB of text
SYSTEM: Final = ("system", "developer")
ASSISTANT: Final = "assistant"
_MIN_UNITS: Final = 1.0  # bytes per token
_MAX_UNITS: Final = 20.0
_SEGMENT_BYTES: Final = 250  # estimated memory
_VOLATILE_BYTES: Final = 150


class ObservedOutcome(NamedTuple):
    """The outcome of a request, as far as known. Tokens: None: not reported.

    available: tokens of the longest match on any replica; None: unknown. up: names of the replicas that accepted requests;
    None: unknown. first_byte: beginning of the answer; None: unknown, or no answer.
    """

    replica: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    available_tokens: int | None = None
    reason: str = ""
    up: frozenset[str] | None = None
    first_byte: float | None = None


class ObservedRequest:
    """A request. number: its position in the stream, from 1. place: where it was read ("line 7"), or "".

    thread: an independent part of a session (a sub-agent), or "". keys: the block keys of its prompt. units, block:
    lengths of the prompt and of a block, in bytes of text or in tokens (exact). outline: () if only keys are known. entries:
    keys of the entries of its prompt log (`entries.py`), b"": unknown. text: the prompt, if it may be shown. price: USD per
    million tokens, uncached and cached; None: unknown.
    """

    __slots__ = (
        "block",
        "body",
        "entries",
        "exact",
        "keys",
        "lead",
        "model",
        "number",
        "outcome",
        "outline",
        "place",
        "price",
        "salt",
        "session",
        "tenant",
        "text",
        "thread",
        "time",
        "tools",
        "turns",
        "units",
    )

    def __init__(self, model: str, keys: bytes, units: int, block: int, *, exact: bool = False, outline: Outline = ()) -> None:
        self.number = 0
        self.place = ""
        self.time = 0.0
        self.model = model
        self.salt = ""
        self.tenant = ""
        self.session = ""
        self.thread = ""
        self.keys = keys[:MAX_KEYS]
        self.units = units
        self.block = block
        self.exact = exact
        self.entries = b""
        self.text = b""
        self.outcome: ObservedOutcome | None = None
        self.price: tuple[float, float] | None = None
        self.outline = outline
        self.tools = tuple([each for each in outline if each.kind == TOOL])
        self.turns = tuple([each for each in outline if each.kind in (TURNS, TEXT)])
        self.lead = 0  # number of leading system turns
        while self.lead < len(self.turns) and self.turns[self.lead].name in SYSTEM:
            self.lead += 1
        self.body = self.turns[self.lead :]

    @property
    def blocks(self) -> int:
        """Number of known block keys."""
        return len(self.keys) // KEY

    @property
    def fields(self) -> tuple[Segment, ...]:
        """The fields in the head."""
        return tuple([each for each in self.outline if each.kind == FIELDS])

    @property
    def head_bytes(self) -> int:
        """Size of tools and fields."""
        return sum([each.size for each in self.outline if each.kind in (TOOL, FIELDS)])

    def end_of(self, turns: int) -> int:
        """The offset of the end of this many turns, in units."""
        return self.head_bytes + sum([each.size for each in self.turns[:turns]])

    @property
    def units_per_token(self) -> float:
        """By the engine's count, if that is plausible."""
        if self.exact:
            return 1.0
        counted = self.outcome.prompt_tokens if self.outcome else None
        found = self.units / counted if counted else 0.0
        return found if _MIN_UNITS <= found <= _MAX_UNITS else DEFAULT_UNITS_PER_TOKEN

    def tokens(self, units: float) -> int:
        """Estimated if no engine has counted."""
        return int(units / self.units_per_token + 0.5)

    @property
    def size(self) -> int:
        """Estimated memory in bytes. Segments are shared among the prompts of a conversation, but counted for each."""
        listed = sum([len(each.volatile) for each in self.outline])
        given = len(self.keys) + len(self.entries) + len(self.text)
        return 1000 + given + _SEGMENT_BYTES * len(self.outline) + _VOLATILE_BYTES * listed

    def __repr__(self) -> str:
        return f"<ObservedRequest {self.number}, {self.model!r}, {self.units} units, {len(self.turns)} turns>"


def common_blocks(one: ObservedRequest, other: ObservedRequest) -> int:
    """Number of common first blocks. Keys are chained: an equal key implies equal keys before it. O(log)."""
    low, high = 0, min(one.blocks, other.blocks)
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * KEY
        if one.keys[at : at + KEY] == other.keys[at : at + KEY]:
            low = middle
        else:
            high = middle - 1
    return low


def answers_in(turns: Sequence[Segment]) -> int:
    return sum([each.name == ASSISTANT for each in turns])
