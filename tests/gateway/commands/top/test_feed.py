"""The thread that follows a gateway's events: it slows down who sends too much, and begins anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.operate import KEY, OperatorError
from gateway.commands.top.access import Access
from gateway.commands.top.feed import LOST, MOST_LINE, Feed, decoded, parsed
from tests.gateway.conftest import eventually, running
from tests.support.fakes import FakeReplica, http

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


NOT_FOUND = http(404, b'{"error": {"message": "no such page"}}')


def event(name: str, value: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()


@contextlib.asynccontextmanager
async def sending(*answers: bytes | Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A stand-in of a gateway: each connection gets the next answer, the last one again and again. Its URL."""
    given = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = given.pop(0) if len(given) > 1 else given[0]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    serving = set[asyncio.Task[None]]()
    server = await asyncio.start_server(lambda *ends: serving.add(asyncio.create_task(serve(*ends))), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*serving)


@contextlib.asynccontextmanager
async def following(admin: str, env: dict[str, str] | None = None) -> AsyncIterator[tuple[list[tuple[str, Any]], Access, Feed]]:
    came: list[tuple[str, Any]] = []
    access = Access(admin, env or {})
    feed = Feed(access, lambda name, value: came.append((name, value)))
    feed.start()
    try:
        yield came, access, feed
    finally:
        feed.close()
        await asyncio.to_thread(feed.join, 40)


async def test_events_of_a_gateway() -> None:
    async with FakeReplica() as one, running(one) as run, following(run.admin_url) as (came, _, _):
        await eventually(lambda: len(came) >= 2)
        assert [name for name, _ in came[:2]] == ["hello", "frame"]
        assert came[0][1]["replicas"][0]["name"] == one.name


async def test_it_begins_anew_when_the_events_end() -> None:
    answers = (HEAD + event("hello", {"at": 1}), HEAD + event("hello", {"at": 2}))
    async with sending(*answers) as url, following(url) as (came, _, _):
        await eventually(lambda: len(came) >= 4)
        assert [name for name, _ in came[:4]] == ["hello", LOST, "hello", LOST]
        assert str(came[1][1]) == f"{url} has ended its events"
        assert [value["at"] for name, value in came if name == "hello"][:2] == [1, 2]


async def test_a_key_is_waited_for() -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run, following(run.admin_url) as (came, access, feed):
        await eventually(lambda: came)
        assert (came[0][0], came[0][1].status) == (LOST, 401)
        assert str(came[0][1]).endswith(f"it has an admin key: set {KEY} to it")
        access.use("wrong")
        feed.resume()
        await eventually(lambda: len(came) == 2)
        assert str(came[1][1]).endswith(f"{KEY} is not its admin key")
        access.use("k-1")
        feed.resume()
        await eventually(lambda: came[-1][0] in ("hello", "frame"))
        assert len([name for name, _ in came if name == LOST]) == 2, "nobody asked again with a key that is none"
        with pytest.raises(OperatorError, match="character"):
            access.use("a\r\nb")


async def test_what_has_no_feed_is_told() -> None:
    async with sending(NOT_FOUND) as url, following(url) as (came, _, _):
        await eventually(lambda: came)
        assert (came[0][0], came[0][1].status) == (LOST, 404)
        assert str(came[0][1]).endswith("it is no admin listener (admin_listen), or is of an older release")


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"data: {\n\n",
        HEAD + b"data: " + b"[" * 100_000 + b"\n\n",
        HEAD + b"data: " + b"x" * (MOST_LINE + 10),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>",
        b"HTTP/1.1 500 X\r\nContent-Length: 3\r\n\r\nabc",
        b"SSH-2.0-x\r\n",
        b"",
        HEAD + b"event: hello\nda",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000,
    ],
    ids=["no json", "nested", "endless", "a page", "500", "ssh", "nothing", "cut", "headers"],
)
async def test_what_is_no_feed_is_an_error_and_is_tried_again(answer: bytes) -> None:
    async with sending(answer) as url, following(url) as (came, _, _):
        await eventually(lambda: len(came) >= 2)
        assert {name for name, _ in came} == {LOST}
        assert all(isinstance(value, OperatorError) and str(value) for _, value in came)


async def test_a_sender_is_not_faster_than_the_loop() -> None:
    """However much it sends: one event is on its way into the loop at a time, and the rest waits at the sender's."""
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD)
        while True:
            writer.write(event("frame", {"requests": ["x" * 10_000]}))
            sent += 1
            await writer.drain()

    async with sending(flood) as url, following(url) as (came, _, feed):
        await eventually(lambda: len(came) >= 200)
        feed.close()
        taken = len(came)
        assert sent - taken < 3000, "socket buffers, of 10 kB events"
        await asyncio.sleep(0)
        assert len(came) == taken, "nothing comes after the end"


@given(st.lists(st.tuples(st.sampled_from(["hello", "frame"]), st.dictionaries(st.text(), st.integers() | st.text()))))
def test_lines_are_events(events: list[tuple[str, Any]]) -> None:
    raw = b"".join(event(name, value) + b": comment\n\n" for name, value in events)
    assert list(parsed(iter(raw.splitlines(keepends=True)))) == events


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(ValueError, match="nested"):
        decoded(b"[" * 200_000)
