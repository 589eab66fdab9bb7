"""How runs end that do not end as usual: their clients leave or cancel, the store does not take it, the answer is large."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.app import compose
from gateway.core import Surroundings
from gateway.features.histories.kept import MAX_KEPT
from gateway.features.runs.recording import SETTLE_S
from gateway.features.runs.runs import Runs
from gateway.request.attempts import MAX_HELD_ANSWER
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, running, serving_runner
from tests.gateway.features.responses.test_recall import RESPONSES, answer_of, ask, kept_in, replica
from tests.gateway.features.runs.test_runs import Slow, begin, ended
from tests.support.fakes import STREAM_HEAD, FakeReplica, FakeRequest, chunk, http, models


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(folder / "kept.sqlite", isolation_level=None)) as file:
        yield file


async def rename(folder: Path, table: str, name: str) -> None:
    """In a thread: the gateway may be in a transaction of its own, which this loop ends."""
    await asyncio.to_thread(_rename, folder, table, name)


def _rename(folder: Path, table: str, name: str) -> None:
    with opened(folder) as file:
        file.execute("begin immediate")
        file.execute(f"alter table {table} rename to {name}")
        file.execute("commit")


def ids_in(folder: Path) -> set[str]:
    with opened(folder) as file:
        return {id_ for (id_,) in file.execute("select id from warmroute_responses union select id from warmroute_runs")}


async def test_one_whose_client_leaves_before_it_has_the_id_is_withdrawn(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first, places = await ask(run, "a"), run.gateway[Runs].places
        with opened(tmp_path) as file:
            file.execute("begin immediate")  # so the run's row is being written until we end this
            asking = asyncio.create_task(run.post({"model": "m", "input": "b", "background": True}, RESPONSES))
            await eventually(lambda: places.taken == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await run.get("/health")
            await eventually(lambda: run.gateway.served.memory.held == 0)
            assert places.taken == 1, "until its row is gone"
            file.execute("rollback")
        second = await ask(run, "c")
        await eventually(lambda: places.taken == 0)
        assert ids_in(tmp_path) == {first.id, second.id}
        assert len(one.requests) == 2


@contextlib.asynccontextmanager
async def refusing(folder: Path, later: list[float]) -> AsyncIterator[tuple[Running, Any]]:
    """A gateway with a run that has ended while the store takes no end; and what lets the store take it again."""
    slow, around = Slow(), Surroundings(clock=lambda: time.monotonic() + later[0])
    async with slow.replica() as one:
        gateway = compose(config_over(one, state=kept_in(folder)), LOGGED, around)
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            stream = await begin(run, stream=True)
            await slow.begun.wait()
            await rename(folder, "warmroute_runs", "gone")
            slow.go.set()
            await eventually(lambda: gateway.router.ledger.open_leases == 0)
            yield run, stream


async def test_an_end_that_the_store_takes_later_is_none_that_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    later = [0.0]
    async with refusing(tmp_path, later) as (run, stream):
        await eventually(lambda: "the end of a run is not stored yet" in caplog.text)
        later[0] = SETTLE_S - 60
        assert run.gateway[Runs].places.taken == 1
        await rename(tmp_path, "gone", "warmroute_runs")
        seen = [event async for event in stream]
        assert (seen[-1].type, seen[-1].response.output_text) == ("response.completed", "to a")
        assert (await run.client.responses.retrieve(seen[-1].response.id)).status == "completed"


async def test_an_end_that_the_store_never_takes(tmp_path: Path) -> None:
    """Its clients are told, and its place is free."""
    later = [0.0]
    async with refusing(tmp_path, later) as (run, stream):
        later[0] = SETTLE_S + 60
        seen = [event async for event in stream]
        assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
        assert "could not be stored" in seen[-1].response.error.message
        await eventually(lambda: run.gateway[Runs].places.taken == 0)
        assert (await run.metrics())['warmroute_background_runs_total{status="failed"}'] == 1


def large(size: int, *, stream: bool) -> FakeReplica:
    """A replica whose answers have about so many bytes, and are a stream or none, whatever was asked."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        answer = answer_of(request.json, "resp_x")
        answer["output"][0]["content"][0]["text"] = "x" * size
        if stream:
            event = {"type": "response.completed", "sequence_number": 0, "response": answer}
            data = f"event: response.completed\ndata: {json.dumps(event)}\n\n".encode()
            writer.write(STREAM_HEAD + chunk(data) + b"0\r\n\r\n")
        else:
            writer.write(http(200, json.dumps(answer).encode()))
        await writer.drain()

    return FakeReplica([behave], listing=models("m"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_answer_is_kept_up_to_the_bound_of_all(tmp_path: Path, stream: bool) -> None:
    size = MAX_KEPT - (64 << 10)
    assert size > MAX_HELD_ANSWER
    async with large(size, stream=stream) as one, running(one, state=kept_in(tmp_path)) as run:
        last = await ended(run, (await begin(run)).id)
        assert (last.status, len(last.output_text), last.background) == ("completed", size, True)
        await eventually(lambda: len(run.gateway[Runs]) == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [MAX_KEPT, 2 * MAX_KEPT])
async def test_one_that_is_larger_fails_and_says_what_to_do(tmp_path: Path, stream: bool, size: int) -> None:
    async with large(size, stream=stream) as one, running(one, state=kept_in(tmp_path)) as run:
        last = await ended(run, (await begin(run)).id)
        assert (last.status, last.error.code) == ("failed", "server_error")
        assert "more than 4,194,304 bytes" in last.error.message
        assert "max_output_tokens" in last.error.message


async def test_the_model_has_one_name_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    """The replica's, as in all answers."""
    async with replica() as one, running(one, state=kept_in(tmp_path), model_aliases={"small": "m"}) as run:
        first = await run.client.responses.create(model="small", input="a", background=True)
        last = await ended(run, first.id)
        plain = await run.client.responses.create(model="small", input="a")
        assert (first.model, last.model, plain.model) == ("m", "m", "m")


async def test_a_cancel_is_logged_as_what_it_is(tmp_path: Path, request_lines: Any) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        await slow.begun.wait()
        await run.client.responses.cancel(first.id)
        await eventually(lambda: not len(run.gateway[Runs]))
        (line,) = [line for line in request_lines() if line["id"] == first.id]
        assert (line["status"], line["cancelled"], line["level"]) == (200, True, "info")
        assert "error" not in line
        metrics = await run.metrics()
        assert metrics['warmroute_background_runs_total{status="cancelled"}'] == 1
        assert not [name for name in metrics if 'code="499"' in name]


@pytest.mark.parametrize("status", [400, 409])  # an error whose words are read before its status goes on, and another
async def test_a_cancel_while_a_replica_refuses_is_no_error_either(tmp_path: Path, request_lines: Any, status: int) -> None:
    waits, left = asyncio.Event(), asyncio.Event()

    async def refuses_slowly(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{" % status)
        await writer.drain()
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise

    async with FakeReplica([refuses_slowly], listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        await waits.wait()
        (going,) = run.gateway[Runs]._runs.values()
        await eventually(lambda: status in (400, going.status))
        await run.client.responses.cancel(first.id)
        await eventually(lambda: not len(run.gateway[Runs]))
        await left.wait()
        (line,) = [line for line in request_lines() if line["id"] == first.id]
        assert (line["status"], line["cancelled"], line["level"]) == (200, True, "info")
        assert "error" not in line


async def said_at_shutdown(run: Running, stream: Any) -> str:
    """What the stream's client is told."""
    await run.gateway.served.running.wait(0.01, asyncio.Event())
    with pytest.raises(openai.APIError) as told:
        async for _ in stream:
            pass
    return told.value.message


async def test_a_shutdown_tells_followers_what_becomes_of_the_response(tmp_path: Path) -> None:
    slow, state = Slow(), kept_in(tmp_path)
    async with slow.replica() as one, running(one, state=state) as run:
        async with running(one, state=state) as other:
            made = await begin(run)
            await slow.begun.wait()
            stream = await other.client.responses.retrieve(made.id, stream=True)
            await eventually(lambda: len(other.gateway[Runs].watched))
            assert "Follow the response again" in await said_at_shutdown(other, stream)
        stream = await run.client.responses.retrieve(made.id, stream=True)
        said = await said_at_shutdown(run, stream)
        assert "it has failed: fetch it" in said
        await eventually(lambda: not len(run.gateway[Runs]))
        assert "Retry" not in said
        assert (await run.client.responses.retrieve(made.id)).status == "failed"
