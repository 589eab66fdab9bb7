"""Logs as prompts of a model: an estimate by the router, and the text and tokens that an engine sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.rendering import Renderer
from replica.sim.cost import SimConfig
from tests.gateway.conftest import eventually, running
from tests.gateway.features.keys.conftest import keyed, made
from tests.gateway.features.prompt_log.kept import (
    CHAT,
    FORMS,
    LISTS,
    MESSAGES,
    NOW,
    RESPONSES,
    SYSTEM,
    TOOLS,
    USER,
    asked,
    called,
    engine,
    kept_in,
)
from tests.replica.conftest import serve
from tests.replica.fakes import WatchedEngine
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, http, models, writes

SIM = SimConfig(kv_tokens=100_000, prefill_rate=1e6, decode_rate=2000.0, max_batch=4)


def prompt_tokens(path: str, raw: bytes) -> int:
    usage = json.loads(raw)["usage"]
    if path == MESSAGES:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage["prompt_tokens" if path == CHAT else "input_tokens"])


@pytest.fixture
async def replica() -> AsyncIterator[str]:
    """The URL of a real one."""
    async for started in serve(WatchedEngine(SIM), None):
        yield started.url


@pytest.mark.parametrize("path", FORMS)
async def test_a_log_is_rendered_as_its_replica_has_seen_it(path: str, replica: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": f"number {at} of the long tale"} for at in range(100)]
    more: dict[str, Any] = {"model": "sim", **SYSTEM[path], "tools": TOOLS[path]}
    more |= {"max_output_tokens": 4} if path == RESPONSES else {"max_tokens": 4}
    async with running(replica, **kept_in(tmp_path)) as run:
        _, told, raw = await asked(run, path, "keep", said, **more)
        code, input_ = await called(run, "GET", f"{told['input']}/render?model=sim")
        assert (code, input_["engine"], input_["sealed"]) == (200, "warmroute", [])
        assert input_["count"] == len(input_["tokens"]) == prompt_tokens(path, raw)
        tokens = {"model": "sim", "tokens": input_["tokens"]}
        async with run.session.post(f"{replica}/detokenize", json=tokens) as answer:
            assert (await answer.json())["prompt"] == input_["text"]
        code, whole = await called(run, "GET", f"{told['head']}/render?model=sim")
        assert (code, whole["tokens"][:1000]) == (200, input_["tokens"][:1000])
        code, shown = await called(run, "GET", f"{told['input']}?model=sim")
        assert code == 200
        assert 0 < shown["estimate"]["cached_tokens"] <= shown["estimate"]["prompt_tokens"]
        assert "estimate" not in (await called(run, "GET", told["input"]))[1]


def engine_of(name: str, asked_for: list[FakeRequest]) -> Any:
    """The endpoints of an engine that tokenizes; other requests get a chat answer."""
    told = {
        ("vllm", "/tokenize"): {"count": 2, "tokens": [5, 6]},
        ("vllm", "/detokenize"): {"prompt": "the text"},
        ("llamacpp", "/apply-template"): {"prompt": "the text"},
        ("llamacpp", "/tokenize"): {"tokens": [5, 6]},
    }

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        found = told.get((name, request.path))
        if found is None:
            await engine(CHAT, stream=False)(request, writer)
        else:
            asked_for.append(request)
            await writes(http(200, json.dumps(found).encode()))(request, writer)

    return behave


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
async def test_each_engine_is_asked_in_its_own_way(name: str, tmp_path: Path) -> None:
    seen = list[FakeRequest]()
    async with FakeReplica([engine_of(name, seen)]) as replica:
        pools = [{"replicas": [{"url": replica.url, "engine": name}]}]
        async with running(pools=pools, **kept_in(tmp_path)) as run:
            tools = TOOLS[CHAT]
            _, told, _ = await asked(run, CHAT, "keep", [USER], tools=tools)
            code, found = await called(run, "GET", f"{told['head']}/render?model=m")
            assert (code, found) == (
                200,
                {"text": "the text", "tokens": [5, 6], "count": 2, "engine": name, "sealed": []},
            )
            first, second = seen
            messages = first.json["messages"]
            assert [message["role"] for message in messages] == ["user", "assistant"]
            assert (first.json["tools"], first.json["add_generation_prompt"]) == (tools, False)
            if name == "vllm":
                assert (second.path, second.json) == ("/detokenize", {"model": "m", "tokens": [5, 6]})
            else:
                assert (second.json["content"], second.json["parse_special"]) == ("the text", True)
            await called(run, "GET", f"{told['input']}/render?model=m")
            assert seen[2].json["add_generation_prompt"] is True


async def test_other_engines_and_broken_answers_are_errors(tmp_path: Path) -> None:
    answers_ = [http(404, b"{}"), http(500, b"{}"), http(200, b"no"), http(200, b'{"tokens": ["a"]}'), http(200, b"[]")]

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if request.path == "/tokenize":
            await writes(answers_.pop(0))(request, writer)
        else:
            await engine(CHAT, stream=False)(request, writer)

    async with FakeReplica([behave]) as replica:
        for name, wanted in (("sglang", [501]), ("vllm", [501, 502, 502, 502, 502])):
            pools = [{"replicas": [{"url": replica.url, "engine": name}]}]
            async with running(pools=pools, **kept_in(tmp_path)) as run:
                _, told, _ = await asked(run, CHAT, "keep", [USER])
                codes = {501: "render_unsupported", 502: "render_failed"}
                for status in wanted:
                    code, error = await called(run, "GET", f"{told['head']}/render?model=m")
                    assert (code, error["code"]) == (status, codes[status])
                assert (await called(run, "GET", f"{told['head']}/render"))[0] == 400
                assert (await called(run, "GET", f"{told['head']}/render?model=none"))[0] == 404
                assert (await called(run, "GET", f"{told['head']}?model=none"))[0] == 404
                assert (await called(run, "GET", f"{told['head']}/render?model=m", key="other"))[0] == 404


async def test_sealed_parts_are_shown_by_digest_and_length(tmp_path: Path) -> None:
    sealed = {"type": "redacted_thinking", "data": "secret bytes"}
    history: list[dict[str, Any]] = [USER, {"role": "assistant", "content": [sealed]}, NOW]
    seen = list[FakeRequest]()
    async with FakeReplica([engine_of("vllm", seen)]) as replica:
        pools = [{"replicas": [{"url": replica.url, "engine": "vllm"}]}]
        async with running(pools=pools, **kept_in(tmp_path)) as run:
            body = {"form": "messages", "body": {LISTS[MESSAGES]: history}}
            _, kept = await called(run, "POST", "", body=body)
            code, found = await called(run, "GET", f"{kept['head']}/render?model=m")
            (part,) = found["sealed"]
            assert (code, part["index"], part["label"], part["bytes"]) == (200, 1, "redacted_thinking", 12)
            assert "secret bytes" not in json.dumps(found)


async def test_a_key_asks_about_its_own_models_only(tmp_path: Path) -> None:
    async with (
        FakeReplica([engine(CHAT, stream=False)], listing=models("a", "b")) as replica,
        keyed(tmp_path, replica, **kept_in(tmp_path)) as run,
    ):
        _, key = await made(run, models=["a"])
        code, told, _ = await asked(run, CHAT, "keep", [USER], key=key, model="a")
        assert code == 200
        assert (await called(run, "GET", f"{told['head']}?model=a", key=key))[0] == 200
        for path in (f"{told['head']}?model=b", f"{told['head']}/render?model=b", f"{told['head']}?model=none"):
            code, error = await called(run, "GET", path, key=key)
            assert (code, error["code"]) == (403, "model_not_allowed")


def tokenizes(*answers_: Behaviour) -> Behaviour:
    """Its answers to /tokenize, the last one again and again; other requests get a chat answer, and /detokenize a text."""
    left = list(answers_)

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if request.path == "/tokenize":
            await (left.pop(0) if len(left) > 1 else left[0])(request, writer)
        elif request.path == "/detokenize":
            await writes(http(200, b'{"prompt": "the text"}'))(request, writer)
        else:
            await engine(CHAT, stream=False)(request, writer)

    return behave


def vllm(*replicas: FakeReplica) -> list[dict[str, Any]]:
    return [{"replicas": [{"url": each.url, "engine": "vllm"} for each in replicas]}]


TOKENS = writes(http(200, b'{"tokens": [5, 6]}'))
FAILURES = {
    "an error": writes(http(500, b"{}")),
    "no endpoint": writes(http(404, b"{}")),
    "cut off": writes(b"HTTP/1.1 200 OK"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_another_replica_is_asked_if_one_fails(failure: Behaviour, tmp_path: Path) -> None:
    async with FakeReplica([tokenizes(failure)]) as one, FakeReplica([tokenizes(TOKENS)]) as other:
        for first, second in ((one, other), (other, one)):  # in either order of the configuration
            async with running(pools=vllm(first, second), **kept_in(tmp_path)) as run:
                _, told, _ = await asked(run, CHAT, "keep", [USER])
                code, found = await called(run, "GET", f"{told['head']}/render?model=m")
                assert (code, found.get("tokens"), found.get("text")) == (200, [5, 6], "the text")
    assert [request.path for request in one.requests].count("/tokenize") >= 1


async def test_a_failure_is_told_before_a_lack(tmp_path: Path) -> None:
    lacks, fails = tokenizes(FAILURES["no endpoint"]), tokenizes(FAILURES["an error"])
    async with FakeReplica([fails]) as one, FakeReplica([lacks]) as other:
        for both in ((one, other), (other, one)):
            async with running(pools=vllm(*both), **kept_in(tmp_path)) as run:
                _, told, _ = await asked(run, CHAT, "keep", [USER])
                assert (await called(run, "GET", f"{told['head']}/render?model=m"))[0] == 502


async def test_an_answer_has_a_bound_and_its_bytes_are_charged(tmp_path: Path) -> None:
    long, longer = (b'{"tokens": [%b5]}' % (b"151643, " * count) for count in (100_000, 300_000))
    async with FakeReplica([tokenizes(writes(http(200, longer)), writes(http(200, long)))]) as replica:
        async with running(pools=vllm(replica), **kept_in(tmp_path)) as run:
            _, told, _ = await asked(run, CHAT, "keep", [USER])
            code, error = await called(run, "GET", f"{told['head']}/render?model=m")
            assert (code, error["code"]) == (502, "render_failed"), "longer than any answer to so short a prompt"
            code, found = await called(run, "GET", f"{told['head']}/render?model=m")
            assert (code, found["count"], len(found["tokens"])) == (200, 100_001, 100_001)
            await eventually(lambda: run.gateway.served.memory.held < 100_000)
        async with running(pools=vllm(replica), limits={"inflight_mb": 1}, **kept_in(tmp_path)) as run:
            _, told, _ = await asked(run, CHAT, "keep", [USER])
            assert (await called(run, "GET", f"{told['head']}/render?model=m"))[0] in (413, 503)
            await eventually(lambda: run.gateway.served.memory.held < 100_000)


async def test_a_replica_that_hangs_is_left_after_a_while(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def hangs(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with FakeReplica([tokenizes(hangs)]) as replica, running(pools=vllm(replica), **kept_in(tmp_path)) as run:
        run.gateway[Renderer].render_s = 0.2
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        code, error = await called(run, "GET", f"{told['head']}/render?model=m")
        over.set()
        assert (code, error["code"]) == (502, "render_failed")
