"""What others will add, each as a toy: registered by one argument, with no other line of the product changed. And a request
that is served without any socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import orjson
import pytest

from gateway.cluster.messages import Drain
from gateway.core import Surroundings
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect, OuterReader, StreamReader
from gateway.dialects.table import DIALECTS, Dialects
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, bad_request
from gateway.fleet.membership import Member
from gateway.request.client import ClientReply, InternalRequest
from gateway.request.exchange import AnswerTap, Exchange
from gateway.request.extensions import Answerer, Preparer
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot
from gateway.upstream.headers import Address
from tests.gateway.composed import CHAT, chat, completion, composed, stream
from tests.gateway.conftest import BODY, eventually, running
from tests.support.fakes import DONE, FakeReplica, streams
from tests.support.in_memory import BytesReply, BytesRequest, MemoryDials, framed, replica

# -- a request without a socket


async def test_a_request_runs_from_bytes_to_bytes() -> None:
    async with composed(replica(completion)) as gateway:
        request = BytesRequest(chat(), CHAT, X_Request_Id="mine")
        reply = await gateway.served.lifecycle.serve(request)
    assert isinstance(reply, BytesReply)
    assert (reply.status, reply.whole) == (200, True)
    assert b"X-Request-Id: mine\r\n" in reply.headers
    assert orjson.loads(reply.body)["choices"][0]["message"]["content"] == "hi"


def _same(reply: BytesReply) -> BytesReply:
    return reply


async def test_a_request_that_never_was_bytes() -> None:
    """A client's request to one path makes two to another one: the first is answered, the second is refused."""
    records: list[SettledRequest] = []
    async with composed(replica(completion), Surroundings(observers=[records.append])) as gateway:
        asked, replies = BytesRequest(b"", "/v1/steps", X_Tenant_Id="acme", X_Request_Id="asked"), [BytesReply(), BytesReply()]
        for reply, model in zip(replies, ("m", "no such model"), strict=True):
            body = chat(model=model)
            api = ApiRequest(model, b"hello " * 100, "", stream=False, metered=True, body=body)
            lease = asked.lease.account.lease()
            lease.grow(len(body))
            request = InternalRequest(asked, f"step-{len(records)}", partial(_same, reply), lease, CHAT)
            assert await gateway.lifecycle.run(request, api, asked.caller()) is reply
            lease.close()
    assert [(reply.status, reply.whole) for reply in replies] == [(200, True), (404, True)]
    assert orjson.loads(replies[0].body)["choices"][0]["message"]["content"] == "hi"
    assert orjson.loads(replies[1].body)["error"]["code"] == "model_not_found"
    ours = [(record.id, record.path, record.sender.tenant, record.subject.model, record.status) for record in records]
    assert ours == [("step-0", CHAT, "acme", "m", 200), ("step-1", CHAT, "acme", "no such model", 404)]
    assert records[0].spent.consumed is not None
    assert asked.lease.account.held == 0


async def test_a_stream_runs_from_bytes_to_bytes_without_the_usage_that_the_client_has_not_asked_for() -> None:
    async with composed(replica(stream)) as gateway:
        reply = await gateway.served.lifecycle.serve(BytesRequest(chat(stream=True), CHAT))
    assert isinstance(reply, BytesReply)
    assert (reply.status, reply.whole) == (200, True)
    assert reply.body.count(b"data: ") == 4
    assert b"usage" not in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "path", "status", "code"),
    [
        (b"no json", CHAT, 400, "invalid_json"),
        (chat().replace(b'"m"', b'"other"'), CHAT, 404, "model_not_found"),
        (b"{}", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_its_errors_are_bytes_too(body: bytes, path: str, status: int, code: str) -> None:
    async with composed(replica(completion)) as gateway:
        reply = await gateway.served.lifecycle.serve(BytesRequest(body, path))
    assert isinstance(reply, BytesReply)
    assert (reply.status, orjson.loads(reply.body)["error"]["code"]) == (status, code)


# -- a dialect


class EchoReader(StreamReader):
    """Its events end with "over"."""

    def feed(self, chunk: bytes) -> bytes:
        self.done = self.done or b"over" in chunk
        return chunk

    def finish(self) -> bytes:
        return b""


class Echo(Dialect):
    """`{"say": TEXT}`; the answer's `tokens` are its cost."""

    name: ClassVar[str] = "echo"

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        try:
            text = json.loads(raw)["say"]
        except (ValueError, KeyError, TypeError) as error:
            raise bad_request("'say' is needed.", "say") from error
        return ApiRequest("m", text.encode(), "", stream=False, metered=True, body=raw)

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return EchoReader()

    def usage_of(self, body: bytes) -> Usage | None:
        return Usage(json.loads(body)["tokens"], 1, 0)

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return orjson.dumps({"oops": error.message})

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        return b"oops\n\n"


WITH_ECHO = Surroundings(dialects=Dialects({**DIALECTS, "/v1/echo": Echo()}))


async def test_a_dialect_is_routed_metered_and_has_its_own_errors() -> None:
    settled: list[SettledRequest] = []
    around = Surroundings(dialects=WITH_ECHO.dialects, observers=[settled.append])
    async with composed(replica(lambda _request: framed(b'{"echo":"hi","tokens":500}')), around) as gateway:
        answers = [
            await gateway.served.lifecycle.serve(BytesRequest(b'{"say":"%b"}' % (b"x" * 2000), "/v1/echo")) for _ in range(2)
        ]
        refused = await gateway.served.lifecycle.serve(BytesRequest(b"{}", "/v1/echo"))
        tokens = gateway.metrics.prompt_tokens.values
    assert [bytes(reply.body) for reply in answers if isinstance(reply, BytesReply)] == [b'{"echo":"hi","tokens":500}'] * 2
    assert isinstance(refused, BytesReply)
    assert (refused.status, bytes(refused.body)) == (400, b'{"oops":"\'say\' is needed."}')
    assert [request.spent.usage for request in settled] == [Usage(500, 1, 0)] * 2 + [None]
    first, second = settled[0].placement, settled[1].placement
    assert second.predicted_cached_tokens > first.predicted_cached_tokens == 0, "the second goes to the first's cache"
    assert tokens["m", "replica.memory:1", "miss"] == 1000


# -- an observer


async def test_an_observer_gets_each_settled_request_and_its_bug_costs_nobody_else() -> None:
    settled: list[SettledRequest] = []

    def broken(_request: SettledRequest) -> None:
        raise ValueError("a bug")

    async with composed(replica(completion), Surroundings(observers=[broken, settled.append])) as gateway:
        await gateway.served.lifecycle.serve(BytesRequest(chat(), CHAT, X_Tenant_Id="acme"))
        await gateway.served.lifecycle.serve(BytesRequest(b"", CHAT))
    first, second = settled
    assert (first.status, first.answer.ok, first.sender.tenant, first.subject.model, first.spent.usage) == (
        200,
        True,
        "acme",
        "m",
        Usage(100, 3, 64),
    )
    assert (second.status, second.answer.ok, second.placement.replica) == (400, False, "")
    assert first.ended >= first.begun


# -- what features add to a request's life


async def test_features_act_at_the_places_of_a_request_and_keep_their_state_in_slots() -> None:
    seen, slot, settled = list[str](), Slot[str]("toy"), list[SettledRequest]()

    def note(place: str) -> Callable[[Exchange], None]:
        return lambda _exchange: seen.append(place)

    def begun(exchange: Exchange) -> None:
        seen.append("begun")
        if exchange.request.headers.get("X-Slot"):
            slot.set(exchange.record, "kept")

    def entering(exchange: Exchange) -> None:
        seen.append("entering")
        if exchange.api.model == "m" and exchange.caller.tenant == "nobody":
            raise GatewayError(418, "teapot", "Not for nobody.")

    async def own(exchange: Exchange) -> ClientReply | None:
        seen.append("answer")
        return gateway.replies.begin(exchange, 203, b"mine", b"") if exchange.caller.tenant == "mine" else None

    async with composed(replica(completion), Surroundings(observers=[settled.append])) as gateway:
        table = gateway.extensions
        table.begun.append(begun)
        table.answerers.append(Answerer(lambda exchange: bool(exchange.caller.tenant), own))
        table.entering.append(entering)
        table.chosen.append(lambda _exchange, live, _now: seen.append(f"chosen of {len(live)}"))
        table.delivered.append(note("delivered"))
        for tenant, status in (("", 200), ("nobody", 418), ("mine", 203)):
            headers = {"X_Tenant_Id": tenant, **({} if tenant else {"X_Slot": "yes"})}
            reply = await gateway.lifecycle.serve(BytesRequest(chat(), CHAT, **headers))
            assert isinstance(reply, BytesReply)
            assert reply.status == status, reply.body
    assert seen == [
        *("begun", "entering", "chosen of 1", "delivered"),
        *("begun", "answer", "entering"),
        *("begun", "answer"),
    ]
    assert [slot.get(record) for record in settled] == ["kept", None, None]
    assert settled[1].slots is None, "a request of which no feature keeps anything has no storage for that"


# -- a member source


class QueueSource:
    """A source that yields what a test puts into its queue; an exception is raised."""

    name, pool, settings, problem = "toy", "default", None, ""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Sequence[Member] | Exception] = asyncio.Queue()

    async def watch(self, *, expects: bool) -> AsyncIterator[Sequence[Member]]:
        while True:
            found = await self.queue.get()
            if isinstance(found, Exception):
                raise found
            yield found


async def test_a_member_source_adds_drains_and_removes_replicas(caplog: pytest.LogCaptureFixture) -> None:
    source, found = QueueSource(), Member("pod-0", "http://pod.memory:1", "default")
    asked: list[str] = []

    def dials(address: Address) -> MemoryDials:
        def answer(request: bytes) -> list[bytes]:
            if b"/v1/chat" in request:
                asked.append(address.host)
            return replica(completion)(request)

        return MemoryDials(address, answer)

    around = Surroundings(dials=dials, members=lambda _config: [source])
    async with composed(replica(completion), around) as gateway:
        fleet = gateway.fleet

        async def ask(number: int) -> str:
            body = chat(messages=[{"role": "user", "content": f"{number} is new"}])
            reply = await gateway.served.lifecycle.serve(BytesRequest(body, CHAT))
            assert isinstance(reply, BytesReply)
            assert reply.status == 200
            return asked[-1]

        await source.queue.put([found])
        await eventually(lambda: (state := fleet.named("pod-0")) and state.up)
        await gateway.control.execute(Drain("replica.memory:1", on=True))
        assert await ask(1) == "pod.memory"
        await gateway.control.execute(Drain("replica.memory:1", on=False))
        assert gateway.local.membership.source_of("pod-0") == "toy"

        await source.queue.put([replace(found, draining=True)])
        await eventually(lambda: (state := fleet.named("pod-0")) and state.draining)
        assert {await ask(number) for number in range(2, 6)} == {"replica.memory"}

        hostile = [Member("replica.memory:1", "http://evil:1", "default"), Member("x\ny", "http://evil:2", "default")]
        await source.queue.put([found, *hostile, Member("lost", "http://evil:3", "no such pool")])
        await eventually(lambda: (state := fleet.named("pod-0")) and not state.draining)
        assert [state.url for state in fleet.replicas] == ["http://replica.memory:1", found.url]
        assert [record.message for record in caplog.records].count("replica is not a member") == 3

        await source.queue.put(OSError("the name server is away"))
        await eventually(lambda: "source of replicas failed" in caplog.text)
        assert fleet.named("pod-0"), "what was known stays"
        await source.queue.put([])
        await eventually(lambda: not (state := fleet.named("pod-0")) or state.leaving)
        assert {await ask(number) for number in range(6, 10)} == {"replica.memory"}


# -- a stage that holds the end of a stream


class EndHolder(OuterReader):
    """Holds the end of a stream."""

    def feed(self, chunk: bytes) -> bytes:
        out = self.inner.feed(chunk)
        self.note()
        self.holds = self.done
        return out.removesuffix(DONE)

    def finish(self) -> bytes:
        return self.inner.finish()


class EndTap(AnswerTap):
    """Gives the end of a stream once the event is set, as a store does that is slow."""

    def __init__(self, go: asyncio.Event) -> None:
        self._go = go

    def reader(self, inner: StreamReader) -> StreamReader:
        return EndHolder(inner)

    async def ended(self, reader: StreamReader) -> bytes:
        await self._go.wait()
        return DONE


async def test_a_held_end_is_waited_for_with_pulses() -> None:
    go = asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        exchange.tap = EndTap(go)

    async with (
        FakeReplica([streams("hello")]) as replica,
        running(replica, limits={"keepalive_s": 0.02, "drain_timeout_s": 1}) as run,
    ):
        run.gateway.extensions.preparers.append(Preparer(lambda _exchange: True, hold))
        async with run.session.post(run.url + CHAT, json={**BODY, "stream": True}) as answer:
            assert b'"hello"' in await answer.content.readuntil(b"\n\n")
            while await answer.content.readuntil(b"\n\n") != b": generating\n\n":
                pass
            go.set()
            assert (await answer.read()).endswith(DONE)
