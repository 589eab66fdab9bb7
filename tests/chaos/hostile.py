"""A hostile replica, as a separate process; its behaviour is set while it runs.

On one port it is an engine that generates the words of the simulated one: a prompt has one right answer, from any replica, and
a partial answer is continued. Its behaviours spoil generations and, except those that close the port, nothing else: probes see
a healthy replica, so that requests have to detect the fault. Another port takes commands: `/BEHAVIOUR`, `/close_idle` (closes
idle connections), `/status` (no effect), each answered by the counts of what it has done so far. A prompt with `POISON` and a
behaviour's name in it gets that behaviour's answer in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import itertools
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replica.sim import text as sim_text
from tests.chaos.wire import Message, read_message

GAP_S = 0.008  # from one word to the next
SLOWLY = 5  # times slower
FLAP_S = 0.15
MODEL = "chaos"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR = {"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the words after its prompt."""

    chat: bool
    stream: bool
    include_usage: bool  # the client wants usage in its stream
    prompt: int
    words: list[str]
    finish: str

    @property
    def usage(self) -> dict[str, int]:
        done = len(self.words)
        return {"prompt_tokens": self.prompt, "completion_tokens": done, "total_tokens": self.prompt + done}

    def whole(self) -> bytes:
        text = "".join(self.words)
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return json.dumps(self._frame({"index": 0, **content, "finish_reason": self.finish}, usage=self.usage)).encode()

    def events(self) -> list[bytes]:
        out = [self._event({"role": "assistant", "content": ""}, None)] if self.chat else []
        # The finish reason is in the last word's event: the words alone do not show their end.
        *words, last = self.words
        out += [self._event({"content": word}, None) for word in words]
        out.append(self._event({"content": last}, self.finish))
        if self.include_usage:
            out.append(event({**self._frame(), "usage": self.usage}))
        return [*out, b"data: [DONE]\n\n"]

    def _event(self, delta: dict[str, str], finish: str | None) -> bytes:
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return event(self._frame({"index": 0, **content, "logprobs": None, "finish_reason": finish}))

    def _frame(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"id": "c", "object": "o", "created": 1, "model": MODEL, "choices": list(choices), **more}


def event(answer: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: int, body: bytes, *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 %d X" % status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def answer_to(request: Message) -> Answer:
    body = json.loads(request.body)
    if "prompt" in body:
        prompt = sim_text.encode(body["prompt"])
    else:
        prompt = sim_text.encode_chat(body["messages"], None, "open" if body.get("continue_final_message") else "answer")
    tokens, by_itself = sim_text.answer(prompt, body["max_tokens"], endless=bool(body.get("ignore_eos")))
    words = [sim_text.decode([token]) for token in tokens]
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Answer(
        "messages" in body, bool(body.get("stream")), include_usage, len(prompt), words, "stop" if by_itself else "length"
    )


# -- behaviours: each answers one request


async def healthy(answer: Answer, writer: asyncio.StreamWriter, gap_s: float = GAP_S) -> None:
    if not answer.stream:
        await asyncio.sleep(gap_s * len(answer.words) / 4)
        writer.write(plain(200, answer.whole()))
        return
    await asyncio.sleep(gap_s)
    await send_events(answer.events(), writer, gap_s)
    writer.write(b"0\r\n\r\n")


async def send_events(events: list[bytes], writer: asyncio.StreamWriter, gap_s: float = GAP_S) -> None:
    writer.write(STREAM_HEAD)
    for part in events:
        writer.write(chunk(part))
        await writer.drain()
        await asyncio.sleep(gap_s)


async def slow(answer: Answer, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(GAP_S * SLOWLY * 10)
    await healthy(answer, writer, GAP_S * SLOWLY)


async def half(answer: Answer, writer: asyncio.StreamWriter) -> None:
    """The head, and the first half of the body or of the first event."""
    if answer.stream:
        part = chunk(answer.events()[0])
        writer.write(STREAM_HEAD + part[: len(part) // 2])
    else:
        body = plain(200, answer.whole())
        writer.write(body[: -len(answer.whole()) // 2])
    await writer.drain()


async def some(answer: Answer, writer: asyncio.StreamWriter) -> list[bytes]:
    """A part of the answer; returns the events that are missing."""
    if not answer.stream:
        await half(answer, writer)
        return []
    events = answer.events()
    count = 1 + answer.prompt % (len(events) - 1)
    await send_events(events[:count], writer)
    return events[count:]


async def reset_in_header(_answer: Answer, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: te")
    reset(writer)


async def reset_in_body(answer: Answer, writer: asyncio.StreamWriter) -> None:
    await half(answer, writer)
    reset(writer)


async def reset_in_stream(answer: Answer, writer: asyncio.StreamWriter) -> None:
    if rest := await some(answer, writer):
        writer.write(chunk(rest[0])[:20])
    reset(writer)


async def ends_early(answer: Answer, writer: asyncio.StreamWriter) -> None:
    await some(answer, writer)
    writer.close()


async def fails_at_once(answer: Answer, writer: asyncio.StreamWriter) -> None:
    if answer.stream:
        writer.write(STREAM_HEAD + chunk(event(ERROR)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    else:
        await answers_500(answer, writer)


async def fails_later(answer: Answer, writer: asyncio.StreamWriter) -> None:
    if answer.stream:
        await some(answer, writer)
        writer.write(chunk(event(ERROR)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    else:
        await answers_500(answer, writer)


async def answers_500(_answer: Answer, writer: asyncio.StreamWriter) -> None:
    writer.write(plain(500, json.dumps(ERROR).encode()))


async def answers_503(_answer: Answer, writer: asyncio.StreamWriter) -> None:
    writer.write(plain(503, json.dumps(ERROR).encode(), b"Retry-After: 1"))


async def answers_garbage(_answer: Answer, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 what is this?\r\n\r\n")


async def answers_429(_answer: Answer, writer: asyncio.StreamWriter) -> None:
    """As an engine's rate limit per key."""
    writer.write(plain(429, json.dumps(ERROR).encode(), b"Retry-After: 60"))


def reset(writer: asyncio.StreamWriter) -> None:
    """As a process that is killed with unread bytes: no FIN, a RST."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


Behaviour = Callable[[Answer, asyncio.StreamWriter], Awaitable[None]]
BEHAVIOURS: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        healthy,
        slow,
        reset_in_header,
        reset_in_body,
        reset_in_stream,
        ends_early,
        fails_at_once,
        fails_later,
        answers_500,
        answers_503,
        answers_garbage,
    )
}
POISON = "poison:"
POISONS: Mapping[str, Behaviour] = {
    poison.__name__: poison
    for poison in (answers_500, answers_503, answers_429, answers_garbage, reset_in_header, reset_in_body)
}
REFUSES, FLAPS = "refuses", "flaps"
FAULTS = (*(name for name in BEHAVIOURS if name != "healthy"), REFUSES, FLAPS)


def poison_of(body: bytes) -> Behaviour | None:
    """The poison in a request's prompt; None without one."""
    _, found, rest = body.partition(POISON.encode())
    return POISONS.get(rest.partition(b" ")[0].decode("latin-1")) if found else None


class Hostile:
    """The process. done: requests answered, and times the port was closed, by behaviour."""

    def __init__(self) -> None:
        self.behaviour, self.model = "healthy", MODEL
        self.done = Counter[str]()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._idle: dict[asyncio.StreamWriter, bool] = {}
        self._flapping: asyncio.Task[None] | None = None
        self._steady = asyncio.Event()

    async def up(self) -> None:
        while self._server is None:
            try:
                self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                await asyncio.sleep(0.1)  # another process tries ports, or is about to close this one
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Stop listening, and reset open connections."""
        if self._server:
            server, self._server = self._server, None
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(5):  # asyncio leaks connections that are accepted but not started when a server is closed
                await asyncio.sleep(0)
            server.close()
        for writer in self._idle:
            if not writer.is_closing():
                reset(writer)
        self.done[self.behaviour] += 1

    async def handle_command(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One command per connection."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            name = (await read_message(reader)).start.split()[1].removeprefix("/")
            if name == "close_idle":
                for other in [other for other, idle in self._idle.items() if idle]:
                    other.close()
            elif name != "status":
                await self._set_behaviour(name)
            writer.write(plain(200, json.dumps(self.done).encode(), b"Connection: close"))
            await writer.drain()

    async def _set_behaviour(self, behaviour: str) -> None:
        if self._flapping:  # not cancelled: it may be about to listen on the port
            self._steady.set()
            await self._flapping
            self._flapping = None
            self._steady.clear()
        self.behaviour = behaviour
        if behaviour == REFUSES:
            await self.down()
        elif behaviour == FLAPS:
            self._flapping = asyncio.create_task(self._flap())
        else:
            await self.up()

    async def _flap(self) -> None:
        """Down and up in turns, until `_steady` is set."""
        for step in itertools.cycle((self.down, self.up)):
            await step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLAP_S):
                    await self._steady.wait()
                return

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._idle[writer] = True
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while not writer.is_closing():
                    request = await read_message(reader)
                    self._idle[writer] = False
                    await self._answer(request, writer)
                    await writer.drain()
                    self._idle[writer] = True
        finally:
            del self._idle[writer]
            writer.close()

    async def _answer(self, request: Message, writer: asyncio.StreamWriter) -> None:
        if request.start.startswith("POST "):
            behaviour = self.behaviour
            await (poison_of(request.body) or BEHAVIOURS.get(behaviour, healthy))(answer_to(request), writer)
            self.done[behaviour] += behaviour in BEHAVIOURS
        elif request.start.startswith("GET /v1/models "):
            entry = {"id": self.model, "object": "model", "created": 1, "owned_by": "vllm"}
            writer.write(plain(200, json.dumps({"object": "list", "data": [entry]}).encode()))
        else:
            writer.write(plain(404, b"{}"))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    hostile = Hostile()
    hostile.port, hostile.model = options.port, options.model
    await hostile.up()
    control = await asyncio.start_server(hostile.handle_command, "127.0.0.1", 0)
    port = control.sockets[0].getsockname()[1]
    where = {"url": f"http://127.0.0.1:{hostile.port}", "control": f"http://127.0.0.1:{port}"}
    sys.stderr.write(json.dumps(where) + "\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
