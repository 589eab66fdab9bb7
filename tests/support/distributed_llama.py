"""A stand-in for Distributed-Llama's API server (`dllama-api`): a process with the same crashes.

    python -m tests.support.distributed_llama [--prefill-ms 0] [--token-ms 0] [--port 0]

It follows the server's source and protocols.md, section 3.5: one accept loop and one request at a time. The process exits
(status 1) if a connection closes before a complete request, if more than Content-Length bytes arrive with the head, if the body
is not JSON, and if fields have unexpected types: `content` that is not a text, `stop` that is not a list of texts. Paths are
compared exactly; any other path gets half a head and no end. Sockets are never closed. It caches one conversation. `stop`,
`temperature` and the other fields are read, but not applied.

It generates the part of the last message after "say ", three characters per token; otherwise "one two three ..." without end.
Each request is a line of JSON on standard output: its content, the number of cached messages, and whether another connection
waited. The beginning of each prefill, during which it neither reads nor writes, is also a line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

CONTEXT = 400  # tokens
READ = 64 * 1024 - 1


def die(why: str) -> NoReturn:
    say(died=why)
    sys.exit(1)


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def read_request(client: socket.socket) -> tuple[str, str, bytes]:
    head = b""
    while b"\r\n\r\n" not in head:
        data = receive(client, READ)
        if not data:
            die("Error while reading headers from socket")
        head += data.partition(b"\0")[0]  # it is a C string there
    begin, _, extra = head.partition(b"\r\n\r\n")
    line, *fields = begin.decode("latin-1").split("\r\n")
    length = 0
    for name, _, value in (each.partition(":") for each in fields):
        if name == "Content-Length":
            digits = value.strip()
            if not digits.isdigit():
                die("Bad Content-Length header - not a number")
            length = int(digits)
    if length and len(extra) > length:
        die("Received more body data than Content-Length header said")
    body = extra
    while len(body) < length:
        data = receive(client, length - len(body))
        if not data:
            die("Error while reading body from socket")
        body += data
    method, path, *_ = [*line.split(" "), "", ""]
    return method, path, body.partition(b"\0")[0]


def receive(client: socket.socket, size: int) -> bytes:
    try:
        return client.recv(size)
    except OSError:
        return b""


def typed(body: Any, name: str, *kinds: type) -> Any:
    """The value of a field, or None. `get<T>()` of another type throws."""
    if name not in body:
        return None
    value = body[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        die(f"type_error: {name} is {type(value).__name__}")
    return value


def messages_of(body: Any) -> list[tuple[str, str]]:
    messages = list[tuple[str, str]]()
    for message in typed(body, "messages", list) or []:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            die("type_error: message")
        messages.append((message["role"], message["content"]))
    return messages


class Server:
    def __init__(self, prefill_s: float, token_s: float, port: int) -> None:
        self._prefill_s = prefill_s
        self._token_s = token_s
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._left: list[socket.socket] = []  # never closed
        self._cached: list[tuple[str, str]] = []

    def run(self) -> None:
        say(port=self._listener.getsockname()[1])
        while True:
            client, _ = self._listener.accept()
            self._left.append(client)
            del self._left[:-900]  # but for the test's own limit of open files
            method, path, body = read_request(client)
            parsed: Any = {}
            if body:
                try:
                    parsed = json.loads(body)
                except ValueError as error:
                    die(f"parse_error: {error}")
            try:
                self._answer(client, method, path, parsed)
            except OSError:
                say(write_error=True)

    def _answer(self, client: socket.socket, method: str, path: str, body: Any) -> None:
        if (method, path) == ("GET", "/v1/models"):
            entry = {"id": "dl", "object": "model", "created": 0, "owned_by": "user"}
            self._plain(client, {"object": "list", "data": [entry]})
            say(models=True)
        elif (method, path) == ("POST", "/v1/chat/completions"):
            self._complete(client, body)
        else:
            client.sendall(b"HTTP/1.1 404 Not Found\r\n")
            say(unknown=f"{method} {path}")

    def _complete(self, client: socket.socket, body: Any) -> None:
        if not isinstance(body, dict):
            die("type_error: body")
        messages = messages_of(body)
        stream = typed(body, "stream", bool) or False
        typed(body, "temperature", int, float)
        typed(body, "seed", int, float)
        limit = int(typed(body, "max_tokens", int, float) or -1)
        if not all(isinstance(each, str) for each in typed(body, "stop", list) or []):
            die("type_error: stop")
        cached = self._resolve(messages)
        prompt = sum(len(text) // 3 + 1 for _, text in messages[cached:])
        texts, generated = list[str](), 0
        room = min(limit, CONTEXT) if limit > 0 else CONTEXT
        if stream:
            client.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
        self._cached += messages[cached:]
        if self._prefill_s:
            say(prefill=len(messages))
            time.sleep(self._prefill_s)
        waited = False
        try:
            for text in itertools.islice(tokens(messages), room):
                if self._token_s:
                    time.sleep(self._token_s)
                waited |= bool(select.select([self._listener], [], [], 0)[0])
                texts.append(text)
                generated += 1
                if stream:
                    self._chunk(client, event({"role": "assistant", "content": text}, ""))
            self._cached.append(("assistant", "".join(texts)))
            if generated == CONTEXT:
                self._cached = []
            if stream:
                self._chunk(client, event(None, "stop"))
                self._chunk(client, b"data: [DONE]")
                client.sendall(b"0000\r\n\r\n")
            else:
                self._plain(client, completion("".join(texts), prompt, generated))
        finally:
            say(messages=len(messages), cached=cached, generated=generated, stream=stream, waited=waited, fields=sorted(body))

    def _resolve(self, messages: list[tuple[str, str]]) -> int:
        if self._cached and len(messages) > len(self._cached) and messages[: len(self._cached)] == self._cached:
            return len(self._cached)
        self._cached = []
        return 0

    def _plain(self, client: socket.socket, value: Any) -> None:
        text = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: {len(text)}\r\n\r\n"
        client.sendall(head.encode() + text)

    def _chunk(self, client: socket.socket, data: bytes) -> None:
        client.sendall(b"%x\r\n%b\r\n" % (len(data), data))


def tokens(messages: list[tuple[str, str]]) -> Iterator[str]:
    last = messages[-1][1] if messages else ""
    if last.startswith("say "):
        text = last.removeprefix("say ")
        yield from (text[at : at + 3] for at in range(0, len(text), 3))
    else:
        yield from (f"word{number} " for number in itertools.count())


def event(delta: dict[str, str] | None, reason: str) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if delta:
        choice["delta"] = delta
    chunk = {"id": "cmpl-c0", "object": "chat.completion", "created": 1_790_000_000, "model": "Distributed Model"}
    return b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\r\n\r\n"


def completion(text: str, prompt: int, generated: int) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": ""}
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    head = {"id": "cmpl-j0", "object": "chat.completion", "created": 1_790_000_000, "model": "Distributed Model"}
    return {**head, "usage": usage, "choices": [choice]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill-ms", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    try:
        Server(given.prefill_ms / 1000, given.token_ms / 1000, given.port).run()
    except KeyboardInterrupt:
        sys.exit(0)
