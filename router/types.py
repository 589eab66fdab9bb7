"""The value types of the decision core. All are immutable by convention.

A `Prompt` comes in, a `Decision` (the best `Candidate` with a reason) goes out, an `Outcome` comes back at the end of the
request. Lengths are in units of the prompt: bytes of its canonical text, or token ids. Tokens are an estimate until the
engine reports them; the scale between the two is learned per `Prompt.scale`.

Types that are created for every decision are plain classes, or tuples where their parts are summed or shown by name: a frozen
dataclass takes five times as long to create, and compiled code reads a plain class's fields directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from router.native import mypyc_attr
from router.residency import PromptTokens

KEY_BYTES: Final = 8  # one block key is an unsigned 64-bit hash, stored as its 8 bytes
MOST_SEQUENCES: Final = 1024  # of one request: what a client asks for beyond that hides no load of others
TOKEN_WEIGHT: Final = 1000  # the index counts in thousandths of a token: a block may be 54.47 tokens, and sums must be exact

BlockKeys = bytes
"""The keys of a prompt's full blocks, first to last: KEY_BYTES each. Key i identifies block i and everything before it."""


@mypyc_attr(acyclic=True)
class Prompt:
    """A prompt for the router.

    keys: the keys of its full blocks. units: its whole length (the partial last block included), in bytes of canonical text or
    in token ids. block_units: the length of one block, in the same units. scale: the name under which units per token are
    learned (a model's bounded label); "" if a unit is a token. session: the conversation that the client names, or ""; for
    sticky policies only. session_key: a number for the session, 0 without one; used by the cost (`learning/sessions.py`). Each
    agent of a session has its own. parent_key: the number of the agent that has started this one, 0: none, or unknown.
    client: a hash that identifies the client, as far as the gateway can distinguish clients. origin: likewise, by properties
    that a client cannot make up, for evidence about replicas. breakpoints: (blocks, seconds)
    each: the client wants the prompt cached up to there, for so long; 0 seconds: it may have wanted that in an earlier prompt
    (`learning/promises.py`). images: number of images, whose tokens are a guess. tokens: its token ids, if they are known
    (`residency.py`). adapter: the name of the adapter that computes it, or "" (`learning/adapters.py`). sequences: that an
    engine runs for it, MOST_SEQUENCES at most. What the constructor does not take is set by the creator of the prompt.
    """

    __slots__ = (
        "adapter",
        "block_units",
        "breakpoints",
        "client",
        "images",
        "keys",
        "origin",
        "parent_key",
        "scale",
        "sequences",
        "session",
        "session_key",
        "tokens",
        "units",
    )

    def __init__(
        self,
        keys: BlockKeys,
        units: int,
        block_units: int,
        scale: str,
        session: str = "",
        client: int = 0,
        session_key: int = 0,
    ) -> None:
        self.keys = keys
        self.units = units
        self.block_units = block_units
        self.scale = scale
        self.session = session
        self.client = client
        self.session_key = session_key
        self.origin = client
        self.breakpoints: tuple[tuple[int, int], ...] = ()
        self.images = 0
        self.parent_key = 0
        self.tokens: PromptTokens | None = None
        self.adapter = ""
        self.sequences = 1

    @property
    def family_key(self) -> int:
        """The number of the parent, which siblings share; without a parent the own one; 0 without a session."""
        return self.parent_key or self.session_key

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def block_weight(self, units_per_token: float) -> int:
        """The weight of a block in the index, in 1 / TOKEN_WEIGHT tokens; positive."""
        return int(self.block_units * TOKEN_WEIGHT / units_per_token + 0.5) or 1

    def _fields(self) -> tuple[object, ...]:
        names = self.session, self.client, self.session_key, self.parent_key
        return self.keys, self.units, self.block_units, self.scale, *names, self.origin, self.breakpoints, self.images

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompt) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Prompt{self._fields()[:-3]!r}"


@dataclass(frozen=True, slots=True)
class Replica:
    """One model server process.

    capacity_tokens: the size of its KV cache, None if unknown (unbounded here). context_tokens: the longest prompt that it
    accepts, None if unknown. one_conversation: its cache holds only the last request. pool: replicas of one pool are expected
    to be equally fast. shares_inflight: it shares a prefix that it is still computing; None: to be learned. slots: a prefix is
    found when its request has ended, by one request at a time. caches: number of private caches behind it, of which the router
    can choose none. adapters: number of adapters that it keeps loaded, None if unknown.
    """

    name: str
    capacity_tokens: int | None = None
    context_tokens: int | None = None
    one_conversation: bool = False
    pool: str = ""
    shares_inflight: bool | None = True
    slots: bool = False
    caches: int = 1
    adapters: int | None = None


class Cost(NamedTuple):
    """The cost of sending a prompt to a replica: seconds, lower is better. The parts add up to `total_s`."""

    queue_s: float  # prefill work booked before this request
    prefill_s: float  # its own uncached tokens
    others_s: float  # delay of later requests by its prefill
    duplicate_s: float  # the price of a second copy of blocks that another replica holds already
    evicted_s: float  # the price of the blocks that must be evicted to make room
    decode_s: float  # slowdown of its prefill by running sequences
    rent_s: float = 0.0  # discount on a copy: earlier waiting for lack of one (not above 0)
    session_s: float = 0.0  # discount for the session's expected tokens beyond the match (not above 0)
    start_s: float = 0.0  # new work on a replica that has just come up
    adapter_s: float = 0.0  # the load of its adapter

    @property
    def first_token_s(self) -> float:
        """The expected time to its own first token."""
        return self.queue_s + self.prefill_s + self.decode_s + self.start_s + self.adapter_s

    @property
    def total_s(self) -> float:
        return sum(self)


class Candidate(NamedTuple):
    """A replica's state when the router chose. Tokens are estimates.

    uncached_tokens: of the prompt, without the match and without the session's expected tokens. booked_tokens: uncached prompt
    tokens of leases before their first token, less the progress of the running prefill. inflight: open leases. decoding: leases
    past their first token. active_tokens: prompt tokens of all open leases.
    """

    replica: str
    matched_blocks: int
    matched_tokens: int
    uncached_tokens: int
    booked_tokens: int
    inflight: int
    decoding: int
    active_tokens: int
    prefill_rate: float  # tokens per second
    cost: Cost


class Decision:
    """The replica chosen for a prompt, and the reason.

    reason: "warm" (the best holds the longest match), "spill" (another holds more but costs more), "cold" (no candidate holds
    any of it), "blind" (the prompt has no full block to match), "session" (instead of the last three: the price of the best
    includes the session's expected tokens beyond its match). available_tokens: the longest match of all. promise: outcome of
    the longest prefix promised to this client (`learning/promises.py`). promised_tokens: its length.
    """

    __slots__ = ("available_tokens", "best", "promise", "promised_tokens", "prompt_tokens", "reason")

    def __init__(self, best: Candidate, reason: str, prompt_tokens: int, available_tokens: int) -> None:
        self.best = best
        self.reason = reason
        self.prompt_tokens = prompt_tokens
        self.available_tokens = available_tokens
        self.promise = ""
        self.promised_tokens = 0

    def __repr__(self) -> str:
        return f"Decision({self.best!r}, {self.reason!r}, {self.prompt_tokens}, {self.available_tokens})"


@mypyc_attr(acyclic=True)
class Outcome:
    """The end of a request. prompt_tokens, cached_tokens: the engine's counts, None if it reports none. shown: the answer had a
    token, so that at least the prompt was computed. countable: the counts are about this prompt alone; else prompt_tokens may
    be larger.
    """

    __slots__ = ("cached_tokens", "countable", "ok", "prompt_tokens", "shown")

    def __init__(
        self,
        ok: bool,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        *,
        shown: bool = True,
        countable: bool = True,
    ) -> None:
        self.ok = ok
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.shown = shown
        self.countable = countable

    def uncounted(self) -> Outcome:
        """The same end without counts."""
        return Outcome(self.ok, shown=self.shown)

    def _fields(self) -> tuple[object, ...]:
        return self.ok, self.prompt_tokens, self.cached_tokens, self.shown, self.countable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Outcome{self._fields()!r}"


class Random(Protocol):
    """The router's source of randomness (such as `random.Random`)."""

    def random(self) -> float: ...
