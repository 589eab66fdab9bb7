"""One client's bodies do not fill the event loop."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gateway.core import Surroundings
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.openai.generations import ChatBody
from gateway.features.histories.items import CONVERSATION, REFERENCES, StoredItems
from gateway.features.translation.forms import OPERATION, TranslatedForm
from gateway.parser import wire
from gateway.parser.parsing import MAX_PARTS, SMALL_BYTES, Parsing
from gateway.parser.process import ParserProcess
from gateway.request.exchange import Exchange
from gateway.request.record import new_record
from gateway.shares import BURST_S, MAX_CLIENTS, QUICK_S, SHARE, LoopShares
from gateway.turns import Turns, turns_of
from tests.gateway.composed import CHAT, completion, composed
from tests.gateway.conftest import eventually, running
from tests.support.compiled import uncompiled
from tests.support.fakes import FakeReplica
from tests.support.in_memory import BytesRequest, replica

HERE = "127.0.0.1"
A_YEAR = 3e7  # of work: the client's share is used up for as long as a test runs
TEXT = os.urandom(3 * SMALL_BYTES).hex()


def chat(text: str = "hi", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def test_a_client_has_a_share_after_a_burst() -> None:
    shares = LoopShares()
    shares.spent("a", BURST_S, 0.0)
    assert not shares.is_used_up("a", 0.0)
    shares.spent("a", BURST_S, 0.0)
    assert shares.is_used_up("a", 0.0)
    assert not shares.is_used_up("b", 0.0)
    assert shares.is_used_up("a", BURST_S / SHARE - 0.1)
    assert not shares.is_used_up("a", BURST_S / SHARE + 0.1)
    shares.spent("a", BURST_S / 2, 100.0)
    assert not shares.is_used_up("a", 100.0), "what was long ago is forgotten"


def test_many_clients_take_no_memory() -> None:
    shares = LoopShares()
    for number in range(3 * MAX_CLIENTS):
        shares.spent(f"long {number}", 10.0, 0.0)
    assert len(shares._debts) == MAX_CLIENTS
    shares.spent("later", 10.0, 1000.0)
    assert list(shares._debts) == ["later"]


class RecordedProcess(ParserProcess):
    """Records the operations, and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = list[str]()

    async def run(self, arguments: tuple[Any, ...], body: bytes, client: str = "") -> tuple[Any, ...]:
        self.ran.append(arguments[0])
        if arguments[0] == OPERATION:
            raise NotImplementedError
        return {wire.MEMBERS: ({}, 0), REFERENCES: ([],), CONVERSATION: (b"{}", None)}[arguments[0]]


async def test_bodies_of_a_client_beyond_its_share_are_read_elsewhere() -> None:
    process = RecordedProcess()
    parsing, api = Parsing(process, 256, 16), ChatBody()
    stored = StoredItems(parsing)
    large = chat(TEXT)
    assert parsing.at_once(api, large, client="a")
    parsing.turns.charge("a", A_YEAR)
    assert parsing.at_once(api, large, client="a") is None
    assert parsing.at_once(api, large, client="b")
    assert parsing.at_once(api, chat(), client="a")
    for client in ("a", "b"):
        await parsing.members(large, client)
        await stored.references(large, client)
        await stored.conversation_fields(b'{"metadata":{}}' + b" " * SMALL_BYTES, client)
        assert process.ran == [wire.MEMBERS, REFERENCES, CONVERSATION], "the other client's are read in the loop"


@pytest.mark.parametrize("free", [True, False])
async def test_work_in_turns_is_charged(free: bool) -> None:
    turns = Turns()
    if not free:
        turns.later(lambda: None)

    def works() -> None:
        end = time.perf_counter() + 2 * BURST_S
        while time.perf_counter() < end:
            """It takes its time."""

    await turns.take(works, "a")
    assert turns.exceeds_share("a")
    assert not turns.exceeds_share("")


async def test_one_call_of_each_client_waits_for_the_thread() -> None:
    turns, order, hold = Turns(), list[str](), threading.Event()

    def noted(name: str) -> Callable[[], str]:
        def work() -> str:
            hold.wait(40)
            assert threading.current_thread() is not threading.main_thread()
            order.append(name)
            return name

        return work

    calls = [asyncio.create_task(turns.outside(noted(name), name[0])) for name in ("a1", "a2", "a3", "b1")]
    await eventually(turns._one.locked)
    hold.set()
    assert await asyncio.gather(*calls) == ["a1", "a2", "a3", "b1"]
    assert order == ["a1", "b1", "a2", "a3"]
    assert not turns._locks


class RecordedExecutor(ThreadPoolExecutor):
    """Counts its calls."""

    calls = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        return super().submit(fn, *args, **kwargs)


async def test_decompression_is_charged_and_leaves_the_loop() -> None:
    """Also of a body that is refused before it is parsed."""
    zipped, bomb = gzip.compress(chat(TEXT)), gzip.compress(bytes(1 << 22))
    encoding = {"Content-Encoding": "gzip"}
    async with FakeReplica() as fake, running(fake) as run:
        turns = turns_of(asyncio.get_running_loop())
        threads = RecordedExecutor()
        asyncio.get_running_loop().set_default_executor(threads)
        assert (await run.session.post(f"{run.url}/v1/chat/completions", data=bomb, headers=encoding)).status == 413
        assert HERE in turns._shares._debts
        assert not threads.calls
        turns.charge(HERE, A_YEAR)
        answer = await run.session.post(f"{run.url}/v1/chat/completions", data=zipped, headers=encoding)
        assert answer.status == 200
        assert fake.requests[-1].body == chat(TEXT)
        assert threads.calls


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that advances with each reading."""
    readings = iter(range(10**9))
    return lambda: next(readings) * step_s


@pytest.mark.parametrize(("took_s", "counts"), [(QUICK_S / 2, 0), (2 * QUICK_S, 1)])
async def test_quick_parsing_does_not_count(took_s: float, counts: int) -> None:
    parsing, api = Parsing(RecordedProcess(), 256, 16, ticking(took_s)), ChatBody()
    parsing.at_once(api, chat(), client="small")
    parsing.at_once(api, chat(TEXT), client="large")
    assert list(parsing.turns._shares._debts) == ["large"] * counts


@uncompiled
@pytest.mark.parametrize(("step_s", "counts"), [(QUICK_S / 100, False), (1.0, True)])
async def test_parsing_and_block_keys_count_unless_they_are_quick(step_s: float, counts: bool) -> None:
    async with composed(replica(completion), Surroundings(clock=ticking(step_s))) as gateway:
        turns = turns_of(asyncio.get_running_loop())
        await gateway.lifecycle.serve(BytesRequest(chat(), CHAT))
        assert not turns._shares._debts
        await gateway.lifecycle.serve(BytesRequest(chat(TEXT), CHAT))
        assert bool(turns._shares._debts) is counts


@uncompiled
async def test_a_client_beyond_its_share_has_its_requests_translated_elsewhere() -> None:
    process = RecordedProcess()
    parsing, request, api = Parsing(process, 256, 16), BytesRequest(chat(TEXT[: SMALL_BYTES + 9]), "/v1/messages"), Messages()
    exchange = Exchange(request, api, new_record(None, request.path, 0.0))
    exchange.api = api.parse(request.take(), MAX_PARTS)
    parsing.turns.charge(request.lease.account.client, A_YEAR)
    with pytest.raises(NotImplementedError):
        await TranslatedForm(parsing).prepare(exchange)
    assert process.ran == [OPERATION]
