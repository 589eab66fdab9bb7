"""Each engine behind a gateway, as its real answers were recorded: what is recognised, read, counted, passed on.

The recorded answers are files beside the checkout; tests of them are skipped where these are not. Engines that were never
recorded are fakes, written by their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.fleet.engines import ENGINES, UNKNOWN
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.fakes import Behaviour, FakeReplica, answers, http, models, status, streams, writes
from tests.support.paths import CAPTURES

recorded = pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers beside the checkout")


def kept_in(name: str) -> Any:
    """A recorded answer's body."""
    return json.loads((CAPTURES / name).read_text("utf-8"))["response"]


def capture(name: str) -> Behaviour:
    """A recorded answer, as it was: status, type of content, body."""
    file = CAPTURES / name
    if file.suffix == ".sse":
        return writes(http(200, file.read_bytes(), "text/event-stream; charset=utf-8"))
    if file.suffix == ".txt":
        return writes(http(200, file.read_bytes(), "text/plain"))
    kept = json.loads(file.read_text("utf-8"))
    return writes(http(kept["status"], json.dumps(kept["response"]).encode()))


@dataclass(frozen=True, slots=True)
class Expected:
    """pages: what probes read. load: running, waiting. cached: of these two recorded answers."""

    pages: Mapping[str, str]
    load: tuple[int, int]
    kv_tokens: int
    cached: Mapping[str, int]


RECORDED = {
    "vllm": Expected({"/metrics": "metrics_under_load.txt"}, (0, 0), 11_648, {"chat_1_cold.json": 0, "chat_2_same.json": 832}),
    "llamacpp": Expected(
        {"/metrics": "metrics_under_load.txt", "/props": "props.json"},
        (1, 0),
        8192,
        {"chat_1_cold.json": 0, "chat_2_same.json": 844, "chat_4_other_prefix.json": 0},
    ),
}


async def row(run: Running) -> dict[str, Any]:
    listed: dict[str, Any] = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"][0]
    return listed


def replica_of(engine: str, *script: Behaviour) -> FakeReplica:
    pages = {path: capture(f"{engine}/{file}") for path, file in RECORDED[engine].pages.items()}
    return FakeReplica(list(script) or [answers()], listing=capture(f"{engine}/models.json"), pages=pages)


@recorded
@pytest.mark.parametrize("engine", RECORDED)
async def test_it_is_recognised_and_its_facts_are_read(engine: str) -> None:
    expected = RECORDED[engine]
    async with replica_of(engine) as replica, running(replica) as run:
        (state,) = run.gateway.fleet.replicas
        await eventually(lambda: state.facts.running is not None)
        listed = await row(run)
        assert (listed["engine"], listed["models"]) == (engine, ["smollm2"])
        assert listed["engine_kv_tokens"] == expected.kv_tokens
        page = await run.metrics()
        name = f'replica="{replica.name}"'
        shown = (page[f"warmroute_replica_engine_running{{{name}}}"], page[f"warmroute_replica_engine_waiting{{{name}}}"])
        assert shown == (listed["engine_running"], listed["engine_waiting"])
        assert shown == numbers(engine)


def numbers(engine: str) -> tuple[float, float]:
    """Running and waiting requests on the recorded page, read by hand."""
    names = {
        "vllm": ("vllm:num_requests_running{", "vllm:num_requests_waiting{"),
        "llamacpp": ("llamacpp:requests_processing ", "llamacpp:requests_deferred "),
    }
    lines = Path(CAPTURES, engine, "metrics_under_load.txt").read_text("utf-8").splitlines()
    one, two = [next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names[engine]]
    return one, two


@recorded
@pytest.mark.parametrize(
    ("engine", "file", "cached"), [(e, file, n) for e, x in RECORDED.items() for file, n in x.cached.items()]
)
async def test_its_cached_tokens_are_counted(engine: str, file: str, cached: int, request_lines: Any) -> None:
    async with replica_of(engine, capture(f"{engine}/{file}")) as replica, running(replica) as run:
        code, _, body = await run.post({**BODY, "model": "smollm2"})
        assert code == 200
        assert body == kept_in(f"{engine}/{file}"), "it went to the client as it was"
        (line,) = request_lines()
        assert line["cached_tokens_reported"] == cached
        assert line["prompt_tokens"] == body["usage"]["prompt_tokens"]


STREAMS = [
    ("vllm/chat_5_stream_usage.sse", True),
    ("vllm/chat_6_stream_plain.sse", False),
    ("vllm/chat_7_stream_continuous_usage.sse", True),
    ("llamacpp/chat_8_stream_usage.sse", True),
    ("llamacpp/chat_9_stream_plain.sse", False),
    ("llamacpp/chat_10_stream_progress.sse", True),
]


@recorded
@pytest.mark.parametrize(("name", "usage"), STREAMS)
async def test_its_streams_are_whole_for_openais_client(name: str, usage: bool, request_lines: Any) -> None:
    engine = name.partition("/")[0]
    async with replica_of(engine, capture(name)) as replica, running(replica) as run:
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await run.client.chat.completions.create(**{**BODY, "model": "smollm2"}, stream=True, **options)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        (line,) = request_lines()
        assert (line["status"], line.get("error")) == (200, None)
        assert (line.get("estimated") == "tokens") != usage


FULL_CONTEXT = {"type": "invalid_request_error", "code": "context_length_exceeded"}  # the words of the API
ERRORS: list[tuple[str, type[openai.APIStatusError], dict[str, str]]] = [
    ("vllm/error_unknown_model.json", openai.NotFoundError, {}),
    ("vllm/error_too_long.json", openai.BadRequestError, FULL_CONTEXT),
    ("vllm/error_bad_json_type.json", openai.BadRequestError, {}),
    ("llamacpp/error_too_long.json", openai.BadRequestError, FULL_CONTEXT),
    ("llamacpp/error_bad_messages.json", openai.BadRequestError, {}),
]


@recorded
@pytest.mark.parametrize(("name", "raised", "changed"), ERRORS)
async def test_its_errors_go_to_the_client_as_they_are(
    name: str, raised: type[openai.APIStatusError], changed: dict[str, str]
) -> None:
    async with replica_of(name.partition("/")[0], capture(name)) as replica, running(replica) as run:
        with pytest.raises(raised) as error:
            await run.client.chat.completions.create(**{**BODY, "model": "smollm2"})
        assert error.value.body == kept_in(name)["error"] | changed
        assert len(replica.requests) == 1, "no other replica is asked for what is the client's fault"
        (state,) = run.gateway.fleet.replicas
        assert state.breaker.allows(run.gateway.clock())


# -- engines that were not recorded, by their sources

SGLANG_PAGE = writes(http(200, b"sglang:num_running_reqs 3\nsglang:num_queue_reqs 2\nsglang:max_total_num_tokens 5000\n"))
TGI_PAGE = writes(http(200, b"tgi_batch_current_size 3\ntgi_queue_size 2\ntgi_batch_current_max_tokens 77\n"))


@pytest.mark.parametrize(
    ("name", "owner", "page", "kv_tokens"), [("sglang", "sglang", SGLANG_PAGE, 5000), ("tgi", "m", TGI_PAGE, None)]
)
async def test_engines_known_by_their_sources(name: str, owner: str, page: Behaviour, kv_tokens: int | None) -> None:
    async with FakeReplica(listing=models("m", owner=owner), pages={"/metrics": page}) as replica, running(replica) as run:
        (state,) = run.gateway.fleet.replicas
        await eventually(lambda: state.facts.running is not None)
        listed = await row(run)
        assert (listed["engine"], listed["engine_running"], listed["engine_waiting"]) == (name, 3, 2)
        assert listed["engine_kv_tokens"] == kv_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_zeros_of_ollama_are_not_believed(stream: bool, request_lines: Any) -> None:
    behaviour = streams("a", "b", cached=0) if stream else answers(cached=0)
    async with FakeReplica([behaviour], listing=models("m", owner="library")) as replica, running(replica) as run:
        assert (await row(run))["engine"] == "ollama"
        for _ in range(3):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, **options})
            assert b'"cached_tokens": 0' in await answer.read(), "the client gets what the engine says"
        lines = request_lines()
        assert [line["cached_tokens_reported"] for line in lines] == [None] * 3
        assert [line["prompt_tokens"] for line in lines] == [100] * 3
        assert lines[-1]["cached_tokens_predicted"] > 0, "it is still believed to hold what it was sent"
        page = await run.metrics()
        assert page[f'warmroute_replica_cache_hits_missing{{replica="{replica.name}"}}'] == 0
        assert not replica.asked, "it has no metrics to be asked for"


async def test_an_engine_that_is_named_is_not_guessed() -> None:
    async with FakeReplica(listing=models("m", owner="vllm")) as replica:
        async with running({"url": replica.url, "engine": "ollama"}) as run:
            assert (await row(run))["engine"] == "ollama"
        async with running({"url": replica.url, "engine": "auto"}) as run:
            assert (await row(run))["engine"] == "vllm"


@pytest.mark.parametrize("name", ["sglang", "tgi", "llamacpp", "vllm"])
async def test_a_named_engine_reads_its_own_page_whatever_owns_its_models(name: str) -> None:
    engine = next(each for each in ENGINES if each.name == name)
    page = writes(http(200, f"{engine.running} 3\n{engine.waiting} 2\n".encode()))
    async with (
        FakeReplica(listing=models("m", owner="proxy"), pages={"/metrics": page}) as replica,
        running({"url": replica.url, "engine": name}) as run,
    ):
        (state,) = run.gateway.fleet.replicas
        await eventually(lambda: state.facts.running is not None)
        assert (state.engine.name, state.facts.running, state.facts.waiting) == (name, 3, 2)


async def test_an_unknown_engine_is_used_as_it_is() -> None:
    async with FakeReplica([status(418, "teapot")], listing=models("m", owner="somebody")) as replica, running(replica) as run:
        assert (await row(run))["engine"] == UNKNOWN.name
        assert (await run.post())[0] == 418
