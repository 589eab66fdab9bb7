"""Sends the requests that `measure` times: random prompts, streamed answers with the arrival time of each piece."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Self

import aiohttp
import msgspec
from msgspec import Meta, Struct

from replica.engine import SetupError

WORDS = tuple(
    re.findall(r"\w+", "the of and to in is that for it as was with be by on not he his but at are this have from or had which")
)
TIMEOUT_S = 120.0  # between two reads of an answer
SHORT = 64  # tokens of a short prompt
BEGUN = 8  # tokens of each stream before a prompt is sent beside them
MORE_PIECES = 16  # pieces of a stream beyond its tokens, such as a piece without text at its end

Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class _Details(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    completion_tokens: Count
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[Any] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Model(Struct):
    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None


class _Models(Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Times in seconds at which the request was sent and the pieces of the answer arrived; tokens of the prompt, cached tokens,
    tokens of the answer.
    """

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


class ReplicaClient:
    """The HTTP client of one replica; enter it first. All methods raise SetupError if the replica does not answer as needed.

    model, context (tokens), overhead_s (seconds of a request without work); block_size and kv_tokens: 0 and None if unknown.
    """

    def __init__(self, url: str, model: str | None) -> None:
        self._url, self.model = url, model
        self._random = random.Random()  # unseeded: no prompt may be cached from an earlier run
        self._tokens_per_word = 1.0
        self.overhead_s = 0.0
        self.context = 0
        self.block_size = 0
        self.kv_tokens: int | None = None
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=TIMEOUT_S)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        try:
            await self._discover()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def _discover(self) -> None:
        """Read the replica's model, context and cache; measure tokens per word, and the seconds of a request without work."""
        page = await self._get("/v1/models")
        try:
            models = {model.id: model.max_model_len for model in msgspec.json.decode(page, type=_Models).data}
        except (msgspec.DecodeError, RecursionError):
            raise SetupError(f"{self._url}/v1/models is not in OpenAI's format: {_line(page)}") from None
        self.model = self.model or next(iter(models), None)
        if self.model not in models:
            raise SetupError(f"{self._url} does not serve {self.model!r}: it has {', '.join(models) or 'no model'}")
        self.context = models[self.model] or 4096
        self._read_metrics(await self._get("/metrics", optional=True))
        text = self.text(SHORT)
        self._tokens_per_word = (await self.generate(text, 2)).prompt / SHORT
        if (await self.generate(text, 2)).cached is None:
            raise SetupError(
                f"{self._url} does not report cached tokens (usage.prompt_tokens_details.cached_tokens), without which costs "
                "cannot be told apart: start vLLM with --enable-prompt-tokens-details"
            )
        self.overhead_s = min([await self._round_trip() for _ in range(9)])

    async def _round_trip(self) -> float:
        began = time.perf_counter()
        await self._get("/v1/models")
        return time.perf_counter() - began

    def _read_metrics(self, page: str) -> None:
        config = re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config[1])) if config else {}
        size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if size.isdecimal() and blocks.isdecimal():
            self.block_size, self.kv_tokens = int(size), int(size) * int(blocks)

    async def cached_texts(self, count: int, length: int, head: str = "") -> list[str]:
        """New prompts, already computed once by the replica, of 0.5 to 1.5 times `length` tokens, as in a mixed batch; each
        begins with `head`.
        """
        texts = [f"{head} {self.text(round(length * (0.5 + (at + 0.5) / count)))}".lstrip() for at in range(count)]
        for text in texts:
            await self.generate(text, 2)
        return texts

    async def streams(self, texts: Items[str], tokens: int, begun: asyncio.Event | None = None) -> list[TimedAnswer]:
        """Run streams at the same time; `begun` is set when each of them has its first BEGUN tokens."""
        counts = Counter[int]()

        def on_piece(index: int) -> None:
            counts[index] += 1
            if begun is not None and len(counts) == len(texts) and min(counts.values()) >= BEGUN:
                begun.set()

        answers = await asyncio.gather(
            *(self.generate(text, tokens, partial(on_piece, index)) for index, text in enumerate(texts))
        )
        if any(answer.tokens < tokens for answer in answers):
            raise SetupError(f"{self._url} ended an answer after fewer than {tokens} tokens: it does not honour ignore_eos")
        return answers

    def text(self, length: int) -> str:
        """A random text of about `length` tokens."""
        return " ".join(self._random.choices(WORDS, k=max(1, round(length / self._tokens_per_word))))

    async def generate(self, text: str, tokens: int, on_piece: Callable[[], None] = lambda: None) -> TimedAnswer:
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        body = {"model": self.model, "prompt": text, "max_tokens": tokens, **options}
        times, usage, sent = list[float](), None, time.perf_counter()
        async for event in self._post(body):
            if event.error is not None:
                raise SetupError(f"{self._url} broke an answer off: {_line(str(event.error))}")
            usage = event.usage or usage
            if event.choices:
                times.append(time.perf_counter())
                on_piece()
            if len(times) > tokens + MORE_PIECES:
                raise SetupError(f"{self._url} does not end an answer of {tokens} tokens: it does not honour max_tokens")
        if not times or not usage:
            raise SetupError(f"{self._url} sent no {'usage' if times else 'text'}: its streams are not in OpenAI's format")
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        if cached is not None and cached >= usage.prompt_tokens:
            raise SetupError(
                f"{self._url} had {cached} of {usage.prompt_tokens} tokens cached: one at least has to be computed"
            )
        answer = TimedAnswer(sent, times, usage.prompt_tokens, cached, usage.completion_tokens)
        expected = len(text.split()) * self._tokens_per_word
        if answer.prompt < expected * 0.7:
            raise SetupError(f"{self._url} truncates: it took {answer.prompt} tokens of a prompt of about {expected:.0f}")
        return answer

    async def _post(self, body: dict[str, object]) -> AsyncIterator[_Event]:
        """The events of the answer's stream."""
        with _errors(self._url):
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise SetupError(f"{self._url}/v1/completions answered {response.status}: {_line(await _text(response))}")
                async for line in response.content:
                    if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
                        yield msgspec.json.decode(line[5:], type=_Event)

    async def _get(self, path: str, optional: bool = False) -> str:
        with _errors(self._url):
            async with self._http.get(self._url + path) as response:
                if response.status != 200 and not optional:
                    raise SetupError(f"{self._url}{path} answered {response.status}: is this an OpenAI-compatible replica?")
                return await _text(response) if response.status == 200 else ""


@contextmanager
def _errors(url: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise SetupError(f"{url} is no address: http://HOST:PORT") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SetupError(f"{url} does not answer: {error or type(error).__name__}") from error
    except (ValueError, RecursionError) as error:  # invalid JSON, JSON of another form, a line without an end
        raise SetupError(f"{url} sent what is not in OpenAI's format: {_line(str(error))}") from error


async def _text(response: aiohttp.ClientResponse) -> str:
    return (await response.read()).decode("utf-8", "replace")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
