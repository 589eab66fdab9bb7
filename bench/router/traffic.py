"""The traffic that decisions are measured in: prompts, and a fleet that answers them in its own time.

Prompts are random bytes. All conversations begin with one of HEADS shared heads; a turn adds TURN_BYTES to the conversation.
The fleet prefills first come, first served, at PREFILL_RATE; an answer takes an exponential time. Requests come at random, and
so fast that the replicas prefill for BUSY of the time, whatever they are; so there are requests in flight, and unequal queues.

A decision's time is that of three calls: the choice (with the hashing), the first token, the end. They happen when they are
due, with other requests' calls between them, and are added up when the request is over.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.router.contestants import BLOCK_BYTES, Contestant

HEADS, HEAD_BYTES = 16, 4_000
TURN_BYTES = 2 * BLOCK_BYTES
PREFILL_RATE = 10_000.0  # tokens per second and replica
OVERHEAD_S = 0.005  # of a request, beside its prefill
ANSWER_S = 1.0
BUSY = 0.6
FILL_SIZES = ((2_000, 8_000, 32_000, 128_000), (4, 3, 2, 1))  # bytes, and how often
TALKING = 32  # conversations at a time while the index is filled
FULL = 0.97  # of its capacity


class Prompts:
    """The same seed gives the same prompts for every contestant."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._heads = [self._chance.randbytes(HEAD_BYTES) for _ in range(HEADS)]

    def conversation(self, size: int) -> bytes:
        """So many bytes, a shared head first (at most half of them)."""
        head = self._chance.choice(self._heads)[: size // 2]
        return head + self._chance.randbytes(size - len(head))

    def cold(self, size: int) -> bytes:
        return self._chance.randbytes(size)

    def shuffled(self, texts: list[bytes]) -> list[bytes]:
        return self._chance.sample(texts, len(texts))

    def filling(self) -> Iterator[bytes]:
        """Without end: conversations of two turns of mixed sizes, TALKING of them at a time."""
        talking: list[bytes] = []
        while True:
            size = int(self._chance.choices(*FILL_SIZES)[0] * self._chance.uniform(0.7, 1.3))
            talking.append(text := self.conversation(size))
            yield text[: self._chance.randrange(size // 2, size)]
            if len(talking) == TALKING:
                yield talking.pop(self._chance.randrange(TALKING))


@dataclass(slots=True)
class Timed:
    """Requests of one sort: what each cost (us), and how much of the prompts was held where they went."""

    us: list[float] = field(default_factory=list)
    tokens: int = 0
    uncached: int = 0

    @property
    def held(self) -> float:
        return 1 - self.uncached / self.tokens


class Fleet:
    """Sends requests through a contestant, one after the other, in simulated time."""

    def __init__(self, contestant: Contestant, replicas: int, seed: int) -> None:
        self.contestant = contestant
        self._chance = random.Random(seed)
        self.replicas = replicas
        self._free: dict[str, float] = {}  # when a replica has prefilled all that it was sent
        self._due: list[tuple[float, int, bool, Any, int, Timed | None]] = []  # when, which, over?, its ticket, ns, where to
        self._sent = 0
        self.now = 0.0

    def send(self, text: bytes, into: Timed | None = None) -> None:
        """Let what is due happen, and decide about the next prompt."""
        self._settle()
        begun = time.perf_counter_ns()
        ticket = self.contestant.choose(text, self.now)
        spent = time.perf_counter_ns() - begun
        replica, tokens, uncached = self.contestant.work(ticket)
        if into:
            into.tokens += tokens
            into.uncached += uncached
        work = OVERHEAD_S + uncached / PREFILL_RATE
        self._free[replica] = max(self.now, self._free.get(replica, 0.0)) + work
        self._push(self._free[replica], False, ticket, spent, into)
        self.now += work / (BUSY * self.replicas) * self._chance.expovariate(1.0)

    def drain(self) -> None:
        """Let all requests end."""
        while self._due:
            self.now = self._due[0][0]
            self._settle()

    def _push(self, at: float, over: bool, ticket: Any, spent: int, into: Timed | None) -> None:
        self._sent += 1
        heapq.heappush(self._due, (at, self._sent, over, ticket, spent, into))

    def _settle(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            at, _, over, ticket, spent, into = heapq.heappop(self._due)
            step = self.contestant.close if over else self.contestant.first_token
            begun = time.perf_counter_ns()
            step(ticket, at)
            spent += time.perf_counter_ns() - begun
            if not over:
                self._push(at + self._chance.expovariate(1 / ANSWER_S), True, ticket, spent, into)
            elif into:
                into.us.append(spent / 1000)


def fill(fleet: Fleet, prompts: Prompts, blocks: int) -> None:
    """Decide about conversations until about `blocks` are credited."""
    fleet.contestant.grow(blocks)
    filling = prompts.filling()
    while fleet.contestant.blocks < blocks * FULL:
        fleet.send(next(filling))
