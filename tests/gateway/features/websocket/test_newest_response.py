"""A message that goes on with the newest response of its connection, which nothing keeps: through a whole gateway."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection

from tests.gateway.conftest import eventually, running
from tests.gateway.features.responses.test_recall import forgetful, kept_in, replica, texts
from tests.gateway.features.websocket.test_responses_socket import answer, dial, nothing_held, receive
from tests.gateway.request.test_dialects import COMPLETED, CREATED, DELTA, events
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, http, models, status, streams

Stored = pytest.mark.parametrize("kept", [False, True], ids=["off", "store"])
UNKNOWN = "previous_response_not_found"


def state(path: Path, *, kept: bool) -> dict[str, Any]:
    return {"state": kept_in(path)} if kept else {}


async def turn(client: ClientConnection, text: Any, previous: str | None = None, **more: Any) -> dict[str, Any]:
    """The response; of an error the message."""
    message = {"type": "response.create", "model": "m", "input": text, "store": False, **more}
    if previous is not None:
        message["previous_response_id"] = previous
    await client.send(json.dumps(message))
    last = (await answer(client))[-1]
    found: dict[str, Any] = last.get("response", last)
    return found


def stored(path: Path) -> int:
    """The responses in a database, which may not have been opened."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE name = 'warmroute_responses'").fetchall()
        return int(database.execute("SELECT count(*) FROM warmroute_responses").fetchone()[0]) if tables else 0


@Stored
async def test_a_conversation_without_a_store(tmp_path: Path, kept: bool, request_lines: Any) -> None:
    """As Codex has it: any replica can answer, the keys extend, and nothing is refused."""
    async with replica() as one, replica() as two, running(one, two, **state(tmp_path, kept=kept)) as run:
        async with dial(run) as client:
            found, said, long = await turn(client, "a" * 4000), ["a" * 4000], " and on" * 100
            for number in range(5):
                said.append(f"to {said[-1][:20]}")
                text = f"b{number}{long}"
                last, found = found, await turn(client, text, found["id"])
                assert (found["previous_response_id"], found["store"]) == (last["id"], False)
                said.append(text)
            asked = max((each.json for each in (*one.requests, *two.requests)), key=lambda each: len(texts(each)))
            assert texts(asked) == said
            assert (asked["store"], asked["previous_response_id"]) == (False, None)
        await nothing_held(run)
        lines = request_lines()
        assert [line["status"] for line in lines] == [200] * 6
        cached = [line["cached_tokens_predicted"] for line in lines]
        assert cached[1] > 0
        assert cached == sorted(cached)
        assert len({line["replica"] for line in lines}) == 1
        assert (await run.metrics())['warmroute_histories_total{result="connection"}'] == 5
    assert not stored(tmp_path / "kept.sqlite")


async def test_replicas_that_speak_chat_only() -> None:
    async def chat_only(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/chat/completions":
            await streams("hello")(request, writer)
        else:
            writer.write(http(404, b'{"detail":"Not Found"}'))

    async with FakeReplica(script=[chat_only]) as one, running(one) as run, dial(run) as client:
        first = await turn(client, "a")
        second = await turn(client, "b", first["id"])
        assert second["previous_response_id"] == first["id"]
        await turn(client, "c", second["id"])
        asked = [message["content"] for message in one.requests[-1].json["messages"]]
        assert json.dumps(asked).count("hello") == 2
        assert [asked[0], asked[2], asked[4]] == ["a", "b", "c"]


async def test_the_official_client() -> None:
    async with replica() as one, running(one) as run, run.client.responses.connect() as client:
        previous: dict[str, Any] = {}
        for text in "abc":
            await client.response.create(model="m", input=text, store=False, **previous)
            async for event in client:
                if event.type == "response.completed":
                    assert event.response.previous_response_id == previous.get("previous_response_id")
                    previous = {"previous_response_id": event.response.id}
                    break
        assert texts(one.requests[-1].json) == ["a", "to a", "b", "to b", "c"]


ITEMS = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.one_of(
            st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=20)),
            st.builds(
                lambda text: {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
                st.text(max_size=20),
            ),
            st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, st.text(max_size=20)),
        ),
        min_size=1,
        max_size=3,
    ),
)
TURNS = st.lists(st.tuples(ITEMS, st.sampled_from(["", "a", "b"]), st.booleans()), min_size=1, max_size=8)


def listed(text: Any) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}] if isinstance(text, str) else text


@settings(max_examples=25, deadline=None)
@given(TURNS)
def test_any_turns_are_what_one_request_with_all_items_is(turns: list[tuple[Any, str, bool]]) -> None:
    """Byte for byte, but for the members that say so. Lanes go on with their own responses, or begin again."""

    async def play() -> None:
        async with replica() as one, running(one) as run:
            async with dial(run) as client:
                histories: dict[str, tuple[str, list[Any]]] = {}
                for text, lane, goes_on in turns:
                    previous, before = histories.get(lane, ("", [])) if goes_on else ("", [])
                    found = await turn(client, text, previous or None, **({"stream_id": lane} if lane else {}))
                    by_socket = one.requests[-1].json
                    whole = {"model": "m", "input": before + listed(text) if previous else text, "store": False}
                    await run.post({**whole, "stream": False}, "/v1/responses")
                    by_http = one.requests[-1].json
                    assert by_socket.pop("previous_response_id", None) is by_http.pop("previous_response_id", None) is None
                    assert (by_socket.pop("stream"), by_http.pop("stream")) == (True, False)
                    assert by_socket == by_http
                    output = json.loads(json.dumps(found["output"]))
                    for item in output:
                        item["content"] = [{k: v for k, v in part.items() if v is not None} for part in item["content"]]
                    histories[lane] = found["id"], before + listed(text) + output
            await eventually(lambda: run.gateway.served.memory.held == 0)

    asyncio.run(play())


@Stored
async def test_only_the_newest_is_remembered_and_only_here(tmp_path: Path, kept: bool) -> None:
    async with replica() as one, running(one, **state(tmp_path, kept=kept)) as run:
        async with dial(run) as client, dial(run) as other:
            first = await turn(client, "a")
            assert (await turn(other, "x", first["id"]))["error"]["code"] == UNKNOWN
            second = await turn(client, "b", first["id"])
            assert (await turn(client, "x", first["id"]))["error"]["code"] == UNKNOWN
            third = await turn(client, "c", second["id"])
        async with dial(run) as client:
            assert (await turn(client, "x", third["id"]))["error"]["code"] == UNKNOWN
        await nothing_held(run)


def cut(_hold: asyncio.Event) -> Behaviour:
    return events(CREATED, DELTA, end=b"")


@pytest.mark.parametrize("failure", [lambda _: status(500), lambda _: status(400, "bad"), cut], ids=["500", "400", "cut"])
async def test_a_failed_response_replaces_nothing(failure: Callable[[asyncio.Event], Behaviour]) -> None:
    script = [forgetful, failure(asyncio.Event()), forgetful]
    async with FakeReplica(script=script, listing=models("m")) as one, running(one) as run, dial(run) as client:
        first = await turn(client, "a")
        assert "error" in await turn(client, "b", first["id"])
        assert (await turn(client, "b", first["id"]))["previous_response_id"] == first["id"]
        assert texts(one.requests[-1].json) == ["a", "to a", "b"]


async def test_the_last_event_does_not_wait_for_the_end_of_the_stream() -> None:
    """And what is complete is remembered then."""
    hold = asyncio.Event()
    script = [events(CREATED, DELTA, COMPLETED, then=hold), forgetful]
    async with FakeReplica(script=script, listing=models("m")) as one, running(one) as run, dial(run) as client:
        first = await turn(client, "a")
        assert "id" in first
        await client.send(json.dumps({"type": "response.create", "model": "m", "input": "b", "stream_id": "other"}))
        hold.set()
        await answer(client)
        await turn(client, "c", first["id"])
        assert len(texts(one.requests[-1].json)) == 3


async def test_lanes_in_flight_have_their_own_newest_responses() -> None:
    async with replica() as one, running(one) as run:
        async with dial(run) as client:
            newest = {lane: await turn(client, lane, stream_id=lane) for lane in "abc"}
            for lane in "abc":
                message = {"type": "response.create", "model": "m", "input": f"{lane}2", "store": False, "stream_id": lane}
                await client.send(json.dumps({**message, "previous_response_id": newest[lane]["id"]}))
            for _ in range(3 * 6):
                await receive(client)
            asked = sorted(texts(each.json) for each in one.requests[-3:])
            assert asked == [[lane, f"to {lane}", f"{lane}2"] for lane in "abc"]
            joined = await turn(client, "d", stream_id="d")
            await turn(client, "e", joined["id"], stream_id="a")  # of another lane
            assert texts(one.requests[-1].json) == ["d", "to d", "e"]
        await nothing_held(run)


@Stored
async def test_a_prepared_prompt_is_gone_on_with_without_its_output(tmp_path: Path, kept: bool) -> None:
    """As Codex does when it starts; also where the client would have it kept."""
    async with replica() as one, running(one, **state(tmp_path, kept=kept)) as run, dial(run) as client:
        for store in (False, True):
            warm = await turn(client, "tools", generate=False, store=store)
            assert warm["output"] == []
            await turn(client, "a", warm["id"])
            assert texts(one.requests[-1].json) == ["tools", "a"]


async def test_a_kept_response_after_one_that_is_not(tmp_path: Path) -> None:
    """It is kept with its whole history, so it can be gone on with anywhere; and what is kept is the store's."""
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        async with dial(run, additional_headers={"Authorization": "Bearer k"}) as client:
            first = await turn(client, "a")
            second = await turn(client, "b", first["id"], store=True)
            assert (second["store"], second["previous_response_id"]) == (True, first["id"])
            third = await turn(client, "c", second["id"], store=True)
            fourth = await turn(client, "d", third["id"])
            fifth = await turn(client, "e", fourth["id"])
            assert fifth["store"] is False
            assert texts(one.requests[-1].json) == ["a", "to a", "b", "to b", "c", "to c", "d", "to d", "e"]
        found = await run.client.responses.create(model="m", input="f", previous_response_id=third["id"])
        assert found.store is True
        assert texts(one.requests[-1].json) == ["a", "to a", "b", "to b", "c", "to c", "f"]
        await run.client.responses.delete(third["id"])
        async with dial(run, additional_headers={"Authorization": "Bearer k"}) as client:
            assert (await turn(client, "x", third["id"]))["error"]["code"] == UNKNOWN


async def test_without_a_store_replicas_are_told_what_the_client_wants() -> None:
    async with replica() as one, running(one) as run, dial(run) as client:
        first = await turn(client, "a", store=True)
        assert one.requests[-1].json["store"] is True
        second = await turn(client, "b", first["id"], store=True)
        assert (second["store"], second["previous_response_id"]) == (True, first["id"])
        assert one.requests[-1].json["store"] is True
        assert texts(one.requests[-1].json) == ["a", "to a", "b"]


async def test_a_flood_of_large_histories_leaves_the_budget_to_requests() -> None:
    limits = {"inflight_mb": 16, "body_mb": 4, "drain_timeout_s": 1}
    async with replica() as one, running(one, limits=limits) as run:
        memory = run.gateway.served.memory
        clients = [await dial(run) for _ in range(12)]
        newest = [await turn(client, "x" * (1 << 20)) for client in clients]
        await eventually(lambda: not run.gateway.router.ledger.open_leases)
        assert 2 << 20 < memory.held < 5 << 20
        memory.check()
        found = [await turn(client, "y", last["id"]) for client, last in zip(clients, newest, strict=True)]
        codes = [each["error"]["code"] if "error" in each else "" for each in found]
        assert codes == [UNKNOWN] * 10 + [""] * 2 or codes == [UNKNOWN] * 9 + [""] * 3
        body = json.dumps({"model": "m", "input": "z" * (3 << 20)}).encode()
        status_, _, _ = await run.post(io.BytesIO(body), "/v1/responses")
        assert status_ == 200
        await asyncio.gather(*(client.close() for client in clients))
        await eventually(lambda: memory.held == 0)


async def test_odd_answers_are_not_remembered() -> None:
    """Without an id, without items, with very many of them."""

    def completed(response: dict[str, Any]) -> Behaviour:
        event = {"type": "response.completed", "sequence_number": 9, "response": response}
        return events(CREATED, DELTA, b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\n")

    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    odd: list[dict[str, Any]] = [
        {"output": [], "usage": usage},
        {"id": "r" * 5000, "output": [], "usage": usage},
        {"id": "resp_odd", "output": {}, "usage": usage},
        {"id": "resp_odd", "output": [{}] * 200_000, "usage": usage},
    ]
    script = [*map(completed, odd), *[forgetful] * 9]
    async with FakeReplica(script=script, listing=models("m")) as one, running(one) as run, dial(run) as client:
        for _ in odd:
            await turn(client, "a")
        assert (await turn(client, "b", "resp_odd"))["error"]["code"] == UNKNOWN
        assert "error" not in await turn(client, "b")
        assert one.requests
