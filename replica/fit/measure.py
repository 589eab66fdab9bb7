"""The measurements from which a replica's costs are fitted: times, and numbers of cached tokens.

Theory of operation. One measurement at a time, on an otherwise idle replica: new prompts, longer and longer while they take
little time; the same prompts again; streams at the same time, with cached prompts so that all begin together; one prompt that
is much longer than these, and streams that share it; a prompt beside streams. Prompts are random words, and the replica counts
their tokens. The time of a request without work is subtracted. These measurements are one round. A machine shared with others
can be a third faster at one moment than at the next, so rounds are most useful far apart, and every measurement counts.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from statistics import fmean, median
from typing import Self

from replica.engine import SetupError
from replica.fit.client import BEGUN, SHORT, ReplicaClient, TimedAnswer

LONGEST_S = 1.5  # seconds of the longest prompt of a series; a prompt of twice the length may take four times as long
LONG_S = 1.0  # seconds, at most, for a prompt of many streams
STEPS = 24  # the fewest steps that all streams share
MAX_STREAMS = 32
LONGER = 4  # the length of the last prompt, as a multiple of the series' longest: cached prompts make contexts long
PAUSE_S = 0.5  # before a new prompt: requests often arrive at an idle replica, whose first step takes longer
LEAST_S = 1e-6  # the shortest time to a first token: the subtracted overhead is an estimate


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A prompt alone: its tokens, the cached ones among them, seconds to the first token."""

    prompt: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """`batch` streams at once, their mean context in tokens, seconds from token to token."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MixedSample:
    """A new prompt beside streams: seconds to its first token, and the number of a stream's steps that it made longer."""

    prompt: int
    batch: int
    context: int
    seconds: float
    long_gaps: int


@dataclass(slots=True)
class Measurements:
    """`max_batch`, `kv_tokens`: None if unknown."""

    prefills: list[PrefillSample] = field(default_factory=list)
    decodes: list[DecodeSample] = field(default_factory=list)
    mixed: list[MixedSample] = field(default_factory=list)
    block_size: int = 0
    kv_tokens: int | None = None
    max_batch: int | None = None


class Measurer:
    """Measures a replica: enter it, then call `measure` for each round. `log` gets a line for each measurement. All methods
    raise SetupError if the replica does not answer as needed.

    client: sends the requests. measured: the results of all rounds so far.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        log: Callable[[str], None],
        client: Callable[[str, str | None], ReplicaClient] = ReplicaClient,
    ) -> None:
        self._url, self._log = url, log
        self._replica = client(url, model)
        self._lengths: dict[int, float] = {}  # by length of prompt: seconds to the first token at the first attempt
        self.measured = Measurements()

    async def __aenter__(self) -> Self:
        await self._replica.__aenter__()
        self.measured.block_size, self.measured.kv_tokens = self._replica.block_size, self._replica.kv_tokens
        self._log(f"{self._replica.model}: up to {self._replica.context} tokens")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._replica.__aexit__()

    async def measure(self) -> None:
        """Measure one round: minutes on a CPU, seconds on a GPU."""
        await self._prefills()
        await self._decodes()
        await self._long_context()
        await self._mixed()

    async def _prefills(self) -> None:
        """Measure new, repeated and extended prompts."""
        known, length = max(self._lengths, default=0), SHORT
        while length <= known or (length < self._replica.context * 0.9 and self._lengths.get(length // 2, 0.0) < LONGEST_S):
            self._lengths.setdefault(length, await self._new_and_again(self._replica.text(length), length))
            length *= 2
        hits = [sample.cached for sample in self.measured.prefills if sample.cached]
        self.measured.block_size = self.measured.block_size or gcd(*hits)

    async def _new_and_again(self, text: str, length: int) -> float:
        """Measure a new prompt, and the same again; returns the seconds to the first token of the new one."""
        self._log(f"a new prompt of {length} tokens, and again")
        await asyncio.sleep(PAUSE_S)
        cold, warm = await self._replica.generate(text, 2), await self._replica.generate(text, 2)
        if cold.prompt >= 2 * SHORT and not warm.cached:
            raise SetupError(
                f"{self._url} had none of {warm.prompt} tokens of a repeated prompt cached: its prefix cache is off"
            )
        more = await self._replica.generate(f"{text} {self._replica.text(SHORT // 2)}", 2)
        self.measured.prefills += map(self._prefill, (cold, warm, more))
        return cold.ttft

    def _prefill(self, answer: TimedAnswer) -> PrefillSample:
        return PrefillSample(answer.prompt, answer.cached or 0, self._first_s(answer))

    def _first_s(self, answer: TimedAnswer) -> float:
        return max(LEAST_S, answer.ttft - self._replica.overhead_s)

    async def _decodes(self) -> None:
        """Measure streams at the same time: an increasing number of short ones; some long ones."""
        batch = 1
        while batch <= min(MAX_STREAMS, self.measured.max_batch or MAX_STREAMS):
            await self._decode(batch, SHORT)
            batch *= 2
        long, tokens = self._long(), self.measured.kv_tokens or 1 << 30
        for batch, length in ((1, long), (2, long), (4, long), (8, long), (1, max(self._lengths))):
            if batch <= (self.measured.max_batch or batch) and batch * length <= tokens // 2:
                await self._decode(batch, length)

    def _long(self) -> int:
        return max((length for length, seconds in self._lengths.items() if seconds < LONG_S), default=SHORT)

    async def _long_context(self) -> None:
        """Measure a very long prompt, however long it takes, and streams that continue it: as many as an engine runs at once
        even if it counts the shared blocks for each of them.
        """
        known, tokens = max(self._lengths), self.measured.kv_tokens or 1 << 30
        length = min(LONGER * known, self._replica.context * 3 // 4, tokens // 2)
        if length < 2 * known:
            return
        text = self._replica.text(length)
        most_s = (length / known) ** 2 * self._lengths[known]  # the time if all of it were attention
        self._log(f"one much longer prompt, which may take {most_s:.0f} s")
        await self._new_and_again(text, length)
        for batch in (1, 4):
            if batch <= (self.measured.max_batch or batch) and batch * length <= tokens // 2:
                await self._decode(batch, SHORT, text)

    async def _decode(self, batch: int, length: int, head: str = "") -> None:
        self._log(f"{batch} streams at once, {length} tokens each{' behind this prompt' if head else ''}")
        answers = await self._replica.streams(await self._replica.cached_texts(batch, length, head), STEPS)
        begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
        gaps = [_step(answer, begin, end) for answer in answers if answer.gaps(begin, end)]
        if not gaps and batch == 1:
            raise SetupError(f"{self._url} sends its streams in one piece: the time per token cannot be measured")
        if not gaps:  # some streams waited until others had finished
            self.measured.max_batch = _most_concurrent(answers)
            return
        context = round(fmean(answer.prompt + answer.tokens / 2 for answer in answers))
        self.measured.decodes.append(DecodeSample(batch, context, fmean(gaps)))

    async def _mixed(self) -> None:
        """Measure two long prompts, each beside a short stream; some shorter ones beside more streams. No length is a few
        tokens more than a multiple of a round chunk size: the step of these few tokens would be too short to be noticed.
        """
        longest, long = max(self._lengths), self._long()
        plan = [
            (1, SHORT, longest * 15 // 16),
            (1, SHORT, longest * 11 // 16),
            (4, long // 2, long * 15 // 8),
            (4, SHORT, long * 3 // 4),
        ]
        for batch, length, prompt in plan:
            if prompt < self._replica.context * 0.9 and batch <= (self.measured.max_batch or batch + 1) - 1:
                await self._mixed_sample(batch, length, prompt)

    async def _mixed_sample(self, batch: int, length: int, prompt: int) -> None:
        self._log(f"a new prompt of {prompt} tokens beside {batch} streams of {length}")
        # Streams that the prompt does not slow down must last longer than the prompt takes.
        step = max(sample.seconds for sample in self.measured.decodes if sample.batch <= batch)
        alone = max(sample.seconds for sample in self.measured.prefills)
        tokens = min(self._replica.context - 2 * length, 2 * STEPS + int(alone / step))
        texts, begun = await self._replica.cached_texts(batch, length), asyncio.Event()
        streams = asyncio.create_task(self._replica.streams(texts, tokens, begun))
        await asyncio.wait((streams, asyncio.create_task(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
        answer, others = await self._replica.generate(self._replica.text(prompt), 2), await streams
        if any(other.times[-1] < answer.times[0] for other in others):
            self._log("not used: a stream ended before the prompt was computed")
            return
        usual = median(gap for other in others for gap in other.gaps(0, answer.sent))
        during = [
            end - begin for begin, end in pairwise(others[0].times) if end > answer.sent and begin + end < 2 * answer.times[0]
        ]
        context = round(fmean(other.prompt for other in others)) + BEGUN
        self.measured.mixed.append(MixedSample(answer.prompt, batch, context, self._first_s(answer), long_gaps(during, usual)))


def long_gaps(gaps: Items[float], usual: float) -> int:
    """The number of a stream's gaps that a prompt has made longer. A step that is slow for other reasons may take twice the
    usual time; the last of a prompt's chunks may be half as long as the others.
    """
    limit = max(1.5 * usual, (usual * max(gaps, default=usual)) ** 0.5)
    return sum(gap > limit for gap in gaps)


def _step(answer: TimedAnswer, since: float, until: float) -> float:
    """The mean time between two tokens; a piece may have several."""
    return fmean(answer.gaps(since, until)) * (len(answer.times) - 1) / (answer.tokens - 1)


def _most_concurrent(answers: Items[TimedAnswer]) -> int:
    return max(sum(other.times[0] <= answer.times[0] < other.times[-1] for other in answers) for answer in answers)
