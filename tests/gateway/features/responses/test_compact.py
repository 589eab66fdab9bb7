"""POST /v1/responses/compact: with its history at replicas that can, refused clearly where they cannot."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import RESPONSES, ask, forgetful, kept_in, texts
from tests.support.fakes import FakeReplica, FakeRequest, http, models, writes

COMPACT = f"{RESPONSES}/compact"
OWN = {"Authorization": "Bearer k"}  # as the client's


async def compacts(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    if request.path != COMPACT:
        await forgetful(request, writer)
        return
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3, "total_tokens": 13}
    output = [{"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}]
    answer = {"id": "resp_c", "object": "response.compaction", "created_at": 1, "output": output, "usage": usage}
    writer.write(http(200, json.dumps(answer).encode()))


async def test_a_history_is_written_out_and_the_answer_is_not_kept(tmp_path: Path) -> None:
    async with FakeReplica([compacts] * 9, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        body = {"model": "m", "previous_response_id": first.id, "input": [{"role": "user", "content": "b"}, {"id": "x"}]}
        assert (await run.post(body, COMPACT, headers=OWN))[0] == 404
        body["input"] = [{"role": "user", "content": "b"}, {"id": first.output[0].id}]
        code, _, found = await run.post(body, COMPACT, headers=OWN)
        assert (code, found["object"], set(found)) == (
            200,
            "response.compaction",
            {"id", "object", "created_at", "output", "usage"},
        )
        asked = one.requests[-1].json
        assert (texts(asked), asked["previous_response_id"]) == (["a", "to a", "b", "to a"], None)
        assert "store" not in asked
        assert (await run.get(f"{RESPONSES}/{found['id']}", headers=OWN))[0] == 404
        metrics = await run.metrics()
        assert metrics['warmroute_responses_kept_total{result="kept"}'] == 1


@pytest.mark.parametrize("code", [404, 405])
async def test_a_replica_that_cannot_is_a_clear_error(tmp_path: Path, code: int) -> None:
    lacks = writes(http(code, b'{"detail": "Not Found"}'))
    async with FakeReplica([lacks] * 3, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        found, _, answer = await run.post({"model": "m", "input": "a"}, COMPACT)
        assert (found, answer["error"]["code"]) == (404, "not_supported")
        assert "summary" in answer["error"]["message"]


async def test_another_error_is_the_replicas_own(tmp_path: Path) -> None:
    own = writes(http(404, b'{"error": {"message": "The model m has gone.", "type": "t"}}'))
    async with FakeReplica([own] * 3, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        found, _, answer = await run.post({"model": "m", "input": "a"}, COMPACT)
        assert (found, answer["error"]["message"]) == (404, "The model m has gone.")
        assert (await run.get(COMPACT))[0] == 405


async def test_it_does_not_run_in_the_background(tmp_path: Path) -> None:
    async with FakeReplica([compacts] * 9, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        body = {"model": "m", "previous_response_id": first.id, "input": "b", "background": True}
        code, _, answer = await run.post(body, COMPACT, headers=OWN)
        assert (code, answer["error"]["param"]) == (400, "background")
