"""Forms, queries and engines' own paths through a whole gateway."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, http, models, writes

OTHER_POOL = models("whisper", "rerank")
DONE = writes(http(200, b'{"text": "hello", "id": "x", "object": "file"}'))
ENGINES = ["/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify"]
MIB = 1 << 20


def audio(model: str, size: int = 99) -> tuple[bytes, dict[str, str]]:
    """A form, as OpenAI's client writes it: the file behind the model, or before it."""
    field = f'--b1\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode()
    file = b'--b1\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + b"R" * size + b"\r\n"
    return file + field + b"--b1--\r\n", {"Content-Type": "multipart/form-data; boundary=b1"}


async def two_pools(run_in: Any) -> None:
    """run_in: gets a gateway, and the replica that has the model whisper."""
    async with FakeReplica(listing=models("chat")) as first, FakeReplica([DONE], listing=OTHER_POOL) as second:
        pools = [{"models": ["chat"], "replicas": [first.url]}, {"replicas": [second.url]}]
        async with running(pools=pools, model_aliases={"whisper-*": "whisper"}) as run:
            await run_in(run, second)
            assert first.requests == []


async def test_openai_s_client_transcribes_and_uploads() -> None:
    async def use(run: Running, replica: FakeReplica) -> None:
        for model in ("whisper", "whisper-1"):
            made = await run.client.audio.transcriptions.create(model=model, file=("a.wav", b"RIFF" * 1000))
            assert made.text == "hello"
        bodies = [each.body for each in replica.requests]
        assert b"whisper-1" not in bodies[1]
        assert [len(body) for body in bodies] == [len(bodies[0])] * 2
        await run.client.files.create(file=b"{}", purpose="batch", extra_query={"model": "whisper-1"})
        assert replica.requests[-1].path == "/v1/files?model=whisper"
        metrics = await run.metrics()
        counted = 'warmroute_requests_total{code="200",endpoint="/v1/audio/transcriptions",model="whisper"}'
        assert metrics[counted] == 2

    await two_pools(use)


async def test_only_the_name_changes_in_a_form() -> None:
    async def use(run: Running, replica: FakeReplica) -> None:
        for size in (10, 3 * MIB):
            body, headers = audio("whisper-large", size)
            status, _, _ = await run.post(io.BytesIO(body), "/v1/audio/transcriptions", headers=headers)
            assert status == 200
            assert replica.requests[-1].body == body.replace(b"whisper-large", b"whisper")

    await two_pools(use)


async def test_a_form_goes_before_the_query_and_json_before_both() -> None:
    async def use(run: Running, replica: FakeReplica) -> None:
        body, headers = audio("whisper")
        assert (await run.post(body, "/v1/files?model=chat", headers=headers))[0] == 200
        assert (await run.post({"model": "whisper"}, "/v1/files?model=chat"))[0] == 200
        assert (await run.post(b"no form", "/v1/files?model=whisper"))[0] == 200
        assert (await run.get("/v1/files?model=whisper"))[0] == 200
        assert len(replica.requests) == 4
        status, _, answer = await run.post(b"no form", "/v1/files")
        assert (status, answer["error"]["param"]) == (400, "model"), "with several pools there has to be one"
        status, _, answer = await run.post(b"", "/v1/files?model=gone")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    await two_pools(use)


@pytest.mark.parametrize("path", ENGINES)
async def test_engines_own_paths_are_passed_through(path: str) -> None:
    async def use(run: Running, replica: FakeReplica) -> None:
        asked = {"model": "whisper-1", "prompt": "hello " * 500, "x": 1}
        assert (await run.post(asked, path))[0] == 200
        assert (replica.requests[-1].path, replica.requests[-1].json) == (path, {**asked, "model": "whisper"})
        metrics = await run.metrics()
        assert metrics[f'warmroute_requests_total{{code="200",endpoint="{path}",model="whisper"}}'] == 1
        counts = not path.endswith("tokenize")
        assert sum(value for name, value in metrics.items() if name.startswith("warmroute_unmetered")) == counts

    await two_pools(use)


async def test_version_is_a_replica_s() -> None:
    async with FakeReplica([writes(http(200, b'{"version": "0.32"}'))]) as replica, running(replica) as run:
        assert json.loads((await run.get("/version"))[2]) == {"version": "0.32"}
        async with run.session.get(f"{run.admin_url}/version") as answer:
            assert answer.status == 404, "on the operators' listener there is no API"
        for path in ("/versions", "/version/x", "/tokenize/x", "/generate"):
            assert (await run.get(path))[0] == 404


async def test_what_is_tokenized_is_not_believed_to_be_cached() -> None:
    prompt = {"model": "m", "prompt": "hello " * 500}
    async with FakeReplica([DONE]) as replica, running(replica) as run:
        await run.post(prompt, "/tokenize")
        assert (await run.post(prompt, "/warmroute/route"))[2]["reason"] == "cold"
