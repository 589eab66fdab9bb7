"""Workloads for the simulator: sources of requests, and recorded traces (`generators.py`: generated workloads).

A workload is a source of requests in time. Open-loop sources know all their arrivals beforehand; in a closed loop a user
sends the next request a think time after the previous answer. Pure: a trace comes in as parsed JSON lines, chance as an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import xxhash

from router.index.blocks import seed
from router.learning.sessions import session_key
from router.types import KEY_BYTES, BlockKeys, Prompt, Random

THINK_CAP_S = 300.0
START_S = 60.0
MOONCAKE_BLOCK, MOONCAKE_BATCH_S, AGENT_BLOCK = 512, 3.0, 64

Row = Mapping[str, Any]  # a line of a trace


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: its prompt, the length of its answer in tokens, its conversation.

    The prompt also names a session, if the client would. Its unit is a token unless `measured` has other counts. thread: an
    independent part of the conversation, such as a sub-agent.
    """

    prompt: Prompt
    output_tokens: int
    session: str
    measured: MeasuredTokens | None = None
    thread: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.measured.tokens if self.measured else self.prompt.units

    @property
    def block_tokens(self) -> float:
        """Tokens of one block of the prompt."""
        return self.prompt.block_units * self.tokens / max(1, self.prompt.units)

    @property
    def running_tokens(self) -> float:
        """Cache space while it runs beside its whole blocks, if known: the tokens of its answer and of its last,
        partial block.
        """
        if self.measured is None:
            return 0.0
        return self.output_tokens + max(0.0, self.tokens - self.prompt.blocks * self.block_tokens)

    @property
    def kept(self) -> BlockKeys:
        """The keys of the blocks that its replica has cached when the answer is complete."""
        return (self.measured and self.measured.answered) or self.prompt.keys

    def cached(self, blocks: int) -> int:
        """Cached tokens on a replica that holds this many leading blocks; at least one token is always computed."""
        if self.measured:
            return self.measured.cached(blocks, self.block_tokens)
        return min(int(blocks * self.block_tokens), self.tokens - 1)


@dataclass(frozen=True, slots=True)
class MeasuredTokens:
    """The token counts of a recorded request, whose blocks are coarser than an engine's, or are pieces of text.

    number: of the request in the recording. tokens: of the prompt. answered: the keys of the prompt and of its answer, as far
    as the next turn shows these; empty: no next turn. follows: (blocks, tokens) of the earlier prompt and answer that this
    prompt continues: a replica that holds all these blocks has cached exactly these tokens. beyond: at some numbers of blocks,
    the shared tokens beyond them, as engines have reported them. engine_block: tokens of an engine's block.
    """

    number: int
    tokens: int
    answered: BlockKeys = b""
    follows: tuple[int, int] = (0, 0)
    beyond: Mapping[int, float] = field(default_factory=dict)
    engine_block: int = 1

    def cached(self, held: int, block_tokens: float) -> int:
        """Cached tokens with `held` blocks. A match that ends elsewhere ends within a block: on average half of the rest is
        shared, too.
        """
        if not held:
            return 0
        found = held * block_tokens
        if held >= self.follows[0] > 0:
            found = max(found, self.follows[1])
        elif held in self.beyond:
            found += self.beyond[held] + self.engine_block / 2  # reports are in whole blocks
        else:
            found += min(block_tokens, self.tokens - found) / 2
        whole = int(min(found, self.tokens - 1))
        return whole - whole % self.engine_block


Arrival = tuple[float, SimulatedRequest]  # time of arrival
Turn = tuple[float, SimulatedRequest]  # think time before it


class WorkloadSource(Protocol):
    """A source of requests. `begin`: the arrivals known at time 0, in order; `after`: the next one after an answer."""

    def begin(self) -> Iterator[Arrival]: ...

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None: ...


def _when(arrival: Arrival) -> float:
    return arrival[0]


class OpenLoop:
    """Arrivals that do not wait for answers."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = sorted(arrivals, key=_when)

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None:
        return None


class ClosedLoop:
    """`users` users, each busy with one session at a time; a session is a sequence of (think time before it, request).

    The users begin at random times within START_S, so that their first, cold prompts do not coincide. No request is sent after
    the horizon.
    """

    def __init__(self, sessions: Iterable[Iterable[Turn]], users: int, horizon_s: float, chance: Random) -> None:
        self._sessions = iter(sessions)
        self._users = users
        self._horizon = horizon_s
        self._chance = chance
        self._rest: dict[str, Iterator[Turn]] = {}

    def begin(self) -> Iterator[Arrival]:
        first = (self._next_session(self._chance.random() * START_S) for _ in range(self._users))
        return iter(sorted(filter(None, first), key=_when))

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None:
        following = next(self._rest[request.session], None)
        if following is None:
            del self._rest[request.session]
            return self._next_session(now)
        think, next_request = following
        return self._in_time(now + think, next_request)

    def _next_session(self, now: float) -> Arrival | None:
        for session in self._sessions:
            turns = iter(session)
            for _, request in turns:
                self._rest[request.session] = turns
                return self._in_time(now, request)
        return None

    def _in_time(self, at: float, request: SimulatedRequest) -> Arrival | None:
        return (at, request) if at < self._horizon else None


# -- recorded traces


class TraceError(ValueError):
    """A trace is invalid; the message has the row and the reason."""


def mooncake(rows: Iterable[Row], chance: Random, speed: float = 1.0) -> Iterator[Arrival]:
    """Mooncake's open-loop format (timestamp in ms, hash_ids of 512-token blocks, chained; no sessions), `speed` times faster.

    Timestamps are batches of 3 s; each request is put at random into its 3 s, because otherwise every batch would be a burst.
    """
    for number, row in enumerate(rows, 1):
        with _blaming_row(number):
            at = (row["timestamp"] / 1000 + chance.random() * MOONCAKE_BATCH_S) / speed
            if not 0 <= at < math.inf:
                raise ValueError("timestamp is not a time")
            ids = row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK]
            keys = b"".join(key.to_bytes(KEY_BYTES, "little") for key in ids)
            request = _request(Prompt(keys, row["input_length"], MOONCAKE_BLOCK, ""), row["output_length"], str(number))
        yield at, request


def agents(rows: Iterable[Row], max_input: int, first: int = 1) -> Iterator[list[Turn]]:
    """Coding-agent sessions (block ids local to a session); sessions with a prompt above `max_input` tokens are omitted.

    first: the number of the first row.
    """
    sizes = set[int]()
    for number, row in enumerate(rows, first):
        with _blaming_row(number):
            sizes.add(size := row.get("block_size", AGENT_BLOCK))
            if len(sizes) > 1 or size < 1:
                raise ValueError("block_size is not the same positive number in all rows")
            session = list(_agent_turns(row, size, str(number), str(number)))
        if session and all(request.prompt.units <= max_input for _, request in session):
            yield session


def _agent_turns(row: Row, size: int, session: str, name: str) -> Iterator[Turn]:
    """A session's requests in order; requests of a sub-agent stand in their place, with a prompt of their own."""
    tools, system = row.get("tool_tokens", 0), row.get("system_tokens", 0)
    head = (tools + system) // size
    shared, own = seed(("head", str(tools), str(system))), seed(("session", name))
    path: list[bytes] = []
    for number, request in enumerate(row["requests"]):
        if "requests" in request:
            yield from _agent_turns(request, size, session, f"{name}/{number}")
            continue
        keep, runs, blocks = request["keep"], request["new"], request["in"] // size
        if not (0 <= keep <= len(path) and blocks <= keep + sum(count for _, count in runs) <= blocks + 1):
            raise ValueError(f"keep and new of request {number} do not make the {blocks} blocks of its prompt")
        del path[keep:]
        for start, count in runs:
            path += (_block_key(len(path), head, block, shared, own) for block in range(start, start + count))
        think = request.get("think_time") or 0.0
        if not think >= 0:
            raise ValueError(f"think_time of request {number} is below 0")
        key = session_key(session)
        prompt = Prompt(b"".join(path[:blocks]), request["in"], size, "", session, session_key=key)
        yield min(think, THINK_CAP_S), replace(_request(prompt, request["out"], session), thread=name)


def _block_key(place: int, head: int, block: int, shared: int, own: int) -> bytes:
    """The key of a block. Sessions with equal sizes of tools and system prompt share the head; all other blocks differ."""
    if place < head:
        return xxhash.xxh3_64_digest(place.to_bytes(8, "little"), shared)
    return xxhash.xxh3_64_digest(block.to_bytes(8, "little"), own)


def _request(prompt: Prompt, output_tokens: int, session: str) -> SimulatedRequest:
    if not (isinstance(prompt.units, int) and prompt.units > 0 and isinstance(output_tokens, int) and output_tokens >= 0):
        raise ValueError(f"{prompt.units!r} tokens in, {output_tokens!r} out")
    return SimulatedRequest(prompt, output_tokens, session)


@contextmanager
def _blaming_row(number: int) -> Iterator[None]:
    """Turns errors inside into a TraceError of this row, which is JSON of any content."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise TraceError(f"row {number} is not as its format says ({type(error).__name__}: {error})") from error
