"""The mock replica: what gateways and routers ask of it, on the wire."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.measure.mock import MockReplica, parameter
from bench.measure.replies import WORDS
from gateway.dialects.table import Dialects
from gateway.dialects.usage import Usage
from gateway.fleet.engines import read, recognise
from gateway.request.unknown_path import is_unknown_path
from gateway.upstream.http1 import AnswerParser
from tests.support.pages import parse_page


async def posted(target: str, body: bytes, *, chat_only: bool = False) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return await asked(head + body, chat_only=chat_only)


async def asked(wire: bytes, *, chat_only: bool = False) -> bytes:
    """What it sends until the answer is complete or it closes."""

    def made() -> MockReplica:
        return MockReplica(0.001, chat_only=chat_only)

    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(wire)
    received = b""
    while not received.endswith((b"0\r\n\r\n", b"}", b"1.0\n")):
        piece = await reader.read(65536)
        if not piece:
            break
        received += piece
    writer.close()
    await writer.wait_closed()
    server.close()
    return received


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_answer_has_its_words_and_usage(framing: str) -> None:
    body = b'{"model":"m","messages":[]}'
    if framing == "length":
        received = await posted("/v1/chat/completions", body)
    else:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        received = await asked(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert answer["choices"][0]["message"]["content"].split() == ["word"] * WORDS
    assert answer["usage"]["completion_tokens"] == WORDS


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_has_as_many_words_as_asked(usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    received = await posted("/v1/chat/completions", json.dumps({"stream": True, "max_tokens": 7, **options}).encode())
    assert received.count(b" word") == 7
    assert received.count(b'"usage"') == usage
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_the_gateway_understands_the_streams_of_the_other_dialects(path: str) -> None:
    limit = "max_tokens" if path == "/v1/messages" else "max_output_tokens"
    body = json.dumps({"model": "m", "stream": True, limit: 7, "input": "x", "messages": [{"role": "user", "content": "x"}]})
    received = await posted(path, body.encode())
    head, answer = AnswerParser(), received.partition(b"\r\n\r\n")[2]
    stream = head.feed(received)
    assert head.complete
    assert answer.count(b'"delta":') >= 7
    dialect = Dialects().at(path)
    reader = dialect.reader(dialect.parse(body.encode()), watchful=False)
    assert reader.feed(stream) == stream
    assert (reader.done, reader.usage) == (True, Usage(500, 7, 256))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_one_that_speaks_chat_only_does_not_know_the_other_paths(path: str) -> None:
    received = await posted(path, b"{}", chat_only=True)
    assert received.startswith(b"HTTP/1.1 404 ")
    assert is_unknown_path(404, received.partition(b"\r\n\r\n")[2])
    assert (await posted("/v1/chat/completions", b"{}", chat_only=True)).startswith(b"HTTP/1.1 200 ")


async def test_parameters_of_a_long_prompt_are_found_at_either_end() -> None:
    content = [{"role": "user", "content": "x" * 40_000}]
    first = {"stream": True, "max_completion_tokens": 3, "messages": content}
    last = {"messages": content, "stream": True, "max_tokens": 3}
    for body in (first, last):
        assert (await posted("/v1/chat/completions", json.dumps(body).encode())).count(b" word") == 3


async def test_it_looks_like_vllm() -> None:
    models = json.loads((await asked(b"GET /v1/models HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")[2])
    assert [model["id"] for model in models["data"]] == ["m"]
    page = parse_page((await asked(b"GET /metrics HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")[2])
    facts = read(recognise([models["data"][0]["owned_by"]], page), page)
    assert (facts.engine.name, facts.kv_tokens, facts.running, facts.waiting) == ("vllm", 1_000_000, 0, 0)


async def test_other_questions_are_not_found_and_grpc_is_refused() -> None:
    assert (await posted("/tokenize", b"{}")).startswith(b"HTTP/1.1 404 ")
    assert (await asked(b"GET /loads?model=m HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
    assert await asked(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == b""


def test_parameters_may_have_a_space() -> None:
    assert parameter(b'{"max_tokens": 12}', b"max_tokens") == b"12}"
    assert parameter(b'{"max_tokens":12}', b"max_token") == b""
