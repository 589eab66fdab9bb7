"""Plain answers: small ones are read whole before they go on, of large ones only the beginning."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.dialects.answer import MAX_PARSED_ANSWER, TAIL
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.dialect import AnswerTail, Dialect
from gateway.dialects.openai.generations import ChatBody
from gateway.dialects.responses.responses import Responses
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.adoption.kept_answer import MAX_KEPT
from gateway.request.attempts import MAX_HELD_ANSWER
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.gateway.dialects.test_openai_stream import cut
from tests.gateway.request.test_attempts import TURNS
from tests.gateway.request.test_robust import dial, post
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, dies_now, http, usage, writes

MIB = 1 << 20
SIZE = 3 * MIB
JSON = b"Content-Type: application/json\r\n"


def large(size: int = SIZE, **counts: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * size}, "finish_reason": "stop"}
    return json.dumps({"id": "c", "choices": [choice], "usage": usage(100, 7, 64), **counts}).encode()


def tail_of(begin: bytes) -> AnswerTail:
    tail = ChatBody().answer_tail(begin)
    assert tail
    return tail


@given(st.lists(st.integers(0, 1 << 20), max_size=20), st.integers(0, 200), st.booleans())
def test_the_usage_of_an_answer_is_found_whatever_its_pieces(places: list[int], behind: int, has_usage: bool) -> None:
    counts = {} if has_usage else {"usage": None}
    whole = large(MAX_PARSED_ANSWER, **counts, behind="y" * behind)
    first, *others = cut(whole, [*places, 100])
    tail = tail_of(first or whole[:1])
    for piece in others if first else [whole[1:]]:
        tail.feed(piece)
    assert tail.usage() == ChatBody().usage_of(whole)
    assert (tail.usage() is not None) == has_usage


_COUNTS = st.fixed_dictionaries(
    {},
    optional={
        name: st.integers(-1, 1 << 40) | st.sampled_from([None, "7", 1.5, {"cached_tokens": 3}])
        for name in ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "prompt_tokens_details")
    },
)
_MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "usage": st.none() | st.just(7) | _COUNTS,
        "error": st.none() | st.just({}) | st.just({"message": "full"}) | st.just("no"),
        "object": st.sampled_from(["chat.completion", "error", 7]),
        "type": st.sampled_from(["message", "error", None]),
        "choices": st.none() | st.lists(st.fixed_dictionaries({"usage": _COUNTS}), max_size=2),
    },
)


@example({"usage": usage(), "error": {"message": "full"}}, ChatBody())
@example({"usage": usage(), "object": "error"}, ChatBody())
@example({"usage": {"input_tokens": 9, "output_tokens": 1}, "type": "error"}, Messages())
@example({"usage": {"prompt_tokens": 9}, "choices": [{"usage": usage()}]}, ChatBody())
@given(_MEMBERS | st.just([]) | st.just("text"), st.sampled_from([ChatBody(), Messages(), Responses()]))
def test_a_usual_answer_has_the_usage_that_its_whole_parsing_finds(answer: Any, dialect: Dialect) -> None:
    """A byte order mark makes the gateway parse all of an answer."""

    def found(body: bytes) -> Usage | str | None:
        try:
            return dialect.usage_of(body)
        except ReplicaFailure as failure:
            return str(failure)

    body = json.dumps(answer).encode()
    assert found(body) == found(b"\xef\xbb\xbf" + body)


@pytest.mark.parametrize("counts", [{"prompt_tokens": 10}, {"prompt_tokens": 10, "completion_tokens": -1}])
def test_a_usage_without_a_count_of_the_answer_is_none(counts: dict[str, Any]) -> None:
    """Whether the answer is read whole or not: it is not an answer of no tokens."""
    for size in (10, 2 * MAX_PARSED_ANSWER):
        assert ChatBody().usage_of(large(size, usage=counts)) is None
    tail = tail_of(large(MAX_PARSED_ANSWER, usage=counts))
    assert tail.usage() is None


@pytest.mark.parametrize("behind", [100, TAIL, 3 * TAIL + 7, 40 * TAIL])
@pytest.mark.parametrize("piece", [1 << 12, TAIL, 1 << 22])
def test_a_usage_that_is_not_at_the_end_is_found(behind: int, piece: int) -> None:
    """vLLM writes the token ids of a prompt, and its log probabilities, behind it."""
    counts = {"prompt_tokens": 50_000, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 49_000}}
    body = b'{"object":"chat.completion","choices":[{"text":"%b"}],"usage":%b,"prompt_token_ids":[%b1]}' % (
        b"x" * MAX_PARSED_ANSWER,
        json.dumps(counts).encode(),
        b"1," * (behind // 2),
    )
    expected = Usage(50_000, 3, 49_000)
    assert ChatBody().usage_of(body) == expected
    tail = tail_of(body[:piece])
    for at in range(piece, len(body), piece):
        tail.feed(body[at : at + piece])
    assert tail.usage() == expected


def test_of_an_answer_that_passes_only_the_end_is_held() -> None:
    tail, pieces = tail_of(b"{"), [bytes(size) for size in (1, 1000, TAIL, 3 * TAIL, 40 * TAIL)]
    tracemalloc.start()
    for piece in pieces * 50:
        tail.feed(piece)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5 * TAIL


@pytest.mark.parametrize("begin", [b"<html>", b"[1]", b"x" * 100])
def test_what_does_not_begin_like_an_object_is_no_answer(begin: bytes) -> None:
    with pytest.raises(ReplicaFailure, match="no JSON object"):
        tail_of(begin)


def held_back(body: bytes, at: int, go: asyncio.Event, *, in_chunks: bool) -> Behaviour:
    """The answer up to that byte, and the rest when `go` is set."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        framing = b"Transfer-Encoding: chunked" if in_chunks else b"Content-Length: %d" % len(body)
        writer.write(b"HTTP/1.1 200 OK\r\n" + JSON + framing + b"\r\n\r\n")
        for part in (body[:at], body[at:]):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if in_chunks else part)
            await writer.drain()
            if part is not body[at:]:
                await go.wait()
        if in_chunks:
            writer.write(b"0\r\n\r\n")

    return behave


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_large_answer_is_passed_on_as_it_comes(in_chunks: bool) -> None:
    body, go = large(), asyncio.Event()
    behaviour = held_back(body, 2 * MIB, go, in_chunks=in_chunks)
    async with FakeReplica([behaviour]) as replica, running(replica) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json=BODY) as answer:
            assert answer.headers.get("Content-Length") == (None if in_chunks else str(len(body)))
            begin = await answer.content.readexactly(MAX_HELD_ANSWER)
            go.set()
            assert begin + await answer.read() == body
        metrics, label = await run.metrics(), f'model="m",replica="{replica.name}"'
        assert metrics[f'warmroute_prompt_tokens_total{{cache="hit",{label}}}'] == 64
        assert metrics[f"warmroute_completion_tokens_total{{{label}}}"] == 7


async def test_usage_far_before_the_end_of_a_large_answer_is_found() -> None:
    body = large(behind="y" * TAIL)
    async with FakeReplica([writes(http(200, body))]) as replica, running(replica) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json=BODY) as answer:
            assert await answer.read() == body
        assert (await run.metrics())[f'warmroute_prompt_tokens_total{{cache="hit",model="m",replica="{replica.name}"}}'] == 64


async def test_a_client_that_does_not_read_holds_the_replica_back() -> None:
    piece, sent = b" " * (1 << 16), 0

    async def endless(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 1000000000\r\n\r\n{")
        while True:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async with FakeReplica([endless]) as replica, running(replica) as run, dial(run) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post())
        await eventually(lambda: run.gateway.served.memory.held > 0 and sent > MAX_HELD_ANSWER)
        await stands_still(run, lambda: sent)
        assert sent < 60 * MIB, "what the kernel's buffers hold"
        assert 0 < run.gateway.served.memory.held < 3 * MIB + MAX_KEPT, "and what a re-sent request would get"


async def test_what_came_of_an_answer_that_broke_off_is_not_held() -> None:
    """The next replica's answer has the room."""
    calls, go = 0, asyncio.Event()

    async def breaks_off(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            await go.wait()
            return dies_now(writer)
        writer.write(b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 1000000\r\n\r\n{" + b" " * 900_000)
        await writer.drain()
        writer.close()
        return None

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(FakeReplica([breaks_off])) for _ in range(3)]
        run = await stack.enter_async_context(running(*urls))
        asked = asyncio.create_task(run.post())
        await eventually(lambda: calls == 3)
        assert run.gateway.served.memory.held < 100_000
        go.set()
        assert (await asked)[0] == 502


async def stands_still(run: Running, count: Callable[[], int]) -> None:
    """Until a count does not change during ten questions to the gateway."""
    before = -1
    while before != count():
        before = count()
        for _ in range(10):
            await run.session.get(run.url + "/health")


def breaks_off(begin: bytes) -> Behaviour:
    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 100000000\r\n\r\n" + begin)
        await writer.drain()
        dies_now(writer)

    return behave


@pytest.mark.parametrize("begin", [b'{"half": ', large()[: MAX_HELD_ANSWER // 2], b"x" * SIZE], ids=["head", "half", "no JSON"])
async def test_another_replica_answers_if_an_answer_fails_in_its_beginning(begin: bytes) -> None:
    async with FakeReplica([breaks_off(begin)]) as one, FakeReplica([answers()]) as two, running(one, two, **TURNS) as run:
        for _ in range(2):
            assert (await run.post())[0] == 200
        assert len(one.requests) >= 1, "it had its turn"


async def test_a_large_answer_that_breaks_off_later_is_cut() -> None:
    async with FakeReplica([breaks_off(large())]) as one, FakeReplica([breaks_off(large())]) as two, running(one, two) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json=BODY) as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert len(one.requests) + len(two.requests) == 1, "it is not repeated: the client has its beginning"
        metrics = await run.metrics()
        assert sum(value for name, value in metrics.items() if name.startswith("warmroute_broken_responses_total")) == 1
