"""Values are counted, and fields measured, before anything is made of a body."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replica.api.bodies import LONG_BODY, PREPARERS, Preparers
from replica.api.completions.requests import parse
from replica.api.responses.requests import parse_responses
from replica.api.server import ServerConfig
from replica.api.validation import MAX_CONTAINERS, MAX_VALUES, ApiError, check_size, signs_within
from replica.engine import EngineInfo, Message, PromptEnd
from replica.sim.cost import SimConfig
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import FakeClock, WatchedEngine
from tests.support.paths import ROOT

FIRST_TIMES = 20  # processes; without what this is for, each tenth ends with a segmentation fault
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab,[{"\\ \n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a,"[', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def marks(value: Any) -> int:
    """What separates values, and opens lists and objects."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(marks, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(marks, value))
    return 0


def containers(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(containers, inner))


@example(["a\\", ",", "\\\\", "[", '\\"{'], 3, 2)
@given(values, st.integers(0, 200), st.integers(2, 40))
def test_values_are_counted_outside_of_strings(value: Any, limit: int, part: int) -> None:
    raw = json.dumps(value).encode()
    assert (signs_within(raw, limit, b",[{", part) > limit) == (marks(value) > limit)
    assert (signs_within(raw, limit, b"[{", part) > limit) == (containers(value) > limit)
    assert signs_within(raw, len(raw), b",[{", part) == marks(value)


@pytest.mark.parametrize(
    "prompt",
    [
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" + b'"a",' * MAX_VALUES + b'"a"]',
        b"[" + b"[1]," * MAX_VALUES + b"[1]]",
        b"[" + b'"",' * 3 * MAX_VALUES + b'""]',
        b"{" + b'"a":{},' * MAX_VALUES + b'"b":1}',
    ],
    ids=["numbers", "texts", "lists", "empty texts", "objects"],
)
def test_a_body_of_too_many_values_is_refused(prompt: bytes) -> None:
    with pytest.raises(ApiError, match="more than the 524,288 values") as refused:
        check_size(b'{"prompt":' + prompt + b"}")
    assert refused.value.status == 400


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"role":"user","content":"a"}'])
def test_a_body_of_too_many_lists_and_objects_is_refused(item: bytes) -> None:
    with pytest.raises(ApiError, match="more than the 65,536 lists and objects"):
        check_size(b'{"messages":[' + (item + b",") * MAX_CONTAINERS + b"1]}")
    check_size(b'{"messages":[' + (item + b",") * (MAX_CONTAINERS - 2) + b"1]}")


def calls(*arguments: str) -> list[dict[str, Any]]:
    return [{"type": "function", "id": "c", "function": {"name": "f", "arguments": each}} for each in arguments]


LISTS = '{"a":[' + "[]," * (MAX_CONTAINERS // 2) + "1]}"


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (partial(parse, "chat"), {"messages": [{"role": "assistant", "tool_calls": calls(LISTS, LISTS)}]}, "messages"),
        (
            parse_responses,
            {"input": [{"type": "function_call", "name": "f", "call_id": at, "arguments": LISTS} for at in ("a", "b")]},
            "input",
        ),
        (partial(parse, "completion"), {"prompt": "Hi", "guided_json": LISTS + LISTS}, "guided_json"),
    ],
    ids=["chat", "responses", "schema"],
)
def test_json_in_texts_counts_before_it_is_read(read: Callable[[bytes, str], object], body: dict[str, Any], param: str) -> None:
    raw = json.dumps(body).encode()
    check_size(raw)
    with pytest.raises(ApiError, match="more than the 524,288 values, or 65,536 lists and objects") as refused:
        read(raw, "sim")
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("text", ["a,", '",', "[{", "\\", '\\",'])
def test_what_stands_in_texts_is_no_value(text: str) -> None:
    check_size(json.dumps({"prompt": text * MAX_VALUES}).encode())


async def test_a_body_that_does_not_end_is_refused() -> None:
    clock = FakeClock()
    engine = WatchedEngine(SimConfig(), clock)
    async for replica in serve(engine, clock, ServerConfig(body_timeout_s=0.05)):
        host, port = replica.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()


MARKED = [["a value of a long body", at] for at in range(1000)]
OWN = set(map(id, MARKED))


class Lenient(WatchedEngine):
    """Takes variables for the template that it does not have."""

    def encode_chat(
        self, messages: list[Message], tools: list[Any] | None, end: PromptEnd = "answer", template: object = None
    ) -> list[int]:
        return super().encode_chat(messages, tools, end)


def marked() -> int:
    """The number of copies of MARKED's values."""
    lists = (each for each in gc.get_objects() if type(each) is list and len(each) == 2)
    return sum(type(each[0]) is str and each[0] == MARKED[0][0] and id(each) not in OWN for each in lists)


@pytest.mark.parametrize(
    ("more", "status"),
    [({}, 200), ({"max_tokens": "many"}, 400), ({"messages": MARKED}, 400), ({"max_tokens": 1 << 40}, 400)],
    ids=["served", "a wrong field", "wrong messages", "refused when it is prepared"],
)
async def test_nothing_of_a_body_waits_for_the_garbage_collector(more: dict[str, Any], status: int) -> None:
    """Which would free it in one go, often a minute later, and nothing else runs meanwhile."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "metadata": MARKED, **more}
    async for replica in serve(WatchedEngine(SimConfig(prefill_rate=1e6, decode_rate=1e6)), None):
        gc.collect()
        gc.disable()
        try:
            assert (await replica.post("/v1/chat/completions", body))[0] == status
            async with asyncio.timeout(10):
                while marked():  # noqa: ASYNC110  (until the handler has ended, too)
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi", "extra": MARKED}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": MARKED}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "metadata": {"a": MARKED}}),
        ("/v1/responses", {"input": [{"role": "user", "content": "Hi", "extra": MARKED}]}),
    ],
)
async def test_nothing_of_a_body_is_kept_while_its_request_waits(path: str, body: dict[str, Any]) -> None:
    clock = FakeClock()
    engine = Lenient(SimConfig(), clock)
    async for replica in serve(engine, clock, ServerConfig()):
        asking = asyncio.create_task(post(replica, path, body))
        await engine.submissions.acquire()
        gc.collect()
        async with asyncio.timeout(10):
            while marked():  # noqa: ASYNC110  (until the handler waits, too)
                await asyncio.sleep(0.01)
        with clock.running():
            assert (await asking)[0] == 200


async def test_the_tokens_of_a_prompt_count_as_long_as_its_request_waits() -> None:
    """They may be twenty times the bytes that they were in the body: the second one is refused."""
    clock = FakeClock()
    engine = WatchedEngine(SimConfig(kv_tokens=40_000), clock)
    async for replica in serve(engine, clock, ServerConfig(max_body_bytes=100_000)):
        asking = asyncio.create_task(post(replica, "/v1/completions", {"prompt": [" " * 18_000] * 5, "max_tokens": 4}))
        await engine.submissions.acquire()
        status, answer = await post(replica, "/v1/completions", long_body())
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        with clock.running():
            assert (await asking)[0] == 200
            assert (await post(replica, "/v1/completions", long_body()))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "word " * 40_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_000}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": "word " * 40_000}}],
            },
        ),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(path: str, body: dict[str, Any]) -> None:
    class Counting(WatchedEngine):
        asked = 0

        def encode(self, text: str, special: bool = True) -> list[int]:
            self.asked += 1
            return super().encode(text, special)

        def encode_chat(self, *arguments: Any, **named: Any) -> list[int]:
            self.asked += 1
            return super().encode_chat(*arguments, **named)

    clock = FakeClock()
    engine = Counting(SimConfig(kv_tokens=1_000), clock)
    async for replica in serve(engine, clock, ServerConfig()):
        status, answer, *_ = await replica.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "more than" in answer["error"]["message"]
        assert engine.asked == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "w " * 150_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "w " * 150_000}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": ["b" * 900_000]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "w " * 150_000}]}),
        ("/v1/responses/input_tokens", {"input": "w " * 150_000}),
    ],
)
async def test_tokens_of_a_text_far_beyond_the_context_are_not_counted(path: str, body: dict[str, Any]) -> None:
    clock = FakeClock()
    async for replica in serve(WatchedEngine(SimConfig(kv_tokens=1_000), clock), clock, ServerConfig()):
        status, answer, *_ = await replica.post(path, body)
        assert status == 400
        assert re.search("has more than 1[0-9]{2},[0-9]{3} tokens|prompt is too long", json.dumps(answer))
        status, *_ = await replica.post("/tokenize", {"prompt": "w " * 60_000})
        assert status == 200


async def test_turns_that_cannot_fit_are_not_tokenized() -> None:
    class Counting(WatchedEngine):
        most = 0

        def encode_chat(self, messages: list[Message], *arguments: Any, **named: Any) -> list[int]:
            self.most = max(self.most, len(messages))
            return super().encode_chat(messages, *arguments, **named)

    turns = [{"role": role, "content": "a"} for _ in range(5_000) for role in ("user", "assistant")]
    clock = FakeClock()
    engine = Counting(SimConfig(kv_tokens=1_000), clock)
    async for replica in serve(engine, clock, ServerConfig()):
        with clock.running():
            asked = {"messages": [*turns, {"role": "user", "content": "last"}], "truncation": "auto", "max_tokens": 10}
            status, answer, *_ = await replica.post("/v1/chat/completions", asked)
        assert status == 200
        assert answer["truncation"]["dropped_messages"] > 9_000
        assert engine.most <= 1_000


@pytest.mark.parametrize("name", ["model", "tool_choice"])
def test_an_error_shows_the_beginning_of_a_value(name: str) -> None:
    long = "b" * 5_000
    named = {"type": "function", "function": {"name": long}}
    tool = {"type": "function", "function": {"name": "a"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], name: named if name == "tool_choice" else long}
    with pytest.raises(ApiError) as refused:
        parse("chat", json.dumps(body).encode(), "the-model")
    assert "b" * 200 in refused.value.message
    assert len(refused.value.message) < 400


FRAGMENTED = """
import ctypes, os
from bench.measure.cpu import rss_bytes
from replica.api.bodies import give_back_memory
assert hasattr(ctypes.CDLL(None), "malloc_trim")
pieces = [bytearray(50_000) for _ in range(4000)]
kept = pieces[::100]
del pieces
before = rss_bytes(os.getpid())
give_back_memory()
print(before, rss_bytes(os.getpid()))
"""


def test_memory_that_is_free_between_what_is_kept_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=False)
    if "malloc_trim" in done.stderr:
        pytest.skip("a C library without malloc_trim")
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < before - 150e6


async def post(replica: Replica, path: str, body: object) -> tuple[int, Any]:
    """A large body."""
    async with replica.http.post(replica.url + path, data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.json()


async def test_values_are_counted_before_a_body_is_read() -> None:
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig()):
        status, answer = await post(replica, "/v1/completions", {"prompt": ["a"] * (MAX_VALUES + 1)})
        assert status == 400
        assert "more than the 524,288 values" in str(answer)  # and not: more than 4,096 prompts


TOO_LONG = "x " * 4_000_000


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": TOO_LONG}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": TOO_LONG, "arguments": "{}"}}]},
        {"role": "user", "content": "<|call|>f " + TOO_LONG},
        {"role": "user", "content": "<|call|>" * 1_000_000},
    ],
    ids=["arguments", "name", "call", "calls"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_all_texts_of_a_message_are_measured(path: str, message: dict[str, Any]) -> None:
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig()):
        status, answer = await post(replica, path, {"messages": [message], "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_role_that_is_unknown_is_shown_in_short() -> None:
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig()):
        message = {"role": "X" * 100_000, "content": "Hi"}
        status, answer, *_ = await replica.post("/v1/chat/completions", {"messages": [message]})
        assert status == 400
        assert len(answer["error"]["message"]) < 300


async def test_requests_on_one_connection_let_others_have_their_turn() -> None:
    count = 400
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig()):
        host, port = replica.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * count)
        await reader.readuntil(b"HTTP/1.1 200 ")
        other_reader, other = await asyncio.open_connection(host, int(port))
        other.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await other_reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET /load HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answered_later = (await reader.read()).count(b"HTTP/1.1 200 ")
        assert answered_later > count // 2
        writer.close()
        other.close()


@pytest.mark.parametrize(
    "function",
    [
        {"name": ""},
        {"name": "a</tool_call>"},
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": "</tool_call>"}}, "required": ["a"]}},
    ],
)
async def test_a_forced_call_can_be_read_again(function: dict[str, Any]) -> None:
    async for replica in serve(WatchedEngine(SimConfig(decode_rate=10_000.0)), None, ServerConfig()):
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": function}]}
        status, answer = await post(replica, "/v1/chat/completions", body | {"tool_choice": "required"})
        assert (status, answer["error"]["param"]) == (400, "tools")
        status, _ = await post(replica, "/v1/chat/completions", body)
        assert status == 200, "that it may be called is no matter"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one two", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "one two"}),
    ],
)
async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(path: str, body: dict[str, Any]) -> None:
    """The tokenizer has more of them, and in the model it would fail all requests of its step."""

    class Small(WatchedEngine):
        @property
        def info(self) -> EngineInfo:
            return replace(super().info, vocab_size=300)

    async for replica in serve(Small(SimConfig()), None, ServerConfig()):
        status, answer = await post(replica, path, body)
        assert status == 400
        assert "the model knows those below 300" in answer["error"]["message"]


def long_body(**fields: Any) -> dict[str, Any]:
    """Almost as long as a body may be where that is 100,000 bytes; sixteen may be here then."""
    return {"prompt": "Hi", "max_tokens": 1, "padding": "x" * 99_900} | fields


def in_pieces(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Its length is not announced."""

    async def pieces() -> AsyncIterator[bytes]:
        data = json.dumps(body).encode()
        for at in range(0, len(data), 10_000):
            yield data[at : at + 10_000]

    return pieces()


@pytest.mark.parametrize("announced", [True, False])
async def test_large_bodies_are_bounded_together(announced: bool) -> None:
    """Until their requests are over, however many may wait; small ones come in."""
    clock = FakeClock()
    engine = WatchedEngine(SimConfig(max_batch=4), clock)

    async def ask(replica: Replica) -> tuple[int, Any, str | None]:
        body = io.BytesIO(json.dumps(long_body()).encode()) if announced else in_pieces(long_body())
        async with replica.http.post(replica.url + "/v1/completions", data=body) as response:
            return response.status, await response.json(), response.headers.get("Retry-After")

    async for replica in serve(engine, clock, ServerConfig(max_body_bytes=100_000)):
        asking = [asyncio.create_task(ask(replica)) for _ in range(16)]
        for _ in asking:
            await engine.submissions.acquire()
        status, answer, retry_after = await ask(replica)
        assert (status, answer["error"]["code"], retry_after) == (503, "queue_full", "1")
        small = asyncio.create_task(replica.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}))
        with clock.running():
            assert {status for status, *_ in await asyncio.gather(*asking)} == {200}
            assert (await small)[0] == 200
            assert (await ask(replica))[0] == 200


async def test_what_a_request_no_longer_has_keeps_nobody_out() -> None:
    """Sixteen bodies of 8 MB that are nearly all padding run; another one comes in."""
    clock = FakeClock()
    engine = WatchedEngine(SimConfig(max_batch=4), clock)
    async for replica in serve(engine, clock, ServerConfig(max_body_bytes=8_000_000)):
        large = long_body(padding="x" * 7_900_000)
        asking = []
        for _ in range(17):
            asking.append(asyncio.create_task(post(replica, "/v1/completions", large)))
            await engine.submissions.acquire()
        with clock.running():
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}


async def test_bytes_that_have_not_come_keep_nobody_out() -> None:
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig(max_body_bytes=100_000)):
        host, port = replica.url.removeprefix("http://").split(":")
        waiting = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 100000\r\n\r\n")
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            waiting.append(writer)
        assert (await post(replica, "/v1/completions", long_body()))[0] == 200
        for writer in waiting:
            writer.close()


async def test_a_body_that_is_announced_too_long_is_refused_at_once() -> None:
    async for replica in serve(WatchedEngine(SimConfig()), None, ServerConfig(max_body_bytes=100_000)):
        host, port = replica.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_nothing_is_kept_of_what_waits_for_a_thread_and_is_given_up() -> None:
    class Work:
        def __call__(self) -> None:
            pass

    preparers, gate = Preparers(), threading.Event()
    blocked = [asyncio.create_task(preparers.run(True, lambda: gate.wait(60))) for _ in range(PREPARERS)]
    await asyncio.sleep(0)  # all threads have something to do
    work = Work()
    kept = weakref.ref(work)
    waiting = asyncio.create_task(preparers.run(True, work))
    del work
    await asyncio.sleep(0)
    assert kept() is not None
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting
    gc.collect()
    assert kept() is None
    assert not any(task.done() for task in blocked)
    gate.set()
    assert await asyncio.gather(*blocked) == [True] * PREPARERS
    assert await preparers.run(True, lambda: 5) == 5
    preparers.close()


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        (1, {"prompt": "Hi", "max_tokens": 20_000}),
        (15, {"prompt": [7] * 5_000, "n": 15, "temperature": 1, "max_tokens": 1, "return_token_ids": True}),
    ],
    ids=["text", "token ids"],
)
async def test_a_long_answer_is_written_beside_the_event_loop(answers: int, asked: dict[str, Any]) -> None:
    """It waits until a thread has time for it; short ones do not."""
    gate, busy, loop = threading.Event(), asyncio.Semaphore(0), asyncio.get_running_loop()

    class Gated(WatchedEngine):
        def encode(self, text: str, special: bool = True) -> list[int]:
            if len(text) > LONG_BODY:
                loop.call_soon_threadsafe(busy.release)
                assert gate.wait(60), "the event loop waits for this thread"
            return super().encode(text, special)

    clock = FakeClock()
    engine = Gated(SimConfig(), clock)
    async for replica in serve(engine, clock, ServerConfig()):
        ask = partial(post, replica, "/v1/completions")
        large = {"prompt": "x" * LONG_BODY + "x", "max_tokens": 1}
        slow = [asyncio.create_task(ask(large)) for _ in range(PREPARERS)]
        for _ in slow:
            await busy.acquire()
        with clock.running():
            long = asyncio.create_task(ask(asked | {"ignore_eos": True}))
            for _ in range(answers):
                await engine.submissions.acquire()
            while await replica.metric("num_requests_running{"):
                pass
            for _ in range(5):
                assert (await ask({"prompt": "Hi", "max_tokens": 1}))[0] == 200
            assert not long.done()
            gate.set()
            assert [status for status, _ in await asyncio.gather(long, *slow)] == [200] * (1 + PREPARERS)


def test_first_bodies_may_come_together() -> None:
    """In some of these processes two threads look at the same type for the first time at the same moment."""
    command = [sys.executable, "-m", "tests.replica.api.first_bodies"]
    for _ in range(FIRST_TIMES):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-1000:]
