"""Streams that break off and go on elsewhere, through a real gateway on real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest

from gateway.dialects.openai.continuation import TextContinuation
from gateway.dialects.openai.request import CHAT
from gateway.request.resumption import READ_STEP, SentBytes, SentEvents
from tests.gateway.conftest import Running, eventually, running
from tests.support.continuing_engine import (
    CACHED_TOKENS,
    ENDS,
    ENGINE_ERROR,
    PROMPT_TOKENS,
    STORY,
    TEXT,
    chat,
    completion,
    events,
    generates,
    line,
)
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    event,
    http,
    status,
    streams,
    writes,
)
from tests.support.tiers import gate

CONTINUATION = TextContinuation(CHAT)

USAGE = {"stream_options": {"include_usage": True}}
Lines = Callable[[], list[dict[str, Any]]]


def resuming(*replicas: FakeReplica, **config: Any) -> AbstractAsyncContextManager[Running]:
    return running(pools=[{"replicas": [replica.url for replica in replicas], "resume_streams": True}], **config)


class Cast:
    """What the replicas do in turn, whichever of them is asked; the last for ever."""

    def __init__(self, *turns: Behaviour) -> None:
        self.turns: Sequence[Behaviour] = turns
        self.asked: list[Any] = []

    def again(self, *turns: Behaviour) -> None:
        self.turns, self.asked = turns, []

    async def __call__(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        turn = self.turns[min(len(self.asked), len(self.turns) - 1)]
        self.asked.append(request.json)
        await turn(request, writer)


async def stream_of(run: Running, body: dict[str, Any]) -> tuple[str, list[Any], bytes]:
    """(the text, all parsed events, the raw bytes)."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with run.session.post(run.url + path, json=body) as answer:
        assert answer.status == 200
        raw = await answer.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"data: [DONE]\n") == 1
    parsed = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
    choices = [choice for event in parsed for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices), parsed, raw


async def counted(run: Running, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in (await run.metrics()).items()
        if sample.startswith(f"warmroute_{name}") and all(label in sample for label in wanted)
    )


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("body", [chat(), chat(**USAGE), completion(**USAGE)], ids=["chat", "usage", "completion"])
@gate("chat-*", "*-reset", reason="each API, each end")
async def test_wherever_and_however_it_breaks_off_the_client_reads_the_undisturbed_answer(
    body: dict[str, Any], end: str, request_lines: Lines
) -> None:
    cast = Cast(generates())
    config = {"timeouts": {"idle_s": 0.03}} if end == "silence" else {}
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two, **config) as run:
        undisturbed, parsed, _ = await stream_of(run, body)
        assert undisturbed == TEXT
        whole = events({**USAGE, **body})
        # A regular end behind the finish reason is no break.
        breaks = next(n for n, each in enumerate(whole, 1) if b'"stop"' in each) if end == "no_done" else len(whole)
        # A replica that is up and silent before its first token computes the prompt: the request ends.
        first = next(n for n, each in enumerate(whole, 1) if STORY[0].encode() in each) if end == "silence" else 0
        for count in range(first, breaks):
            cast.again(generates(until=count, end=end), generates(name="c-2"))
            text, pieces, _ = await stream_of(run, body)
            assert text == TEXT, f"broken off after {count} events"
            finishes = [choice["finish_reason"] for piece in pieces for choice in piece["choices"] if choice["finish_reason"]]
            assert finishes == ["stop"]
            ids = {(piece["id"], piece["created"]) for piece in pieces}
            assert len(ids) == 1
            if pieces[-1].get("usage"):
                assert pieces[-1] | {"id": ""} == parsed[-1] | {"id": ""}
            else:
                assert "stream_options" not in body or len(cast.asked) == 1, "the usage was lost with the end"
        await eventually(lambda: len(request_lines()) == breaks - first + 1)
        broken = (
            breaks - first - (end in ("no_done", "error"))
        )  # an empty stream, or an error at once, has not begun: that is failover
        assert await counted(run, "resumed_streams_total", result="good") == broken
        assert await counted(run, "resumed_streams_total") == broken
        assert await counted(run, "broken_responses_total") == broken


async def test_bad_framing_in_mid_stream_is_a_break_like_any_other() -> None:
    go_on = asyncio.Event()

    async def babbles(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for each in events(request.json)[:3]:
            writer.write(chunk(each))
        await go_on.wait()
        writer.write(b"what is this?\r\n")

    cast = Cast(babbles, generates())
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        parts = aiter(await run.client.chat.completions.create(**chat()))
        texts = [(await anext(parts)).choices[0].delta.content for _ in range(3)]
        go_on.set()
        texts += [part.choices[0].delta.content async for part in parts]
        assert "".join(text or "" for text in texts) == TEXT


async def test_it_goes_on_and_on_and_is_billed_as_one_answer(request_lines: Lines) -> None:
    cast = Cast(
        generates(until=3),
        generates(until=4, end="error", name="c-2"),
        generates(until=5, end="eof", name="c-3"),
        generates(name="c-4"),
    )
    fleet = [FakeReplica([cast]) for _ in range(5)]
    prices = {"m": {"input": 1, "output": 1}}
    async with fleet[0], fleet[1], fleet[2], fleet[3], fleet[4], resuming(*fleet, prices=prices) as run:
        text, parsed, _ = await stream_of(run, chat(max_tokens=15, **USAGE))
        assert text == "".join(STORY[:15])
        assert [asked["max_tokens"] for asked in cast.asked] == [15, 13, 10, 6]
        assert all(asked["stream_options"] == USAGE["stream_options"] for asked in cast.asked)
        counts = parsed[-1]["usage"]
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (PROMPT_TOKENS, 15)
        assert counts["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
        assert parsed[-2]["choices"][0]["finish_reason"] == "length"
        await eventually(request_lines)
        (logged,) = request_lines()
        assert (logged["resumed"], logged["status"], "error" in logged) == (3, 200, False)
        assert [attempt["reason"] for attempt in logged["failed_attempts"]] == ["reset", "status", "reset"]
        assert len({logged["replica"], *(attempt["replica"] for attempt in logged["failed_attempts"])}) == 4
        assert (logged["prompt_tokens"], logged["completion_tokens"]) == (PROMPT_TOKENS, 15)
        assert await counted(run, "completion_tokens_total") == 15
        assert await counted(run, "resumed_streams_total", result="good", model="m") == 1


async def fails(run: Running, body: dict[str, Any], result: str) -> tuple[str, str]:
    """(the text, the error) of a stream that nobody can finish."""
    text, parsed, _ = await stream_of(run, body)
    errors = [event["error"] for event in parsed if "error" in event]
    assert len(errors) == 1
    assert parsed[-1] == {"error": errors[0]}
    assert await counted(run, "resumed_streams_total", result=result) == await counted(run, "resumed_streams_total") == 1
    return text, errors[0]["message"]


async def test_a_request_that_kills_its_engines_ends_after_a_few(request_lines: Lines) -> None:
    cast = Cast(generates(until=3))
    fleet = [FakeReplica([cast]) for _ in range(6)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], fleet[4], fleet[5], resuming(*fleet) as run:
        text, error = await fails(run, chat(), "failed")
        assert text == "".join(STORY[:8])
        assert "failed while it answered" in error
        assert len(cast.asked) == 4
        await eventually(request_lines)
        assert request_lines()[0]["resumed"] == 3
        assert "failed while it answered" in request_lines()[0]["error"]


@pytest.mark.parametrize("before", [1, 2])
async def test_what_was_sent_before_the_first_byte_counts_too(before: int) -> None:
    cast = Cast(*[dies] * before, generates(until=3))
    fleet = [FakeReplica([cast]) for _ in range(6)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], fleet[4], fleet[5], resuming(*fleet) as run:
        await fails(run, chat(), "failed")
        assert len(cast.asked) == 4


@pytest.mark.parametrize("refusal", [dies, status(503), status(429), writes(b"\x00 what?\r\n\r\n")])
async def test_replicas_that_do_not_begin_are_passed_over(refusal: Behaviour, request_lines: Lines) -> None:
    cast = Cast(generates(until=5), refusal, generates())
    fleet = [FakeReplica([cast]) for _ in range(3)]
    async with fleet[0], fleet[1], fleet[2], resuming(*fleet) as run:
        assert (await stream_of(run, chat()))[0] == TEXT
        assert len(cast.asked) == 3
        await eventually(request_lines)
        logged = request_lines()[0]
        assert logged["resumed"] == 1
        assert len(logged["failed_attempts"]) == 2, "each attempt is on a fresh connection, so that none is repeated silently"


async def test_a_replica_that_is_gone_is_passed_over() -> None:
    fleet = [FakeReplica(), FakeReplica(), FakeReplica()]

    async def takes_another_with_it(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        next(replica for replica in fleet if not replica.requests).refuse()
        await generates(until=5)(request, writer)

    cast = Cast(takes_another_with_it, generates())
    for replica in fleet:
        replica.script = [cast]
    async with fleet[0], fleet[1], fleet[2], resuming(*fleet) as run:
        assert (await stream_of(run, chat()))[0] == TEXT
        assert len(cast.asked) == 2


@pytest.mark.parametrize("odd", [answers(), writes(http(200, b"<html>", "text/html"))])
async def test_what_is_no_stream_is_not_passed_on(odd: Behaviour) -> None:
    cast = Cast(generates(until=5), odd)
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        assert (await fails(run, chat(), "failed"))[0] == "".join(STORY[:4])


async def test_an_engine_that_does_not_take_the_request_ends_it() -> None:
    cast = Cast(generates(until=5), status(400, "unknown field continue_final_message"), generates())
    fleet = [FakeReplica([cast]) for _ in range(3)]
    async with fleet[0], fleet[1], fleet[2], resuming(*fleet) as run:
        assert (await fails(run, chat(), "failed"))[0] == "".join(STORY[:4])
        assert len(cast.asked) == 2


async def test_without_another_replica_it_cannot_be_resumed() -> None:
    async with FakeReplica([generates(until=5)]) as one, resuming(one) as run:
        assert (await fails(run, chat(), "impossible"))[0] == "".join(STORY[:4])


@pytest.mark.parametrize("body", [chat(tools=[{"type": "function"}]), chat(n=1, logprobs=True), completion(max_tokens=None)])
async def test_what_is_more_than_a_text_ends_with_an_error(body: dict[str, Any]) -> None:
    cast = Cast(generates(until=5), generates())
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        await fails(run, body, "impossible")
        assert len(cast.asked) == 1


async def test_an_error_that_is_the_clients_passes() -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    bad = writes(STREAM_HEAD + chunk(events(chat())[1]) + chunk(line(error) + DONE) + b"0\r\n\r\n")
    async with FakeReplica([bad]) as one, FakeReplica([bad]) as two, resuming(one, two) as run:
        text, parsed, _ = await stream_of(run, chat())
        assert (text, parsed[-1]) == (STORY[0], error)
        assert await counted(run, "resumed_streams_total") == 0


@pytest.mark.parametrize("end", ENDS)
async def test_off_by_default(end: str, request_lines: Lines) -> None:
    cast = Cast(generates(until=5, end=end), generates())
    config = {"timeouts": {"idle_s": 0.03}} if end == "silence" else {}
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, running(one, two, **config) as run:
        text, parsed, _ = await stream_of(run, chat())
        assert text == "".join(STORY[:4])
        assert "error" in parsed[-1]
        assert len(cast.asked) == 1
        await eventually(request_lines)
        assert "resumed" not in request_lines()[0]
        assert await counted(run, "resumed_streams_total") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_that_cannot_be_resumed_begins_again_before_its_first_token(path: str, request_lines: Lines) -> None:
    """Messages are not resumed, nor are chats with tools: here no token has passed."""
    opening = events(chat())[:1] if path.endswith("completions") else [b"event: ping\ndata: {}\n\n"]
    text = b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"x"}}\n\n'
    whole = events(chat()) if path.endswith("completions") else [text, b"event: message_stop\ndata: {}\n\n"]
    broken = writes(STREAM_HEAD + b"".join(map(chunk, opening)) + b"0\r\n\r\n")
    cast = Cast(broken, writes(STREAM_HEAD + b"".join(map(chunk, whole)) + b"0\r\n\r\n"))
    body = {**chat(tools=[{"type": "function", "function": {"name": "f"}}]), "max_tokens": 5}
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        async with run.session.post(run.url + path, json=body) as answer:
            assert b"error" not in await answer.read()
        assert len(cast.asked) == 2
        await eventually(request_lines)
        assert "error" not in request_lines()[0]


async def test_a_client_that_leaves_the_second_part_frees_its_replica(request_lines: Lines) -> None:
    never = asyncio.Event()
    cast = Cast(generates(until=3), streams("and", "on", hold=never))
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        stream = await run.client.chat.completions.create(**chat())
        assert [(await anext(stream)).choices[0].delta.content for _ in range(4)] == ["", *STORY[:2], "and"]
        await stream.close()
        await eventually(lambda: one.gone + two.gone == 1)
        await eventually(request_lines)
        assert (request_lines()[0]["status"], request_lines()[0]["resumed"]) == (499, 1)


async def test_the_time_of_an_answer_is_limited_over_all_its_parts(request_lines: Lines) -> None:
    never = asyncio.Event()
    cast = Cast(generates(until=3), streams("and", "on", hold=never))
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two, timeouts={"total_s": 2}) as run:
        assert (await fails(run, chat(), "failed"))[0] == "".join([*STORY[:2], "and"])
        assert len(request_lines()[0]["failed_attempts"]) == 1, "the second had less time than any answer"


def generates_then(end: Callable[[asyncio.StreamWriter], None]) -> Behaviour:
    """The whole text with its [DONE], but not the end of its framing; then `end`."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"".join(events(request.json))))
        await writer.drain()
        end(writer)
        await asyncio.Event().wait()

    return behave


def writes_error(writer: asyncio.StreamWriter) -> None:
    writer.write(chunk(ENGINE_ERROR))


def closes(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("end", [closes, writes_error, lambda _: None], ids=["close", "error", "silence"])
async def test_what_comes_after_done_is_no_failure(end: Callable[[asyncio.StreamWriter], None], request_lines: Lines) -> None:
    cast = Cast(generates(until=5), generates_then(end))
    total_s = 0 if end in (writes_error, closes) else 2  # only silence is ended by it
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two, timeouts={"total_s": total_s}) as run:
        assert (await stream_of(run, chat()))[0] == TEXT
        assert await counted(run, "broken_responses_total") == await counted(run, "resumed_streams_total", result="good") == 1
        await eventually(request_lines)
        logged = request_lines()[0]
        assert (len(logged["failed_attempts"]), logged["resumed"], "error" in logged) == (1, 1, False)


class Ticks:
    """A clock of which each reading is a millisecond later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


async def test_streams_that_break_off_together_are_read_in_turns_and_one_after_the_other() -> None:
    sent, turns, ended = SentEvents(Ticks()), 0, list[tuple[str, int]]()

    async def read(name: str) -> None:
        kept = SentBytes()
        for _ in range(40):
            kept.add(event(name * READ_STEP))
        so_far = await sent.read(CONTINUATION, kept)
        assert so_far is not None
        assert so_far.text == 40 * READ_STEP * name
        ended.append((name, turns))

    reading = asyncio.gather(*map(read, "abc"))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert [name for name, _ in ended] == ["a", "b", "c"]
    at = [turn for _, turn in ended]
    assert min(at[0], at[1] - at[0], at[2] - at[1]) >= 40


async def test_streams_of_little_text_that_break_off_together_have_a_turn_each() -> None:
    sent, turns, ended = SentEvents(lambda: 0.0), 0, list[int]()

    async def read() -> None:
        kept = SentBytes()
        kept.add(event("a"))
        assert await sent.read(CONTINUATION, kept)
        ended.append(turns)

    reading = asyncio.gather(*(read() for _ in range(5)))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(set(ended)) == 5


async def test_a_client_that_leaves_while_another_stream_is_read_delays_no_other() -> None:
    sent, kept = SentEvents(Ticks()), SentBytes()
    kept.add(40 * event("a"))
    reads = [asyncio.create_task(sent.read(CONTINUATION, kept)) for _ in range(3)]
    for _ in range(5):  # the first is in the middle of it
        await asyncio.sleep(0)
    reads[0].cancel()
    reads[1].cancel()
    so_far = await reads[2]
    assert so_far is not None
    assert so_far.pieces == 40


def large(size: int) -> dict[str, Any]:
    return {**chat(**USAGE), "messages": [{"role": "user", "content": "x" * size}]}


@pytest.mark.parametrize("room", [True, False])
async def test_the_request_for_the_rest_is_charged_until_it_is_sent(room: bool) -> None:
    breaks, goes_on = asyncio.Event(), asyncio.Event()
    cast = Cast(streams("a", "b", hold=breaks, die=True), streams("c", hold=goes_on))
    limits = {"inflight_mb": 4, "body_mb": 1, "drain_timeout_s": 1}
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two, limits=limits) as run:
        budget = run.gateway.served.memory
        asked = asyncio.create_task(stream_of(run, large(1_000_000)))
        await eventually(lambda: cast.asked)
        others = budget.lease("another client")
        assert others.grow(1 << (10 if room else 21))
        breaks.set()
        if room:
            await eventually(lambda: len(cast.asked) == 2)
            await eventually(lambda: 1_000_000 < budget.held < 1_200_000)
        goes_on.set()
        text, parsed, _ = await asked
        assert (text, len(cast.asked)) == (("abc", 2) if room else ("ab", 1))
        assert [event["error"]["code"] for event in parsed if "error" in event] == ([] if room else ["replica_failed"])
        assert await counted(run, "resumed_streams_total", result="good" if room else "impossible") == 1
        others.close()


async def test_the_request_for_the_rest_is_dropped_when_it_is_sent() -> None:
    size, holds = 1_000_000, [asyncio.Event(), asyncio.Event()]
    parts = iter([streams("first", "second", hold=holds[0], die=True), streams("third", hold=holds[1])])

    async def plays(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await next(parts)(request, writer)

    def memory() -> int:
        """With one request, that of the replica that answers now."""
        one.requests.clear()
        two.requests.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        async with (
            FakeReplica([plays]) as one,
            FakeReplica([plays]) as two,
            resuming(one, two) as run,
            run.session.post(f"{run.url}/v1/chat/completions", json=large(size)) as answer,
        ):
            assert b"first" in await answer.content.readuntil(b"\n\n")
            before = memory()
            holds[0].set()
            while b"third" not in await answer.content.readuntil(b"\n\n"):
                """It is about to go on."""
            await eventually(lambda: memory() - before < size // 2)
            holds[1].set()
            await answer.read()
    finally:
        tracemalloc.stop()


async def test_official_clients_read_it() -> None:
    cast = Cast(generates(until=6), generates(name="c-2"))
    async with FakeReplica([cast]) as one, FakeReplica([cast]) as two, resuming(one, two) as run:
        stream = await run.client.chat.completions.create(**chat(**USAGE))
        parts = [part async for part in stream]
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == TEXT
        assert {part.id for part in parts} == {"c-1"}
        cast.again(generates(until=6))
        with pytest.raises(openai.APIError, match="failed while it answered"):
            _ = [part async for part in await run.client.chat.completions.create(**chat())]
