"""What realtime sessions use counts against their key while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidStatus

from gateway.features.keys.keys import Keys
from gateway.features.websocket.boundaries import MAX_FRAMES
from gateway.features.websocket.frames import POLICY
from tests.gateway.conftest import Running, eventually
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.websocket.test_frames import masked
from tests.gateway.features.websocket.test_responses_socket import closed
from tests.gateway.features.websocket.test_tunnel import RealtimeReplica, dial
from tests.gateway.features.websocket.test_usage_tap import done, text

PRICES = {"m": {"input": 1.0, "cached_input": 1.0, "output": 1.0}}
A_PRICE = 100_000 / 1e6  # of one answer
CREATE = '{"type": "response.create"}'


async def session(connection: ServerConnection) -> None:
    """An answer for each message; for "none" one without usage."""
    async for message in connection:
        event = {"type": "response.done", "response": {}} if message == "none" else done(90_000, 10_000, 0)
        await connection.send(text(event).decode())


async def asked(client: ClientConnection, message: str | bytes = "go") -> None:
    await client.send(message)
    await client.recv()


def account(run: Running, id_: str) -> Any:
    found = run.gateway[Keys].limiter.account(id_)
    assert found is not None
    return found


async def test_an_answer_counts_when_it_passes_and_the_last_one_ends_the_session(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=2.5 * A_PRICE)
        async with dial(run, additional_headers=bearer(key)) as client:
            await asked(client)
            moment = run.gateway[Keys].moment()
            spent = account(run, id_).spent(moment.day)
            assert spent == round(A_PRICE * 1e12)
            assert account(run, id_).reserved == spent, "as much is reserved for the next one"
            await asked(client)
            await asked(client)
            code, reason = await closed(client)
            assert (code, "budget" in reason) == (POLICY, True)
        await eventually(lambda: account(run, id_).open == 0)
        assert account(run, id_).spent(moment.day) == round(3 * A_PRICE * 1e12), "nothing twice"
        assert account(run, id_).reserved == 0
        with pytest.raises(InvalidStatus, match="429"):
            await dial(run, additional_headers=bearer(key))
    line = request_lines()[0]
    assert (line["status"], line["prompt_tokens"], "budget" in line["error"]) == (101, 270_000, True)


async def test_sessions_reserve_before_they_begin(tmp_path: Path) -> None:
    """An answer of the usual length costs more than half of the budget."""
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        _, key = await made(run, budget_usd_day=0.0015)
        async with dial(run, additional_headers=bearer(key)):
            with pytest.raises(InvalidStatus, match="429"):
                await dial(run, additional_headers=bearer(key))


@pytest.mark.parametrize(
    ("settings", "answers"), [({"requests_per_minute": 3}, 4), ({"uncached_tokens_per_minute": 50_000}, 1)], ids=str
)
async def test_limits_per_minute_hold_within_a_session(tmp_path: Path, settings: dict[str, Any], answers: int) -> None:
    """The first answer is the request of the handshake."""
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url) as run:
        _, key = await made(run, **settings)
        async with dial(run, additional_headers=bearer(key)) as client:
            for _ in range(min(answers, 3)):
                await asked(client)
            assert (await closed(client))[0] == POLICY


async def test_an_answer_without_usage_costs_what_was_reserved(tmp_path: Path) -> None:
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=1.0)
        async with dial(run, additional_headers=bearer(key)) as client:
            await asked(client)
            await asked(client, "none")
            assert account(run, id_).spent(run.gateway[Keys].moment().day) == round(2 * A_PRICE * 1e12)


async def halves(connection: ServerConnection) -> None:
    """A part of an answer for each message."""
    async for _ in connection:
        await connection.send('{"type": "response.output_text.delta", "delta": "word"}')


async def test_who_leaves_a_long_session_pays_at_least_what_is_known(tmp_path: Path) -> None:
    """Its prompt so far, and the events that have passed; also if it leaves before the answer begins."""

    async def behave(connection: ServerConnection) -> None:
        async for message in connection:
            if message == CREATE:
                await connection.send(text(done(90_000, 10_000, 0)).decode())
            elif message == "half":
                await connection.send('{"type": "response.created"}')
                for _ in range(2000):
                    await connection.send('{"type": "response.output_text.delta", "delta": "word"}')

    async with RealtimeReplica(behave).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        for begun in (False, True):
            id_, key = await made(run, budget_usd_day=50 * A_PRICE)
            client = await dial(run, additional_headers=bearer(key))
            await asked(client, CREATE)
            moment = run.gateway[Keys].moment()
            first = account(run, id_).spent(moment.day)
            if begun:
                await client.send("half")
                for _ in range(2001):
                    await client.recv()
            else:
                await client.send('{"type": "response.create", "pad": "' + "x" * 4000 + '"}')
            await client.close()
            await eventually(lambda id_=id_: account(run, id_).open == 0)  # type: ignore[misc]
            assert account(run, id_).spent(moment.day) - first >= (100_000 + 1900 * begun) * 1_000_000, begun
            assert account(run, id_).reserved == 0


LONG = '{"pad": "' + "x" * 400_000 + '", "type": "response.create"}'


@pytest.mark.parametrize("message", [LONG, '{"type": "response.create", "pad": 1e999}'], ids=["long", "no JSON to the gateway"])
async def test_who_leaves_after_a_message_that_is_only_searched_pays_for_it(tmp_path: Path, message: str) -> None:
    async with RealtimeReplica(halves).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=50 * A_PRICE)
        client = await dial(run, additional_headers=bearer(key))
        reserved = account(run, id_).reserved
        assert reserved > 0
        await client.send(message)
        await client.close()
        await eventually(lambda: account(run, id_).open == 0)
        spent = account(run, id_).spent(run.gateway[Keys].moment().day)
        assert spent >= max(reserved, (message is LONG) * 100_000 * 1_000_000)


async def test_who_leaves_between_answers_pays_nothing_more(tmp_path: Path) -> None:
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=50 * A_PRICE)
        async with dial(run, additional_headers=bearer(key)) as client:
            await asked(client, CREATE)
        await eventually(lambda: account(run, id_).open == 0)
        assert account(run, id_).spent(run.gateway[Keys].moment().day) == round(A_PRICE * 1e12)


PAD = "x" * 300_000
NAMING: dict[str, str | bytes] = {
    "session": '{"type": "session.update", "session": {"model": "secret"}}',
    "escaped": r'{"type": "session.update", "session": {"mod\u0065l": "secret"}}',
    "nested": '{"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "secret"}}}}}',
    "response": '{"type": "response.create", "response": {"model": "secret"}}',
    "beside": '{"type": "session.update", "model": "secret"}',
    "long": '{"type": "session.update", "pad": "' + PAD + '", "session": {"model": "secret"}}',
    "long, escaped": '{"type": "session.update", "pad": "' + PAD + r'", "session": {"mod\u0065l": "secret"}}',
    "a number beyond doubles": '{"type": "session.update", "pad": 1e999, "session": {"model": "secret"}}',
    "deep": '{"type": "session.update", "pad": ' + "[" * 2000 + "]" * 2000 + ', "session": {"model": "secret"}}',
    "UTF-16": '{"type": "session.update", "session": {"model": "secret"}}'.encode("utf-16"),
}


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("kind", NAMING)
async def test_a_session_names_no_other_model_than_its_key_may_use(tmp_path: Path, kind: str, parts: int) -> None:
    seen = list[str | bytes]()

    async def listens(connection: ServerConnection) -> None:
        async for message in connection:
            seen.append(message)
            await connection.send("{}")

    allowed: list[str | bytes] = [
        '{"type": "session.update", "session": {"model": "m"}}',
        '{"type": "input_audio_buffer.append", "audio": "' + "AmodelA/" * 40_000 + '"}',
        '{"type": "conversation.item.create", "text": "' + r"\u4f60\u597d" * 25_000 + '"}',
        bytes(range(256)) * 9,
    ]
    message = NAMING[kind]
    size = len(message) // parts + 1
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    async with RealtimeReplica(listens).up() as replica, keyed(tmp_path, replica.url) as run:
        (_, key), (_, free) = await made(run, models=["m"]), await made(run)
        async with dial(run, additional_headers=bearer(key)) as client:
            for each in allowed:
                await asked(client, each)
            await client.send(pieces)
            assert (await closed(client))[0] == POLICY
        assert seen == allowed, "the replica has no such message"
        async with dial(run, additional_headers=bearer(free)) as client:
            await client.send(pieces)
            await client.recv()
        assert seen[len(allowed) :] == [message]


@pytest.mark.parametrize("kind", [kind for kind in NAMING if kind != "nested"])
@pytest.mark.parametrize("query", ["", "?model=m"])
async def test_a_session_of_a_key_with_a_budget_has_one_model(tmp_path: Path, kind: str, query: str) -> None:
    """Its answers have the price of the handshake's model; a model for transcription only is none of an answer."""
    seen, prices = list[str | bytes](), {"*": {"input": 1.0, "output": 1.0}}

    async def listens(connection: ServerConnection) -> None:
        async for message in connection:
            seen.append(message)
            await connection.send("{}")

    async with RealtimeReplica(listens).up() as replica, keyed(tmp_path, replica.url, prices=prices) as run:
        _, key = await made(run, budget_usd_day=1.0)
        async with dial(run, query, additional_headers=bearer(key)) as client:
            allowed = [NAMING["nested"], *(['{"type": "session.update", "model": "m"}'] if query else [])]
            for each in allowed:
                await asked(client, each)
            await client.send(NAMING[kind])
            assert (await closed(client))[0] == POLICY
        assert seen == allowed


@pytest.mark.parametrize("politely", [True, False], ids=["close", "abort"])
async def test_who_leaves_in_the_middle_of_an_answer_pays_what_was_reserved(tmp_path: Path, politely: bool) -> None:
    async with RealtimeReplica(halves).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=1.0)
        client = await dial(run, additional_headers=bearer(key))
        reserved = account(run, id_).reserved
        await asked(client)
        if politely:
            await client.close()
        else:
            client.transport.abort()
        await eventually(lambda: account(run, id_).open == 0)
        assert (account(run, id_).spent(run.gateway[Keys].moment().day), account(run, id_).reserved) == (reserved, 0)


async def test_a_flood_in_which_usage_could_hide_ends_the_session(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """Pings of the client, whose pongs come at once from the replica."""
    go = asyncio.Event()

    async def flooding(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.write(b"\x8a\x00" * (2 * MAX_FRAMES))
        await go.wait()

    async with RealtimeReplica(flooding).up() as replica, keyed(tmp_path, replica.url, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=1.0)
        async with dial(run, additional_headers=bearer(key)) as client:
            client.transport.write(masked(1, b"go"))
            try:
                await closed(client)
            finally:
                go.set()
        await eventually(lambda: account(run, id_).open == 0)
        assert account(run, id_).spent(run.gateway[Keys].moment().day) > 0
    assert "frames" in request_lines()[0]["error"]


async def test_a_revoked_key_has_no_further_answer(tmp_path: Path) -> None:
    async with RealtimeReplica(session).up() as replica, keyed(tmp_path, replica.url) as run:
        id_, key = await made(run)
        async with dial(run, additional_headers=bearer(key)) as client:
            await asked(client)
            async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}") as revoked:
                assert revoked.status == 200
            await asked(client)
            assert await closed(client) == (POLICY, f"The key {id_} was revoked.")
