"""A stand-in of Distributed-Llama's API, a process that crashes as easily as that does, behind a gateway: nothing kills it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config.schema import KeyConfig
from gateway.upstream.access.options import ConnectionOptions
from gateway.upstream.client import ReplicaCall
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import eventually, running
from tests.gateway.features.translation.adaptation.test_request import BODIES
from tests.support.engine_processes import DistributedLlama
from tests.support.fakes import FakeReplica, models

CHAT = "/v1/chat/completions"


def said(text: str, *before: tuple[str, str]) -> list[dict[str, str]]:
    messages = [{"role": role, "content": content} for role, content in before]
    return [*messages, {"role": "user", "content": f"say {text}"}]


# -- what it answers


async def test_clients_get_openais_answers() -> None:
    async with DistributedLlama() as engine, running(engine.config) as run:
        create = run.client.chat.completions.create
        whole = await create(model="dl", messages=said("hello there"), temperature=0.1, top_p=0.5)  # type: ignore[call-overload]
        assert (whole.object, whole.model, whole.choices[0].message.content) == ("chat.completion", "dl", "hello there")
        assert (whole.choices[0].finish_reason, whole.usage) == ("stop", None)
        texts, reasons = "", []
        async for chunk in await create(model="dl", messages=said("a b c d e f"), stream=True, max_tokens=2):  # type: ignore[call-overload]
            texts += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        assert (texts, reasons[-1], set(reasons[:-1])) == ("a b c ", "length", {None})
        assert engine.alive
        assert all(event["stream"] for event in await engine.says(2))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_the_gateways_work_and_end_the_engines(stream: bool) -> None:
    async with DistributedLlama(token_ms=2) as engine, running(engine.config) as run:
        body = {"model": "dl", "messages": said("one two three " * 90), "stop": "two thr", "stream": stream}
        if stream:
            texts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await run.client.chat.completions.create(**body)  # type: ignore[call-overload]
            ]
            assert "".join(texts) == "one "
        else:
            _, _, answer = await run.post(body)
            (choice,) = answer["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
        assert (await run.post({"model": "dl", "messages": said("next")}))[0] == 200
        first, _ = await engine.says(2)
        assert first["generated"] < 300, "the rest was not generated"


async def test_messages_and_responses_are_translated_and_adapted() -> None:
    async with DistributedLlama() as engine, running(engine.config) as run:
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0) as claude:
            message = await claude.messages.create(
                model="dl",
                max_tokens=50,
                messages=said("a stop b"),
                stop_sequences=["stop"],  # type: ignore[arg-type]
            )
            assert [block.text for block in message.content if block.type == "text"] == ["a "]
            async with claude.messages.stream(model="dl", max_tokens=50, messages=said("hello")) as stream:  # type: ignore[arg-type]
                assert await stream.get_final_text() == "hello"
        response = await run.client.responses.create(model="dl", input="say hi there")
        assert response.output_text == "hi there"
        assert engine.alive


async def test_what_it_cannot_do_is_an_error_or_goes_to_another_replica() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"model": "dl", "messages": said("x"), "tools": tools}
    async with DistributedLlama() as engine, FakeReplica(listing=models("dl")) as other:
        async with running(engine.config) as run:
            code, _, answer = await run.post(body)
            assert (code, answer["error"]["param"]) == (400, "tools")
            for path, content in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
                code, _, answer = await run.post({"model": "dl", **content}, path)
                assert (code, "endpoint" in answer["error"]["message"]) == (404, True)
            assert (await run.get("/v1/files"))[0] == 404
        async with running(engine.config, other) as run:
            for _ in range(4):
                assert (await run.post(body))[0] == 200
            assert len(other.requests) == 4
        assert engine.alive
        assert [event for event in engine.events if "unknown" in event] == []


# -- what does not kill it


class Background:
    """A gateway in front of a stand-in, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.engine, self.port = DistributedLlama(), 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),))

    async def _main(self) -> None:
        try:
            async with self.engine, running(self.engine.config, health={"interval_s": 0.05}) as run:
                self.port = int(run.url.rpartition(":")[2])
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def behind() -> Iterator[Background]:
    with Background() as background:
        yield background
        answer = background.request("POST", CHAT, json.dumps({"model": "dl", "messages": said("alive")}).encode(), {})
        assert (answer, background.engine.alive) == (200, True)
        assert [event for event in background.engine.events if "died" in event or "unknown" in event] == []


hostile = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
PATHS = [CHAT, f"{CHAT}?x=1", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/models/dl", "/metrics", "/", "/v1/x%00y"]
RAW = st.binary(max_size=40) | st.sampled_from([b"", b"{", b"null", b"[]", b'{"messages":', b"\0", b'{"model":"dl"}\0{}'])


@hostile
@given(body=BODIES, model=st.sampled_from(["dl", "x", None]), path=st.sampled_from(PATHS))
def test_bodies_of_all_kinds(behind: Background, body: dict[str, Any], model: str | None, path: str) -> None:
    raw = json.dumps({**body, "model": model, "max_tokens": body.get("max_tokens", 2)}).encode()
    status = behind.request("POST", path, raw, {})
    assert status != 502, "no replica has failed"
    assert behind.engine.alive


@hostile
@given(
    body=RAW,
    method=st.sampled_from(["POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
    path=st.sampled_from(PATHS),
    headers=st.dictionaries(
        st.sampled_from(["Authorization", "Expect", "Connection", "X-A", "Upgrade"]), st.text("ab-, ", max_size=5)
    ),
)
def test_requests_of_all_kinds(behind: Background, body: bytes, method: str, path: str, headers: dict[str, str]) -> None:
    with contextlib.suppress(http.client.HTTPException):
        assert (
            behind.request(method, path, body, {**headers, **({"Expect": "100-continue"} if "Expect" in headers else {})})
            != 502
        )
    assert behind.engine.alive


@hostile
@given(
    cut=st.integers(0, 400),
    stream=st.booleans(),
    read=st.integers(0, 600),
    reset=st.booleans(),
    chunked=st.booleans(),
)
def test_clients_that_leave_at_any_moment(
    behind: Background, cut: int, stream: bool, read: int, reset: bool, chunked: bool
) -> None:
    body = json.dumps({"model": "dl", "stream": stream, "messages": said("x" * 90)}).encode()
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    whole = b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (CHAT.encode(), framing, sent)
    with socket.create_connection(("127.0.0.1", behind.port), timeout=60) as client:
        client.sendall(whole[:cut] if cut < 399 else whole)
        if cut >= 399 and read:
            client.recv(read)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert behind.engine.alive


async def test_many_clients_that_leave_at_once_leave_it_alive_and_serve_the_others() -> None:
    chance = random.Random(7)
    async with DistributedLlama(token_ms=1) as engine, running(engine.config, health={"interval_s": 0.01}) as run:

        async def ask(number: int) -> str:
            text = f"{number} " * 5
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * 0.3 if number % 2 else None):
                    whole = await run.client.chat.completions.create(model="dl", messages=said(text))  # type: ignore[arg-type]
                    return "good" if whole.choices[0].message.content == text else "wrong"
            return "left"

        results = await asyncio.gather(*map(ask, range(60)))
        assert [each for number, each in enumerate(results) if number % 2 == 0] == ["good"] * 30
        assert engine.alive
        await eventually(lambda: not run.gateway.upstream.busy(engine.url))


# -- one at a time


async def test_requests_are_queued_in_the_gateway() -> None:
    async with DistributedLlama(token_ms=5) as engine:
        pool = {"replicas": [engine.config], "max_queue": 3, "queue_s": 30}
        async with running(pools=[pool], health={"interval_s": 0.01}) as run:
            asking = [asyncio.create_task(run.post({"model": "dl", "messages": said("x" * 60)})) for _ in range(6)]
            codes = sorted([(await each)[0] for each in asking])
            assert codes == [200] * 4 + [429] * 2, "one runs, three wait"
            served = await engine.says(4)
            assert not any(event["waited"] for event in served), "no other connection, probes included"


async def test_a_replica_of_another_kind_beside_it_does_not_make_it_serve_two() -> None:
    async with (
        DistributedLlama(token_ms=5) as engine,
        FakeReplica(listing=models("dl")) as other,
        running(engine.config, other) as run,
    ):
        await asyncio.gather(*(run.post({"model": "dl", "messages": said(f"{number}" * 60)}) for number in range(12)))
        await eventually(lambda: len(engine.served) + len(other.requests) == 12)
        assert not any(event["waited"] for event in engine.served)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_it_reads_the_prompt_takes_it_down_with_nobody(stream: bool) -> None:
    """It works on until its first token, and would answer no probe meanwhile."""
    health = {"interval_s": 0.05, "timeout_s": 0.1, "failures": 1}
    async with DistributedLlama(prefill_ms=1000, token_ms=1) as engine, running(engine.config) as run:
        await reload(run, engine.config, health=health)
        (state,) = run.gateway.fleet.replicas
        errors = list[str]()
        body = {"model": "dl", "messages": said("x" * 900), "stream": stream}
        asking = asyncio.create_task(run.post(body))
        await engine.prefills()
        asking.cancel()
        while not engine.served:
            errors.append(state.error)
            await asyncio.sleep(0.01)
        (served,) = engine.served
        assert (set(errors), served["generated"] < 100) == ({""}, True), "nor does it generate for nobody"
        await eventually(lambda: not run.gateway.upstream.busy(engine.url))
        assert (await run.post({"model": "dl", "messages": said("y")}))[0] == 200
        assert state.up


async def test_a_replica_that_gets_other_options_still_serves_one_at_a_time_and_stays_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUR_KEY", "secret")
    health = {"interval_s": 60, "timeout_s": 0.1, "failures": 1}
    async with DistributedLlama(prefill_ms=1500, token_ms=1) as engine, running(engine.config, health=health) as run:
        upstream, (state,) = run.gateway.upstream, run.gateway.fleet.replicas

        async def ask() -> None:
            call = ReplicaCall("POST", CHAT, b"", json.dumps({"messages": said("x" * 30), "stream": True}).encode())
            call.adapted = True
            answer = await upstream.open(engine.url, call)
            try:
                await answer.read(1 << 20)
            finally:
                answer.close()

        first = asyncio.create_task(ask())
        await engine.prefills()
        options = state.member.connection_options
        upstream.set_options(engine.url, ConnectionOptions(KeyConfig(env="OUR_KEY"), None, options.fragile))
        await run.gateway.fleet.probe_all(upstream)
        assert not first.done()
        assert state.up, "the probe has waited for the request"
        second = asyncio.create_task(ask())
        await asyncio.gather(first, second)
        assert not (await engine.says(2))[0]["waited"]


# -- one conversation


async def test_conversations_are_held_to_the_replica_that_keeps_them() -> None:
    async with DistributedLlama() as one, DistributedLlama() as two, running(one.config, two.config) as run:
        talks = [said(f"{name} begins. " * 20) for name in ("first", "second")]
        places: list[list[str]] = [[], []]
        for _ in range(4):
            for number, talk in enumerate(talks):
                code, headers, answer = await run.post({"model": "dl", "messages": talk})
                assert code == 200
                places[number].append(headers["X-Warmroute-Replica"])
                talk.append(answer["choices"][0]["message"])
                talk.append({"role": "user", "content": f"say {number} goes on. " * 4})
        assert [len(set(each)) for each in places] == [1, 1]
        for engine in (one, two):
            assert [event["cached"] for event in await engine.says(4)] == [0, 2, 4, 6]


async def test_what_another_conversation_has_displaced_is_not_believed_to_be_there() -> None:
    async with DistributedLlama() as engine, running(engine.config) as run:
        first, second = said("first " * 100), said("second " * 100)
        matched = []
        for talk in (first, first, second, first):
            _, headers, _ = await run.post({"model": "dl", "messages": talk})
            matched.append(int(headers["X-Warmroute-Cached-Tokens"]) > 0)
        assert matched == [False, True, False, False]


# -- its life


async def test_a_restart_is_noticed() -> None:
    async with running("http://127.0.0.1:1") as run:
        async with DistributedLlama() as engine:
            await reload(run, engine.config, health={"interval_s": 0.02})
            assert (await run.post({"model": "dl", "messages": said("x")}))[0] == 200
        await eventually(lambda: not next(iter(run.gateway.fleet.replicas)).up)
        assert next(iter(run.gateway.fleet.replicas)).down_by == "refused"


async def test_a_replica_that_dies_within_a_stream_is_an_error() -> None:
    async with DistributedLlama(token_ms=5) as engine, running(engine.config) as run:
        stream = await run.client.chat.completions.create(model="dl", messages=said("x" * 600), stream=True)  # type: ignore[call-overload]
        await anext(aiter(stream))
        engine.kill()
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_operators_see_what_it_is(request_lines: Any) -> None:
    async with DistributedLlama() as engine, running(engine.config) as run:
        (row,) = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
        assert (row["engine"], row["up"], row["models"]) == ("distributed-llama", True, ["dl"])
        await run.post({"model": "dl", "messages": said("x")})
        (line,) = request_lines()
        assert "translated" not in line
        assert sum(value for name, value in (await run.metrics()).items() if name.startswith("warmroute_unmetered")) == 1


async def test_it_is_not_probed_while_it_works() -> None:
    """A probe would wait behind the request, and time out."""
    health = {"interval_s": 0.02, "timeout_s": 0.3, "failures": 1}
    async with DistributedLlama(token_ms=150) as engine, running(engine.config) as run:
        await reload(run, engine.config, health=health)
        (state,) = run.gateway.fleet.replicas
        errors = list[str]()
        asking = asyncio.create_task(run.post({"model": "dl", "messages": said("x" * 12)}))
        while not asking.done():
            errors.append(state.error)
            await asyncio.sleep(0.01)
        assert (await asking)[0] == 200
        assert set(errors) == {""}
