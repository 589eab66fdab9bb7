"""Sealed parts: verbatim at the pool that made them, at no other pool, and shown to nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Running, running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.features.prompt_log.kept import (
    LISTS,
    MESSAGES,
    NOW,
    RESPONSES,
    USER,
    asked,
    called,
    engine,
    in_turn,
    kept_in,
)
from tests.gateway.request.test_dialects import BEGUN, CREATED, ENDS, SAYS, events, response
from tests.support.fakes import (
    Behaviour,
    FakeReplica,
    FakeRequest,
    dies,
    dies_after_headers,
    dies_in_plain_body,
    http,
    models,
    status,
    writes,
)

SEAL = "EqQB/+=\u00e9 \\u0041"
BLOCK = {"type": "redacted_thinking", "data": SEAL}
ITEM = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SEAL}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}
SEALED: dict[str, Any] = {MESSAGES: BLOCK, RESPONSES: ITEM}
SHOWN = {"sha256": sha256(SEAL.encode()).hexdigest(), "bytes": len(SEAL.encode())}
ALL = [(path, stream) for path in SEALED for stream in (False, True)]


def seals(path: str, *, stream: bool) -> Behaviour:
    """An engine that seals its thoughts."""
    if path == MESSAGES:
        if stream:
            block = named("content_block_start", index=1, content_block=BLOCK)
            return events(BEGUN + SAYS + block, ENDS)
        said = [BLOCK, {"type": "text", "text": "hello"}]
        body = {"id": "m", "type": "message", "role": "assistant", "content": said, "stop_reason": "end_turn", "usage": {}}
        return writes(http(200, json.dumps(body).encode()))

    async def responds(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        made = response(id=f"resp_{next(_numbers)}", output=[ITEM, SAID])
        last = named("response.completed", response=made, sequence_number=4)
        behaviour = events(CREATED, last) if stream else writes(http(200, json.dumps(made).encode()))
        await behaviour(request, writer)

    return responds


_numbers = itertools.count()


@contextlib.asynccontextmanager
async def two(tmp_path: Path, big: FakeReplica, small: FakeReplica, **more: Any) -> AsyncIterator[Running]:
    """A pool, its fallback, and a pool beside them."""
    pools = [
        {"name": "big", "models": ["m"], "replicas": [big.url], "fallback": {"pool": "small", "model": "little"}, **more},
        {"name": "small", "models": ["little"], "replicas": [small.url]},
    ]
    async with running(pools=pools, **kept_in(tmp_path)) as run:
        yield run


def sealed_at(replica: FakeReplica, path: str) -> list[Any]:
    """The sealed parts that the replica got last."""
    turns = replica.requests[-1].json[LISTS[path]]
    contents = [turn.get("content") for turn in turns]
    blocks = turns if path == RESPONSES else [block for each in contents if isinstance(each, list) for block in each]
    return [block for block in blocks if block.get("type") in ("redacted_thinking", "reasoning")]


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_sealed_parts_go_back_verbatim_and_are_shown_by_digest_and_length(
    path: str, stream: bool, tmp_path: Path
) -> None:
    async with FakeReplica([seals(path, stream=stream)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        assert told["kept"] is True
        code, again, _ = await asked(run, path, f'keep, base="{told["head"]}"', [NOW], stream=stream)
        assert (code, sealed_at(replica, path)) == (200, [SEALED[path]])
        code, found = await called(run, "GET", f"{again['head']}/entries")
        assert (code, SEAL in json.dumps(found, ensure_ascii=False)) == (200, False)
        entries = found["entries"]
        assert [bool(each["entry"].get("sealed")) for each in entries] == [False, True, False, True]
        shown = entries[1]["body"][0]
        holder = next(block for block in shown["content"] if block["type"] != "text") if path == MESSAGES else shown
        assert holder["data" if path == MESSAGES else "encrypted_content"] == SHOWN
        assert {name: entries[1]["entry"]["sealed"][0][name] for name in SHOWN} == SHOWN
        assert (await called(run, "GET", told["head"]))[1]["issuer"] == "default"


FAILURES = [dies, dies_after_headers, dies_in_plain_body, status(500), status(503), status(429)]


@pytest.mark.parametrize("fault", FAILURES)
@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_no_failure_brings_sealed_parts_to_the_fallback(
    path: str, stream: bool, fault: Behaviour, tmp_path: Path
) -> None:
    big = in_turn(seals(path, stream=stream), fault)
    other = seals(path, stream=stream)
    async with (
        FakeReplica([big], listing=models("m")) as one,
        FakeReplica([other], listing=models("little")) as two_,
        two(tmp_path, one, two_) as run,
    ):
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        headers = {"Authorization": "Bearer k", "Prompt-Log": f'keep, base="{told["head"]}"'}
        body = {"model": "m", "max_tokens": 9, LISTS[path]: [NOW], "stream": stream}
        async with run.session.post(run.url + path, json=body, headers=headers) as answer:
            assert answer.status != 200 or b"error" in await answer.read()
        assert not two_.requests
        assert len(one.requests) >= 2
        plain = await asked(run, path, "keep", [USER], stream=stream)
        assert plain[0] == 200, "a log without sealed parts goes to the fallback"
        assert len(two_.requests) == 1


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_no_pool_without_replicas_and_no_queue_brings_sealed_parts_to_the_fallback(
    path: str, stream: bool, tmp_path: Path
) -> None:
    behaviour = seals(path, stream=stream)
    async with (
        FakeReplica([behaviour], listing=models("m")) as one,
        FakeReplica([behaviour], listing=models("little")) as two_,
        two(tmp_path, one, two_, max_inflight=1, max_queue=0) as run,
    ):
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        header = f'keep, base="{told["head"]}"'
        permit = run.gateway.fleet.target("m").admission.try_admit()
        assert permit is not None
        code, _, _ = await asked(run, path, header, [NOW], stream=stream)
        assert code == 429
        permit.release()
        await run.post({"name": one.name}, "/warmroute/drain")
        code, _, _ = await asked(run, path, header, [NOW], stream=stream)
        assert code == 503
        assert not two_.requests


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_what_the_fallback_has_sealed_goes_to_the_fallback(path: str, stream: bool, tmp_path: Path) -> None:
    big = in_turn(status(503), seals(path, stream=stream))
    async with (
        FakeReplica([big], listing=models("m")) as one,
        FakeReplica([seals(path, stream=stream)], listing=models("little")) as two_,
        two(tmp_path, one, two_) as run,
    ):
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        assert (told["kept"], len(two_.requests)) == (True, 1)
        assert (await called(run, "GET", told["head"]))[1]["issuer"] == "small"
        before = len(one.requests)
        code, again, _ = await asked(run, path, f'keep, base="{told["head"]}"', [NOW], stream=stream)
        assert (code, len(one.requests), two_.requests[-1].json["model"]) == (200, before, "little")
        assert sealed_at(two_, path) == [SEALED[path]]
        code, _, _ = await asked(run, path, f'keep, base="{again["head"]}"', [NOW], stream=stream)
        assert (code, len(two_.requests), len(sealed_at(two_, path))) == (200, 3, 2)


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_model_of_another_pool_is_refused(path: str, stream: bool, tmp_path: Path) -> None:
    async with (
        FakeReplica([seals(path, stream=stream)], listing=models("m")) as one,
        FakeReplica([seals(path, stream=stream)], listing=models("little")) as two_,
        two(tmp_path, one, two_) as run,
    ):
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        more = {"stream": stream, "model": "little"}
        code, error, _ = await asked(run, path, f'keep, base="{told["head"]}"', [NOW], **more)
        assert (code, error["code"], error["issuer"]) == (409, "sealed_issuer", "big")
        said = {"role": "assistant", "content": [BLOCK]} if path == MESSAGES else None
        whole = [USER, {"role": "assistant", "content": _blocks(stream)}, NOW] if said else [USER, ITEM, SAID, NOW]
        code, error, _ = await asked(run, path, "keep", whole, **more)
        assert (code, error["code"], error["issuer"]) == (409, "sealed_issuer", "big"), "as a whole history, too"
        assert not two_.requests
        assert (await run.metrics())['warmroute_prompt_log_refused_total{code="sealed_issuer"}'] == 2
        code, _, _ = await asked(run, path, f'keep, base="{told["input"]}"', [NOW], **more)
        assert (code, sealed_at(two_, path)) == (200, []), "the log before the answer has no sealed parts"
        code, error, _ = await asked(run, path, f'keep, base="{told["head"]}"', [NOW], key="another", **more)
        assert (code, error["code"]) == (404, "prompt_log_not_found")
        code, _, _ = await asked(run, path, "keep", whole, key="another", **more)
        assert (code, sealed_at(two_, path)) == (200, [SEALED[path]]), "another's turns are unknown"


@pytest.mark.parametrize("header", [None, "name"])
async def test_a_head_as_the_previous_response_binds_without_the_header(header: str | None, tmp_path: Path) -> None:
    async with (
        FakeReplica([seals(RESPONSES, stream=False)], listing=models("m")) as one,
        FakeReplica([seals(RESPONSES, stream=False)], listing=models("little")) as two_,
        two(tmp_path, one, two_) as run,
    ):
        _, told, _ = await asked(run, RESPONSES, "keep", [USER])
        code, error, _ = await asked(run, RESPONSES, header, [NOW], model="little", previous_response_id=told["head"])
        assert (code, error["code"], error["issuer"], len(two_.requests)) == (409, "sealed_issuer", "big", 0)
        code, _, _ = await asked(run, RESPONSES, header, [NOW], previous_response_id=told["head"])
        assert (code, sealed_at(one, RESPONSES)) == (200, [ITEM])


def _blocks(stream: bool) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "hello"}
    return [text, BLOCK] if stream else [BLOCK, text]


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_another_replica_of_the_pool_takes_them(path: str, stream: bool, tmp_path: Path) -> None:
    good = seals(path, stream=stream)
    async with FakeReplica([good]) as one, FakeReplica([good]) as other, running(one, other, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, path, "keep", [USER], stream=stream)
        first, second = (one, other) if one.requests else (other, one)
        first.script = [dies]
        code, _, _ = await asked(run, path, f'keep, base="{told["head"]}"', [NOW], stream=stream)
        assert (code, sealed_at(second, path)) == (200, [SEALED[path]])


async def test_an_import_knows_the_issuer_of_turns_that_are_kept(tmp_path: Path) -> None:
    async with (
        FakeReplica([seals(MESSAGES, stream=False)], listing=models("m")) as one,
        FakeReplica([engine(MESSAGES, stream=False)], listing=models("little")) as two_,
        two(tmp_path, one, two_) as run,
    ):
        _, told, _ = await asked(run, MESSAGES, "keep", [USER])
        whole = [USER, {"role": "assistant", "content": _blocks(stream=False)}, NOW]
        code, made = await called(run, "POST", "", body={"form": "messages", "body": {"messages": whole}})
        assert code == 200
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("delete from warmroute_responses where head = ?", [told["head"]])
        code, error, _ = await asked(run, MESSAGES, f'base="{made["head"]}"', [NOW], model="little")
        assert (code, error["code"], error["issuer"]) == (409, "sealed_issuer", "big")
