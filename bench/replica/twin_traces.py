"""What the twin and its original are sent: conversations, cut down to what a small model on one core carries, as token ids.

An arrival is a time in seconds, the prompt's tokens, the answer's length. The tokens of a block follow from its key, so prompts
that shared blocks still do; what is behind the last whole block is a request's own. Answers are as in the trace, not as
generated, so both engines have the same prompts and can find the same.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from replica.engine import EngineRequest, Sequence
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine, Timer
from router.simulation.generators import BLOCK, ChatWorkload, Lengths
from router.simulation.workloads import MOONCAKE_BATCH_S, MOONCAKE_BLOCK, SimulatedRequest
from router.types import KEY_BYTES

VOCABULARY = range(1000, 40_000)  # ids that any tokenizer has, and none of them special
CHAT = ChatWorkload(
    hours=2.0,
    users=24,
    systems=3,
    system=160,
    turns=5.0,
    message=Lengths(80, 0.8, 400),
    output=Lengths(24, 0.8, 100),
    pause_s=20.0,
)
TOKEN_S = 0.04  # of an answer, when the generator's users wait for theirs
SMALLER, MOST, EVERY = 32, 1200, 16  # Mooncake: lengths are divided, longer prompts left out, one conversation in EVERY stays


class Arrival(NamedTuple):
    at: float
    prompt: list[int]
    output: int


def chat(seed: int) -> list[Arrival]:
    """The generator's conversations, as they come when answers take TOKEN_S a token."""
    chance = random.Random(seed)
    source, order = CHAT.source(1, chance), itertools.count()
    due = [(at, next(order), request) for at, request in source.begin()]
    heapq.heapify(due)
    found = list[Arrival]()
    while due:
        at, number, request = heapq.heappop(due)
        found.append(Arrival(at, _tokens(request, number), request.output_tokens))
        if following := source.after(request, at + request.output_tokens * TOKEN_S):
            heapq.heappush(due, (following[0], next(order), following[1]))
    return found


def _tokens(request: SimulatedRequest, number: int) -> list[int]:
    prompt = request.prompt
    names = (prompt.keys[at : at + KEY_BYTES].hex() for at in range(0, len(prompt.keys), KEY_BYTES))
    return _text(names, BLOCK, prompt.units, number)


def mooncake(file: Path, seed: int) -> list[Arrival]:
    """An hour of recorded conversations: some of them, whole; all lengths SMALLER times smaller."""
    chance, found = random.Random(seed), list[Arrival]()
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for number, row in enumerate(map(json.loads, lines)):
            ids, length = row["hash_ids"], row["input_length"] // SMALLER
            at = row["timestamp"] / 1000 + chance.random() * MOONCAKE_BATCH_S
            # All prompts have the first block; the second distinguishes conversations.
            if len(ids) > 1 and ids[1] % EVERY == 0 and length <= MOST:
                tokens = _text(map(str, ids), MOONCAKE_BLOCK // SMALLER, length, number)
                found.append(Arrival(at, tokens, max(1, row["output_length"] // SMALLER)))
    return sorted(found)


def _text(names: Iterator[str], block: int, length: int, number: int) -> list[int]:
    """The tokens of whole blocks by their names, then the request's own."""
    whole = [random.Random(name).choices(VOCABULARY, k=block) for name in itertools.islice(names, length // block)]
    tokens = [token for block_tokens in whole for token in block_tokens]
    return tokens + random.Random(number).choices(VOCABULARY, k=max(1, length) - len(tokens))


# -- how fast they are to come


class VirtualClock:
    """A clock whose time passes at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Timer]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> Timer:
        timer = _Timer(callback, args)
        heapq.heappush(self._due, (when, next(self._order), timer))
        return timer

    def advance(self, until: float) -> Iterator[float]:
        """Let happen what is due until then; yields how long it was from one thing to the next, before that happens."""
        while self._due and self._due[0][0] <= until:
            when, _, timer = heapq.heappop(self._due)
            if timer.callback is not None:
                yield when - self.now
                self.now = when
                timer.callback(*timer.args)
        if until < math.inf:
            yield until - self.now
            self.now = until


class _Timer:
    def __init__(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


def busy_share(config: SimConfig, arrivals: list[Arrival]) -> float:
    """Of the time up to the last answer, that in which the simulated engine has something to do."""
    clock, busy = VirtualClock(), 0.0
    engine = SimEngine(config, clock)
    for arrival in [*arrivals, None]:
        for passed in clock.advance(arrival.at if arrival else math.inf):
            busy += passed if engine.load().running else 0.0
        if arrival:
            engine.submit(EngineRequest(arrival.prompt, arrival.output, ignore_eos=True))
    return busy / clock.now


def first_tokens(config: SimConfig, arrivals: list[Arrival]) -> list[float]:
    """Seconds to the first token of each, in virtual time."""
    clock, found = VirtualClock(), [0.0] * len(arrivals)
    engine, silent = SimEngine(config, clock), dict[int, Sequence]()

    def listen() -> None:
        for number, sequence in list(silent.items()):
            if sequence.pending:
                found[number] = clock.now - arrivals[number].at
                del silent[number]

    for number, arrival in enumerate(arrivals):
        for _ in clock.advance(arrival.at):
            listen()
        listen()
        silent[number] = engine.submit(EngineRequest(arrival.prompt, arrival.output, ignore_eos=True))
    for _ in clock.advance(math.inf):
        listen()
    listen()
    return found


def at_load(config: SimConfig, arrivals: list[Arrival], load: float, seconds: float) -> list[Arrival]:
    """The arrivals of `seconds`, as much faster or slower as makes the simulated engine busy for `load` of the time."""
    slow, fast = 0.01, 1000.0
    for _ in range(24):
        speed = math.sqrt(slow * fast)
        if busy_share(config, _faster(arrivals, speed, seconds)) < load:
            slow = speed
        else:
            fast = speed
    return _faster(arrivals, slow, seconds)


def _faster(arrivals: list[Arrival], speed: float, seconds: float) -> list[Arrival]:
    begin = arrivals[0].at
    sooner = (Arrival((at - begin) / speed, prompt, output) for at, prompt, output in arrivals)
    return list(itertools.takewhile(lambda arrival: arrival.at < seconds, sooner))
