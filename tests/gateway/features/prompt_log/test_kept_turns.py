"""Turns that are kept, and requests that go on from them, through a whole gateway, in each API, plain and streamed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.naming.chain import EMPTY, head_name
from gateway.features.prompt_log.naming.forms import names_in
from gateway.features.prompt_log.turns.own_turn import own_turn
from tests.gateway.conftest import running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.features.prompt_log.kept import (
    ALL,
    CHAT,
    FORMS,
    MESSAGES,
    NOW,
    RESPONSES,
    SAID,
    SYSTEM,
    TOOLS,
    USER,
    asked,
    body_of,
    engine,
    in_turn,
    kept_in,
    responds,
    seen,
)
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_dialects import (
    BEGUN,
    CREATED,
    DELTA,
    ENDS,
    counted,
    events,
    message,
    response,
)
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, http, status, streams, writes


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_request_goes_on_from_a_kept_turn(path: str, stream: bool, tmp_path: Path) -> None:
    frame = {**SYSTEM[path], "tools": TOOLS[path]}
    leading = [{"role": "system", "content": "Be brief."}] if path == CHAT else []
    whole = names_in(json.dumps(body_of(path, [*leading, USER, SAID, NOW], **frame)).encode(), FORMS[path])
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        began = int(time.time())
        _, first, _ = await asked(run, path, "keep", [*leading, USER], stream=stream, **frame)
        assert (first["kept"], first["length"]) == (True, 2)
        assert began + 2_592_000 <= first["expires"] <= time.time() + 2_592_000
        header = f'keep, base="{first["head"]}", expect="{head_name(whole.chain)}"'
        code, second, _ = await asked(run, path, header, [*leading, NOW], stream=stream, **frame)
        assert (code, second["kept"], second["length"], second["frame"]) == (200, True, 4, whole.frame)
        assert second["input"] == head_name(whole.chain)
        told = [("system", "Be brief.")] if path == CHAT else []
        assert seen(replica, path) == [*told, ("user", "hi"), ("assistant", "hello"), ("user", "and now?")]
        sent = replica.requests[-1].json
        assert all(sent[name] == value for name, value in frame.items())
        header = f'base="{second["head"]}", frame="{second["frame"]}"'
        code, third, _ = await asked(run, path, header, [USER], stream=stream)
        assert (code, third["length"], third["frame"]) == (200, 6, whole.frame)
        assert len(seen(replica, path)) == len(told) + 5
        sent = replica.requests[-1].json
        assert all(sent[name] == value for name, value in frame.items())
        assert counted(await run.metrics(), "prompt_log_turns_total") == (3 if path == RESPONSES else 2)


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_an_answer_is_made_again_from_the_input_head(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER], stream=stream)
        code, other, _ = await asked(run, path, f'keep, base="{first["input"]}"', [NOW], stream=stream)
        assert (code, seen(replica, path), other["length"]) == (200, [("user", "hi"), ("user", "and now?")], 3)
        code, last, _ = await asked(run, path, f'base="{other["head"]}"', [USER], stream=stream)
        assert seen(replica, path) == [("user", "hi"), ("user", "and now?"), ("assistant", "hello"), ("user", "hi")]
        assert (code, last["length"]) == (200, 5)
        wrong = f'base="{other["head"]}", expect="{first["head"]}"'
        code, error, _ = await asked(run, path, wrong, [USER], stream=stream)
        assert (code, error["code"], error["length"]) == (409, "prompt_log_diverged", 4)
        assert error["heads"] == [first["input"], other["input"], other["head"], last["input"]]


@pytest.mark.parametrize("path", FORMS)
async def test_the_empty_log_is_a_base(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, told, _ = await asked(run, path, f'keep, base="{head_name(EMPTY)}"', [USER])
        assert (code, told["kept"], told["length"]) == (200, True, 2)


@pytest.mark.parametrize("path", FORMS)
async def test_a_base_that_cannot_be_used_is_refused(path: str, tmp_path: Path) -> None:
    other = MESSAGES if path == CHAT else CHAT
    engines = in_turn(engine(other, stream=False), engine(path, stream=False), status(500))
    async with FakeReplica([engines]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, theirs, _ = await asked(run, other, "keep", [USER])
        _, ours, _ = await asked(run, path, "keep", [NOW])
        unknown = await asked(run, path, f'base="{head_name(b"x" * 32)}"', [USER])
        foreign = await asked(run, path, f'base="{ours["head"]}"', [USER], key="another")
        assert unknown[0] == foreign[0] == 404
        assert unknown[1] == foreign[1], "another's head reads like none"
        assert unknown[1]["code"] == "prompt_log_not_found"
        code, error, _ = await asked(run, path, f'base="{theirs["head"]}"', [USER])
        assert (code, error["code"], error["form"]) == (409, "prompt_log_form", FORMS[other])
        frame = f'frame="pf1_{"x" * 43}"'
        code, error, _ = await asked(run, path, frame, [USER])
        assert (code, error["code"]) == (404, "prompt_frame_not_found")
        code, error, _ = await asked(run, path, frame, [USER], tools=TOOLS[path])
        assert (code, error["code"]) == (400, "prompt_log_invalid")
        if path != CHAT:
            code, error, _ = await asked(run, path, frame, [USER], **SYSTEM[path])
            assert (code, error["code"]) == (400, "prompt_log_invalid")
        assert len(replica.requests) == 2
        assert counted(await run.metrics(), "prompt_log_refused_total") >= 5


async def test_an_expired_base_is_gone(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep, ttl=60", [USER])
        assert told["expires"] <= time.time() + 60
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("update warmroute_responses set expires_at = 7")
        code, error, _ = await asked(run, CHAT, f'base="{told["head"]}"', [NOW])
        assert (code, error["code"], error["expired_at"]) == (410, "prompt_log_expired", 7)


async def test_a_log_that_is_too_long_is_refused(tmp_path: Path) -> None:
    limits = {"body_mb": 1}
    async with FakeReplica([answers()]) as replica, running(replica, limits=limits, **kept_in(tmp_path)) as run:
        head, code, error = "", 200, dict[str, Any]()
        for _ in range(3):
            base = f', base="{head}"' if head else ""
            code, error, _ = await asked(run, CHAT, f"keep{base}", [{"role": "user", "content": "x" * 500_000}])
            head = error.get("head", "")
        assert (code, error["code"]) == (413, "history_too_large")


async def test_an_answer_does_not_wait_for_a_store_that_is_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By another process. The store itself would give up after ten seconds, with another reason."""
    async with FakeReplica([answers()]) as replica, running(replica, late_s=0.05, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, "keep", [USER])  # opens it
        with contextlib.closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            caplog.clear()
            code, told, _ = await asked(run, CHAT, "keep", [NOW])
    assert (code, told["kept"]) == (200, False)
    assert [each.__dict__["reason"] for each in caplog.records] == ["the database took longer than 0.05 s"]


@pytest.mark.parametrize("path", FORMS)
async def test_results_reach_the_call_of_their_answer(path: str, tmp_path: Path) -> None:
    """Two equal answers with different ids: the base is the one whose calls have results; results in any order."""
    ids = itertools.count()

    async def calls(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        one, two = f"c{next(ids)}", f"c{next(ids)}"
        await writes(http(200, json.dumps(calling_answer(path, one, two)).encode()))(request, writer)

    async with FakeReplica([calls]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        _, again, _ = await asked(run, path, "keep", [USER])
        assert again["head"] == first["head"]
        for one, two in (("c0", "c1"), ("c2", "c3")):
            code, told, _ = await asked(run, path, f'base="{first["head"]}"', tool_results(path, two, one))
            assert code == 200
            raw = json.dumps(replica.requests[-1].json)
            assert raw.count(f'"{one}"') == raw.count(f'"{two}"') == 2, "of the call, and of its result"
            whole = names_in(json.dumps(replica.requests[-1].json).encode(), FORMS[path])
            assert told["input"] == head_name(whole.chain)


@pytest.mark.parametrize("path", FORMS)
async def test_results_reach_their_calls_where_each_turn_has_the_same_ids(path: str, tmp_path: Path) -> None:
    """Some engines number the calls of each answer anew. The results come in the other order, and are found by ids."""

    numbers = itertools.count()

    async def calls(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        made = {**calling_answer(path, "c0", "c1"), "id": f"resp_{next(numbers)}"}
        await writes(http(200, json.dumps(made).encode()))(request, writer)

    async with FakeReplica([calls]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, path, "keep", [USER])
        whole: list[Any] = [USER]
        for turn in range(1, 4):
            answer = calling_answer(path, "c0", "c1")
            own = tool_results(path, "c1", "c0")
            whole += [*_said(path, answer), *own]
            expect = names_in(json.dumps(body_of(path, whole)).encode(), FORMS[path])
            header = f'keep, base="{told["head"]}", expect="{head_name(expect.chain)}"'
            code, told, _ = await asked(run, path, header, own)
            assert (code, told["kept"]) == (200, True), told
            raw = json.dumps(replica.requests[-1].json)
            assert raw.count('"c0"') == raw.count('"c1"') == 2 * turn
            assert names_in(raw.encode(), FORMS[path]) == expect
            swapped = body_of(path, [*whole[: -len(own)], *tool_results(path, "c0", "c1")])
            assert names_in(json.dumps(swapped).encode(), FORMS[path]).chain != expect.chain


def _said(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer as turns of a later request."""
    if path == CHAT:
        return [answer["choices"][0]["message"]]
    return [{"role": "assistant", "content": answer["content"]}] if path == MESSAGES else answer["output"]


def calling_answer(path: str, one: str, two: str) -> dict[str, Any]:
    if path == CHAT:
        calls = [{"id": id_, "type": "function", "function": {"name": "read", "arguments": "{}"}} for id_ in (one, two)]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"id": "c", "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}]}
    if path == MESSAGES:
        blocks = [{"type": "tool_use", "id": id_, "name": "read", "input": {}} for id_ in (one, two)]
        return {"id": "m", "type": "message", "role": "assistant", "content": blocks, "stop_reason": "tool_use", "usage": {}}
    items = [{"type": "function_call", "call_id": id_, "name": "read", "arguments": "{}"} for id_ in (one, two)]
    return response(id=f"resp_{one}", output=items)


def tool_results(path: str, *ids: str) -> list[dict[str, Any]]:
    if path == CHAT:
        return [{"role": "tool", "tool_call_id": id_, "content": f"of {id_}"} for id_ in ids]
    if path == MESSAGES:
        return [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id_, "content": f"of {id_}"} for id_ in ids]}
        ]
    return [{"type": "function_call_output", "call_id": id_, "output": f"of {id_}"} for id_ in ids]


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_store_that_fails_costs_no_answer(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER], stream=stream)
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("alter table warmroute_responses rename to gone")
        code, told, raw = await asked(run, path, "keep", [NOW], stream=stream)
        assert (code, told["kept"], told["length"], b"hel" in raw) == (200, False, 2, True)
        code, error, _ = await asked(run, path, f'base="{first["head"]}"', [NOW], stream=stream)
        assert (code, error["code"]) == (503, "state_unavailable")
    nowhere: dict[str, Any] = {"state": {"url": f"sqlite:///{tmp_path}/state.db/below.db"}}
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **nowhere) as run:
        code, told, raw = await asked(run, path, "keep", [USER], stream=stream)
        assert (code, told["kept"], b"hel" in raw) == (200, False, True)


async def test_a_full_store_costs_no_answer(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path, max_mb=1, owner_mb=0)) as run:
        code, told, _ = await asked(run, CHAT, "keep", [{"role": "user", "content": "x" * 300_000}])
        assert (code, told["kept"], told["length"]) == (200, False, 2)
        assert (await run.metrics())['warmroute_prompt_log_turns_total{result="full"}'] == 1


async def test_an_answer_that_ends_for_its_length_is_an_entry_and_a_broken_one_is_none(tmp_path: Path) -> None:
    cut = {"id": "c", "choices": [{"index": 0, "message": SAID, "finish_reason": "length"}]}
    engines = in_turn(writes(http(200, json.dumps(cut).encode())), streams("hel", die=True))
    async with FakeReplica([engines]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        assert told["kept"] is True
        headers = {"Prompt-Log": "keep"}
        async with run.session.post(run.url + CHAT, json=body_of(CHAT, [NOW], stream=True), headers=headers) as answer:
            assert b"prompt_log" not in await answer.read()
        with sqlite3.connect(tmp_path / "state.db") as file:
            assert file.execute("select status from warmroute_responses").fetchall() == [("incomplete",)]


@pytest.mark.parametrize("path", FORMS)
async def test_the_same_turn_again_is_one_row(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        heads = {(await asked(run, path, "keep", [USER]))[1]["head"] for _ in range(3)}
        assert len(heads) == 1
        with sqlite3.connect(tmp_path / "state.db") as file:
            rows = file.execute("select count(*) from warmroute_responses").fetchone()[0]
        assert rows == (3 if path == RESPONSES else 1), "a response has an id of its engine"


async def test_cache_markers_are_not_stored(tmp_path: Path) -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    async with FakeReplica([message()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, MESSAGES, "keep", [marked])
        assert "cache_control" in json.dumps(replica.requests[-1].json)
        await asked(run, MESSAGES, f'base="{told["head"]}"', [{**marked, "content": [*marked["content"]]}])
        assert json.dumps(replica.requests[-1].json["messages"]).count("cache_control") == 1


def test_an_element_without_its_cache_markers_keeps_its_bytes() -> None:
    """Engines see the spelling of numbers and texts, and the order of members."""
    block = b'{"type": "tool_use", "id": "c", "name": "f", "input": {"n": 123456789012345678901234567890, "x": 1.0e2}'
    marker = b'"cache_control": {"type": "ephemeral"}'
    other = b'{"role": "user",  "content": "as it is"}'
    body = b'{"model": "m", "messages": [{"content": [%b, %b}], %b, "role": "assistant"}, %b]}' % (block, marker, marker, other)
    stored = own_turn(body, "messages", EMPTY, (), named=False).stored
    parts = block[1:].split(b', "input": ')
    assert stored.count(parts[1]) == 1
    assert stored.endswith(b"," + other)
    assert b"cache_control" not in stored
    whole = json.loads(b"[%b]" % stored)
    assert whole[0] == {"content": [json.loads(block + b"}")], "role": "assistant"}


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_replayed_with_their_signature(stream: bool, tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
    sealed = {"type": "redacted_thinking", "data": "abc"}
    text = {"type": "text", "text": "hello"}
    body = {"id": "m", "type": "message", "role": "assistant", "content": [thought, sealed, text], "stop_reason": "end_turn"}
    pieces = [
        named("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Hm."}),
        named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "sig"}),
        named("content_block_start", index=1, content_block=sealed),
        named("content_block_start", index=2, content_block=text),
    ]
    behaviour = events(BEGUN, *pieces, ENDS) if stream else writes(http(200, json.dumps({**body, "usage": {}}).encode()))
    async with FakeReplica([behaviour]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, MESSAGES, "keep", [USER], stream=stream)
        assert told["kept"] is True
        await asked(run, MESSAGES, f'base="{told["head"]}"', [NOW], stream=stream)
        assert replica.requests[-1].json["messages"][1]["content"] == [thought, sealed, text]


async def test_an_answer_with_foreign_blocks_is_kept_as_a_body_only(tmp_path: Path) -> None:
    foreign = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    body = {"id": "m", "type": "message", "role": "assistant", "content": [foreign], "stop_reason": "end_turn", "usage": {}}
    streamed = events(BEGUN, named("content_block_start", index=0, content_block=foreign), ENDS)
    engines = in_turn(writes(http(200, json.dumps(body).encode())), streamed)
    async with FakeReplica([engines]) as replica, running(replica, **kept_in(tmp_path)) as run:
        assert (await asked(run, MESSAGES, "keep", [USER]))[1]["kept"] is True
        assert (await asked(run, MESSAGES, "keep", [USER], stream=True))[1]["kept"] is False


@pytest.mark.parametrize(("path", "stream"), ALL[2:])
async def test_translated_answers_are_kept(path: str, stream: bool, tmp_path: Path) -> None:
    behaviour = chat_only(streams("hello") if stream else answers())
    async with FakeReplica([behaviour]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        assert told["kept"] is True
        code, again, _ = await asked(run, path, f'base="{told["head"]}"', [NOW], stream=stream)
        assert (code, again["length"]) == (200, 4)


async def test_a_stream_ends_when_its_turn_is_durable(tmp_path: Path) -> None:
    """A transaction of another process holds the end, and nothing before it."""
    async with FakeReplica([streams("hel", "lo")]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, "keep", [NOW])
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("begin immediate")
        headers = {"Prompt-Log": "keep"}
        async with run.session.post(run.url + CHAT, json=body_of(CHAT, [USER], stream=True), headers=headers) as answer:
            read = b""
            while b'"stop"' not in read:
                read += await answer.content.readany()
            assert b"prompt_log" not in read
            assert b"[DONE]" not in read
            other.execute("rollback")
            other.close()
            rest = await answer.read()
            assert b"prompt_log" in rest
            assert rest.endswith(b"data: [DONE]\n\n")


async def test_heads_are_in_no_log_line_and_no_metric(request_lines: Callable[[], Any], tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        await asked(run, CHAT, f'base="{told["head"]}", expect="{told["head"]}"', [NOW])
        await asked(run, CHAT, f'base="{head_name(b"x" * 32)}"', [NOW])
        await asked(run, CHAT, f'expect="{head_name(EMPTY)}"', [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("alter table warmroute_responses rename to gone")
        await asked(run, CHAT, "keep", [USER])
        assert "pl1_" not in json.dumps(request_lines())
        assert "pl1_" not in str(await run.metrics())


async def test_a_response_goes_on_from_a_head_as_its_previous_one(tmp_path: Path) -> None:
    async with FakeReplica([responds]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, raw = await asked(run, RESPONSES, "keep", [USER], store=False)
        assert json.loads(raw)["store"] is False, "as the client has asked; the names tell that it is kept"
        code, again, _ = await asked(run, RESPONSES, "name, keep", [NOW], previous_response_id=told["head"])
        assert (code, again["length"], len(seen(replica, RESPONSES))) == (200, 4, 3)
        code, _, _ = await asked(run, RESPONSES, None, [NOW], previous_response_id=told["head"])
        assert (code, len(seen(replica, RESPONSES))) == (200, 3)
        code, error, _ = await asked(run, RESPONSES, "keep", [NOW], conversation="conv_x")
        assert (code, error["code"]) == (400, "prompt_log_invalid")


async def test_a_response_with_the_header_goes_on_from_a_stored_one(tmp_path: Path) -> None:
    """Its id is a base like its head; a response that was stored without the header is named then."""
    async with FakeReplica([responds]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, _, raw = await asked(run, RESPONSES, None, [USER])
        id_ = json.loads(raw)["id"]
        code, first, raw = await asked(run, RESPONSES, "keep", [NOW], previous_response_id=id_)
        assert (code, first["kept"], first["length"]) == (200, True, 4)
        assert json.loads(raw)["previous_response_id"] == id_
        told = [("user", "hi"), ("assistant", "hello"), ("user", "and now?")]
        assert seen(replica, RESPONSES) == told
        code, named, _ = await asked(run, RESPONSES, "name", [NOW], previous_response_id=id_)
        assert (code, named["input"], named["head"]) == (200, first["input"], first["head"])
        once = 'once="c0ffee-0001"'
        code, again, _ = await asked(run, RESPONSES, once, [NOW], previous_response_id=id_)
        assert (code, again["head"], seen(replica, RESPONSES), len(replica.requests)) == (200, first["head"], told, 4)
        code, again, _ = await asked(run, RESPONSES, once, [NOW], previous_response_id=id_)
        assert (code, again["repeated"], len(replica.requests)) == (200, True, 4)
        code, error, _ = await asked(run, RESPONSES, once, [NOW], previous_response_id=first["head"])
        assert (code, error["code"]) == (422, "once_mismatch")


async def test_a_stored_response_that_is_no_base_is_refused(tmp_path: Path) -> None:
    engines = in_turn(engine(CHAT, stream=False), responds)
    async with FakeReplica([engines]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, other, _ = await asked(run, CHAT, "keep", [USER])
        _, _, raw = await asked(run, RESPONSES, None, [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            turn_id = file.execute("select id from warmroute_responses where id like 'turn_%'").fetchone()[0]
        id_ = json.loads(raw)["id"]
        for header in ("keep", 'once="c0ffee-0001"', f'frame="pf1_{"x" * 43}"'):
            unknown = await asked(run, RESPONSES, header, [NOW], previous_response_id="resp_x")
            foreign = await asked(run, RESPONSES, header, [NOW], previous_response_id=id_, key="another")
            assert unknown == foreign
            code, error, _ = unknown
            assert (code, error["code"], error["param"]) == (404, "prompt_log_not_found", "previous_response_id")
            code, error, _ = await asked(run, RESPONSES, header, [NOW], previous_response_id=turn_id)
            assert (code, error["code"], error["form"]) == (409, "prompt_log_form", "chat")
        code, error, _ = await asked(run, RESPONSES, f'base="{other["input"]}"', [NOW], previous_response_id=id_)
        assert (code, error["code"], error["param"]) == (400, "prompt_log_invalid", "base")
        assert len(replica.requests) == 2


async def test_a_turn_of_another_api_is_no_response(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await asked(run, CHAT, "keep", [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            id_ = file.execute("select id from warmroute_responses").fetchone()[0]
        headers = {"Authorization": "Bearer k"}
        for path in (id_, f"{id_}/input_items"):
            async with run.session.get(f"{run.url}{RESPONSES}/{path}", headers=headers) as answer:
                assert answer.status == 404
        async with run.session.delete(f"{run.url}{RESPONSES}/{id_}", headers=headers) as answer:
            assert answer.status == 404
        code, error, _ = await asked(run, RESPONSES, None, [NOW], previous_response_id=id_)
        assert (code, error["code"]) == (400, "previous_response_not_found")


async def test_an_empty_answer_of_responses_adds_no_entry(tmp_path: Path) -> None:
    made = response(id="resp_1", output=[])
    async with FakeReplica([_ends_with(made)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, RESPONSES, "keep", [USER], stream=True)
        assert (told["kept"], told["head"], told["length"]) == (True, told["input"], 1)
        code, _, _ = await asked(run, RESPONSES, f'base="{told["head"]}"', [NOW], stream=True)
        assert code == 200


async def test_an_answer_that_the_last_event_leaves_out_is_not_kept(tmp_path: Path) -> None:
    """Its row would have another head than the client is told."""
    made = response(id="resp_1", output=[])
    async with FakeReplica([_ends_with(made, DELTA)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, RESPONSES, "keep", [USER], stream=True)
        assert (told["kept"], told["length"]) == (False, 2)
        code, error, _ = await asked(run, RESPONSES, f'base="{told["input"]}"', [NOW], stream=True)
        assert (code, error["code"]) == (404, "prompt_log_not_found")
        assert (await run.metrics())['warmroute_prompt_log_turns_total{result="unfit"}'] == 1


def _ends_with(made: dict[str, Any], *deltas: bytes) -> Behaviour:
    return events(CREATED, *deltas, named("response.completed", response=made, sequence_number=4))


@pytest.mark.parametrize("path", FORMS)
async def test_a_frame_lives_as_long_as_the_last_turn_that_names_it(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep, ttl=60", [USER], tools=TOOLS[path])
        _, other, _ = await asked(run, path, f'keep, frame="{first["frame"]}"', [NOW])
        with sqlite3.connect(tmp_path / "state.db") as file:
            expiry = file.execute("select expires_at from warmroute_frames").fetchone()[0]
        assert int(expiry) == other["expires"] > first["expires"]


@pytest.mark.parametrize("path", FORMS)
async def test_a_base_with_its_frame_is_no_way_around_the_largest_body(path: str, tmp_path: Path) -> None:
    long = {"role": "user", "content": "x" * 600_000}
    limits = {"body_mb": 1}
    async with (
        FakeReplica([engine(path, stream=False)]) as replica,
        running(replica, limits=limits, **kept_in(tmp_path)) as run,
    ):
        _, told, _ = await asked(run, path, "keep", [long])
        code, error, _ = await asked(run, path, f'base="{told["head"]}"', [long])
        assert (code, error["code"], len(replica.requests)) == (413, "history_too_large", 1)
