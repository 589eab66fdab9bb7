"""POST /v1/responses/input_tokens: with its history at replicas that can, estimated where they cannot."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import RESPONSES, ask, forgetful, kept_in, texts
from tests.gateway.request.test_dialects import metered
from tests.support.fakes import FakeReplica, FakeRequest, http, models, writes

COUNT = f"{RESPONSES}/input_tokens"


async def counts(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    if request.path != COUNT:
        await forgetful(request, writer)
        return
    answer = {"object": "response.input_tokens", "input_tokens": sum(map(len, texts(request.json)))}
    writer.write(http(200, json.dumps(answer).encode()))


async def test_a_history_is_counted(tmp_path: Path) -> None:
    async with FakeReplica([counts] * 9, listing=models("m")) as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        before = await metered(run)
        async with openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key="k", max_retries=0) as client:
            count = client.responses.input_tokens.count
            assert (await count(model="m", input="b")).input_tokens == 1
            assert (await count(model="m", input="b", previous_response_id=first.id)).input_tokens == len("ato ab")
            refers = [{"type": "item_reference", "id": first.output[0].id}]
            assert (await count(model="m", input=refers)).input_tokens == len("to a")  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError, match="not found"):
                await count(model="m", input="b", previous_response_id="resp_9")
        assert await metered(run) == before
        assert (await run.metrics())['warmroute_responses_kept_total{result="kept"}'] == 1
        assert (await run.get(COUNT))[0] == 405


@pytest.mark.parametrize("code", [404, 405])
async def test_where_no_replica_can_it_is_estimated(code: int) -> None:
    lacks = writes(http(code, b'{"detail": "Not Found"}'))
    async with FakeReplica([lacks] * 3, listing=models("m")) as one, running(one) as run:
        async with openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key="k") as client:
            count = await client.responses.input_tokens.count(model="m", input="word " * 800)
            assert (count.object, 1000 <= count.input_tokens < 1020) == ("response.input_tokens", True)
        assert len(one.requests) == 1
