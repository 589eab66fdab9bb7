"""Generations that belong to a token (`once`): whatever happens to their clients, each is generated once."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from gateway.dialects.events.sse import events_of, object_of
from gateway.features.prompt_log.once.answering import OnceAnswers
from gateway.features.prompt_log.once.runs import OnceRuns
from gateway.features.prompt_log.once.store import MAX_TOKENS
from gateway.request.attempts import MAX_HELD_ANSWER
from gateway.request.owner import owner_of
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.prompt_log.kept import (
    ALL,
    CHAT,
    FORMS,
    MESSAGES,
    NOW,
    USER,
    asked,
    body_of,
    called,
    engine,
    in_turn,
    kept_in,
)
from tests.gateway.features.prompt_log.test_kept_turns import calling_answer, tool_results
from tests.gateway.features.prompt_log.test_refs_api import ref
from tests.support.fakes import FakeReplica, FakeRequest, answers, dies, hangs, http, status, streams, writes

ONCE = 'once="c0ffee-0001"'
TOKEN = "c0ffee-0001"
OWNER = owner_of("", "Bearer k", None)


def both(path: str) -> Callable[[FakeRequest, asyncio.StreamWriter], Awaitable[None]]:
    """An engine that answers in the form that is asked for."""

    async def responds(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await engine(path, stream=bool(request.json.get("stream")))(request, writer)

    return responds


def text_of(path: str, raw: bytes, *, stream: bool) -> str:
    if not stream:
        found = json.loads(raw)
        if path == CHAT:
            return str(found["choices"][0]["message"]["content"])
        parts = found["content"] if path == MESSAGES else found["output"][0]["content"]
        return "".join(part["text"] for part in parts)
    found_events = [object_of(each) for each in events_of(raw)]
    if path == CHAT:
        deltas = [choice["delta"].get("content") for each in found_events for choice in each.get("choices", ())]
    else:
        deltas = [each.get("delta") for each in found_events if str(each.get("type")).endswith("delta")]
        deltas = [each.get("text") if isinstance(each, dict) else each for each in deltas]
    return "".join(each for each in deltas if each)


def results(metrics: dict[str, float]) -> dict[str, int]:
    """Requests with a token, by their result."""
    name = "warmroute_once_total{"
    return {key.split('"')[1]: int(value) for key, value in metrics.items() if key.startswith(name) and value}


def tokens(metrics: dict[str, float]) -> float:
    return sum(value for key, value in metrics.items() if key.startswith("warmroute_completion_tokens_total"))


async def settled(run: Running) -> None:
    await eventually(lambda: not len(run.gateway[OnceRuns]))


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_token_that_comes_again_gets_the_stored_turn(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, first, raw = await asked(run, path, ONCE, [USER], stream=stream)
        assert (code, first["kept"], text_of(path, raw, stream=stream)) == (200, True, "hello")
        await settled(run)
        metered = tokens(await run.metrics())
        assert metered > 0
        for form in (stream, not stream):
            code, again, raw = await asked(run, path, ONCE, [USER], stream=form)
            assert (code, text_of(path, raw, stream=form)) == (200, "hello")
            assert again == {**first, "repeated": True}
        assert len(replica.requests) == 1
        assert results(await run.metrics()) == {"run": 1, "repeated": 2}
        assert tokens(await run.metrics()) == metered
        code, told, _ = await asked(run, path, f'base="{first["head"]}"', [NOW], stream=stream)
        assert (code, told["length"]) == (200, 4)


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_repeated_answer_is_the_same_one(path: str, stream: bool, tmp_path: Path) -> None:
    """Its id, model, reason and usage are those of the generation."""
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, _, raw = await asked(run, path, ONCE, [USER], stream=stream)
        _, _, again = await asked(run, path, ONCE, [USER])
        if not stream:
            one, other = json.loads(raw), json.loads(again)
            for name in ("id", "model", "stop_reason", "status", "output"):
                assert one.get(name) == other.get(name)
            if path == CHAT:
                assert one["choices"][0]["finish_reason"] == other["choices"][0]["finish_reason"]
                assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        assert len(replica.requests) == 1


async def test_a_stream_without_usage_has_it_when_it_is_repeated_plain(tmp_path: Path) -> None:
    """The client of the stream has not asked for the usage, but the gateway has."""
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, _, raw = await asked(run, CHAT, ONCE, [USER], stream=True)
        assert b"completion_tokens" not in raw
        _, _, again = await asked(run, CHAT, ONCE, [USER])
        assert json.loads(again)["usage"] == {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104}
        assert len(replica.requests) == 1


@pytest.mark.parametrize("first", [True, False])
async def test_the_usage_in_a_joined_stream_is_for_the_client_that_asked_for_it(first: bool, tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with FakeReplica([streams("hel", "lo", hold=hold)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        one = asyncio.create_task(asked_raw(run, ONCE, stream=True, stream_options={"include_usage": first}))
        await eventually(lambda: replica.requests)
        other = asyncio.create_task(asked_raw(run, ONCE, stream=True, stream_options={"include_usage": not first}))
        token = run.gateway[OnceRuns].find((OWNER, TOKEN))
        assert token is not None
        await eventually(lambda: token.log.followers == 2)
        hold.set()
        for (code, raw, _), wanted in ((await one, first), (await other, not first)):
            assert (code, text_of(CHAT, raw, stream=True), raw.count(b"data: [DONE]")) == (200, "hello", 1)
            assert (b"completion_tokens" in raw) == wanted
            assert b"prompt_log" in raw
        assert (len(replica.requests), results(await run.metrics())) == (1, {"run": 1, "joined": 1})
        await settled(run)
        assert tokens(await run.metrics()) > 0


@pytest.mark.parametrize("path", FORMS)
async def test_all_who_follow_a_silent_generation_get_signs_of_life(path: str, tmp_path: Path) -> None:
    go = asyncio.Event()

    async def waits(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await both(path)(request, writer)

    headers = {"Authorization": "Bearer k", "Prompt-Log": ONCE}
    asked_for: dict[str, Any] = {"json": body_of(path, [USER], stream=True), "headers": headers}
    limits = {"keepalive_s": 0.02, "drain_timeout_s": 1}
    async with FakeReplica([waits]) as replica, running(replica, limits=limits, **kept_in(tmp_path)) as run:
        url = run.url + path
        async with run.session.post(url, **asked_for) as one, run.session.post(url, **asked_for) as other:
            pulses = [await each.content.readuntil(b"\n\n") for each in (one, other)]
            go.set()
            found = [await each.read() for each in (one, other)]
        assert all(pulse.startswith(b"event: ping\n" if path == MESSAGES else b": ") for pulse in pulses)
        assert [text_of(path, raw, stream=True) for raw in found] == ["hello", "hello"]
        assert len(replica.requests) == 1


@pytest.mark.parametrize("path", FORMS)
async def test_who_waits_for_the_other_form_gets_signs_of_life(path: str, tmp_path: Path) -> None:
    """Then the answer of the generation, or its error as an event."""
    go, fails = asyncio.Event(), False

    async def waits(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await (status(400) if fails else both(path))(request, writer)

    limits = {"keepalive_s": 0.02, "drain_timeout_s": 1}
    headers = {"Authorization": "Bearer k", "Prompt-Log": ONCE}
    async with FakeReplica([waits]) as replica, running(replica, limits=limits, **kept_in(tmp_path)) as run:
        for fails in (True, False):
            go.clear()
            before = len(replica.requests)
            first = asyncio.create_task(asked(run, path, ONCE, [USER], stream=False))
            await eventually(lambda: len(replica.requests) > before)  # noqa: B023
            body = body_of(path, [USER], stream=True)
            async with run.session.post(run.url + path, json=body, headers=headers) as other:
                pulse = await other.content.readuntil(b"\n\n")
                go.set()
                raw = await other.read()
            assert pulse.startswith(b"event: ping\n" if path == MESSAGES else b": ")
            assert (await first)[0] == (400 if fails else 200)
            if fails:
                assert b"error" in raw
                await settled(run)
            else:
                assert text_of(path, raw, stream=True) == "hello"
                assert b'"repeated":true' in raw


async def test_who_waits_for_another_process_gets_signs_of_life(tmp_path: Path) -> None:
    hold = asyncio.Event()
    limits = {"keepalive_s": 0.02, "drain_timeout_s": 1}
    config = {**kept_in(tmp_path), "limits": limits}
    async with FakeReplica([hangs(hold)]) as replica, running(replica, **config) as one, running(replica, **config) as other:
        other.gateway[OnceAnswers].wait_s = 0.5
        first = asyncio.create_task(asked_raw(one, ONCE, stream=True))
        await eventually(lambda: replica.requests)
        code, raw, _ = await asked_raw(other, ONCE, stream=True)
        assert (code, raw.startswith(b": "), b'"code":"once_running"' in raw) == (200, True, True)
        assert len(replica.requests) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        hold.set()


async def test_an_error_before_the_first_token_reaches_a_client_that_has_not_asked_for_usage(
    request_lines: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """As the gateway writes it after pulses. The client's line in the log has an error, too."""
    hold, event = asyncio.Event(), b'data: {"error":{"message":"x","type":"server_error","code":"replica_failed"}}\n\n'
    async with FakeReplica([hangs(hold)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        client = asyncio.create_task(asked_raw(run, ONCE, stream=True))
        await eventually(lambda: replica.requests)
        token = run.gateway[OnceRuns].find((OWNER, TOKEN))
        assert token is not None
        assert token.request is not None
        reply = token.request.reply(keep_alive=True, patience_s=1.0)
        reply.begin(200, b"Content-Type: text/event-stream\r\n", length=None)
        reply.end(event)
        code, raw, _ = await client
        assert (code, raw) == (200, event)
        await eventually(request_lines)
        assert [line.get("error") for line in request_lines()] == ["the generation ended with an error"]
        hold.set()


async def test_a_repeated_answer_is_not_that_of_an_equal_turn(tmp_path: Path) -> None:
    """A turn with the same bytes, kept before without a token, has no facts about an answer."""
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, kept, _ = await asked(run, CHAT, "keep", [USER])
        _, told, raw = await asked(run, CHAT, ONCE, [USER])
        await settled(run)
        _, again, repeated = await asked(run, CHAT, ONCE, [USER])
        one, other = json.loads(raw), json.loads(repeated)
        assert (told["head"], again["head"], again["repeated"]) == (kept["head"], kept["head"], True)
        assert (other["id"], other["model"]) == (one["id"], one["model"])
        assert other["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
        assert len(replica.requests) == 2


async def test_two_tokens_have_rows_of_their_own_even_if_their_answers_are_equal(tmp_path: Path) -> None:
    """The engine gives both answers one id, one text and one usage."""
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        found = [await asked(run, CHAT, f'once="token-000{number}"', [USER]) for number in (1, 2)]
        await settled(run)
        assert found[0][2] == found[1][2]
        children = (await called(run, "GET", found[0][1]["input"]))[1]["children"]
        assert len(children) == len({each["request_id"] for each in children}) == 2
        for number in (1, 2):
            code, again, _ = await asked(run, CHAT, f'once="token-000{number}"', [USER])
            assert (code, again["repeated"]) == (200, True)
        assert len(replica.requests) == 2


@pytest.mark.parametrize("path", FORMS)
async def test_the_same_token_joins_a_running_generation(path: str, tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await both(path)(request, writer)

    async with FakeReplica([slow]) as replica, running(replica, **kept_in(tmp_path)) as run:
        forms = (True, True, False, True)
        clients = [asyncio.create_task(asked(run, path, ONCE, [USER], stream=form)) for form in forms]
        await eventually(lambda: replica.requests)
        hold.set()
        found = await asyncio.gather(*clients)
        assert [each[0] for each in found] == [200] * 4
        assert {text_of(path, each[2], stream=form) for each, form in zip(found, forms, strict=True)} == {"hello"}
        assert len({each[1]["head"] for each in found}) == len(replica.requests) == 1
        counts = results(await run.metrics())
        assert (counts["run"], sum(counts.values())) == (1, 4), "the form that came first is joined, the other one waits"


async def cut(run: Running, path: str, token: str, turns: list[Any], size: int, *, stream: bool) -> None:
    """A client that leaves after these bytes of the answer and its head; 0: once it has sent its request."""
    host, port = run.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(body_of(path, turns, stream=stream)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"
    head += f'Prompt-Log: once="{token}"\r\nContent-Length: {len(body)}\r\n\r\n'
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        if size > 0:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readexactly(size)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("path", FORMS)
async def test_a_client_that_leaves_at_any_byte_finds_its_answer(path: str, tmp_path: Path) -> None:
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, _, whole = await asked(run, path, 'once="measured"', [USER], stream=True)
        lengths = range(0, len(whole) + 400, 1 if path == CHAT else 7)  # the head, and each byte of the stream
        limit = asyncio.Semaphore(16)

        async def one(size: int) -> None:
            async with limit:
                turns = [{"role": "user", "content": f"cut after {size}"}]
                await cut(run, path, f"cut-at-{size:05}", turns, size, stream=True)
                code, told, raw = await asked(run, path, f'once="cut-at-{size:05}"', turns, stream=True)
                assert (code, text_of(path, raw, stream=True)) == (200, "hello"), told

        await asyncio.gather(*map(one, lengths))
        await settled(run)
        assert len(replica.requests) == 1 + len(lengths)
        found = results(await run.metrics())
        assert found["run"] == 1 + len(lengths)


@pytest.mark.parametrize("path", FORMS)
async def test_another_request_with_the_token_is_refused(path: str, tmp_path: Path) -> None:
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, ONCE, [USER], temperature=0.5)
        for turns, header, more in (
            ([NOW], ONCE, {"temperature": 0.5}),
            ([USER], f'{ONCE}, base="{first["head"]}"', {"temperature": 0.5}),
            ([USER], ONCE, {"temperature": 0.6}),
            ([USER], ONCE, {"temperature": 0.5, "tools": [{"type": "function", "function": {"name": "f"}, "name": "f"}]}),
        ):
            code, error, _ = await asked(run, path, header, turns, **more)
            assert (code, error["code"]) == (422, "once_mismatch")
        same = {"temperature": 0.5, "metadata": {"user_id": "x"}, "stream": True}
        code, told, _ = await asked(run, path, ONCE, [USER], **same)
        assert (code, told["repeated"], len(replica.requests)) == (200, True, 1)
        assert results(await run.metrics()) == {"run": 1, "mismatch": 4, "repeated": 1}


async def test_a_request_is_not_compared_with_one_that_does_not_get_the_token(tmp_path: Path) -> None:
    """Another gateway claims the token for the same request, while a different one waits here for the store."""
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, ONCE, [USER])
        await settled(run)
        with contextlib.closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as file:
            ended = file.execute("select * from warmroute_once").fetchone()
            file.execute("delete from warmroute_once")
            file.execute("begin immediate")
            different = asyncio.create_task(asked(run, CHAT, ONCE, [NOW]))
            await eventually(lambda: len(run.gateway[OnceRuns]))
            same = asyncio.create_task(asked(run, CHAT, ONCE, [USER]))
            await asked(run, CHAT, None, [USER])  # the one before it waits by now
            file.execute(f"insert into warmroute_once values ({', '.join('?' * len(ended))})", ended)
            file.execute("commit")
        code, told, _ = await same
        assert (code, told.get("repeated")) == (200, True)
        assert (await different)[0] == 422


@pytest.mark.parametrize("path", FORMS)
async def test_results_of_other_calls_of_the_base_are_another_request(path: str, tmp_path: Path) -> None:
    """Swapped results of two calls are two conversations; the calls are in the base only."""
    calling = writes(http(200, json.dumps(calling_answer(path, "c0", "c1")).encode()))
    async with FakeReplica([in_turn(calling, both(path))]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        header, turns = f'{ONCE}, base="{first["head"]}"', tool_results(path, "c0", "c1")
        assert (await asked(run, path, header, turns))[0] == 200
        code, error, _ = await asked(run, path, header, swapped(path, turns))
        assert (code, error["code"], len(replica.requests)) == (422, "once_mismatch", 2)
        code, told, _ = await asked(run, path, header, turns)
        assert (code, told["repeated"], len(replica.requests)) == (200, True, 2)


def swapped(path: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The two results, each with the id of the other one."""
    name = {CHAT: "tool_call_id", MESSAGES: "tool_use_id"}.get(path, "call_id")
    made = copy.deepcopy(turns)
    results_ = made[0]["content"] if path == MESSAGES else made
    results_[0][name], results_[1][name] = results_[1][name], results_[0][name]
    return made


async def test_a_token_of_another_owner_is_like_none(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, ONCE, [USER])
        code, told, _ = await asked(run, CHAT, ONCE, [NOW], key="another")
        assert (code, "repeated" in told, len(replica.requests)) == (200, False, 2)
        ended = await called(run, "DELETE", f"once/{TOKEN}")
        foreign = await called(run, "DELETE", f"once/{TOKEN}", key="third")
        unknown = await called(run, "DELETE", "once/unknown-token", key="third")
        assert ended == foreign == unknown
        assert unknown[0] == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_is_stopped_by_its_owner_only(stream: bool, tmp_path: Path) -> None:
    hold = asyncio.Event()
    slow = streams("hel", "lo", hold=hold) if stream else hangs(hold)
    async with FakeReplica([in_turn(slow, both(CHAT))]) as replica, running(replica, **kept_in(tmp_path)) as run:
        client = asyncio.create_task(asked_raw(run, ONCE, stream=stream))
        await eventually(lambda: replica.requests)
        assert (await called(run, "DELETE", f"once/{TOKEN}", key="another"))[0] == 404
        assert (await called(run, "GET", f"once/{TOKEN}"))[0] == 405
        assert await called(run, "DELETE", f"once/{TOKEN}") == (200, {"stopped": True})
        code, raw, repeats = await client
        assert (code, b"once_stopped" in raw or b"was stopped" in raw) == (200 if stream else 409, True)
        assert repeats == (None if stream else "false"), "an SDK that repeats the request would begin it anew"
        await eventually(lambda: replica.gone == 1)
        assert (await called(run, "DELETE", f"once/{TOKEN}"))[0] == 404
        await settled(run)
        code, told, _ = await asked(run, CHAT, ONCE, [USER], stream=stream)
        assert (code, told["kept"], len(replica.requests)) == (200, True, 2)
        hold.set()


class WatchedEvent(asyncio.Event):
    """waited: somebody has waited for it."""

    waited = False

    async def wait(self) -> Literal[True]:
        self.waited = True
        return await super().wait()


@pytest.mark.parametrize("here", [True, False])
async def test_a_stop_is_told_to_those_who_wait(here: bool, tmp_path: Path) -> None:
    """In the other form, or at another gateway: they do not begin the generation anew."""
    hold, end, state = asyncio.Event(), WatchedEvent(), kept_in(tmp_path)
    async with (
        FakeReplica([in_turn(streams("hel", "lo", hold=hold), both(CHAT))]) as replica,
        running(replica, **state) as one,
        running(replica, **state) as other,
    ):
        first = asyncio.create_task(asked_raw(one, ONCE, stream=True))
        await eventually(lambda: replica.requests)
        run, waiting = one.gateway[OnceRuns].find((OWNER, TOKEN)), one if here else other
        assert run is not None
        run.ended = end
        second = asyncio.create_task(asked_raw(waiting, ONCE))
        await eventually(lambda: end.waited if here else len(other.gateway[OnceRuns].watched))
        assert await called(one, "DELETE", f"once/{TOKEN}") == (200, {"stopped": True})
        code, raw, _ = await second
        assert (code, b"once_stopped" in raw, len(replica.requests)) == (409, True, 1)
        await first
        code, told, _ = await asked(other, CHAT, ONCE, [NOW])
        assert (code, told["kept"], len(replica.requests)) == (200, True, 2), "the token is free, for any request"
        assert results(await other.metrics()) == {"run": 1}
        hold.set()


async def asked_raw(run: Running, header: str, **more: Any) -> tuple[int, bytes, str | None]:
    """(status, body, x-should-retry)."""
    headers = {"Authorization": "Bearer k", "Prompt-Log": header}
    async with run.session.post(run.url + CHAT, json=body_of(CHAT, [USER], **more), headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers.get("x-should-retry")


@pytest.mark.parametrize("path", FORMS)
async def test_a_failed_generation_frees_its_token(path: str, tmp_path: Path) -> None:
    behaviours = [status(400), dies, both(path)]

    async def present(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await behaviours[0](request, writer)

    async with FakeReplica([present]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, _, _ = await asked(run, path, ONCE, [USER])
        assert code == 400
        await settled(run)
        behaviours.pop(0)
        code, _, _ = await asked(run, path, ONCE, [USER])
        assert code >= 500
        await settled(run)
        behaviours.pop(0)
        code, told, _ = await asked(run, path, ONCE, [USER])
        assert (code, told["kept"]) == (200, True)
        assert results(await run.metrics()) == {"run": 3}


@pytest.mark.parametrize("turn", [USER, NOW])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "an event after pulses"])
async def test_a_failed_generation_is_told_to_nobody_who_comes_later(
    turn: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    """Its token is not free yet, because the store is busy: the same request, or another one, waits, and begins anew."""
    hold, end = asyncio.Event(), WatchedEvent()
    limits = {"keepalive_s": 0.02 if stream else 3600, "drain_timeout_s": 1}

    async def refuses(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await status(400)(request, writer)

    engines = in_turn(refuses, both(CHAT))
    async with FakeReplica([engines]) as replica, running(replica, limits=limits, **kept_in(tmp_path)) as run:
        first = asyncio.create_task(asked_raw(run, ONCE, stream=stream))
        await eventually(lambda: replica.requests)
        token = run.gateway[OnceRuns].find((OWNER, TOKEN))
        assert token is not None
        await eventually(lambda: token.begun.is_set() == stream)
        token.ended = end
        with contextlib.closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as busy:
            busy.execute("begin immediate")
            hold.set()
            code, raw, _ = await first
            assert (code, b'"error"' in raw) == (200 if stream else 400, True)
            second = asyncio.create_task(asked(run, CHAT, ONCE, [turn], stream=stream))
            await eventually(lambda: end.waited or second.done())
            busy.execute("rollback")
        code, told, _ = await second
        assert (code, told["kept"], len(replica.requests)) == (200, True, 2), told
        assert results(await run.metrics()) == {"run": 2}


async def test_a_stream_that_breaks_off_is_generated_anew(tmp_path: Path) -> None:
    """It has an end, an error event, and that is not the answer."""
    engines = in_turn(streams("hel", die=True), both(CHAT))
    async with FakeReplica([engines]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, raw, _ = await asked_raw(run, ONCE, stream=True)
        assert b"prompt_log" not in raw
        await settled(run)
        code, told, raw = await asked(run, CHAT, ONCE, [USER], stream=True)
        assert (code, told["kept"], text_of(CHAT, raw, stream=True)) == (200, True, "hello")
        assert (len(replica.requests), results(await run.metrics())) == (2, {"run": 2})


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_kept_is_held_in_memory(stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, "keep", [NOW])
        run.gateway[OnceRuns].pause_s = 0.01
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("alter table warmroute_responses rename to gone")
        code, told, raw = await asked(run, CHAT, ONCE, [USER], stream=stream)
        assert (code, told["kept"], text_of(CHAT, raw, stream=stream)) == (200, False, "hello")
        await settled(run)
        code, told, again = await asked(run, CHAT, ONCE, [USER], stream=stream)
        assert (code, told["kept"], again, len(replica.requests)) == (200, False, raw, 2)
        assert results(await run.metrics()) == {"run": 1, "joined": 1}


async def test_a_large_plain_answer_is_held_in_memory(tmp_path: Path) -> None:
    """It passes as it comes, so it is not kept."""
    text = "x" * (MAX_HELD_ANSWER + 1)
    async with FakeReplica([answers(text)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, told, raw = await asked(run, CHAT, ONCE, [USER])
        assert (code, told["kept"], text_of(CHAT, raw, stream=False) == text) == (200, False, True)
        await settled(run)
        assert (await asked(run, CHAT, ONCE, [USER]))[::2] == (200, raw)
        assert len(replica.requests) == 1


async def test_nothing_is_generated_without_the_store(tmp_path: Path) -> None:
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, "keep", [NOW])
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("alter table warmroute_once rename to gone")
        code, error, _ = await asked(run, CHAT, ONCE, [USER])
        assert (code, error["code"], len(replica.requests)) == (503, "state_unavailable", 1)


@pytest.mark.parametrize("path", FORMS)
async def test_the_expected_head_of_a_repeated_request_is_compared(path: str, tmp_path: Path) -> None:
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, base, _ = await asked(run, path, "keep", [USER])
        header = f'{ONCE}, base="{base["head"]}"'
        _, first, _ = await asked(run, path, header, [NOW])
        await settled(run)
        code, told, _ = await asked(run, path, f'{header}, expect="{first["input"]}"', [NOW])
        assert (code, told["repeated"]) == (200, True)
        code, error, _ = await asked(run, path, f'{header}, expect="{first["head"]}"', [NOW], stream=True)
        assert (code, error["code"], error["length"]) == (409, "prompt_log_diverged", 3)
        assert error["heads"] == [base["input"], base["head"], first["input"]]
        assert len(replica.requests) == 2


# -- refs


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_repeated_answer_tells_where_the_ref_is(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([both(path)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, base, _ = await asked(run, path, 'keep, ref="main"', [USER])
        header = f'{ONCE}, base="{base["head"]}", ref="main"'
        _, first, _ = await asked(run, path, header, [NOW], stream=stream)
        await settled(run)
        assert first["ref"] is True
        _, again, _ = await asked(run, path, header, [NOW], stream=stream)
        assert again == {**first, "repeated": True}
        _, bare, _ = await asked(run, path, f'{ONCE}, base="{base["head"]}"', [NOW], stream=stream)
        assert "ref" not in bare
        _, later, _ = await asked(run, path, f'keep, base="{first["head"]}", ref="main"', [USER])
        _, again, _ = await asked(run, path, header, [NOW], stream=stream)
        assert (again["repeated"], again["ref"]) == (True, False), "another device went on; the ref stays"
        assert (await ref(run, "GET", "main"))[1]["head"] == later["head"]
        assert len(replica.requests) == 3


async def test_a_repeated_answer_moves_a_ref_as_its_generation_would(tmp_path: Path) -> None:
    """The ref is at the base, or at another beginning of the turn, or does not exist; else it stays."""
    async with FakeReplica([both(CHAT)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, zero, _ = await asked(run, CHAT, "keep", [USER])
        _, base, _ = await asked(run, CHAT, f'keep, base="{zero["head"]}"', [USER])
        header = f'{ONCE}, base="{base["head"]}"'
        _, first, _ = await asked(run, CHAT, header, [NOW])
        await settled(run)
        for at, moved in ((None, True), (base["head"], True), (first["input"], True), (zero["head"], False)):
            await ref(run, "DELETE", "main")
            if at is not None:
                assert (await ref(run, "PUT", "main", at, If_None_Match="*"))[0] == 200
            _, told, _ = await asked(run, CHAT, f'{header}, ref="main"', [NOW])
            assert (told["repeated"], told["ref"]) == (True, moved)
            assert (await ref(run, "GET", "main"))[1]["head"] == (first["head"] if moved else at)


async def test_a_request_with_another_ref_waits_for_the_end(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with FakeReplica([streams("hel", "lo", hold=hold)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        one = asyncio.create_task(asked(run, CHAT, ONCE, [USER], stream=True))
        await eventually(lambda: replica.requests)
        token = run.gateway[OnceRuns].find((OWNER, TOKEN))
        assert token is not None
        token.ended = end = WatchedEvent()
        other = asyncio.create_task(asked(run, CHAT, f'{ONCE}, ref="main"', [USER], stream=True))
        await eventually(lambda: end.waited)
        hold.set()
        (_, first, _), (_, told, _) = await one, await other
        assert told == {**first, "repeated": True, "ref": True}
        assert (await ref(run, "GET", "main"))[1]["head"] == first["head"]
        assert len(replica.requests) == 1


# -- several processes


def row(file: sqlite3.Connection) -> tuple[Any, ...]:
    return tuple(file.execute("select runner, alive_until, turn from warmroute_once where token = ?", [TOKEN]).fetchone())


@pytest.mark.parametrize("path", FORMS)
async def test_another_gateway_waits_for_the_end_and_has_the_answer(path: str, tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await both(path)(request, writer)

    state = kept_in(tmp_path)
    async with FakeReplica([slow]) as replica, running(replica, **state) as one, running(replica, **state) as other:
        first = asyncio.create_task(asked(one, path, ONCE, [USER], stream=True))
        await eventually(lambda: replica.requests)
        second = asyncio.create_task(asked(other, path, ONCE, [USER]))
        await eventually(lambda: len(other.gateway[OnceRuns].watched))
        hold.set()
        (code, told, _), (also, again, raw) = await first, await second
        assert (code, also, text_of(path, raw, stream=False)) == (200, 200, "hello")
        assert (again["head"], again["repeated"], len(replica.requests)) == (told["head"], True, 1)
        assert results(await other.metrics()) == {"repeated": 1}


@pytest.mark.parametrize("path", FORMS)
async def test_a_turn_that_is_stored_after_its_answer_ends_its_token(path: str, tmp_path: Path) -> None:
    """The store is late, so the answer says that it is not kept. It is generated once all the same."""
    hold, state = asyncio.Event(), kept_in(tmp_path)

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await both(path)(request, writer)

    async with (
        FakeReplica([in_turn(slow, both(path))]) as replica,
        running(replica, late_s=0.05, **state) as one,
        running(replica, **state) as other,
    ):
        first = asyncio.create_task(asked(one, path, ONCE, [USER], stream=True))
        await eventually(lambda: replica.requests)
        with contextlib.closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as file:
            file.execute("begin immediate")
            await asked(one, path, "keep", [NOW])  # its turn waits for the lock, and the next one for this one
            hold.set()
            code, told, _ = await first
        assert (code, told["kept"]) == (200, False)
        code, told, raw = await asked(other, path, ONCE, [USER])
        assert (code, told["kept"], told["repeated"], text_of(path, raw, stream=False)) == (200, True, True, "hello")
        assert len(replica.requests) == 2


async def test_a_generation_that_runs_for_long_elsewhere_is_conflict(tmp_path: Path) -> None:
    hold, state = asyncio.Event(), kept_in(tmp_path)
    async with (
        FakeReplica([streams("hello", hold=hold)]) as replica,
        running(replica, **state) as one,
        running(replica, **state) as other,
    ):
        first = asyncio.create_task(asked(one, CHAT, ONCE, [USER], stream=True))
        await eventually(lambda: replica.requests)
        other.gateway[OnceAnswers].wait_s = 0.0
        headers = {"Authorization": "Bearer k", "Prompt-Log": ONCE}
        async with other.session.post(other.url + CHAT, json=body_of(CHAT, [USER]), headers=headers) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], answer.headers["Retry-After"]) == (409, "once_running", "5")
        assert (await called(other, "DELETE", f"once/{TOKEN}"))[0] == 200, "any process may stop it"
        await eventually(lambda: replica.gone)
        hold.set()
        with contextlib.suppress(aiohttp.ClientError, StopIteration, RuntimeError):
            await first


async def test_the_token_of_a_silent_runner_is_taken_over_by_one(tmp_path: Path) -> None:
    hold, state = asyncio.Event(), kept_in(tmp_path)

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await both(CHAT)(request, writer)

    async with FakeReplica([slow]) as replica, running(replica, **state) as one, running(replica, **state) as other:
        hold.set()
        await asked(one, CHAT, ONCE, [USER])
        await settled(one)
        hold.clear()
        dead = "update warmroute_once set runner = 'dead-1', turn = '', alive_until = ?"
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute(dead, [time.time() + 60])
        for run in (one, other):
            run.gateway[OnceAnswers].wait_s = 0.0
        assert (await asked(other, CHAT, ONCE, [USER]))[0] == 409, "it may be alive"
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute(dead, [time.time() - 1])
        for run in (one, other):
            run.gateway[OnceAnswers].wait_s = 30.0
        clients = [asyncio.create_task(asked(run, CHAT, ONCE, [USER])) for run in (one, other) for _ in range(4)]
        await eventually(lambda: len(replica.requests) == 2)
        hold.set()
        found = await asyncio.gather(*clients)
        assert [each[0] for each in found] == [200] * 8
        assert len(replica.requests) == 2, "one of them generates"
        both_results = [results(await run.metrics()) for run in (one, other)]
        assert sum(each.get("taken_over", 0) for each in both_results) == 1


async def test_what_a_runner_finds_after_it_was_taken_over_does_not_end_the_token(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with FakeReplica([streams("hello", hold=hold)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        client = asyncio.create_task(asked_raw(run, ONCE, stream=True))
        await eventually(lambda: replica.requests)
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("update warmroute_once set runner = 'another-1'")
        hold.set()
        with contextlib.suppress(aiohttp.ClientError):
            await client
        await settled(run)
        with sqlite3.connect(tmp_path / "state.db") as file:
            assert (row(file)[0], row(file)[2]) == ("another-1", "")


async def test_the_end_of_a_gateway_frees_its_tokens(tmp_path: Path) -> None:
    hold = asyncio.Event()
    state = {**kept_in(tmp_path), "limits": {"drain_timeout_s": 1}}
    async with FakeReplica([in_turn(streams("hello", hold=hold), both(CHAT))]) as replica:
        async with running(replica, **state) as run:
            client = asyncio.create_task(asked_raw(run, ONCE, stream=True))
            await eventually(lambda: replica.requests)
            await run.gateway[OnceRuns].close()
            assert b"shutting down" in (await client)[1]
            code, error, _ = await asked(run, CHAT, 'once="another-token"', [USER])
            assert (code, error["code"]) == (503, "shutting_down")
        async with running(replica, **state) as run:
            code, told, _ = await asked(run, CHAT, ONCE, [USER])
            assert (code, told["kept"], results(await run.metrics())) == (200, True, {"run": 1})


# -- bounds and time


async def test_an_owner_has_a_bounded_number_of_tokens(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, ONCE, [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            rows = [(OWNER, f"token-{n:06}", "d", "r", 0.0, "turn_x", time.time() + 60) for n in range(MAX_TOKENS - 1)]
            file.executemany("insert into warmroute_once values (?, ?, ?, ?, ?, ?, ?)", rows)
        code, error, _ = await asked(run, CHAT, 'once="one-too-many"', [USER])
        assert (code, error["code"], len(replica.requests)) == (429, "too_many_tokens", 1)
        code, told, _ = await asked(run, CHAT, ONCE, [USER])
        assert (code, told["repeated"]) == (200, True)
        code, _, _ = await asked(run, CHAT, 'once="one-too-many"', [USER], key="another")
        assert code == 200
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("update warmroute_once set expires_at = 7 where token = 'token-000007'")
        code, _, _ = await asked(run, CHAT, 'once="one-too-many"', [USER])
        assert code == 200, "an expired one makes room"


async def test_a_token_is_forgotten_after_a_day(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, ONCE, [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            left = file.execute("select expires_at from warmroute_once").fetchone()[0] - time.time()
            assert 86_000 < left <= 86_400
            file.execute("update warmroute_once set expires_at = 7")
        assert await (await run.gateway[OnceRuns].open()).purge() == 1
        code, told, _ = await asked(run, CHAT, ONCE, [NOW])
        assert (code, "repeated" in told, len(replica.requests)) == (200, False, 2)


async def test_an_answer_that_is_gone_is_not_generated_again(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, ONCE, [USER])
        await called(run, "DELETE", told["head"])
        code, error, _ = await asked(run, CHAT, ONCE, [USER])
        assert (code, error["code"], len(replica.requests)) == (410, "prompt_log_expired", 1)


async def test_generations_take_places_of_background_runs(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        runs = run.gateway[OnceRuns]
        taken = 0
        while runs.places.admit(OWNER, "203.0.113.7"):
            taken += 1
        code, error, _ = await asked(run, CHAT, ONCE, [USER])
        assert (code, error["code"], taken) == (429, "too_many_background_responses", 200)
        for _ in range(taken):
            runs.places.release(OWNER, "203.0.113.7")
        assert (await asked(run, CHAT, ONCE, [USER]))[0] == 200
        await settled(run)
        assert runs.places.taken == 0


async def test_refused_requests_count_for_the_limits_of_their_key(tmp_path: Path) -> None:
    """What the log refuses has read the store, so it is a request of the key."""
    head = f"pl1_{'x' * 42}A"
    unknown, diverged, frame = f'base="{head}"', f'expect="{head}"', f'frame="pf1_{"x" * 43}"'
    async with FakeReplica([both(CHAT)]) as replica, keyed(tmp_path, replica, **kept_in(tmp_path)) as run:
        for header, turns, refused in (
            (unknown, USER, (404, "prompt_log_not_found")),
            (diverged, USER, (409, "prompt_log_diverged")),
            (f"keep, {diverged}", USER, (409, "prompt_log_diverged")),
            (frame, USER, (404, "prompt_frame_not_found")),
            (ONCE, NOW, (422, "once_mismatch")),
        ):
            _, key = await made(run, requests_per_minute=2)
            if header == ONCE:
                _, another = await made(run)
                assert (await asked(run, CHAT, ONCE, [USER], key=another))[0] == 200
            code, error, _ = await asked(run, CHAT, header, [turns], key=key)
            assert (code, error["code"]) == refused
            assert (await asked(run, CHAT, header, [turns], key=key))[0] == refused[0]
            code, error, _ = await asked(run, CHAT, "name", [USER], key=key)
            assert (code, error["code"]) == (429, "rate_limit_exceeded"), header


async def test_a_key_that_is_revoked_ends_its_generation(tmp_path: Path) -> None:
    hold = asyncio.Event()
    replica_ = FakeReplica([streams("hello", hold=hold)])
    async with replica_ as replica, keyed(tmp_path, replica, **kept_in(tmp_path)) as run:
        id_, key = await made(run)
        headers = {**bearer(key), "Prompt-Log": ONCE}
        body = body_of(CHAT, [USER], stream=True)
        client = asyncio.create_task(run.session.post(run.url + CHAT, json=body, headers=headers))
        await eventually(lambda: replica.requests)
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}") as answer:
            assert answer.status == 200
        await eventually(lambda: replica.gone)
        await settled(run)
        (await client).close()
        async with run.session.post(run.url + CHAT, json=body, headers=headers) as answer:
            assert answer.status == 401
        assert len(replica.requests) == 1
        hold.set()
