"""Generated workloads: one kind of traffic each, to show the strength or weakness of a policy.

A generator is a frozen value; lengths in its fields are in tokens. `rate` (requests a second) and `users` are for each replica:
a larger fleet gets proportionally more. The defaults keep a default fleet's replica (10,000 tokens/s of prefill, 50 tokens/s of
decode for each of 64 sequences, 1,000,000 KV tokens) prefilling about two thirds of the time if it is routed well; `burst_head`
intentionally arrives at the fleet's full capacity.

All randomness comes from an argument: the k-th request of an open loop, or the k-th session of a closed one, is the same for
every policy. A prompt is a `Text`: consecutive pieces, whose keys depend on all earlier pieces, so two prompts share exactly
the leading blocks with the same pieces.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import xxhash

from router.learning.sessions import session_key
from router.simulation.workloads import ClosedLoop, OpenLoop, SimulatedRequest, Turn, WorkloadSource
from router.types import Prompt, Random

BLOCK = 64  # tokens


class Generator(Protocol):
    """hours: time during which requests arrive. `source` makes a new source for a fleet of this many replicas."""

    @property
    def hours(self) -> float: ...

    def source(self, replicas: int, chance: Random) -> WorkloadSource: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts around `mean`; sigma: of the logarithm; never above `most`, nor below 1."""

    mean: float
    sigma: float = 0.8
    most: int = 100_000

    def draw(self, chance: Random) -> int:
        normal = math.sqrt(-2 * math.log(1 - chance.random())) * math.cos(2 * math.pi * chance.random())
        drawn = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt under construction."""

    tokens: int = 0
    keys: bytes = b""
    state: int = 0  # hash of all pieces and their offsets

    def then(self, piece: str, tokens: int) -> Text:
        """The text extended by `tokens` tokens, identified by `piece`. O(blocks)."""
        state, end = xxhash.xxh3_64_intdigest(f"{self.tokens} {piece}".encode(), self.state), self.tokens + tokens
        blocks = range(self.tokens // BLOCK, end // BLOCK)
        keys = b"".join(xxhash.xxh3_64_digest(block.to_bytes(8, "little"), state) for block in blocks)
        return Text(end, self.keys + keys, state)

    def request(self, output_tokens: int, session: str) -> SimulatedRequest:
        prompt = Prompt(self.keys, self.tokens, BLOCK, "", session, session_key=session_key(session))
        return SimulatedRequest(prompt, output_tokens, session)


# -- open loops: arrivals do not depend on answers


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """One long system prompt, then a short message; every request comes from another user."""

    hours: float = 0.1
    rate: float = 11.0
    system: int = 8000
    message: Lengths = Lengths(600, most=4000)
    output: Lengths = Lengths(150, most=1000)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        system = Text().then("system", self.system)

        def write(number: int) -> SimulatedRequest:
            return system.then(f"user {number}", self.message.draw(chance)).request(self.output.draw(chance), f"user {number}")

        return OpenLoop(_stream(self.rate * replicas, self.hours, write, chance))


@dataclass(frozen=True, slots=True)
class NoReuse:
    """All prompts differ from their first token on: no cache hits are possible."""

    hours: float = 0.5
    rate: float = 1.1
    prompt: Lengths = Lengths(6000, 1.0)
    output: Lengths = Lengths(250, most=2000)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        def write(number: int) -> SimulatedRequest:
            return Text().then(f"user {number}", self.prompt.draw(chance)).request(self.output.draw(chance), f"user {number}")

        return OpenLoop(_stream(self.rate * replicas, self.hours, write, chance))


@dataclass(frozen=True, slots=True)
class Rag:
    """An instruction, some documents in the order of their relevance, a question.

    Documents are drawn by Zipf's law (the k-th most popular in proportion to k^-zipf), without repetition in a prompt. So two
    prompts share the instruction, often the first document, seldom the second.
    """

    hours: float = 0.3
    rate: float = 1.15
    instruction: int = 500
    corpus: int = 2000
    zipf: float = 1.1
    documents: int = 4
    document: Lengths = Lengths(2000, 0.5, 10_000)
    question: Lengths = Lengths(100, most=1000)
    output: Lengths = Lengths(250, most=2000)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        lengths = [self.document.draw(chance) for _ in range(self.corpus)]
        popularity = list(itertools.accumulate((1 + rank) ** -self.zipf for rank in range(self.corpus)))
        instruction = Text().then("instruction", self.instruction)

        def write(number: int) -> SimulatedRequest:
            text, taken = instruction, set[int]()
            while len(taken) < self.documents:
                document = bisect.bisect(popularity, chance.random() * popularity[-1])
                if document not in taken:
                    taken.add(document)
                    text = text.then(f"document {document}", lengths[document])
            text = text.then(f"question {number}", self.question.draw(chance))
            return text.request(self.output.draw(chance), f"user {number}")

        return OpenLoop(_stream(self.rate * replicas, self.hours, write, chance))


@dataclass(frozen=True, slots=True)
class BurstHead:
    """A batch job: long prompts of one length over one shared head, at the fleet's full speed, then none.

    A rule that follows the head alone sends all of them to one replica. No request names a session.
    """

    hours: float = 1.0
    rate: float = 1.37
    prompts: int = 50  # for each replica
    head: int = 2500
    rest: int = 7300
    output: Lengths = Lengths(100, 0.5, 1000)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        head = Text().then("head", self.head)

        def write(number: int) -> SimulatedRequest:
            return head.then(f"prompt {number}", self.rest).request(self.output.draw(chance), "")

        stream = _stream(self.rate * replicas, self.hours, write, chance)
        return OpenLoop(itertools.islice(stream, self.prompts * replicas))


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """One hot prefix in every request, small tails, a high rate: more than any single replica could take. No sessions."""

    hours: float = 0.05
    rate: float = 22.0
    prefix: int = 4000
    tail: Lengths = Lengths(300, 0.5, 2000)
    output: Lengths = Lengths(60, 0.5, 500)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        prefix = Text().then("prefix", self.prefix)

        def write(number: int) -> SimulatedRequest:
            return prefix.then(f"tail {number}", self.tail.draw(chance)).request(self.output.draw(chance), "")

        return OpenLoop(_stream(self.rate * replicas, self.hours, write, chance))


def _stream(
    rate: float, hours: float, write: Callable[[int], SimulatedRequest], chance: Random
) -> Iterator[tuple[float, SimulatedRequest]]:
    """Poisson arrivals."""
    now = _exponential(1 / rate, chance)
    for number in itertools.count():
        if now >= hours * 3600:
            return
        yield now, write(number)
        now += _exponential(1 / rate, chance)


def _exponential(mean: float, chance: Random) -> float:
    return -mean * math.log(1 - chance.random())


# -- closed loops: the next turn comes after the answer


class Step(NamedTuple):
    """One turn: tokens added to the prompt after `pause_s`, and tokens of the answer."""

    pause_s: float
    added: int
    output: int


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Conversations over one of a few system prompts. Every turn adds the last answer and a message, after a pause."""

    hours: float = 0.3
    users: int = 104
    systems: int = 4
    system: int = 1500
    turns: float = 8.0  # on average, at least 1
    message: Lengths = Lengths(1200, 1.0, 20_000)
    output: Lengths = Lengths(250, most=2000)
    pause_s: float = 40.0  # on average

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        return ClosedLoop(self._sessions(chance), self.users * replicas, self.hours * 3600, chance)

    def _sessions(self, chance: Random) -> Iterator[Iterator[Turn]]:
        for number in itertools.count():
            system = Text().then(f"system {int(chance.random() * self.systems)}", self.system)
            turns = 1 + int(_exponential(1 / -math.log(1 - 1 / self.turns), chance)) if self.turns > 1 else 1
            yield _turns(system, f"chat {number}", [self._step(chance) for _ in range(turns)])

    def _step(self, chance: Random) -> Step:
        return Step(_exponential(self.pause_s, chance), self.message.draw(chance), self.output.draw(chance))


@dataclass(frozen=True, slots=True)
class Agents:
    """Coding agents: a long head of tools and system prompt shared by all agents of a kind, then many turns of tool output.

    Some turns are followed by a sub-agent, which has a shorter head, its own prompt and fewer turns.
    """

    hours: float = 0.3
    users: int = 11
    kinds: int = 3
    head: int = 12_000
    turns: tuple[int, int] = (20, 60)
    added: Lengths = Lengths(2500, most=20_000)
    output: Lengths = Lengths(150, most=1500)
    pause_s: float = 2.0  # for the tool to run, on average
    sub_share: float = 0.05  # of turns
    sub_head: int = 4000
    sub_turns: tuple[int, int] = (4, 12)

    def source(self, replicas: int, chance: Random) -> WorkloadSource:
        return ClosedLoop(self._sessions(chance), self.users * replicas, self.hours * 3600, chance)

    def _sessions(self, chance: Random) -> Iterator[Iterator[Turn]]:
        for number in itertools.count():
            head = Text().then(f"kind {int(chance.random() * self.kinds)}", self.head)
            plan = self._plan(self.turns, chance)
            subs = {turn: self._plan(self.sub_turns, chance) for turn in range(len(plan)) if chance.random() < self.sub_share}
            yield self._with_subs(head, f"agent {number}", plan, subs)

    def _with_subs(self, head: Text, session: str, plan: list[Step], subs: Mapping[int, list[Step]]) -> Iterator[Turn]:
        for turn, following in enumerate(_turns(head, session, plan)):
            yield following
            if turn in subs:
                sub_head = Text().then("sub-agent", self.sub_head)
                yield from _turns(sub_head, session, subs[turn], f"{session} sub {turn}")

    def _plan(self, turns: tuple[int, int], chance: Random) -> list[Step]:
        count = turns[0] + int(chance.random() * (turns[1] - turns[0] + 1))
        return [
            Step(_exponential(self.pause_s, chance), self.added.draw(chance), self.output.draw(chance)) for _ in range(count)
        ]


def _turns(head: Text, session: str, plan: list[Step], name: str = "") -> Iterator[Turn]:
    """The prompts of one growing text, generated lazily."""
    text = head
    for turn, step in enumerate(plan):
        text = text.then(f"{name or session} {turn}", step.added)
        yield step.pause_s, text.request(step.output, session)
        text = text.then(f"{name or session} {turn} answer", step.output)


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "shared_prompt": SharedPrompt(),
        "no_reuse": NoReuse(),
        "chat": ChatWorkload(),
        "rag": Rag(),
        "agents": Agents(),
        "burst_head": BurstHead(),
        "hot_prefix": HotPrefix(),
    }
)
