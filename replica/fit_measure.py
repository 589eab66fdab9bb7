"""What a replica is asked so that its costs can be told from its answers: times, and what it says was cached.

Theory of operation. One thing at a time, on a replica that does nothing else: prompts that nobody has seen, longer and longer
as long as they are quick; the same ones again; streams beside each other, whose prompts are cached so that all begin
together; a prompt beside streams. Prompts are made of words drawn at random, and their length is what the replica counts. Each
prompt's time is the median of several; what a request takes without any work is taken off.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import gcd
from statistics import fmean, median
from typing import Any

import aiohttp

from replica.engine import SetupError

WORDS = tuple(
    re.findall(r"\w+", "the of and to in is that for it as was with be by on not he his but at are this have from or had which")
)
TIMEOUT_S = 120.0  # without a byte of an answer
SHORT = 64
LONGEST_S = 3.0  # a prompt that takes longer is the last; one twice as long may take four times as long
LONG_S = 1.0  # prompts of many streams are not to take longer than this
REPEATS = 3
STEPS = 24  # of a stream, at least, that all are to share
MOST_STREAMS = 32
PAUSE_S = 0.5  # before a new prompt: requests come to replicas that were idle, whose first step takes longer
LEAST_S = 1e-6  # that a first token takes: what is taken off is a guess
BEGUN = 8  # tokens of each stream, before a prompt joins them


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt alone: its tokens, those of them that were cached, seconds to the first token."""

    prompt: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Decode:
    """So many streams at once, how many tokens each had on average, seconds from token to token."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A new prompt beside streams: seconds to its first token, and how many of a stream's steps it made longer."""

    prompt: int
    batch: int
    context: int
    seconds: float
    long_gaps: int


@dataclass(slots=True)
class Measured:
    """`max_batch`, `kv_tokens`: None if they are not known."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    besides: list[Beside] = field(default_factory=list)
    block_size: int = 0
    kv_tokens: int | None = None
    max_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """When its request went out, when its pieces came; tokens of the prompt, cached ones, tokens of the answer."""

    sent: float
    times: list[float]
    prompt: int
    cached: int | None
    tokens: int

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    def gaps(self, since: float, until: float) -> list[float]:
        return [end - begin for begin, end in pairwise(self.times) if begin >= since and end <= until]


class Measurer:
    """`measure` once. `say` gets a line for each thing that is measured."""

    def __init__(self, url: str, model: str | None, say: Callable[[str], None]) -> None:
        self._url, self._model, self._say = url, model, say
        self._chance = random.Random()  # of its own in every run: nothing of it may be cached from an earlier one
        self._tokens_per_word = 1.0
        self._overhead_s = 0.0
        self._context = 0
        self._http: aiohttp.ClientSession
        self._measured = Measured()

    async def measure(self) -> Measured:
        """Raises SetupError if the replica does not answer as is needed; about a minute on a CPU, seconds on a GPU."""
        connections = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(connector=connections, timeout=timeout) as self._http:
                await self._get_to_know()
                cold = await self._prefills()
                await self._decodes(cold)
                await self._besides(cold)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SetupError(f"{self._url} does not answer: {error or type(error).__name__}") from error
        return self._measured

    async def _get_to_know(self) -> None:
        """Its model, context and cache; how many tokens a word has, and the seconds of a request without work."""
        page = await self._get("/v1/models")
        try:
            models = {model["id"]: model.get("max_model_len") for model in json.loads(page)["data"]}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise SetupError(f"{self._url}/v1/models is not as OpenAI's: {_line(page)}") from None
        self._model = self._model or next(iter(models), None)
        if self._model not in models:
            raise SetupError(f"{self._url} does not serve {self._model!r}: it has {', '.join(models) or 'no model'}")
        self._context = models[self._model] or 4096
        self._read_metrics(await self._get("/metrics", optional=True))
        self._say(f"{self._model}: up to {self._context} tokens")
        text = self._text(SHORT)
        self._tokens_per_word = (await self._ask(text, 2)).prompt / SHORT
        if (await self._ask(text, 2)).cached is None:
            raise SetupError(
                f"{self._url} does not report cached tokens (usage.prompt_tokens_details.cached_tokens), without which no cost "
                "can be told from another: start vLLM with --enable-prompt-tokens-details"
            )
        self._overhead_s = min([await self._round_trip() for _ in range(9)])

    async def _round_trip(self) -> float:
        began = time.perf_counter()
        await self._get("/v1/models")
        return time.perf_counter() - began

    def _read_metrics(self, page: str) -> None:
        config = re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config[1])) if config else {}
        size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if size.isdecimal() and blocks.isdecimal():
            self._measured.block_size, self._measured.kv_tokens = int(size), int(size) * int(blocks)

    # -- what is measured

    async def _prefills(self) -> dict[int, Answer]:
        """Prompts that are new, and again, and with something behind them; returns one new one of each length.

        All lengths in turn, and that REPEATS times: who disturbs one measurement of a length is gone at the next.
        """
        taken = dict[int, list[tuple[Answer, Answer, Answer]]]()
        length = SHORT
        while length < self._context * 0.9 and (length == SHORT or taken[length // 2][0][0].ttft < LONGEST_S):
            taken[length] = [await self._new_and_again(length)]
            length *= 2
        for _ in range(1, REPEATS):
            for length, times in taken.items():
                times.append(await self._new_and_again(length))
        for times in taken.values():
            self._measured.prefills += [self._prefill(answers) for answers in zip(*times, strict=True)]
        hits = [sample.cached for sample in self._measured.prefills if sample.cached]
        self._measured.block_size = self._measured.block_size or gcd(*hits)
        return {length: times[0][0] for length, times in taken.items()}

    async def _new_and_again(self, length: int) -> tuple[Answer, Answer, Answer]:
        self._say(f"a new prompt of {length} tokens, and again")
        text = self._text(length)
        await asyncio.sleep(PAUSE_S)
        cold, warm = await self._ask(text, 2), await self._ask(text, 2)
        if cold.prompt >= 2 * SHORT and not warm.cached:
            raise SetupError(
                f"{self._url} had none of {warm.prompt} tokens cached when they came again: its prefix cache is off"
            )
        return cold, warm, await self._ask(f"{text} {self._text(SHORT // 2)}", 2)

    def _prefill(self, answers: Items[Answer]) -> Prefill:
        middle = sorted(answers, key=lambda answer: answer.ttft)[len(answers) // 2]
        return Prefill(middle.prompt, middle.cached or 0, self._first_s(middle))

    def _first_s(self, answer: Answer) -> float:
        return max(LEAST_S, answer.ttft - self._overhead_s)

    async def _decodes(self, cold: dict[int, Answer]) -> None:
        """Streams beside each other: short ones, more and more; some long ones."""
        batch = 1
        while batch <= MOST_STREAMS and self._measured.max_batch is None:
            await self._decode(batch, SHORT)
            batch *= 2
        long = self._long(cold)
        for batch, length in ((1, long), (2, long), (4, long), (8, long), (1, max(cold))):
            if batch <= (self._measured.max_batch or batch) and batch * length <= (self._measured.kv_tokens or 1 << 30) // 2:
                await self._decode(batch, length)

    def _long(self, cold: dict[int, Answer]) -> int:
        return max((length for length, answer in cold.items() if answer.ttft < LONG_S), default=SHORT)

    async def _decode(self, batch: int, length: int) -> None:
        self._say(f"{batch} streams at once, {length} tokens each")
        answers = await self._streams(await self._cached_texts(batch, length), STEPS)
        begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
        gaps = [_step(answer, begin, end) for answer in answers if answer.gaps(begin, end)]
        if not gaps and batch == 1:
            raise SetupError(f"{self._url} sends its streams in one piece: the time of a token cannot be told")
        if not gaps:  # some waited until others were through
            self._measured.max_batch = _most_at_once(answers)
            return
        context = round(fmean(answer.prompt + answer.tokens / 2 for answer in answers))
        self._measured.decodes.append(Decode(batch, context, median(gaps)))

    async def _besides(self, cold: dict[int, Answer]) -> None:
        """Two long prompts, beside a short stream each; some shorter ones beside more streams. None is some round chunks and a
        few tokens long: the step of these few would not be seen."""
        longest, long = max(cold), self._long(cold)
        plan = [
            (1, SHORT, longest * 15 // 16),
            (1, SHORT, longest * 11 // 16),
            (4, long // 2, long * 15 // 8),
            (4, SHORT, long * 3 // 4),
        ]
        for batch, length, prompt in plan:
            if prompt < self._context * 0.9 and batch <= (self._measured.max_batch or batch + 1) - 1:
                await self._beside(batch, length, prompt)

    async def _beside(self, batch: int, length: int, prompt: int) -> None:
        self._say(f"a new prompt of {prompt} tokens beside {batch} streams of {length}")
        # Streams that are not held up by the prompt must last longer than it takes.
        step = max(sample.seconds for sample in self._measured.decodes if sample.batch <= batch)
        alone = max(sample.seconds for sample in self._measured.prefills)
        tokens = min(self._context - 2 * length, 2 * STEPS + int(alone / step))
        texts, begun = await self._cached_texts(batch, length), asyncio.Event()
        streams = asyncio.create_task(self._streams(texts, tokens, begun))
        await asyncio.wait((streams, asyncio.create_task(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
        answer, others = await self._ask(self._text(prompt), 2), await streams
        if any(other.times[-1] < answer.times[0] for other in others):
            return  # the prompt was not beside them to its end
        usual = median(gap for other in others for gap in other.gaps(0, answer.sent))
        during = [
            end - begin for begin, end in pairwise(others[0].times) if end > answer.sent and begin + end < 2 * answer.times[0]
        ]
        longer = sum(gap > 1.5 * usual for gap in during)
        context = round(fmean(other.prompt for other in others)) + BEGUN
        self._measured.besides.append(Beside(answer.prompt, batch, context, self._first_s(answer), longer))

    # -- requests

    async def _cached_texts(self, count: int, length: int) -> list[str]:
        """New prompts that the replica has computed once: of half to one and a half of `length`, as a batch is in use."""
        texts = [self._text(round(length * (0.5 + (at + 0.5) / count))) for at in range(count)]
        for text in texts:
            await self._ask(text, 2)
        return texts

    async def _streams(self, texts: Items[str], tokens: int, begun: asyncio.Event | None = None) -> list[Answer]:
        """`begun` is set when each of them has had some tokens."""
        counts = Counter[int]()

        def came(index: int) -> None:
            counts[index] += 1
            if begun is not None and len(counts) == len(texts) and min(counts.values()) >= BEGUN:
                begun.set()

        answers = await asyncio.gather(*(self._ask(text, tokens, partial(came, index)) for index, text in enumerate(texts)))
        if any(answer.tokens < tokens for answer in answers):
            raise SetupError(f"{self._url} ended an answer after fewer than {tokens} tokens: it does not honour ignore_eos")
        return answers

    def _text(self, length: int) -> str:
        """Of about so many tokens, new from its first words on."""
        return " ".join(self._chance.choices(WORDS, k=max(1, round(length / self._tokens_per_word))))

    async def _ask(self, text: str, tokens: int, came: Callable[[], None] = lambda: None) -> Answer:
        asked = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        body = {"model": self._model, "prompt": text, "max_tokens": tokens, **asked}
        times, usage, sent = list[float](), None, time.perf_counter()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SetupError(f"{self._url}/v1/completions answered {response.status}: {_line(await response.text())}")
            async for event in _events(response.content):
                if "error" in event:
                    raise SetupError(f"{self._url} broke an answer off: {event['error']}")
                usage = event.get("usage") or usage
                if event.get("choices"):
                    times.append(time.perf_counter())
                    came()
        if not times or not usage:
            raise SetupError(f"{self._url} sent no {'usage' if times else 'text'}: its streams are not as OpenAI's")
        details = usage.get("prompt_tokens_details") or {}
        answer = Answer(sent, times, usage["prompt_tokens"], details.get("cached_tokens"), usage["completion_tokens"])
        expected = len(text.split()) * self._tokens_per_word
        if answer.prompt < expected * 0.7:
            raise SetupError(f"{self._url} truncates: it took {answer.prompt} tokens of a prompt of about {expected:.0f}")
        return answer

    async def _get(self, path: str, optional: bool = False) -> str:
        async with self._http.get(self._url + path) as response:
            if response.status != 200 and not optional:
                raise SetupError(f"{self._url}{path} answered {response.status}: is this an OpenAI-compatible replica?")
            return await response.text() if response.status == 200 else ""


async def _events(lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
            yield json.loads(line[5:])


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _step(answer: Answer, since: float, until: float) -> float:
    """The usual time between two tokens; pieces may be of several."""
    return median(answer.gaps(since, until)) * (len(answer.times) - 1) / (answer.tokens - 1)


def _most_at_once(answers: Items[Answer]) -> int:
    return max(sum(other.times[0] <= answer.times[0] < other.times[-1] for other in answers) for answer in answers)
