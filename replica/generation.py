"""One answer in the making, and the several that `n` asks for.

Theory of operation. A `Generation` is one sequence of the engine: `next` turns its steps into text that may be sent and
keeps metrics and statistics; `close`, exactly once and in any case, frees it. `Choices` are the generations of one request.
The others begin when the first has its first token: by then the prompt is cached, and is computed once for all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

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


class Generation:
    """`next` until a piece has a finish reason; `close` exactly once, in any case. `began` is when the request came."""

    def __init__(self, around: Surroundings, request: Request, stops: tuple[str, ...], began: float) -> None:
        self._around, self._began = around, began
        self._stop_tokens = frozenset(request.stop_tokens)
        self._transcript = Transcript(around.engine.decode, stops)
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
        if self._transcript.matched is not None:
            return Piece(text, scores, "stop", self._transcript.matched)
        return Piece(text, scores, step.finish, step.end_token if step.end_token in self._stop_tokens else None)

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
    """The `n` generations of a request; `make` begins one of them. `close` exactly once."""

    def __init__(self, make: Callable[[int], Generation], n: int) -> None:
        self._make, self.n = make, n
        self._all = [make(0)]

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces as they come, each with its choice's index. To be closed."""
        piece = await self._all[0].next()
        yield 0, piece
        self._all += [self._make(index) for index in range(1, self.n)]
        if self.n == 1:
            while piece.finish is None:
                piece = await self._all[0].next()
                yield 0, piece
            return
        asking = {
            asyncio.ensure_future(generation.next()): index
            for index, generation in enumerate(self._all)
            if index or piece.finish is None
        }
        try:
            while asking:
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, piece = asking[task], await task
                    del asking[task]
                    if piece.finish is None:
                        asking[asyncio.ensure_future(self._all[index].next())] = index
                    yield index, piece
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def usage(self) -> Usage:
        """The prompt counts once, however many answers it has."""
        first = self._all[0].sequence
        return Usage(len(first.request.prompt), sum(one.completion_tokens for one in self._all), first.cached_tokens)

    def fail(self) -> None:
        for generation in self._all:
            if generation.reason == "abort":
                generation.reason = "error"

    def close(self) -> None:
        for generation in self._all:
            generation.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
