"""The answer of a request as a value, for features that ask: one toy per way on which answers go out."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from gateway.admission.memory import Budget
from gateway.dialects.finished_answer import MAX_ANSWER, FinishedAnswer
from gateway.dialects.openai.chat_answer import ChatAssembler
from gateway.request.answer_assembly import STEP, AnswerAssembly
from gateway.request.exchange import AnswerTap, Exchange
from tests.gateway.composed import CHAT, chat, completion, composed, stream
from tests.support.compiled import uncompiled
from tests.support.in_memory import Answer, BytesRequest, framed, replica


async def answers(answer: Answer, *requests: BytesRequest, times: int = 1, **pool: Any) -> list[FinishedAnswer | None]:
    """What two features read at the end, of which each has asked `times`."""
    found = list[FinishedAnswer | None]()

    def ask(exchange: Exchange) -> None:
        for _ in range(times):
            exchange.assemble()

    def read(exchange: Exchange) -> None:
        found.append(exchange.assembly.answer if exchange.assembly is not None else None)

    async with composed(answer, **pool) as gateway:
        gateway.lifecycle.extensions.begun.append(ask)
        gateway.lifecycle.extensions.delivered += [read, read]
        for request in requests:
            await gateway.served.lifecycle.serve(request)
    return found


@uncompiled
async def test_a_plain_answer() -> None:
    first, second = await answers(replica(completion), BytesRequest(chat(), CHAT))
    assert first is second
    assert first is not None
    assert (first.text, first.whole) == ("hi", False), "this engine gives no finish_reason"
    assert first.usage is not None
    assert first.usage.cached == 64


@uncompiled
async def test_a_stream_is_read_once_for_all_who_ask() -> None:
    first, second = await answers(replica(stream), BytesRequest(chat(stream=True), CHAT), times=2)
    assert first is second
    assert first is not None
    assert (first.text, first.pieces, first.done) == ("abc", 3, True)


@uncompiled
async def test_a_stream_that_another_replica_goes_on_with_is_one_answer() -> None:
    def events(*texts: str, last: bytes) -> bytes:
        chunks = [{"id": "c", "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
        return framed(b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in chunks) + last, "text/event-stream")

    end = orjson.dumps({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    sent = [
        events("Hel", last=b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'),
        events("l", "o", last=b"data: %b\n\ndata: [DONE]\n\n" % end),
    ]
    two = ["http://replica.memory:1", "http://replica.memory:2"]
    request = BytesRequest(chat(stream=True), CHAT)
    found, _ = await answers(replica(lambda _request: sent.pop(0)), request, replicas=two, resume_streams=True)
    assert found is not None
    assert (found.text, found.whole) == ("Hello", True)
    assert not sent


class Reading(AnswerTap):
    """Reads the value before the answer goes out."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.seen = list[str]()

    async def whole(self, body: bytes) -> bytes:
        assert self.exchange.assembly is not None
        answer = self.exchange.assembly.answer
        assert answer is not None
        self.seen.append(answer.text)
        return body


@uncompiled
async def test_a_tap_has_the_value_before_the_answer_goes_out() -> None:
    taps = list[Reading]()

    def tap(exchange: Exchange) -> None:
        exchange.assemble()
        taps.append(Reading(exchange))
        exchange.tap = taps[-1]

    async with composed(replica(completion)) as gateway:
        gateway.lifecycle.extensions.begun.append(tap)
        await gateway.served.lifecycle.serve(BytesRequest(chat(), CHAT))
    assert [each.seen for each in taps] == [["hi"]]


@uncompiled
async def test_nobody_asks() -> None:
    assert await answers(replica(stream), BytesRequest(chat(stream=True), CHAT), times=0) == [None, None]


def large(_request: bytes) -> bytes:
    message = {"content": "x" * (1 << 19)}
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    return framed(orjson.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}))


@uncompiled
async def test_a_large_answer_that_is_passed_on_as_it_comes() -> None:
    request = BytesRequest(chat(), CHAT)
    found, _ = await answers(replica(large), request)
    assert found is not None
    assert (len(found.text), found.whole) == (1 << 19, True)
    assert len(request.answer.body) > 1 << 19


@uncompiled
async def test_a_path_on_which_no_model_answers_has_none() -> None:
    request = BytesRequest(orjson.dumps({"model": "m", "input": "hello"}), "/v1/embeddings")
    assert await answers(replica(lambda _request: framed(b'{"data":[]}')), request) == [None, None]


def test_held_bytes_are_charged_and_without_room_there_is_no_value() -> None:
    lease = Budget(4 * STEP).lease("192.0.2.1")
    assembly = AnswerAssembly(ChatAssembler(), lease)
    piece = b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": "x" * 1000}}]}).encode()
    assembly.feed(piece)
    assert 1000 <= lease.held <= 1000 + STEP
    for _ in range(4 * STEP // 1000):
        assembly.feed(piece)
    assert assembly.answer is None
    assert lease.held <= 4 * STEP


@pytest.mark.parametrize("size", [5 * STEP, MAX_ANSWER + 1])
def test_a_body_without_room_has_no_value(size: int) -> None:
    assembly = AnswerAssembly(ChatAssembler(), Budget(4 * STEP if size < MAX_ANSWER else 1 << 30).lease("192.0.2.1"))
    assembly.read(b'{"choices":[{"message":{"content":"%b"}}]}' % (b"x" * size))
    assert assembly.answer is None
