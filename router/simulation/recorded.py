"""Recorded traffic: a file of `warmroute record` as a workload.

A file is JSON lines. The first is a header: format, version, the share of conversations that were recorded, the fleet. Then a
line for each request, in the order in which they ended:

    t, seconds, ttft   seconds: of arrival, to its end, to its first byte (streams only)
    in, out, cached    tokens: of the prompt, of the answer, of the prompt as the engine had them cached; null: not reported
    units, block       the length of the prompt and of a block, in bytes of canonical text; with "ids": true, in token ids
    parent, new        its full blocks (`block_tree.py`)
    session, chain     the conversation, by a number: as its client names it, or as its prompts show it
    client, tenant     numbers, likewise
    pool, replica, model, status, predicted

and a last line with `end`, which is missing if the recorder was killed.

Replay. A conversation begins at its recorded time; its next request follows when the previous answer is complete and the
recorded think time is over (overlapping requests of a conversation are chains of their own). If a client had nothing running
when it began a conversation, it has waited for its last one: so in the replay the conversation begins after the same pause
behind that one. Otherwise conversations would pile up on a slightly slower fleet, unlike real users'. Clients that share one
key or address almost always have something running, and their conversations begin at their recorded times. An open loop sends
each request at its recorded time: on a slower fleet, or by chance, before the answer that it continues. A file with a share of
the conversations is scaled up: each is replayed 1 / share times, at times shifted by up to SPREAD_S, so that the fleet keeps
its size. Blocks common to several conversations stay common to the copies; the others differ in each copy.

A recorded block is coarser than an engine's, and only prompts are recorded. The part of an answer that the next turn repeats is
known to be cached with it. If prompts diverge within a block, the engines' reports show how much of it they share. See
`MeasuredTokens`.

A recorded fleet is warm, and a simulated one would be cold, perhaps for long if it is busy. So prefixes that requests found
cached at first, although no recorded request had left them there, are cached at the beginning (`held`).

A busy fleet is chaotic: a request that comes a few milliseconds later goes to another replica, and so do its successors. So one
replay is one sample, as the recording itself is. Replays with another chance send each request up to JITTER_S earlier or later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from router.learning.sessions import session_key
from router.simulation.block_tree import BlockTree
from router.simulation.workloads import Arrival, MeasuredTokens, Row, SimulatedRequest, TraceError, Turn
from router.types import KEY_BYTES, BlockKeys, Prompt, Random

FORMAT: Final = "warmroute-trace"
VERSION: Final = 1
MAX_REQUESTS: Final = 5_000_000
MAX_TOKENS: Final = 1_000_000_000  # of a prompt, or an answer
MAX_UNITS: Final = 1 << 40
MAX_SECONDS: Final = 1e9
MAX_NUMBER: Final = 1 << 53  # of a session, a pool ...
MAX_COPIES: Final = 10_000  # a share below 1 / MAX_COPIES is refused
OPEN_ENDS: Final = 4  # latest prompts of a conversation that its next prompt may continue: sub-agents run concurrently
SPREAD_S: Final = 60.0
JITTER_S: Final = 0.02
HELD_S: Final = 900.0  # a longer think time says nothing about a cache
ENGINE_BLOCK: Final = 16  # tokens: of vLLM's default, and of the simulated engine


@dataclass(slots=True)
class RecordedRequest:
    """One request (see the module). last: the number of its last block. blocks: number of blocks."""

    at: float
    seconds: float
    ttft: float | None
    tokens: int
    output: int | None
    cached: int | None
    predicted: int
    units: int
    block: int
    ids: bool
    last: int
    blocks: int
    session: int
    named: bool
    pool: int
    replica: int
    model: int
    client: int
    status: int
    parent: int  # last block shared with any earlier prompt
    shared: int = 0  # leading blocks that other conversations have, too
    follows: tuple[int, int] = (0, 0)  # as in `MeasuredTokens`
    next: RecordedRequest | None = None  # the request that continues it

    @property
    def ended(self) -> float:
        return self.at + self.seconds

    @property
    def replayable(self) -> bool:
        """True if it was computed: a replica gave a good answer, or at least its beginning."""
        return self.status < 400 or (self.status == CLIENT_LEFT and self.ttft is not None)


CLIENT_LEFT: Final = 499


class Partings:
    """Tokens that prompts share beyond a block at which some of them diverge: the mean of the engines' reports."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, tuple[float, int]]] = {}  # by the first block of the run, and the block

    def learn(self, tree: BlockTree, one: RecordedRequest) -> None:
        """Learn from a report, unless it is not about the block at which the prompt diverges (its replica had less, or
        more).
        """
        if one.cached is None or not one.parent or not one.units:
            return
        block_tokens = one.tokens * one.block / one.units
        beyond = one.cached - tree.depth(one.parent) * block_tokens
        if -ENGINE_BLOCK < beyond < block_tokens:
            run = self._sums.setdefault(tree.first_of_run(one.parent), {})
            total, count = run.get(one.parent, (0.0, 0))
            run[one.parent] = total + beyond, count + 1

    def of(self, tree: BlockTree, block: int) -> dict[int, float]:
        """The shared tokens beyond some numbers of blocks, for a prompt that ends at this block."""
        found, depth = dict[int, float](), 0
        for first, last in tree.path(block):
            for at, (total, count) in self._sums.get(first, {}).items():
                if at <= last:
                    found[depth + at - first + 1] = total / count
            depth += last - first + 1
        return found


@dataclass(slots=True)
class RecordedTraffic:
    """A whole file. share: of the conversations. pools: the replicas of each pool at the beginning of the recording."""

    share: float = 1.0
    pools: dict[int, list[Row]] = field(default_factory=dict)
    requests: list[RecordedRequest] = field(default_factory=list)
    tree: BlockTree = field(default_factory=BlockTree)
    partings: Partings = field(default_factory=Partings)
    policy: str = ""
    end: float | None = None
    lost: int = 0

    @property
    def seconds(self) -> float:
        return self.end or max([one.ended for one in self.requests], default=0.0)


def is_header(row: Row) -> bool:
    return "format" in row


def read(rows: Iterable[Row]) -> RecordedTraffic:
    """Read a recording. Raises TraceError."""
    lines = iter(rows)
    recording, owners = RecordedTraffic(), _Owners()
    ends: dict[tuple[bool, int], list[RecordedRequest]] = {}
    with _blaming_line(1):
        _read_header(next(lines, {}), recording)
    for number, row in enumerate(lines, 2):
        if recording.end is not None:
            raise TraceError(f"line {number}: nothing may follow the line with 'end'")
        if number > MAX_REQUESTS + 2:
            raise TraceError(f"more than {MAX_REQUESTS} requests")
        with _blaming_line(number):
            if "end" in row:
                recording.end, recording.lost = _seconds(row, "end"), _whole(row, "lost", MAX_NUMBER, 0)
                continue
            one = _request(row, recording.tree)
        recording.requests.append(one)
        recording.partings.learn(recording.tree, one)
        if recording.share < 1:
            owners.visit(recording.tree, one)
        _follow(recording.tree, one, ends.setdefault((one.named, one.session), []))
    if recording.share < 1:
        for one in recording.requests:
            one.shared = owners.shared(recording.tree, one)
    recording.requests.sort(key=_when)
    return recording


def _when(one: RecordedRequest) -> float:
    return one.at


def _read_header(row: Row, recording: RecordedTraffic) -> None:
    if row.get("format") != FORMAT:
        raise ValueError(f"format is {row.get('format')!r}, and not {FORMAT!r}")
    if row.get("version") != VERSION:
        raise ValueError(f"version is {row.get('version')!r}: this release reads version {VERSION}")
    recording.share = _number(row, "sample", 1.0, 1.0)
    if recording.share < 1 / MAX_COPIES:
        raise ValueError(f"sample is below {1 / MAX_COPIES}")
    recording.policy = str(row.get("policy", ""))[:100]
    fleet = row.get("fleet", [])
    if not isinstance(fleet, list) or not all(isinstance(each, dict) for each in fleet):
        raise ValueError("fleet is not a list of objects")
    for each in fleet:
        replica = {
            "kv_tokens": _whole(each, "kv_tokens", MAX_UNITS, 0),
            "prefill_rate": _number(each, "prefill_rate", 1e12, 0.0),
        }
        recording.pools.setdefault(_whole(each, "pool", MAX_NUMBER, 0), []).append(replica)


def _request(row: Row, tree: BlockTree) -> RecordedRequest:
    named, block, units = "session" in row, _whole(row, "block", MAX_UNITS), _whole(row, "units", MAX_UNITS)
    parent = _whole(row, "parent", MAX_NUMBER)
    last = tree.add(parent, _whole(row, "new", MAX_NUMBER))
    blocks, tokens = tree.depth(last), _whole(row, "in", MAX_TOKENS)
    if block < 1 or blocks * block > units or (units and not tokens):
        raise ValueError(f"{blocks} blocks of {block}, {tokens} tokens, in a prompt of {units}")
    return RecordedRequest(
        at=_seconds(row, "t"),
        seconds=_seconds(row, "seconds"),
        ttft=None if row.get("ttft") is None else _seconds(row, "ttft"),
        tokens=tokens,
        output=None if row.get("out") is None else _whole(row, "out", MAX_TOKENS),
        cached=None if row.get("cached") is None else _whole(row, "cached", tokens),
        predicted=_whole(row, "predicted", MAX_TOKENS * 100, 0),
        units=units,
        block=block,
        ids=row.get("ids", False) is True,
        last=last,
        blocks=blocks,
        session=_whole(row, "session" if named else "chain", MAX_NUMBER, None if named else 0),
        named=named,
        pool=_whole(row, "pool", MAX_NUMBER, 0),
        replica=_whole(row, "replica", MAX_NUMBER, 0),
        model=_whole(row, "model", MAX_NUMBER, 0),
        client=_whole(row, "client", MAX_NUMBER, 0),
        status=_whole(row, "status", 999, 200),
        parent=parent,
    )


def _whole(row: Row, name: str, most: int, default: int | None = None) -> int:
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]!r}, and not a whole number from 0 to {most}")
    return value


def _number(row: Row, name: str, most: float, default: float) -> float:
    value: Any = row.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]!r}, and not a number from 0 to {most:g}")
    return float(value)


def _seconds(row: Row, name: str) -> float:
    return _number(row, name, MAX_SECONDS, math.nan)


@contextmanager
def _blaming_line(number: int) -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"line {number}: {error}") from error


# -- conversations


def _follow(tree: BlockTree, one: RecordedRequest, ends: list[RecordedRequest]) -> None:
    """Finds the prompt that this one continues: among the conversation's latest prompts, the longest that leads to it."""
    before = [each for each in ends if each.blocks and each.block == one.block and tree.leads_to(each.last, one.last)]
    found = max(before, key=_length, default=None)
    if found is not None and found.output is not None and one.units and found.next is None:
        tokens = min(found.tokens + found.output, one.tokens - 1)
        blocks = int(tokens * one.units / (one.tokens * one.block))
        if found.blocks <= blocks <= one.blocks:
            found.next, one.follows = one, (blocks, tokens)
    if found is not None:
        ends.remove(found)
    ends.append(one)
    del ends[:-OPEN_ENDS]


def _length(one: RecordedRequest) -> int:
    return one.blocks


class _Owners:
    """The runs of the tree that several conversations use, and up to which block."""

    def __init__(self) -> None:
        self._owner: dict[int, tuple[bool, int]] = {}
        self._shared: dict[int, int] = {}

    def visit(self, tree: BlockTree, one: RecordedRequest) -> None:
        who = one.named, one.session
        for first, last in tree.path(one.last):
            if self._owner.setdefault(first, who) != who:
                self._shared[first] = max(self._shared.get(first, 0), last)

    def shared(self, tree: BlockTree, one: RecordedRequest) -> int:
        """Its leading blocks that other conversations use, too."""
        blocks = 0
        for first, last in tree.path(one.last):
            common = min(self._shared.get(first, 0), last)
            blocks += max(0, common - first + 1)
            if common < last:
                break
        return blocks


# -- replay


@dataclass(frozen=True, slots=True)
class Replay:
    """A recording, prepared for a replay.

    requests: in order of time. decode_rate: of answers of unknown length. engine_block: tokens of an engine's block. copies:
    shifts in time by (conversation, number); empty: one copy of each.
    """

    recording: RecordedTraffic
    requests: list[RecordedRequest]
    decode_rate: float
    engine_block: int = ENGINE_BLOCK

    def request(self, number: int, copy: int, thread: str = "") -> SimulatedRequest:
        """requests[number] as a request of the simulator. thread: see `SimulatedRequest`."""
        one, tree = self.requests[number], self.recording.tree
        name = f"{one.named:d} {one.session} {copy}"
        keys = tree.keys(one.last, shared=one.shared, copy=copy)
        answered: BlockKeys = b""
        if following := one.next:
            answered = tree.keys(following.last, following.follows[0], shared=following.shared, copy=copy)
        session = name if one.named else ""
        scale = "" if one.ids else f"model {one.model}"
        prompt = Prompt(
            keys, max(1, one.units), one.block, scale, session, _client(one, copy), session_key(session) if session else 0
        )
        output = one.output
        if output is None:
            output = int((one.seconds - (one.ttft if one.ttft is not None else one.seconds)) * self.decode_rate)
        tokens = max(1, one.tokens)
        beyond = self.recording.partings.of(tree, one.last)
        measured = MeasuredTokens(number, tokens, answered, one.follows, beyond, self.engine_block)
        return SimulatedRequest(prompt, output, name, measured, thread)

    def copies(self, chance: Random, jitter_s: float) -> list[tuple[float, int, int]]:
        """(time, number, copy) of all requests to be sent, in order of time."""
        share, shifts = self.recording.share, dict[tuple[bool, int], list[float]]()
        sent = list[tuple[float, int, int]]()
        for number, one in enumerate(self.requests):
            who = one.named, one.session
            if who not in shifts:
                more = 0 if share == 1 else int(1 / share + chance.random()) - 1
                ways = [(2 * chance.random() - 1) * SPREAD_S for _ in range(more)]
                shifts[who] = [0.0, *(abs(way) if one.at + way < 0 else way for way in ways)]
            for copy, shift in enumerate(shifts[who]):
                late = (2 * chance.random() - 1) * jitter_s if jitter_s else 0.0
                sent.append((max(0.0, one.at + shift + late), number, copy))
        return sorted(sent)


def _client(one: RecordedRequest, copy: int) -> int:
    """The client's number; copies are other clients, like unrecorded clients."""
    return (one.client + (copy << 40)) & ((1 << 63) - 1)


def held(replay: Replay, names: dict[int, int], chance: Random) -> Iterator[tuple[int, SimulatedRequest]]:
    """Requests whose prefixes replicas had cached before the recording, by their reports within HELD_S, ordered by use, the
    earliest last: a request that continues no recorded one, with more cached tokens than earlier requests on its replica
    explain. names: the simulated number of each replica. Includes all copies.
    """
    tree, there, found = replay.recording.tree, dict[int, dict[int, int]](), list[tuple[int, int]]()
    for number, one in enumerate(replay.requests):
        if one.at > HELD_S:
            break
        known = there.setdefault(one.replica, {})
        matched, path = 0, tree.path(one.last)
        for first, last in path:
            common = min(known.get(first, 0), last)
            matched += max(0, common - first + 1)
            if common < last:
                break
        for first, last in path:
            known[first] = max(known.get(first, 0), last)
        blocks = int((one.cached or 0) * one.units / (max(1, one.tokens) * one.block))
        if one.follows == (0, 0) and blocks > matched:
            found.append((number, blocks))
    copies: dict[int, list[int]] = {}
    for _, number, copy in replay.copies(chance, 0.0):
        copies.setdefault(number, []).append(copy)
    for number, blocks in reversed(found):
        one = replay.requests[number]
        for copy in copies[number]:
            request = replay.request(number, copy)
            prompt = request.prompt
            units, tokens = blocks * one.block, max(1, blocks * one.block * one.tokens // one.units)
            shorter = Prompt(prompt.keys[: blocks * KEY_BYTES], units, one.block, prompt.scale, session_key=prompt.session_key)
            yield names[one.replica] + copy, SimulatedRequest(shorter, 0, request.session, MeasuredTokens(number, tokens))


class OpenReplay:
    """A `Source` that sends each request at its recorded time. Prompts are made when they are due."""

    def __init__(self, replay: Replay, chance: Random, speed: float = 1.0, jitter_s: float = 0.0) -> None:
        self._replay = replay
        self._speed = speed
        self._sent = replay.copies(chance, jitter_s)

    def __len__(self) -> int:
        return len(self._sent)

    def begin(self) -> Iterator[Arrival]:
        for at, number, copy in self._sent:
            yield at / self._speed, self._replay.request(number, copy)

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None:
        return None


class ClosedReplay:
    """A `Source` in which each request of a chain follows the previous answer, after the recorded think time (see the
    module).
    """

    def __init__(self, replay: Replay, chance: Random, speed: float = 1.0, jitter_s: float = 0.0) -> None:
        """speed: factor for the number of conversations that begin. Think times stay. With a speed other than 1 there are more
        clients, and no conversation waits for another.
        """
        self._replay = replay
        self._speed = speed
        self._chains: dict[str, list[tuple[float, int, int]]] = {}  # think time, number and copy; the next one last
        self._first: list[tuple[float, int, int, str]] = []
        self._sent = 0
        ends = dict[str, float]()  # time at which each chain's last answer ended
        parts: dict[tuple[bool, int, int], set[str]] = {}  # the chains of a conversation
        latest = dict[int, str]()  # of each client, the chain with the latest end
        for at, number, copy in replay.copies(chance, jitter_s):
            one = replay.requests[number]
            chains, client = parts.setdefault((one.named, one.session, copy), set()), _client(one, copy)
            free = [name for name in chains if ends[name] <= at]
            if not chains and one.client and speed == 1 and ends.get(latest.get(client, ""), math.inf) <= at:
                free = [latest[client]]
            if free:
                name = max(free, key=ends.__getitem__)
                self._chains[name].append((at - ends[name], number, copy))
            else:
                name = str(len(ends))
                self._chains[name] = []
                self._first.append((at, number, copy, name))
            chains.add(name)
            ends[name] = at + one.seconds
            if ends[name] >= ends.get(latest.get(client, ""), 0.0):
                latest[client] = name
            self._sent += 1
        for chain in self._chains.values():
            chain.reverse()

    def __len__(self) -> int:
        return self._sent

    def begin(self) -> Iterator[Arrival]:
        for at, number, copy, name in self._first:
            yield at / self._speed, self._replay.request(number, copy, name)

    def after(self, request: SimulatedRequest, now: float) -> Turn | None:
        rest = self._chains[request.thread]
        if not rest:
            return None
        think, number, copy = rest.pop()
        return now + think, self._replay.request(number, copy, request.thread)
