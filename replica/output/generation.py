"""One answer in progress, and all the answers of a request.

Theory of operation. A `Generation` is one sequence of the engine: `next` turns its new tokens into text that may be sent and
reports to an `Observer`; `close`, exactly once and in any case, frees it. `Choices` are the generations of one request: `n`
for each of its prompts. The first one of each prompt begins at once, the others when the first has its first token: by then
the prompt is cached, and is computed only once for all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from replica.engine import Engine, EngineRequest, FinishReason, NewTokens, Sequence
from replica.output.transcript import PlacedScore, Transcript


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice, and the tokens drawn for it. `stop_reason`: the stop string or the stop token id that ended it,
    as in vLLM.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    scores: list[PlacedScore] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request, or of one of its answers. `cached_tokens`: tokens of the prompt that were found in the cache (None:
    not reported).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prompt tokens, and how many were found in the cache; seconds from arrival to first token, in the queue, in prefill."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    queued_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """`reason`: a finish reason, "abort" (the client left) or "error". Seconds from arrival to end, from first to last token,
    and of decoding tokens to text (None: there was no token).
    """

    reason: str
    total_s: float
    decode_s: float | None
    detokenise_s: float | None


class Observer(Protocol):
    """Called for each generation: `first_token` at most once, `generated` with each step, `ended` exactly once. `now` is the
    event loop's time."""

    def first_token(self, first: FirstToken, now: float) -> None: ...

    def generated(self, tokens: int, now: float) -> None: ...

    def ended(self, end: GenerationEnd, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for an answer's text: stop strings, whether special tokens have text, a text to begin with.

    `coalesce_s`: how long text is collected before it is returned, except for the first."""

    stops: tuple[str, ...] = ()
    special: bool = False
    echo: str = ""
    coalesce_s: float = 0.0


class Generation:
    """One answer in progress: call `next` until a delta has a finish reason, and `close` exactly once, in any case. `began`:
    when the request arrived.
    """

    def __init__(self, engine: Engine, observer: Observer, request: EngineRequest, options: TextOptions, began: float) -> None:
        self._observer, self._began, self._coalesce_s = observer, began, options.coalesce_s
        self._stop_tokens = frozenset(request.stop_tokens)
        self._transcript = Transcript(engine.detokenizer(options.special), options.stops, request.min_tokens)
        self._echo = options.echo
        self._detokenised_s = 0.0
        self._first_at = self._last_at = 0.0
        self.completion_tokens = 0
        self.reason = "abort"  # until the answer ends otherwise
        self._submitted_at = _now()
        self.sequence: Sequence = engine.submit(request)

    async def next(self) -> Delta:
        """The next text, possibly empty."""
        if self.completion_tokens and self._coalesce_s:
            # The sequence merges what the engine generates meanwhile.
            await asyncio.sleep(self._last_at + self._coalesce_s - _now())
        new = await self.sequence.next()
        self._last_at = _now()
        if self.completion_tokens == 0:
            self._first(self._last_at)
        self._observer.generated(len(new.tokens), self._last_at)
        delta = self._delta(new)
        self.completion_tokens += len(delta.tokens)
        self._detokenised_s += _now() - self._last_at
        if delta.finish is not None:
            self.reason = delta.finish
        return delta

    def _delta(self, new: NewTokens) -> Delta:
        ended, before = new.end_token is not None, self._transcript.pushed
        text, scores = self._transcript.push(new.tokens[:-1] if ended else new.tokens, new.scores)
        if new.finish is not None and self._transcript.matched is None:
            rest, more = self._transcript.finish()
            text, scores = text + rest, scores + more
        text, self._echo = self._echo + text, ""
        if self._transcript.matched is not None:
            # Tokens after the stop string are not part of the answer: their number depends on timing.
            tokens = new.tokens[: self._transcript.pushed - before]
            return Delta(text, tokens, scores, "stop", self._transcript.matched)
        return Delta(text, new.tokens, scores, new.finish, new.end_token if new.end_token in self._stop_tokens else None)

    def _first(self, now: float) -> None:
        sequence, self._first_at = self.sequence, now
        prefill_s = now - self._submitted_at - sequence.queued_s
        tokens = len(sequence.request.prompt), sequence.cached_tokens
        self._observer.first_token(FirstToken(*tokens, now - self._began, sequence.queued_s, prefill_s), now)

    def close(self) -> None:
        self.sequence.close()
        now, decode_s, detokenise_s = _now(), None, None
        if self.completion_tokens:
            decode_s, detokenise_s = self._last_at - self._first_at, self._detokenised_s
        self._observer.ended(GenerationEnd(self.reason, now - self._began, decode_s, detokenise_s), now)


class Choices:
    """The generations of a request with `prompts` prompts, the i-th answer to the k-th prompt at index k * n + i; `make` begins
    one of them. `close` exactly once.
    """

    def __init__(self, make: Callable[[int], Generation], prompts: int, n: int) -> None:
        self._make, self._firsts, self._n = make, range(0, prompts * n, n), n
        self.count = prompts * n
        self._all: dict[int, Generation] = {}

    def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Begin the generations; yields the deltas as they come, each with its choice's index. The caller closes the
        generator.
        """
        return self._only() if self.count == 1 else self._many()

    async def _begin(self, indices: Iterable[int]) -> None:
        """Begin these generations, and let other tasks run between two of them: beginning one takes milliseconds for a long
        prompt, so a hundred would take a good part of a second.
        """
        for index in indices:
            self._all[index] = self._make(index)
            await asyncio.sleep(0)

    async def _only(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        self._all[0] = self._make(0)
        delta = Delta("")
        while delta.finish is None:
            delta = await self._all[0].next()
            yield [(0, delta)]

    async def _many(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        await self._begin(self._firsts)
        pending = self._next(self._firsts)
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                ended = sorted((pending.pop(task), task) for task in done)
                deltas = [(index, task.result()) for index, task in ended if task.exception() is None]
                if len(deltas) < len(ended):
                    if deltas:
                        yield deltas
                    await asyncio.gather(*done)  # raises
                pending |= self._next(index for index, delta in deltas if delta.finish is None)
                yield deltas  # before the others begin, which takes long if there are many
                for index, _ in deltas:
                    pending |= self._next(await self._begin_others(index))
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _next(self, indices: Iterable[int]) -> dict[asyncio.Future[Delta], int]:
        """The futures of the next deltas of these choices."""
        return {asyncio.ensure_future(self._all[index].next()): index for index in indices}

    async def _begin_others(self, index: int) -> range:
        """Begin the prompt's other answers if this is the first delta of its first answer."""
        begun = index not in self._firsts or index + 1 in self._all
        others = range(0) if begun else range(index + 1, index + self._n)
        await self._begin(others)
        return others

    def usage(self) -> TokenUsage:
        """A prompt counts once, however many answers it has."""
        first = [self._all[index].sequence for index in self._firsts]
        return TokenUsage(
            sum(len(sequence.request.prompt) for sequence in first),
            sum(one.completion_tokens for one in self._all.values()),
            sum(sequence.cached_tokens for sequence in first),
        )

    def usage_of(self, index: int) -> TokenUsage:
        """One answer's usage until now, without cached tokens: as vLLM reports it in the middle of a stream."""
        generation = self._all[index]
        return TokenUsage(len(generation.sequence.request.prompt), generation.completion_tokens)

    def fail(self) -> None:
        for generation in self._all.values():
            if generation.reason == "abort":
                generation.reason = "error"

    def close(self) -> None:
        for generation in reversed(self._all.values()):  # the last ones may still be waiting for the blocks of the first ones
            generation.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
