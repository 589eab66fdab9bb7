"""Mock replicas that cost next to nothing: a vLLM server as far as a gateway can see, on raw protocols.

    python -m bench.measure.mock [--replicas 2] [--interval 0.01] [--chat-only]

Prints the ports, one a line. A generation (chat, completions, Messages, Responses) is answered at once, a streamed one with
`max_tokens` chunks of one word: the head at once, the first chunk after FIRST_S (as it is when a prompt is prefilled), one more
every `--interval` seconds. `--chat-only`: Messages and Responses are unknown paths.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Sequence
from typing import cast

import uvloop

from bench.measure.replies import CHAT, COMPLETIONS, REPLIES, STREAM_HEAD, Replies, response
from gateway.cluster.listeners import open_listeners
from gateway.server.http.accept import Acceptor

FIRST_S = 0.002
CHUNKS = 16  # of a stream without max_tokens
_CHAT_PATHS = frozenset([CHAT, COMPLETIONS])
# sglang-router writes it by its newer name; Responses has one of its own.
_LIMITS = (b"max_tokens", b"max_completion_tokens", b"max_output_tokens")
_ENDS = 2048  # bytes of a long body in which its parameters are looked for: at its ends, whoever wrote it

_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":131072}]}'
_METRICS = b"""process_start_time_seconds 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="62500"} 1.0
"""
_ABOUT = b'{"model_path":"m","served_model_name":"m","tokenizer_path":"m","is_generation":true,"version":"0.11.0"}'


PAGES = {
    b"/v1/models": response(_MODELS),
    b"/metrics": response(_METRICS, b"text/plain; version=0.0.4"),
    b"/health": response(b"", b"text/plain"),
    b"/version": response(b'{"version":"0.11.0"}'),
    # read by SGLang's and vLLM's routers to recognise the engine
    b"/health_generate": response(b"", b"text/plain"),
    b"/get_model_info": response(_ABOUT),
    b"/model_info": response(_ABOUT),
    b"/get_server_info": response(_ABOUT),
    b"/server_info": response(_ABOUT),
}
_NOT_FOUND = response(b'{"detail":"Not Found"}', status=b"404 Not Found")  # FastAPI's


def parameter(body: bytes, name: bytes) -> bytes:
    """The first bytes of a parameter's value, wherever it stands among the others; b"" if it is not there."""
    at = body.find(b'"%s":' % name)
    return body[at + len(name) + 3 : at + len(name) + 16].lstrip() if at >= 0 else b""


class MockReplica(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, interval: float, *, chat_only: bool = False) -> None:
        self._interval = interval
        self._chat_only = chat_only
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one, but no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if self._buffer.startswith(b"PRI "):  # sglang-router probes for gRPC
            self.transport.close()
            return
        at = self._buffer.find(b"\r\n\r\n") + 4
        if at < 4:
            return
        head = self._buffer[:at]
        lower = head.lower()
        end = at
        if (length := lower.find(b"\r\ncontent-length:")) >= 0:
            end += int(lower[length + 17 : lower.index(b"\r\n", length + 2)])
        elif b"\r\ntransfer-encoding: chunked" in lower:
            last = self._buffer.find(b"\r\n0\r\n\r\n", at - 2)
            end = last + 7 if last >= 0 else len(self._buffer) + 1
        if len(self._buffer) < end:
            return
        body, self._buffer = self._buffer[at:end], self._buffer[end:]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        method, target, _ = head.split(b" ", 2)
        replies = REPLIES.get(target) if method == b"POST" else None
        if replies is None or (self._chat_only and target not in _CHAT_PATHS):
            self.transport.write(PAGES.get(target.partition(b"?")[0], _NOT_FOUND))
            return
        if len(body) > 2 * _ENDS:
            body = body[:_ENDS] + body[-_ENDS:]
        if not parameter(body, b"stream").startswith(b"true"):
            self.transport.write(replies.plain)
            return
        limit = next(filter(None, (parameter(body, name) for name in _LIMITS)), b"")
        count = limit.partition(b",")[0].partition(b"}")[0]
        chunks = int(count) if count.isdigit() else CHUNKS
        usage = parameter(body, b"include_usage").startswith(b"true")
        self.transport.write(STREAM_HEAD)
        first = self._loop.time() + FIRST_S
        self._loop.call_at(first, self._send_word, replies, first, 1, chunks, usage)

    def _send_word(self, replies: Replies, first: float, number: int, chunks: int, usage: bool) -> None:
        """Chunks come at their times: one that was late does not delay the others."""
        if self.transport.is_closing():
            return
        self.transport.write(replies.begin + replies.word if number == 1 else replies.word)
        if number < chunks:
            self._loop.call_at(first + number * self._interval, self._send_word, replies, first, number + 1, chunks, usage)
        else:
            self.transport.write(replies.end(chunks, usage))


async def serve(replicas: int, interval: float, *, chat_only: bool = False) -> None:
    """Until it is killed. With uvloop's own server, clients that connect at once would wait for seconds."""
    for _ in range(replicas):
        (listener,) = open_listeners("127.0.0.1", 0)
        print(Acceptor(listener, lambda: MockReplica(interval, chat_only=chat_only)).sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().create_future()


def many_files() -> None:
    """As many connections as the machine lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.measure.mock")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--interval", type=float, default=0.01)
    parser.add_argument("--chat-only", action="store_true", help="without Messages and Responses")
    options = parser.parse_args(arguments)
    many_files()
    uvloop.run(serve(options.replicas, options.interval, chat_only=options.chat_only))


if __name__ == "__main__":
    main()
