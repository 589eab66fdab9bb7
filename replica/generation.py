"""One answer in the making, and the several that a request asks for.

Theory of operation. A `Generation` is one sequence of the engine: `next` turns its steps into text that may be sent and
keeps metrics and statistics; `close`, exactly once and in any case, frees it. `Choices` are the generations of one request:
`n` to each of its prompts. The first to each prompt begin at once, the others when it has its first token: by then the
prompt is cached, and is computed once for all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from replica.engine import Engine, Request, Sequence, Step
from replica.metrics import Metrics
from replica.stats import Stats
from replica.transcript import Transcript
from replica.wire import Piece, Usage


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all generations share. `coalesce_s` is for how long text is gathered before it is given out, but for the first."""

    engine: Engine
    metrics: Metrics
    stats: Stats
    coalesce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How tokens become an answer's text: what ends it, whether special tokens have a text, what stands before it."""

    stops: tuple[str, ...] = ()
    special: bool = False
    echo: str = ""


class Generation:
    """`next` until a piece has a finish reason; `close` exactly once, in any case. `began` is when the request came."""

    def __init__(self, around: Surroundings, request: Request, reading: Reading, began: float) -> None:
        self._around, self._began = around, began
        self._stop_tokens = frozenset(request.stop_tokens)
        decode = partial(around.engine.decode, special=True) if reading.special else around.engine.decode
        self._transcript = Transcript(decode, reading.stops, request.min_tokens)
        self._echo = reading.echo
        self._detokenised_s = 0.0
        self._first_at = self._last_at = 0.0
        self.completion_tokens = 0
        self.reason = "abort"  # what it is unless something better happens
        self._submitted_at = _now()
        self.sequence: Sequence = around.engine.submit(request)

    async def next(self) -> Piece:
        """The next text, perhaps empty."""
        if self.completion_tokens and self._around.coalesce_s:
            # What the engine makes meanwhile is merged by the sequence.
            await asyncio.sleep(self._last_at + self._around.coalesce_s - _now())
        step = await self.sequence.next()
        self._last_at = _now()
        if self.completion_tokens == 0:
            self._first(self._last_at)
        self.completion_tokens += len(step.tokens)
        self._around.metrics.generated(len(step.tokens))
        self._around.stats.add("decode_tokens", len(step.tokens), self._last_at)
        piece = self._piece(step)
        self._detokenised_s += _now() - self._last_at
        if piece.finish is not None:
            self.reason = piece.finish
        return piece

    def _piece(self, step: Step) -> Piece:
        ended = step.end_token is not None
        text, scores = self._transcript.push(step.tokens[:-1] if ended else step.tokens, step.scores)
        if step.finish is not None and self._transcript.matched is None:
            rest, more = self._transcript.finish()
            text, scores = text + rest, scores + more
        text, self._echo = self._echo + text, ""
        if self._transcript.matched is not None:
            return Piece(text, step.tokens, scores, "stop", self._transcript.matched)
        return Piece(text, step.tokens, scores, step.finish, step.end_token if step.end_token in self._stop_tokens else None)

    def _first(self, now: float) -> None:
        sequence, stats = self.sequence, self._around.stats
        prompt, cached = len(sequence.request.prompt), sequence.cached_tokens
        self._first_at = now
        self._around.metrics.first_token(prompt, cached, now - self._began)
        stats.add("prefill_tokens", prompt - cached, now)
        stats.add("cached_tokens", cached, now)
        stats.phase("queue", sequence.queued_s, now)
        stats.phase("prefill", now - self._submitted_at - sequence.queued_s, now)

    def close(self) -> None:
        self.sequence.close()
        now = _now()
        self._around.metrics.ended(self.reason, now - self._began)
        self._around.stats.add("answers", 1, now)
        if self.completion_tokens:
            self._around.stats.phase("decode", self._last_at - self._first_at, now)
            self._around.stats.phase("detokenise", self._detokenised_s, now)


class Choices:
    """The generations of a request with `prompts` prompts, the i-th answer to the k-th of them at index k * n + i; `make`
    begins one of them. `close` exactly once."""

    def __init__(self, make: Callable[[int], Generation], prompts: int, n: int) -> None:
        self._make, self._firsts, self._n = make, range(0, prompts * n, n), n
        self.count = prompts * n
        self._all: dict[int, Generation] = {}

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Begin; pieces as they come, each with its choice's index. To be closed."""
        for index in self._firsts:
            self._all[index] = self._make(index)
        return self._only() if self.count == 1 else self._many()

    async def _only(self) -> AsyncGenerator[tuple[int, Piece], None]:
        piece = Piece("")
        while piece.finish is None:
            piece = await self._all[0].next()
            yield 0, piece

    async def _many(self) -> AsyncGenerator[tuple[int, Piece], None]:
        asking = {asyncio.ensure_future(generation.next()): index for index, generation in self._all.items()}
        try:
            while asking:
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, piece = asking[task], await task
                    del asking[task]
                    goes_on = [index] if piece.finish is None else []
                    for at in [*goes_on, *self._begun_after(index)]:
                        asking[asyncio.ensure_future(self._all[at].next())] = at
                    yield index, piece
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _begun_after(self, index: int) -> list[int]:
        """The other answers to a prompt, which begin with the first piece of its first."""
        others = [at for at in range(index + 1, index + self._n) if index in self._firsts and at not in self._all]
        self._all |= {at: self._make(at) for at in others}
        return others

    def usage(self) -> Usage:
        """A prompt counts once, however many answers it has."""
        first = [self._all[index].sequence for index in self._firsts]
        return Usage(
            sum(len(sequence.request.prompt) for sequence in first),
            sum(one.completion_tokens for one in self._all.values()),
            sum(sequence.cached_tokens for sequence in first),
        )

    def usage_of(self, index: int) -> Usage:
        """What one answer cost until now, without what was cached, as vLLM tells it in the middle of a stream."""
        generation = self._all[index]
        return Usage(len(generation.sequence.request.prompt), generation.completion_tokens)

    def fail(self) -> None:
        for generation in self._all.values():
            if generation.reason == "abort":
                generation.reason = "error"

    def close(self) -> None:
        for generation in self._all.values():
            generation.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
