"""The parser process: whatever becomes of it or of who waits for it, nothing hangs, and no result goes to another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.dialects.dialect import ASK
from gateway.dialects.json_edits import apply
from gateway.dialects.json_structure import signs
from gateway.dialects.openai.continuation_request import continue_body
from gateway.dialects.table import DIALECTS, DRY_RUN, OTHER
from gateway.errors import GatewayError
from gateway.parser import process as parser_process
from gateway.parser import wire
from gateway.parser.parsing import INLINE_BYTES, INLINE_STRUCTURE, UNCOUNTED_BYTES, Parsing
from gateway.parser.process import ParserProcess
from tests.gateway.conftest import eventually
from tests.gateway.dialects.test_continuation import after
from tests.support.limits import open_files

CHAT = DIALECTS["/v1/chat/completions"]

# A stand-in for the program: it reads one byte of a job, and then does this.
ODD = "import os, socket, sys, time; sock = socket.socket(fileno=int(sys.argv[2])); sock.recv(1); "


def body(size: int = 1000, **more: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}], **more})


def asked_for_usage(raw: bytes) -> bytes:
    """What goes to the replica."""
    return apply(raw, CHAT.parse(raw).edits)


@contextlib.asynccontextmanager
async def parser(**options: Any) -> AsyncIterator[tuple[Parsing, ParserProcess]]:
    process = ParserProcess(**options)
    try:
        yield Parsing(process, 256, 64), process
    finally:
        await process.close()
        assert process.pid is None


async def test_it_is_started_once_and_only_when_it_is_needed() -> None:
    async with parser() as (parsing, process):
        assert parsing.at_once(CHAT, body())
        assert process.started == 0
        large = body(INLINE_BYTES)
        assert parsing.at_once(CHAT, large) is None
        for _ in range(3):
            api = await parsing.parse(CHAT, large)
            assert (api.model, api.body, api.prompt, api.made is not None, api.repeatable) == ("m", large, None, True, True)
        assert process.started == 1


async def test_a_body_that_is_not_long_and_cannot_have_many_values_is_parsed_at_once() -> None:
    async with parser() as (parsing, process):
        commas = INLINE_STRUCTURE - signs(body()) - body().count(b"{") - 1
        for text in ("x" * (INLINE_BYTES - 2000), "," * commas + "x" * UNCOUNTED_BYTES, "," * (UNCOUNTED_BYTES - 2000)):
            api = parsing.at_once(CHAT, body().replace(b'"m"', b'"m","x":"%b"' % text.encode()))
            assert api
            assert api.has_prompt
        for text in ("x" * INLINE_BYTES, "," * (commas + 1) + "x" * UNCOUNTED_BYTES):
            assert parsing.at_once(CHAT, body().replace(b'"m"', b'"m","x":"%b"' % text.encode())) is None
        assert process.started == 0


COSTLY = {
    "fields of a message": b'"content":"x"%b' % b"".join(b',"%05d":0' % number for number in range(27_000)),
    "more of them": b'"content":"x"%b' % b"".join(b',"%05d":0' % number for number in range(99_000)),
    "null fields of a message": b'"content":"x"%b' % b"".join(b',"%05d":null' % number for number in range(99_000)),
    "parts": b'"content":[%b{"text":""}]' % (b'{"text":"","a":0},' * 5_000),
    "objects": b'"x":%b0%b' % (b'{"":' * 100_000, b"}" * 100_000),
    "objects in lists": b'"x":[%b0]' % (b'{"a":1},' * 50_000),
}


@pytest.mark.parametrize("shape", COSTLY)
async def test_a_body_of_costly_values_is_left_to_the_process(shape: str) -> None:
    async with parser() as (parsing, process):
        raw = b'{"model":"m","messages":[{"role":"user",%b}]}' % COSTLY[shape]
        assert len(raw) <= INLINE_BYTES
        assert signs(raw) <= INLINE_STRUCTURE
        for kind in (CHAT, OTHER, DRY_RUN):
            assert parsing.at_once(kind, raw) is None
        assert process.started == 0


async def test_as_many_objects_as_half_of_the_values_are_parsed_at_once() -> None:
    async with parser() as (parsing, _):
        raw = body(UNCOUNTED_BYTES, x=[{}] * (INLINE_STRUCTURE // 3 - 5))
        assert 2 * signs(raw) > INLINE_STRUCTURE
        assert parsing.at_once(CHAT, raw)
        assert parsing.at_once(CHAT, raw.replace(b"{}", b"{},0")) is None


async def test_many_at_once_get_their_own_results() -> None:
    async with parser() as (parsing, _):
        sizes = [1000 * number for number in range(1, 40)]
        requests = await asyncio.gather(*(parsing.parse(CHAT, body(size, stream=True)) for size in sizes))
        assert [request.body for request in requests] == [asked_for_usage(body(size, stream=True)) for size in sizes]


async def test_a_request_that_leaves_does_not_put_the_others_out_of_step() -> None:
    async with parser() as (parsing, process):
        tasks = [asyncio.create_task(parsing.parse(CHAT, body(1_000_000 + number))) for number in range(12)]
        await eventually(lambda: process.started)
        for task in tasks[::2]:
            task.cancel()
        left = await asyncio.gather(*tasks[::2], return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in left)
        for number, task in list(enumerate(tasks))[1::2]:
            assert (await task).body == body(1_000_000 + number)
        assert process.started == 1


async def test_clients_take_turns_whatever_the_size_of_their_bodies() -> None:
    """Neither many jobs of one client nor small ones keep another client from being served."""
    async with parser() as (parsing, process):
        order = list[str]()

        async def parse(client: str, size: int) -> None:
            await parsing.parse(CHAT, body(size), client=client)
            order.append(client)

        jobs = [("a", 300_000)] * 8 + [("b", 3_000_000)] * 2
        await asyncio.gather(*(parse(*job) for job in jobs))
        assert "".join(order) in ("ababaaaaaa", "aababaaaaa"), "the first one begins at once"
        assert process.started == 1


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "sock.close()", "sock.sendall(b'\\1\\0\\0\\0?')"])
async def test_a_process_that_fails_is_a_500_and_is_replaced(end: str) -> None:
    async with parser(boot=ODD + end) as (parsing, process):
        for number in range(3):
            with pytest.raises(GatewayError) as caught:
                await parsing.parse(CHAT, body(1_000_000))
            assert caught.value.status == 500
            assert process.started == number + 1


async def test_without_file_descriptors_for_a_process_the_gateway_is_out_of_resources() -> None:
    async with parser() as (parsing, process):
        with open_files(3), pytest.raises(GatewayError, match="Too many open files") as caught:
            await parsing.parse(CHAT, body(INLINE_BYTES))
        error = caught.value
        assert (error.status, error.code, error.retry_after_s) == (503, "gateway_overloaded", 1)
        assert (await parsing.parse(CHAT, body(INLINE_BYTES))).model == "m"
        assert process.started == 1


async def test_a_process_that_is_killed_between_two_jobs_is_replaced() -> None:
    async with parser() as (parsing, process):
        await parsing.parse(CHAT, body())
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        statuses = list[int]()
        for _ in range(2):  # the first one may find the dead one
            try:
                await parsing.parse(CHAT, body())
                statuses.append(200)
            except GatewayError as error:
                statuses.append(error.status)
        assert statuses in ([500, 200], [200, 200])


async def test_a_process_that_takes_too_long_is_killed() -> None:
    async with parser(boot=ODD + "time.sleep(1000)", job_s=0.5) as (parsing, process):
        first, second = await asyncio.gather(*(parsing.parse(CHAT, body(9_000_000)) for _ in range(2)), return_exceptions=True)
        for error in (first, second):
            assert isinstance(error, GatewayError)
            assert (error.status, error.retry_after_s) == (503, 1)
        assert process.started == 2
        assert process.pid is None


async def test_a_request_that_waits_too_long_gets_an_error() -> None:
    async with parser(boot=ODD + "time.sleep(1000)", wait_s=0.2) as (parsing, process):
        with pytest.raises(GatewayError, match="waited too long"):
            await parsing.parse(CHAT, body())
        assert process.started == 1


async def test_the_queue_is_bounded_and_requests_that_left_are_not_in_it() -> None:
    async with parser(boot=ODD + "time.sleep(1000)") as (parsing, process):
        waiting = [asyncio.create_task(parsing.parse(CHAT, body()))]
        await eventually(lambda: process.started)
        half = parser_process.MAX_WAITING // 2
        waiting += [asyncio.create_task(parsing.parse(CHAT, body())) for _ in range(half)]
        await eventually(lambda: f"{half} waiting" in repr(process))
        with pytest.raises(GatewayError) as caught:
            await parsing.parse(CHAT, body())
        assert caught.value.status == 503
        other = asyncio.create_task(parsing.parse(CHAT, body(), client="other"))
        await eventually(lambda: f"{half + 1} waiting" in repr(process))
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        for task in waiting[100:]:
            task.cancel()
        await asyncio.gather(*waiting[100:], return_exceptions=True)
        assert "99 waiting" in repr(process)
        await process.close()
        results = await asyncio.gather(*waiting[:100], return_exceptions=True)
        assert {one.code for one in results if isinstance(one, GatewayError)} == {"shutting_down"}
        assert len(results) == 100
        with pytest.raises(GatewayError, match="shutting down"):
            await parsing.parse(CHAT, body())


async def test_a_process_that_does_not_start_is_a_500() -> None:
    async with parser(boot="raise SystemExit(1)") as (parsing, _):
        with pytest.raises(GatewayError) as caught:
            await parsing.parse(CHAT, body())
        assert caught.value.status == 500


async def test_a_bug_in_the_process_is_a_500_and_its_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with parser() as (parsing, process):
        with pytest.raises(GatewayError) as caught:
            await process.run(("no such operation",), b"{}")
        assert (caught.value.status, caught.value.code) == (500, "internal_error")
        (record,) = caplog.records
        assert "KeyError: 'no such operation'" in vars(record)["traceback"]
        assert (await parsing.parse(CHAT, body())).model == "m"
        assert process.started == 1, "it goes on"


async def test_a_body_that_needs_too_much_memory_is_refused() -> None:
    """The address space is bounded; a bound that is hit is an answer, not the end of the process."""
    tokens = b'{"model":"m","messages":[{"role":"u","content":[' + b",".join([b"{}"] * 200_000) + b"]}]}"
    async with parser(memory_mb=64) as (parsing, process):
        assert (await parsing.parse(CHAT, body())).model == "m"
        with pytest.raises(GatewayError) as caught:
            await parsing.parse(CHAT, tokens)
        assert caught.value.status in (413, 500)
        assert (await parsing.parse(CHAT, body())).model == "m"
        assert process.started <= 2


async def test_a_long_continuation_is_made_there_too() -> None:
    async with parser() as (parsing, process):
        so_far = after(["We", "ll"], {})
        for size in (10, 100_000, 9_000_000):
            raw = body(size, max_tokens=10)
            verdict, edits = continue_body(CHAT.name, raw, so_far.text, so_far.tokens)
            assert verdict == ASK
            assert await parsing.continuation(CHAT, raw, so_far) == apply(raw, edits)
        raw = body(100_000, max_tokens=2)
        assert await parsing.continuation(CHAT, raw, so_far) == b""
        assert await parsing.continuation(CHAT, body(100_000, n=2), so_far) is None
        assert process.started == 1


async def test_what_is_no_json_object_on_another_path_needs_no_parser() -> None:
    """A file that is uploaded, say."""
    async with parser() as (parsing, process):
        for raw in (b"--boundary\r\n" + b"{" * 1_000_000, b" " * 999 + b"x" * 1_000_000, b"\x00" * 1_000_000):
            api = parsing.at_once(OTHER, raw)
            assert api is not None
            assert (api.model, api.body) == ("", raw)
        for begin in (b" ", b"\xef\xbb\xbf", b" " * 5000):
            assert parsing.at_once(OTHER, begin + b'{"model":"m","x":"%b"}' % (b"x" * INLINE_BYTES)) is None
        assert process.started == 0


async def test_the_loop_turns_while_a_large_body_is_parsed() -> None:
    """The purpose of the parser process. No time is asserted, only that other tasks had their turns."""
    async with parser() as (parsing, _):
        await parsing.parse(CHAT, body())
        task, turns = asyncio.create_task(parsing.parse(CHAT, body(60_000_000, stream=True))), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await task).body.endswith(b',"stream_options":{"include_usage":true}}')
        assert turns > 100


def test_it_ends_with_its_parent() -> None:
    """Even with one that is killed, and though it does not listen to a service manager's signals."""
    code = (
        "import asyncio, os, signal; from gateway.parser.process import ParserProcess\n"
        "async def main():\n"
        "    process = ParserProcess()\n"
        f"    await process.run(('{wire.PARSE}', 'chat', 256, 64, (), {{}}), {body()!r})\n"
        "    os.kill(process.pid, signal.SIGTERM); os.kill(process.pid, signal.SIGINT)\n"
        f"    await process.run(('{wire.PARSE}', 'chat', 256, 64, (), {{}}), {body()!r})\n"
        "    assert process.started == 1\n"
        "    print(process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    # The child has this end of the pipe as well: it is at its end when both are gone.
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"", "gone, or waiting for somebody to see it"
