"""A request as the doctor sees it: digests of its prompt, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.dialects.prompt.segments import FIELDS, TEXT, TOOL, TURNS, Outline, Segment
from router import DEFAULT_UNITS_PER_TOKEN

KEY: Final = 8  # bytes of a block key
MAX_KEYS: Final = 1 << 17  # bytes of block keys that are kept of a prompt: 4 MiB of text
SYSTEM: Final = ("system", "developer")
ASSISTANT: Final = "assistant"
_FEWEST_UNITS: Final = 1.0  # bytes per token
_MOST_UNITS: Final = 20.0
_SEGMENT_BYTES: Final = 250  # of memory, more or less
_VOLATILE_BYTES: Final = 150


class ObservedOutcome(NamedTuple):
    """What became of a request, as far as is known. Tokens: None: not reported.

    available: tokens of the longest match of all replicas, None: not known. up: names of the replicas that took requests,
    None: not known. first_byte: when the answer began, None: it did not, or that is not known.
    """

    replica: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    available_tokens: int | None = None
    reason: str = ""
    up: frozenset[str] | None = None
    first_byte: float | None = None


class ObservedRequest:
    """A request. number: its place in the stream, from 1. place: where it was read ("line 7"), "": nowhere.

    thread: the part of a session that goes on by itself (recorded sub-agents), "" for the others. keys: the block keys of its
    prompt, units and block: its length and that of a block, in bytes of text or in tokens (exact). outline: () where only keys
    are known; text: the prompt itself, where it may be shown.
    price: USD per million tokens, uncached and cached; None: not known.
    """

    __slots__ = (
        "block",
        "body",
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
        self.text = b""
        self.outcome: ObservedOutcome | None = None
        self.price: tuple[float, float] | None = None
        self.outline = outline
        self.tools = tuple([each for each in outline if each.kind == TOOL])
        self.turns = tuple([each for each in outline if each.kind in (TURNS, TEXT)])
        self.lead = 0  # turns of the system prompt that it begins with
        while self.lead < len(self.turns) and self.turns[self.lead].name in SYSTEM:
            self.lead += 1
        self.body = self.turns[self.lead :]

    @property
    def blocks(self) -> int:
        """Whose keys are known."""
        return len(self.keys) // KEY

    @property
    def fields(self) -> tuple[Segment, ...]:
        """What the head has beside tools."""
        return tuple([each for each in self.outline if each.kind == FIELDS])

    @property
    def head_bytes(self) -> int:
        """Of tools and fields."""
        return sum([each.size for each in self.outline if each.kind in (TOOL, FIELDS)])

    def end_of(self, turns: int) -> int:
        """The offset of the end of so many turns, in units."""
        return self.head_bytes + sum([each.size for each in self.turns[:turns]])

    @property
    def units_per_token(self) -> float:
        """By the engine's count, if it has one that can be true."""
        if self.exact:
            return 1.0
        told = self.outcome.prompt_tokens if self.outcome else None
        found = self.units / told if told else 0.0
        return found if _FEWEST_UNITS <= found <= _MOST_UNITS else DEFAULT_UNITS_PER_TOKEN

    def tokens(self, units: float) -> int:
        """An estimate where no engine has counted."""
        return int(units / self.units_per_token + 0.5)

    @property
    def size(self) -> int:
        """Bytes of memory, more or less; segments are shared among the prompts of a conversation, but count for each."""
        listed = sum([len(each.volatile) for each in self.outline])
        return 1000 + len(self.keys) + len(self.text) + _SEGMENT_BYTES * len(self.outline) + _VOLATILE_BYTES * listed

    def __repr__(self) -> str:
        return f"<Observed {self.number}, {self.model!r}, {self.units} units, {len(self.turns)} turns>"


def common_blocks(one: ObservedRequest, other: ObservedRequest) -> int:
    """How many blocks both begin with. Keys are chained: where one is the same, so are all before it. O(log)."""
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
