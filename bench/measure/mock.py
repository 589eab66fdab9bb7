"""Mock replicas that cost next to nothing: a vLLM server as far as a gateway can see, on raw protocols.

    python -m bench.measure.mock [--replicas 2] [--interval 0.01]

Prints the ports, one a line. A chat completion is answered at once, a streamed one with `max_tokens` chunks of one word: the
head at once, the first chunk after FIRST_S (as it is when a prompt is prefilled), one more every `--interval` seconds. Messages
and Responses are answered at once, without streaming.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Sequence
from typing import cast

import uvloop

from bench.measure.answer import DONE, WORD
from gateway.cluster.listeners import open_listeners
from gateway.server.http.accept import Acceptor

FIRST_S = 0.002
WORDS = 40  # of an answer that is not streamed
CHUNKS = 16  # of a stream without max_tokens
_ENDS = 2048  # bytes of a long body in which its parameters are looked for: at its ends, whoever wrote it

_USAGE = b'"usage":{"prompt_tokens":500,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":256}}'
_ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%s"},"finish_reason":"stop"}],%s}'
) % (WORD * WORDS, _USAGE % (WORDS, 500 + WORDS))
_EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % WORD
_LAST_EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":131072}]}'
_METRICS = b"""process_start_time_seconds 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="62500"} 1.0
"""
_ABOUT = b'{"model_path":"m","served_model_name":"m","tokenizer_path":"m","is_generation":true,"version":"0.11.0"}'


def _response(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, kind, len(body), body)


_ANSWER_RESPONSE = _response(_ANSWER)
# The same text and counts in the words of the other dialects.
_OTHER_RESPONSES = {
    b"/v1/messages": _response(
        b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"%s"}],"stop_reason":'
        b'"end_turn","stop_sequence":null,"usage":{"input_tokens":244,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":256,"output_tokens":%d}}' % (WORD * WORDS, WORDS)
    ),
    b"/v1/responses": _response(
        b'{"id":"resp_1","object":"response","created_at":1700000000,"model":"m","status":"completed","output":[{"type":'
        b'"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"%s","annotations":[]}]}],"usage":'
        b'{"input_tokens":500,"input_tokens_details":{"cached_tokens":256},"output_tokens":%d,"total_tokens":%d}}'
        % (WORD * WORDS, WORDS, 500 + WORDS)
    ),
}
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


_CHUNK = _chunk(_EVENT)

PAGES = {
    b"/v1/models": _response(_MODELS),
    b"/metrics": _response(_METRICS, b"text/plain; version=0.0.4"),
    b"/health": _response(b"", b"text/plain"),
    b"/version": _response(b'{"version":"0.11.0"}'),
    # read by SGLang's and vLLM's routers to recognise the engine
    b"/health_generate": _response(b"", b"text/plain"),
    b"/get_model_info": _response(_ABOUT),
    b"/model_info": _response(_ABOUT),
    b"/get_server_info": _response(_ABOUT),
    b"/server_info": _response(_ABOUT),
}
_NOT_FOUND = _response(b"{}", status=b"404 Not Found")


def parameter(body: bytes, name: bytes) -> bytes:
    """The first bytes of a parameter's value, wherever it stands among the others; b"" if it is not there."""
    at = body.find(b'"%s":' % name)
    return body[at + len(name) + 3 : at + len(name) + 16].lstrip() if at >= 0 else b""


class MockReplica(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, interval: float) -> None:
        self._interval = interval
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
        if method == b"POST" and target in _OTHER_RESPONSES:
            self.transport.write(_OTHER_RESPONSES[target])
            return
        if method != b"POST" or not target.endswith(b"/completions"):
            self.transport.write(PAGES.get(target.partition(b"?")[0], _NOT_FOUND))
            return
        if len(body) > 2 * _ENDS:
            body = body[:_ENDS] + body[-_ENDS:]
        if not parameter(body, b"stream").startswith(b"true"):
            self.transport.write(_ANSWER_RESPONSE)
            return
        # sglang-router writes it by its newer name.
        limit = parameter(body, b"max_tokens") or parameter(body, b"max_completion_tokens")
        count = limit.partition(b",")[0].partition(b"}")[0]
        chunks = int(count) if count.isdigit() else CHUNKS
        usage = parameter(body, b"include_usage").startswith(b"true")
        self.transport.write(_STREAM_HEAD)
        first = self._loop.time() + FIRST_S
        self._loop.call_at(first, self._send_word, first, 1, chunks, usage)

    def _send_word(self, first: float, number: int, chunks: int, usage: bool) -> None:
        """Chunks come at their times: one that was late does not delay the others."""
        if self.transport.is_closing():
            return
        self.transport.write(_CHUNK)
        if number < chunks:
            self._loop.call_at(first + number * self._interval, self._send_word, first, number + 1, chunks, usage)
            return
        last = [_LAST_EVENT, b'data: {"id":"c","choices":[],%s}\n\n' % (_USAGE % (chunks, 500 + chunks)) if usage else b""]
        end = b"".join(_chunk(event) for event in (*last, DONE + b"\n\n") if event)
        self.transport.write(end + b"0\r\n\r\n")


async def serve(replicas: int, interval: float) -> None:
    """Until it is killed. With uvloop's own server, clients that connect at once would wait for seconds."""
    for _ in range(replicas):
        (listener,) = open_listeners("127.0.0.1", 0)
        print(Acceptor(listener, lambda: MockReplica(interval)).sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().create_future()


def many_files() -> None:
    """As many connections as the machine lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.measure.mock")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--interval", type=float, default=0.01)
    options = parser.parse_args(arguments)
    many_files()
    uvloop.run(serve(options.replicas, options.interval))


if __name__ == "__main__":
    main()
