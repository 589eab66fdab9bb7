"""Clients under constant load, and the fate of each of their requests.

Every request is sent once, on a new connection or on one that its client keeps; there are no retries. Its fate is one of:

    answered   the whole of the one right text, and a proper end
    cut        the beginning of that text in a stream, then an error event and [DONE]
    refused    an error in OpenAI's shape
    unreached  the port is closed (not a byte was sent)
    wrong      another text, or an invalid answer
    lost       anything else: silence, a broken connection, a stream without its end
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from replica.sim import text as sim_text
from tests.chaos import wire
from tests.chaos.hostile import MODEL

ANSWERED, CUT, REFUSED, UNREACHED, WRONG, LOST = "answered", "cut", "refused", "unreached", "wrong", "lost"
PATIENCE_S = 120.0
MAX_TOKENS = 1000
ENDLESS = 5000  # tokens: more than can be generated in a test
WORDS = (15, 50)  # an answer's least and most


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the only right answer to it."""

    path: str
    body: bytes
    stream: bool
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Fate:
    kind: str
    why: str = ""


def questions(seed: int, *, endless: bool = False, model: str = MODEL) -> Iterator[Question]:
    """Chats and completions, streamed and not, all different. endless: streams of chats that take minutes."""
    chance = random.Random(seed)
    for number in itertools.count():
        prompt = f"Question {number} of {seed}: {chance.random()}?"
        fields: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "stream": endless or number % 3 > 0}
        if endless or number % 4:
            messages = [{"role": "user", "content": prompt}]
            path, fields["messages"], tokens = "/v1/chat/completions", messages, sim_text.encode_chat(list(messages), None)
        else:
            prompt += "\nAnswer:"
            path, fields["prompt"], tokens = "/v1/completions", prompt, sim_text.encode(prompt)
        if endless:
            fields |= {"max_tokens": ENDLESS, "ignore_eos": True}
        answer = sim_text.answer(tokens, fields["max_tokens"], endless=endless)[0]
        if endless or WORDS[0] <= len(answer) <= WORDS[1]:
            yield Question(path, json.dumps(fields).encode(), fields["stream"], sim_text.decode(answer), len(answer))


def fate_of(question: Question, answer: wire.Message) -> Fate:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if answer.status != 200:
        return _refusal(answer)
    if (kind == "text/event-stream") is not question.stream:
        return Fate(WRONG, f"it came as {kind}")
    if question.stream:
        return _fate_of_stream(question, answer.body)
    choice = answer.json["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Fate(ANSWERED) if text == question.text else Fate(WRONG, f"wrong text: {text!r}, not {question.text!r}")


def _refusal(answer: wire.Message) -> Fate:
    error = answer.json["error"]
    clear = answer.status >= 400 and error["message"] and error["type"] and answer.headers.get("x-request-id")
    return Fate(REFUSED, f"{answer.status} {error['code']}") if clear else Fate(WRONG, f"unclear: {answer}")


def _fate_of_stream(question: Question, body: bytes) -> Fate:
    *events, done, rest = body.split(b"\n\n")
    if done != b"data: [DONE]" or rest:
        return Fate(LOST, f"the stream ends with {body[-100:]!r}")
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events if not event.startswith(b":")]
    choices = [choice for event in parsed for choice in event.get("choices", ())]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    if parsed and "error" in parsed[-1]:
        error = parsed[-1]["error"]
        if len(parsed) == 1 and isinstance(error["code"], int):
            return Fate(WRONG, "an engine's own error came before anything else")
        good = question.text.startswith(text) and error["message"]
        return Fate(CUT, error["message"]) if good else Fate(WRONG, f"wrong text before an error: {text!r}")
    finishes = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    good = text == question.text and finishes == ["stop"]
    return Fate(ANSWERED) if good else Fate(WRONG, f"wrong text: {text!r} {finishes}, not {question.text!r}")


class Client:
    """Sends one question after the other. started: set once a stream has begun. on_chunk: called for each chunk of one."""

    def __init__(self, url: str, *, keeps: bool, on_chunk: Callable[[], None] = lambda: None) -> None:
        self.started = asyncio.Event()
        self._port = wire.port_of(url)
        self._keeps = keeps
        self._on_chunk = on_chunk
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        if self._open is None:
            self._open = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, question: Question) -> Fate:
        """Does not raise."""
        try:
            await self.connect()
        except ConnectionRefusedError:
            return Fate(UNREACHED)
        except OSError as error:
            return Fate(LOST, f"connecting: {error!r}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.send(question)
                return await self.receive(question)
        except (OSError, EOFError, ValueError, LookupError) as error:
            self.close()
            return Fate(LOST, f"{question.path}, stream {question.stream}: {error!r}")

    async def send(self, question: Question) -> None:
        assert self._open
        self._open[1].write(wire.request("POST", question.path, question.body))
        await self._open[1].drain()

    async def receive(self, question: Question) -> Fate:
        """Raises what `wire` raises."""
        assert self._open
        reader, body = self._open[0], b""
        answer = await wire.read_head(reader)
        if answer.headers.get("transfer-encoding") == "chunked":
            async for part in wire.chunks(reader):
                self.started.set()
                self._on_chunk()
                body += part
        else:
            body = await reader.readexactly(int(answer.headers["content-length"]))
        if not self._keeps or answer.headers.get("connection") == "close":
            self.close()
        return fate_of(question, answer._replace(body=body))

    def close(self) -> None:
        if self._open:
            self._open[1].close()
            self._open = None


@contextlib.contextmanager
def clients(url: str, count: int, *, keep: bool) -> Iterator[list[Client]]:
    """`count` clients, which disconnect at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Client(url, keeps=keep))) for _ in range(count)]


class Load:
    """Concurrent clients within the block; at its end running requests are awaited. Every second one keeps its connection.

    Clients stop by themselves when the port is closed.
    """

    def __init__(self, url: str, *, count: int = 30, seed: int = 1) -> None:
        self._url, self._count = url, count
        self._questions = questions(seed)
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self.fates = Counter[str]()
        self.reasons = Counter[str]()  # of cut and refused requests
        self.lost: list[str] = []
        self.sent = 0
        self.tokens = 0  # in all answers
        self.pieces = 0  # chunks of streams so far

    async def __aenter__(self) -> Load:
        clients = [Client(self._url, keeps=number % 2 == 0, on_chunk=self._on_chunk) for number in range(self._count)]
        self._tasks = [asyncio.create_task(self._keep_asking(client)) for client in clients]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over = True
        for task in self._tasks if error else ():
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    async def over(self) -> None:
        """Wait until all have stopped by themselves."""
        await asyncio.gather(*self._tasks)

    async def more(self, count: int, kind: str = ANSWERED) -> None:
        """Wait until `count` more requests have had this fate."""
        end = self.fates[kind] + count
        await self._until(lambda: self.fates[kind] >= end)

    async def streams(self) -> None:
        """Wait until many streams are running."""
        end = self.pieces + 10 * self._count
        await self._until(lambda: self.pieces >= end)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def _keep_asking(self, client: Client) -> None:
        with contextlib.closing(client):
            while not self._over:
                question = next(self._questions)
                fate = await client.ask(question)
                self.fates[fate.kind] += 1
                self.tokens += question.tokens if fate.kind == ANSWERED else 0
                if fate.kind == UNREACHED:
                    break
                self.sent += 1
                if fate.kind in (LOST, WRONG):
                    self.lost.append(fate.why)
                elif fate.why:
                    self.reasons[fate.why] += 1
                self._news.set()

    def _on_chunk(self) -> None:
        self.pieces += 1
        self._news.set()

    def __repr__(self) -> str:
        return f"<Load {self.sent} sent, {dict(self.fates)}, {dict(self.reasons)}>"
