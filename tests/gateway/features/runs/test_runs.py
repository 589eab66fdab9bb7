"""Responses that run in the background, through a whole gateway and the official client."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.app import compose
from gateway.core import Surroundings
from gateway.features.runs.beginning import MAX_OWNED
from gateway.features.runs.runs import Runs
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, running, serving_runner
from tests.gateway.features.responses.test_recall import answer_of, kept_in, replica, texts
from tests.support.fakes import STREAM_HEAD, FakeReplica, FakeRequest, chunk, dies_now, http, models, status


class Slow:
    """An engine that streams `before` pieces, waits for `go`, then streams the rest: `text`, then the end. left: a request was
    closed before that.
    """

    def __init__(self, *, dies: bool = False, text: str = "you") -> None:
        self.text = text
        self.go, self.begun, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.dies = dies

    async def __call__(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        answer = answer_of(request.json, "resp_of_the_replica")
        item = answer["output"][0]
        writer.write(STREAM_HEAD)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        begun = {**answer, "status": "in_progress", "output": [], "usage": None}
        self.say(writer, "response.created", 7, response=begun)
        self.say(writer, "response.output_item.added", 8, output_index=0, item={**item, "content": []})
        part = {**item["content"][0], "text": ""}
        self.say(writer, "response.content_part.added", 9, **place, part=part)
        self.say(writer, "response.output_text.delta", 10, **place, delta="to ", logprobs=[])
        await writer.drain()
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self.dies:
            dies_now(writer)
            return
        self.say(writer, "response.output_text.delta", 11, **place, delta=self.text, logprobs=[])
        self.say(writer, "response.completed", 12, response=answer)
        writer.write(b"0\r\n\r\n")

    def say(self, writer: asyncio.StreamWriter, kind: str, number: int, **data: Any) -> None:
        event = {"type": kind, "sequence_number": number, **data}
        writer.write(chunk(f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()))

    def replica(self) -> FakeReplica:
        return FakeReplica([self] * 999, listing=models("m", "other"))


async def begin(run: Running, text: str = "a", **more: Any) -> Any:
    return await run.client.responses.create(model="m", input=text, background=True, **more)


async def ended(run: Running, id_: str) -> Any:
    """The response, once its stream has ended."""
    async with asyncio.timeout(40):
        async for _ in await run.client.responses.retrieve(id_, stream=True):
            pass
    return await run.client.responses.retrieve(id_)


async def written(run: Running) -> None:
    """All that the store was told before is in it: writes are made in their order."""
    await run.client.conversations.create()


async def test_it_is_answered_at_once_and_completed_later(tmp_path: Path, request_lines: Any) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run, instructions="be short", metadata={"a": "b"})
        assert (first.status, first.background, first.output, first.metadata) == ("queued", True, [], {"a": "b"})
        assert (first.instructions, first.model) == ("be short", "m")
        await slow.begun.wait()
        async for event in await run.client.responses.retrieve(first.id, stream=True):
            if event.type == "response.output_text.delta":
                break
        await written(run)
        assert (await run.client.responses.retrieve(first.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await run.client.responses.create(model="m", input="b", previous_response_id=first.id)
        slow.go.set()
        last = await ended(run, first.id)
        assert (last.status, last.id, last.output_text, last.background) == ("completed", first.id, "to a", True)
        assert (last.created_at, last.store) == (first.created_at, True)
        asked = one.requests[0].json
        assert (asked["background"], asked["store"], asked["stream"]) == (False, False, True)
        again = await run.client.responses.create(model="m", input="b", previous_response_id=first.id, stream=True)
        assert [event.type async for event in again][-1] == "response.completed"
        assert texts(one.requests[-1].json) == ["a", "to a", "b"]
        metrics = await run.metrics()
        assert metrics['warmroute_background_runs_total{status="completed"}'] == 1
        line = next(line for line in request_lines() if line["id"] == first.id)
        assert (line["status"], line["prompt_tokens"], line["replica"]) == (200, 10, one.name)
        assert len(run.gateway[Runs]) == 0


async def test_a_running_one_is_cancelled_and_its_replica_left(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        await slow.begun.wait()
        for _ in range(2):
            assert (await run.client.responses.cancel(first.id)).status == "cancelled"
        await slow.left.wait()
        await eventually(lambda: not len(run.gateway[Runs]))
        assert (await run.client.responses.retrieve(first.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await run.client.responses.create(model="m", input="b", previous_response_id=first.id)


async def test_deleting_a_running_one_ends_it(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        await slow.begun.wait()
        await run.client.responses.delete(first.id)
        await slow.left.wait()
        await eventually(lambda: not len(run.gateway[Runs]))
        with pytest.raises(openai.NotFoundError):
            await run.client.responses.retrieve(first.id)


async def test_one_that_has_ended_or_never_ran_in_the_background(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        assert (await ended(run, first.id)).status == "completed"
        assert (await run.client.responses.cancel(first.id)).status == "completed"
        plain = await run.client.responses.create(model="m", input="a")
        with pytest.raises(openai.BadRequestError, match="background"):
            await run.client.responses.cancel(plain.id)
        with pytest.raises(openai.BadRequestError, match="store"):
            await begin(run, store=False)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await begin(run, previous_response_id="resp_none")
        with pytest.raises(openai.NotFoundError, match="nosuch"):
            await run.client.responses.create(model="nosuch", input="a", background=True)


async def test_ids_of_others_do_not_exist(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        other = run.client.with_options(api_key="other")
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        slow.go.set()
        assert (await ended(run, first.id)).status == "completed"


async def test_a_replica_that_refuses_or_dies_fails_it(tmp_path: Path) -> None:
    slow = Slow(dies=True)
    slow.go.set()
    refuses = status(400, "too long")
    async with FakeReplica([refuses, slow], listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        last = await ended(run, (await begin(run)).id)
        assert (last.status, last.error.code, last.error.message) == ("failed", "invalid_prompt", "too long")
        last = await ended(run, (await begin(run)).id)
        assert (last.status, last.error.code) == ("failed", "server_error")


async def test_an_answer_that_is_no_stream_is_kept_as_well(tmp_path: Path) -> None:
    async def plain(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(http(200, json.dumps(answer_of(request.json, "resp_x")).encode()))

    async with FakeReplica([plain], listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run, stream=True)
        events = [event async for event in first]
        assert events[-1].type == "response.completed"
        last = await ended(run, events[0].response.id)
        assert (last.status, last.output_text) == ("completed", "to a")


async def test_a_stream_goes_on_from_any_event(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        stream = await begin(run, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.response.aclose()
        id_ = seen[0].response.id
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        rest = await run.client.responses.retrieve(id_, stream=True, starting_after=seen[2].sequence_number)
        slow.go.set()
        seen[3:] = [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert (seen[-1].type, seen[-1].response.id, seen[-1].response.store) == ("response.completed", id_, True)
        replayed = [event async for event in await run.client.responses.retrieve(id_, stream=True)]
        assert [event.model_dump() for event in replayed] == [event.model_dump() for event in seen]
        run.gateway[Runs].logs.check()
        run.gateway[Runs].logs.forget(run.gateway[Runs].logs.keys()[0])
        made = [event async for event in await run.client.responses.retrieve(id_, stream=True)]
        assert "".join(event.delta for event in made if event.type == "response.output_text.delta") == "to a"
        (last,) = [event async for event in await run.client.responses.retrieve(id_, stream=True, starting_after=4)]
        assert (last.type, last.sequence_number, last.response.output_text) == ("response.completed", 5, "to a")


@pytest.mark.parametrize("here", [True, False], ids=["here", "in another gateway"])
async def test_who_follows_a_silent_run_gets_signs_of_life(tmp_path: Path, request_lines: Any, here: bool) -> None:
    slow, state, limits = Slow(), kept_in(tmp_path), {"keepalive_s": 0.02, "drain_timeout_s": 1}
    async with slow.replica() as one, running(one, state=state) as run, running(one, state=state, limits=limits) as other:
        made = await begin(other if here else run)
        await slow.begun.wait()
        headers = {"Authorization": f"Bearer {other.client.api_key}"}
        async with other.session.get(f"{other.url}/v1/responses/{made.id}?stream=true", headers=headers) as answer:
            for _ in range(2):
                assert (await answer.content.readuntil(b": running\n\n")).endswith(b"\n\n")
            stream = await other.client.responses.retrieve(made.id, stream=True)
            slow.go.set()
            data = await answer.read()
        events = [event for event in data.decode().split("\n\n") if event and not event.startswith(":")]
        assert "event: response.completed" in events[-1]
        assert [event async for event in stream][-1].type == "response.completed"
        await eventually(lambda: not len(run.gateway[Runs]) and not len(other.gateway[Runs]))
    assert max(line.get("pulses", 0) for line in request_lines() if line["path"].startswith("/v1/responses/")) >= 2


async def test_no_owner_has_more_than_its_share(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = [await begin(run, f"{number}") for number in range(MAX_OWNED)]
        with pytest.raises(openai.RateLimitError) as refused:
            await begin(run)
        assert refused.value.response.headers["retry-after"] == "5"
        other = run.client.with_options(api_key="other")
        assert (await other.responses.create(model="m", input="a", background=True)).status == "queued"
        await run.client.responses.cancel(made[0].id)
        await eventually(lambda: len(run.gateway[Runs]) == MAX_OWNED)
        await begin(run)
        slow.go.set()
        for each in made[1:]:
            assert (await ended(run, each.id)).status == "completed"


async def test_a_gateway_that_goes_down_says_so(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one:
        async with running(one, state=kept_in(tmp_path)) as run:
            first = await begin(run)
            await slow.begun.wait()
            served = run.gateway.served.running
            await served.wait(0.01, asyncio.Event())
            await eventually(lambda: not len(run.gateway[Runs]))
        async with running(one, state=kept_in(tmp_path)) as run:
            last = await run.client.responses.retrieve(first.id)
            assert (last.status, last.error.code) == ("failed", "server_error")
            assert "restarted" in last.error.message


async def test_two_gateways_on_one_store(tmp_path: Path) -> None:
    """The other one sees it, follows it and cancels it; and leaves it alone."""
    slow = Slow()
    state = kept_in(tmp_path)
    async with slow.replica() as one, running(one, state=state) as run, running(one, state=state) as other:
        first, second = await begin(run), await begin(run)
        await slow.begun.wait()
        assert (await other.client.responses.retrieve(first.id)).status in ("queued", "in_progress")
        assert (await other.client.responses.cancel(first.id)).status == "cancelled"
        await eventually(lambda: len(run.gateway[Runs]) == 1)
        follows = await other.client.responses.retrieve(second.id, stream=True, starting_after=5)
        slow.go.set()
        (last,) = [event async for event in follows]
        assert (last.type, last.sequence_number, last.response.output_text) == ("response.completed", 6, "to a")


async def test_one_whose_process_was_killed_fails_after_a_while(tmp_path: Path) -> None:
    slow = Slow()
    now = [1_000_000.0]
    around = Surroundings(wall_clock=lambda: now[0])
    config = config_over("http://127.0.0.1:1", state=kept_in(tmp_path))
    async with slow.replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await begin(run)
        await slow.begun.wait()
        file = sqlite3.connect(tmp_path / "kept.sqlite")
        with file:  # as if it were another process's, which has been silent
            file.execute("update warmroute_runs set runner = 'dead', alive_until = 1000050")
            file.execute("update warmroute_responses set expires_at = 2000000")
        file.close()
        gateway = compose(config, LOGGED, around)
        async with serving_runner(gateway, clients_runner(gateway.served)) as other:
            assert (await other.client.responses.retrieve(first.id)).status in ("queued", "in_progress")
            now[0] += 60
            last = await other.client.responses.retrieve(first.id)
            assert (last.status, last.error.code) == ("failed", "server_error")
        await slow.left.wait()


async def test_items_are_found_by_their_ids_before_a_run_and_after_it(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await run.client.responses.create(model="m", input="a")
        known: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
        with pytest.raises(openai.NotFoundError, match="Item with id 'msg_never' not found"):
            await begin(run, [{"type": "item_reference", "id": "msg_never"}])  # type: ignore[arg-type]
        second = await ended(run, (await begin(run, known)).id)
        assert texts(one.requests[-1].json) == ["to a", "b"]
        await run.client.responses.delete(first.id)
        third = await run.client.responses.create(model="m", input="c", previous_response_id=second.id)
        assert texts(one.requests[-1].json) == ["to a", "b", "to b", "c"], "they were kept with the run"
        refer: Any = [{"type": "item_reference", "id": second.output[0].id}]
        await run.client.responses.create(model="m", input=refer)
        assert texts(one.requests[-1].json) == ["to b"]
        await run.client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await run.client.responses.create(model="m", input=refer)
        assert third.id


async def test_it_goes_to_the_fallback_of_a_pool_without_replicas(tmp_path: Path) -> None:
    further = {"pool": "small", "model": "m"}
    async with replica() as one:
        pools = [
            {"name": "big", "models": ["large"], "replicas": ["http://127.0.0.1:9"], "fallback": further},
            {"name": "small", "models": ["m"], "replicas": [one.url]},
        ]
        async with running(pools=pools, state=kept_in(tmp_path)) as run:
            made = await run.client.responses.create(model="large", input="a", background=True)
            assert (await ended(run, made.id)).output_text == "to a"
            assert one.requests[-1].json["model"] == "m"
            with pytest.raises(openai.NotFoundError):
                await run.client.responses.create(model="unknown", input="a", background=True)


async def test_events_that_are_not_there_yet_are_refused(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        done = await ended(run, (await begin(run)).id)
        seen = [event async for event in await run.client.responses.retrieve(done.id, stream=True)]
        last = seen[-1].sequence_number
        assert [event async for event in await run.client.responses.retrieve(done.id, stream=True, starting_after=last)] == []
        with pytest.raises(openai.BadRequestError, match=f"The latest event of this response is number {last}"):
            await run.client.responses.retrieve(done.id, stream=True, starting_after=last + 1)


async def test_a_stream_that_ends_with_an_error_is_logged_as_one(tmp_path: Path, request_lines: Any) -> None:
    """Its run goes on in another gateway, and is deleted there."""
    slow, state = Slow(), kept_in(tmp_path)
    async with slow.replica() as one, running(one, state=state) as run, running(one, state=state) as other:
        id_ = (await begin(run)).id
        await slow.begun.wait()
        follows = await other.client.responses.retrieve(id_, stream=True)
        await run.client.responses.delete(id_)
        with pytest.raises(openai.APIError, match="The response was deleted"):
            async for _ in follows:
                pass
        await eventually(lambda: any("was deleted" in line.get("error", "") for line in request_lines()))


async def test_one_whose_object_is_nested_deeply_has_an_end(tmp_path: Path) -> None:
    """The object cannot be written again; its bytes can."""
    deep = json.loads("[" * 300 + "]" * 300)
    body = {"model": "m", "input": "a", "background": True, "stream": True, "metadata": {"a": deep}}
    async with FakeReplica([status(400)] * 9, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        for _ in range(2):
            async with run.session.post(run.url + "/v1/responses", json=body) as answer:
                said = await answer.text()
            assert said.rstrip().rpartition("event: ")[2].startswith("response.failed")
        assert (await run.metrics())['warmroute_background_runs_total{status="failed"}'] == 2
