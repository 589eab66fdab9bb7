"""Responses that the gateway keeps, through a whole gateway and the official client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import openai
import pytest
from yarl import URL

from gateway.parser.parsing import INLINE_BYTES
from gateway.request.owner import owner_of
from tests.gateway.conftest import Running, running
from tests.support.fakes import STREAM_HEAD, FakeReplica, FakeRequest, chunk, dies_now, http, models, writes

RESPONSES = "/v1/responses"
_numbers = itertools.count()


def kept_in(path: Path, **more: Any) -> dict[str, Any]:
    return {"url": f"sqlite:///{path / 'kept.sqlite'}", **more}


def texts(asked: dict[str, Any]) -> list[str]:
    """Of the items that a replica was asked with."""
    found = []
    for item in asked["input"] if isinstance(asked["input"], list) else [{"content": asked["input"]}]:
        content = item.get("content", item.get("output"))
        found.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    return found


def answer_of(asked: dict[str, Any], id_: str) -> dict[str, Any]:
    prompt_tokens = 10 + sum(map(len, texts(asked))) // 4
    message = {
        "type": "message",
        "id": f"msg_{id_}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": f"to {texts(asked)[-1][:20]}", "annotations": [], "logprobs": None}],
    }
    return {
        "id": id_,
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "previous_response_id": asked.get("previous_response_id"),
        "store": asked.get("store", True),
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + 3,
        },
    }


async def repeating(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """An engine whose responses all have the same id."""
    await forgetful(request, writer, "resp_same")


async def with_an_odd_id(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    await forgetful(request, writer, "résp a+b%25")


async def forgetful(request: FakeRequest, writer: asyncio.StreamWriter, id_: str = "") -> None:
    """An engine that keeps nothing: it refuses what goes on with anything. id_: of its response, "": a new one."""
    if request.method != "POST" or request.path != RESPONSES:
        writer.write(http(404, b'{"error": {"message": "no such thing here", "type": "t"}}'))
        return
    asked = request.json
    if asked.get("previous_response_id") or asked.get("conversation"):
        writer.write(http(404, b'{"error": {"message": "Response not found.", "type": "t"}}'))
        return
    answer = answer_of(asked, id_ or f"resp_{next(_numbers)}")
    if not asked.get("stream"):
        writer.write(http(200, json.dumps(answer).encode()))
        return
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    item = answer["output"][0]
    text = item["content"][0]["text"]
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "content": [], "status": "in_progress"}}),
        (
            "response.content_part.added",
            {"item_id": item["id"], "output_index": 0, "content_index": 0, "part": {**item["content"][0], "text": ""}},
        ),
        (
            "response.output_text.delta",
            {"item_id": item["id"], "output_index": 0, "content_index": 0, "delta": text, "logprobs": []},
        ),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": answer}),
    ]
    writer.write(STREAM_HEAD)
    for number, (kind, data) in enumerate(events):
        whole = {"type": kind, "sequence_number": number, **data}
        writer.write(chunk(f"event: {kind}\ndata: {json.dumps(whole)}\n\n".encode()))
        await writer.drain()
    if text == "to die":  # after all that matters
        dies_now(writer)
        return
    writer.write(b"0\r\n\r\n")


def replica() -> FakeReplica:
    return FakeReplica([forgetful] * 999, listing=models("m", "other"))


async def ask(run: Running, text: Any, *, stream: bool = False, client: Any = None, **more: Any) -> Any:
    """The response as the official client has it in the end."""
    client = client or run.client
    if not stream:
        return await client.responses.create(model="m", input=text, **more)
    async with client.responses.stream(model="m", input=text, **more) as events:
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_any_replica(tmp_path: Path, stream: bool, request_lines: Any) -> None:
    async with replica() as one, replica() as two, running(one, two, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a", stream=stream, store=True)
        assert (first.previous_response_id, first.store) == (None, True)
        last, said = first, ["a", "to a"]
        for number in range(4):
            before = last.id
            last = await ask(run, f"b{number}", stream=stream, store=True, previous_response_id=before)
            assert (last.previous_response_id, last.store, last.output_text) == (before, True, f"to b{number}")
            said += [f"b{number}", f"to b{number}"]
        asked = max((each.json for each in (*one.requests, *two.requests)), key=lambda each: len(texts(each)))
        assert texts(asked) == said[:-1]
        assert (asked["store"], asked["previous_response_id"]) == (False, None)
        await ask(run, "c", stream=stream, store=True, previous_response_id=first.id)
        metrics = await run.metrics()
        assert metrics['warmroute_responses_kept_total{result="kept"}'] == 6
        assert metrics['warmroute_histories_total{result="found"}'] == 5
        assert [line["status"] for line in request_lines()] == [200] * 6


async def test_a_kept_response_is_found_again_listed_and_deleted(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        second = await ask(run, [{"role": "user", "content": "b"}], previous_response_id=first.id)
        found = await run.client.responses.retrieve(second.id)
        assert found.model_dump() == second.model_dump()
        page = await run.client.responses.input_items.list(second.id, order="asc", limit=2)
        assert page.has_more
        items = [item async for item in run.client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.content[0].text for item in items] == ["a", "to a", "b"]
        assert len({item.id for item in items}) == 3
        newest = await run.client.responses.input_items.list(second.id, limit=1)
        assert newest.data[0].content[0].text == "b"  # type: ignore[union-attr]

        await run.client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await run.client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="was deleted"):
            await ask(run, "c", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await run.client.responses.cancel(second.id)
        assert len(one.requests) == 2, "the replica was never asked about what it does not have"


async def test_what_may_be_included_is_there_anyway(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        wanted: list[Any] = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        assert (await run.client.responses.retrieve(first.id, include=wanted)).model_dump() == first.model_dump()
        page = await run.client.responses.input_items.list(first.id, include=wanted)
        assert len(page.data) == 1


async def test_it_outlives_the_gateway_and_two_share_it(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        async with running(one, state=kept_in(tmp_path)) as other:
            second = await ask(other, "b", previous_response_id=first.id)
            third = await ask(run, "c", previous_response_id=second.id)
    async with replica() as two, running(two, state=kept_in(tmp_path)) as run:
        await ask(run, "d", previous_response_id=third.id)
        assert texts(two.requests[-1].json) == ["a", "to a", "b", "to b", "c", "to c", "d"]


async def test_store_false_keeps_nothing_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the default store, which is opened by its first use."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with replica() as one, running(one, state={"url": "sqlite"}) as run:
        body = json.dumps({"model": "m", "input": "a", "store": False, "x": 1.0}, indent=1).encode()
        status, _, found = await run.post(io.BytesIO(body), RESPONSES)
        assert status == 200
        assert one.requests[-1].body == body
        assert not os.listdir(tmp_path)
        with pytest.raises(openai.NotFoundError):
            await run.client.responses.retrieve(found["id"])
        first = await ask(run, "a")
        second = await ask(run, "b", previous_response_id=first.id, store=False)
        assert second.store is False
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(run, "c", previous_response_id=second.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_ids_of_others_do_not_exist(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        by_key = run.client.with_options(api_key="another")
        by_tenant = run.client.with_options(default_headers={"X-Tenant-Id": "t"})
        conversation = await run.client.conversations.create(items=[{"role": "user", "content": "a"}])
        for client in (by_key, by_tenant):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(first.id)
            with pytest.raises(openai.BadRequestError):
                await ask(run, "b", client=client, previous_response_id=first.id)
            with pytest.raises(openai.NotFoundError):
                await ask(run, "b", client=client, conversation=conversation.id)
            with pytest.raises(openai.NotFoundError):
                await client.conversations.items.list(conversation.id)
        own = await ask(run, "b", client=by_tenant)
        same = by_tenant.with_options(api_key="rotated")
        assert (await ask(run, "c", client=same, previous_response_id=own.id)).previous_response_id == own.id


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_an_engine_gives_twice_is_that_of_the_first_one(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who goes on with the first one, or reads it, gets what another request was about."""
    async with FakeReplica([repeating] * 9, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a", stream=stream)
        second = await ask(run, "b", stream=stream)
        third = await ask(run, "c", stream=stream, previous_response_id=first.id)
        assert [each.store for each in (first, second, third)] == [True, False, False]
        assert {each.id for each in (first, second, third)} == {"resp_same"}
        assert texts(one.requests[-1].json) == ["a", "to a", "c"]
        assert (await run.client.responses.retrieve(first.id)).output_text == "to a"
        conversation = await run.client.conversations.create()
        assert (await ask(run, "d", stream=stream, conversation=conversation.id)).store is False
        await ask(run, "e", stream=stream, conversation=conversation.id)
        assert texts(one.requests[-1].json) == ["d", "to d", "e"], "it has its turns all the same"
        metrics = await run.metrics()
    assert metrics['warmroute_responses_kept_total{result="repeated"}'] == 4
    assert sum("id of an earlier response" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("path", ["/v1/responses//ID", "/v1/responses/ID/", "/v1/responses%2FID", "/v1//responses/ID/cancel"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_no_path_leads_to_a_replica_past_the_check_whose_a_response_is(tmp_path: Path, method: str, path: str) -> None:
    """A replica that reads paths less strictly, and has kept what it was asked not to."""
    async with FakeReplica([forgetful, writes(http(200, b"{}"))], listing=models("m")) as one:
        for state, code, asked in ((kept_in(tmp_path), 404, 1), ({"url": "off"}, 200, 2)):
            async with running(one, state=state) as run:
                if asked == 1:
                    await ask(run, "a")
                url = URL(run.url + path.replace("ID", "resp_1"), encoded=True)
                async with run.session.request(method, url, headers={"Authorization": "Bearer other"}) as answer:
                    assert answer.status == code
                    assert asked == 2 or (await answer.json())["error"]["code"] == "not_found"
                assert len(one.requests) == asked


async def test_an_id_may_have_any_printable_character(tmp_path: Path) -> None:
    async with FakeReplica([with_an_odd_id] * 2, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        assert first.store
        for below in ("", "/input_items"):
            code, _, _ = await run.get(f"{RESPONSES}/{quote(first.id)}{below}", headers={"Authorization": "Bearer k"})
            assert code == 200


async def test_an_expired_response_is_gone(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path, ttl_s=0.001)) as run:
        first = await ask(run, "a")
        with pytest.raises(openai.APIStatusError) as caught:
            await run.client.responses.retrieve(first.id)
        assert (caught.value.status_code, caught.value.code) == (410, "expired")
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(run, "b", previous_response_id=first.id)
        assert (caught.value.status_code, caught.value.param) == (410, "previous_response_id")


async def test_a_stream_that_is_cut_after_its_last_event_is_whole(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        found = await ask(run, "die", stream=True)
        assert found.store is True
        assert (await run.client.responses.retrieve(found.id)).output_text == "to die"


async def test_what_could_not_be_kept_says_so(tmp_path: Path) -> None:
    """The client has its answer, and nobody has told it that it is kept."""
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite")) as database:
            database.execute("DROP TABLE warmroute_responses")
        for stream in (False, True):
            found = await ask(run, "b", stream=stream)
            assert (found.store, found.output_text) == (False, "to b")
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(run, "c", previous_response_id=first.id)
        assert (caught.value.status_code, caught.value.code) == (503, "state_unavailable")
        with pytest.raises(openai.InternalServerError):
            await run.client.responses.retrieve(first.id)
        metrics = await run.metrics()
        assert metrics['warmroute_responses_kept_total{result="failed"}'] == 2
        assert metrics['warmroute_histories_total{result="failed"}'] == 1


async def test_a_store_that_cannot_be_opened_costs_its_requests_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with replica() as one, running(one, state={"url": f"sqlite:///{tmp_path}/file/a.sqlite"}) as run:
        assert (await ask(run, "a")).store is False
        with pytest.raises(openai.InternalServerError):
            await ask(run, "b", previous_response_id="resp_x")
        assert (await ask(run, "a", store=False)).output_text == "to a"


async def test_a_conversation_has_its_items(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        client = run.client
        made = await client.conversations.create(metadata={"topic": "x"}, items=[{"role": "user", "content": "a"}])
        first = await ask(run, "b", conversation=made.id)
        assert first.conversation
        assert first.conversation.id == made.id
        await ask(run, "c", stream=True, conversation={"id": made.id})
        assert texts(one.requests[-1].json) == ["a", "b", "to b", "c"]
        assert one.requests[-1].json["conversation"] is None
        items = [item async for item in client.conversations.items.list(made.id, order="asc", limit=2)]
        assert [item.content[0].text for item in items] == ["a", "b", "to b", "c", "to c"]  # type: ignore[union-attr]
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "d"}])
        only = added.data[0]
        assert (await client.conversations.items.retrieve(only.id or "", conversation_id=made.id)).id == only.id
        await client.conversations.items.delete(only.id or "", conversation_id=made.id)
        updated = await client.conversations.update(made.id, metadata={"topic": "y"})
        assert updated.metadata == {"topic": "y"}
        assert (await client.conversations.retrieve(made.id)).metadata == {"topic": "y"}
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await ask(run, "e", conversation=made.id)
        assert len(one.requests) == 2


async def test_a_large_history_is_written_out_by_the_parser_process(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path), limits={"body_mb": 8, "drain_timeout_s": 1}) as run:
        large = "x" * (INLINE_BYTES + 10)
        first = await ask(run, large)
        second = await ask(run, "b", previous_response_id=first.id)
        assert texts(one.requests[-1].json) == [large, f"to {large[:20]}", "b"]
        assert run.gateway.parsing.process.started
        third = await ask(run, "y" * (6 << 20), previous_response_id=second.id)
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(run, "c", previous_response_id=third.id)
        assert (caught.value.status_code, caught.value.code) == (413, "history_too_large")


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


BAD: list[tuple[str, str, Any, int]] = [
    ("POST", RESPONSES, {"model": "m", "input": "a", "previous_response_id": "r", "conversation": "c"}, 400),
    ("POST", RESPONSES, {"model": "m", "input": "a", "previous_response_id": 7}, 400),
    ("POST", RESPONSES, {"model": "m", "input": "a", "conversation": "never"}, 404),
    ("GET", f"{RESPONSES}/never", None, 404),
    ("GET", f"{RESPONSES}/never/input_items", None, 404),
    ("POST", f"{RESPONSES}/never/cancel", None, 404),
    ("DELETE", f"{RESPONSES}/never", None, 404),
    ("PUT", f"{RESPONSES}/never", None, 405),
    ("GET", f"{RESPONSES}/{'x' * 300}", None, 400),
    ("GET", f"{RESPONSES}/known/input_items?limit=0", None, 400),
    ("GET", f"{RESPONSES}/known/input_items?limit=x", None, 400),
    ("GET", f"{RESPONSES}/known/input_items?order=up", None, 400),
    ("GET", f"{RESPONSES}/known/input_items?{'&'.join('a' * 40)}", None, 400),
    ("GET", f"{RESPONSES}/known?include=everything", None, 400),
    ("GET", f"{RESPONSES}/known?{'&'.join('a' * 40)}", None, 400),
    ("GET", f"{RESPONSES}/known/input_items?include[]=reasoning.encrypted_content&include[]=x", None, 400),
    ("GET", "/v1/conversations/known/items?include=x", None, 400),
    ("GET", "/v1/conversations", None, 405),
    ("GET", "/v1/conversations/never", None, 404),
    ("POST", "/v1/conversations", [], 400),
    ("POST", "/v1/conversations", {"metadata": {"a": 1}}, 400),
    ("POST", "/v1/conversations", {"metadata": {str(at): "x" for at in range(17)}}, 400),
    ("POST", "/v1/conversations", {"items": [{}] * 21}, 400),
    ("POST", "/v1/conversations", {"items": ["x"]}, 400),
    ("POST", "/v1/conversations", {"items": [{"type": "x", "y": nested(300)}]}, 400),
    ("POST", "/v1/conversations/never/items", {"items": []}, 404),
    ("POST", "/v1/conversations/never/items", {}, 400),
    ("GET", "/v1/conversations/never/input_items", None, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "expected"), BAD)
async def test_bad_input_is_refused_in_openais_shape(tmp_path: Path, method: str, path: str, body: Any, expected: int) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        async with run.session.request(method, run.url + path, json=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, set(error)) == (expected, {"message", "type", "param", "code"})
        assert not one.requests


def test_an_owner_is_a_tenant_or_a_digest_of_credentials() -> None:
    owners: list[Callable[[], str]] = [
        lambda: owner_of("t", "Bearer a", None),
        lambda: owner_of("", "Bearer a", None),
        lambda: owner_of("", None, "a"),
        lambda: owner_of("", None, None),
    ]
    found = [each() for each in owners]
    assert len(set(found)) == 4
    assert owner_of("t", "Bearer b", None) == found[0]
    assert owner_of("key:x", None, None) != owner_of("", "x", None)
    assert "Bearer" not in found[1]
    assert owner_of("M\udcfcller", None, None) == "octets:4dfc6c6c6572", "a header that is not UTF-8"
    assert owner_of("Müller", None, None) == "tenant:Müller"


async def test_a_tenant_whose_name_is_not_utf_8_keeps_its_responses(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "input": "a"}).encode()

    async def asked(run: Running, head: bytes, payload: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection(*run.url.removeprefix("http://").split(":"))
        length = b"Content-Length: %d\r\n" % len(payload)
        writer.write(
            head + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Tenant-Id: M\xfcller\r\n" + length + b"\r\n" + payload
        )
        answer = await reader.read()
        writer.close()
        return answer

    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        answer = await asked(run, b"POST /v1/responses", body)
        assert answer.startswith(b"HTTP/1.1 200")
        kept = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert kept["store"] is True
        assert (await asked(run, b"GET /v1/responses/" + kept["id"].encode())).startswith(b"HTTP/1.1 200")
        assert (await run.get(f"{RESPONSES}/{kept['id']}"))[0] == 404, "it is that tenant's"


DEEP = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_nested_too_deeply_is_answered_and_not_kept(tmp_path: Path, stream: bool) -> None:
    """It can be read, and not be written again."""
    item = {"type": "message", "role": "user", "content": "x", "z": DEEP}
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = await run.client.conversations.create()
        body = {"model": "m", "input": [item], "conversation": made.id, "stream": stream}
        async with run.session.post(run.url + RESPONSES, json=body, headers={"Authorization": "Bearer k"}) as answer:
            raw = await answer.text()
            assert answer.status == 200
        assert '"store":false' in raw.replace(" ", "")
        assert (await run.metrics())['warmroute_responses_kept_total{result="unfit"}'] == 1
        first = await ask(run, [item])
        with pytest.raises(openai.BadRequestError, match="nested too deeply"):
            await run.client.responses.input_items.list(first.id)
        with pytest.raises(openai.BadRequestError, match="nested too deeply"):
            await run.client.conversations.create(items=[item])  # type: ignore[list-item]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_read_is_answered_and_not_kept(tmp_path: Path, stream: bool) -> None:
    """The items of a long turn are those of its conversation once the parser process has read them."""
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = await run.client.conversations.create()
        many = [{"role": "user", "content": "x", "z": [0] * 20_000}]
        assert (await ask(run, many, stream=stream, conversation=made.id)).store
        assert run.gateway.parsing.process.started == 1
        await run.gateway.parsing.process.close()
        found = await ask(run, many, stream=stream, conversation=(await run.client.conversations.create()).id)
        assert (found.store, found.output_text) == (False, "to x")
        assert (await run.metrics())['warmroute_responses_kept_total{result="failed"}'] == 1
        assert len((await run.client.conversations.items.list(made.id)).data) == 2


@pytest.mark.parametrize("id_", ["a\0b", "\ud800", "a\nb", "x" * 257, ""])
async def test_an_id_that_no_database_takes_is_refused(tmp_path: Path, id_: str) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        for body in ({"previous_response_id": id_}, {"conversation": id_}, {"input": [{"type": "item_reference", "id": id_}]}):
            code, _, answer = await run.post({"model": "m", "input": "a", **body}, RESPONSES)
            assert (code, answer["error"]["type"]) == (400, "invalid_request_error"), body
        assert one.requests == []


@pytest.mark.parametrize("name", ["store", "background"])
@pytest.mark.parametrize("value", ["false", 0, 1, {}])
async def test_flags_are_true_or_false(tmp_path: Path, name: str, value: Any) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        code, _, answer = await run.post({"model": "m", "input": "a", name: value}, RESPONSES)
        assert (code, answer["error"]["param"]) == (400, name)


async def test_an_unknown_response_says_why_and_what_to_do(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        code, _, answer = await run.post({"model": "m", "input": "a", "previous_response_id": "resp_9"}, RESPONSES)
        assert (code, answer["error"]["code"]) == (400, "previous_response_not_found")
        assert "'resp_9' not found. It was not stored, has expired, or belongs to" in answer["error"]["message"]
        assert answer["error"]["message"].endswith("Send the whole input.")


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation"])
async def test_a_dry_run_has_the_history(tmp_path: Path, kind: str) -> None:
    text, dry = "".join(f"{number}. You help. " for number in range(400)), "/warmroute/route?path=/v1/responses"
    async with replica() as one, replica() as two, running(one, two, state=kept_in(tmp_path)) as run:
        owner = {"Authorization": "Bearer k"}
        if kind == "conversation":
            id_ = (await run.post({}, "/v1/conversations", headers=owner))[2]["id"]
            await ask(run, text, conversation=id_)
        else:
            id_ = (await ask(run, text)).id
        warm = one if len(one.requests) else two
        asked = {"model": "m", "input": "and now?", kind: id_}
        code, _, decision = await run.post(asked, dry, headers=owner)
        assert (code, decision["replica"], decision["reason"]) == (200, warm.name, "warm")
        assert decision["candidates"][0]["matched_tokens"] > 1000
        assert (await run.post(asked, dry, headers={"Authorization": "Bearer else"}))[0] in (400, 404)
        assert len(one.requests) + len(two.requests) == 1, "nothing is sent"


async def test_what_goes_into_a_conversation_is_bounded_and_read_by_the_parser_process(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        path = f"/v1/conversations/{(await run.post({}, '/v1/conversations'))[2]['id']}/items"
        many = b'{"items":[{"type":"x","y":[%b0]}]}' % (b"[]," * 600_000)
        for place in ("/v1/conversations", path):
            async with run.session.post(run.url + place, data=io.BytesIO(many)) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (413, "request_too_complex")
        large = {"items": [{"role": "user", "content": str(at) + "x" * 40_000} for at in range(20)]}
        code, _, added = await run.post(large, path)
        assert run.gateway.parsing.process.started == 1
        assert (code, len(added["data"]), added["has_more"]) == (200, 20, False)
        listed = json.loads((await run.get(path))[2])
        ends = {"first_id": added["last_id"], "last_id": added["first_id"]}
        assert listed == {**added, **ends, "data": added["data"][::-1]}


async def test_a_page_of_a_conversation_has_as_many_items_as_fit(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        texts_ = ["a" * (5 << 20), "b" * (5 << 20), "c" * (20 << 20), "d", "e" * (5 << 20)]
        items = [{"role": "user", "content": text} for text in texts_]
        body = io.BytesIO(json.dumps({"items": items}).encode())
        async with run.session.post(f"{run.url}/v1/conversations", data=body, headers={"Authorization": "Bearer k"}) as answer:
            id_ = (await answer.json())["id"]
        orders: list[Literal["asc", "desc"]] = ["asc", "desc"]
        for order in orders:
            listed = [item async for item in run.client.conversations.items.list(id_, order=order)]
            found = [item.content[0].text for item in listed]  # type: ignore[union-attr]
            assert found == (texts_ if order == "asc" else texts_[::-1])
        page = await run.client.conversations.items.list(id_, order="asc")
        assert (len(page.data), page.has_more) == (2, True)


async def test_pages_come_to_an_end_where_an_id_comes_twice(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        items: Any = [{"id": "i", "role": "user", "content": str(at)} for at in range(5)]
        made = await run.client.conversations.create(items=items)
        kept = await ask(run, items)
        last = await ask(run, "b", previous_response_id=kept.id)
        orders: list[Literal["asc", "desc"]] = ["asc", "desc"]
        for order in orders:
            pages = run.client.conversations.items.list(made.id, order=order, limit=2)
            assert [item async for item in pages]
            listed = run.client.responses.input_items.list(last.id, order=order, limit=2)
            assert [item async for item in listed]
