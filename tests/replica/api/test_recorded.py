"""Our answers beside those that vLLM and llama.cpp have given: every field that is in all of theirs is in ours with the same
type, and the events of streams come in the same order."""

from typing import Any

import orjson
import pytest

from tests.replica.conftest import Replica
from tests.support.paths import CAPTURES

pytestmark = pytest.mark.skipif(not CAPTURES.exists(), reason="no recorded answers beside the checkout")
MESSAGES = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
RESPONSES = {"max_output_tokens": 4, "input": "Hi"}
# Fields of vLLM's alone: counts per turn of the tools that it runs itself, and what a client reads as null or 0 here.
VLLMS = {"input_tokens_per_turn", "cached_tokens_per_turn", "output_tokens_per_turn", "tool_output_tokens_per_turn"}
VLLMS |= {"tool_output_tokens", "presence_penalty", "frequency_penalty"}


def fields(value: Any, at: str = "") -> set[str]:
    """`path=type` of everything in a JSON value that is not null."""
    if isinstance(value, dict):
        return {path for name, inner in value.items() if name not in VLLMS for path in fields(inner, f"{at}.{name}")}
    if isinstance(value, list):
        return {path for inner in value for path in fields(inner, f"{at}[]")} | {f"{at}=list"}
    return set() if value is None else {f"{at}={'number' if type(value) in (int, float) else type(value).__name__}"}


@pytest.mark.parametrize(
    ("capture", "path", "body"),
    [
        ("vllm/messages_anthropic.json", "/v1/messages", MESSAGES),
        ("llamacpp/messages_anthropic.json", "/v1/messages", MESSAGES),
        ("vllm/responses.json", "/v1/responses", RESPONSES),
        ("llamacpp/responses.json", "/v1/responses", RESPONSES),
        ("llamacpp/messages_count_tokens.json", "/v1/messages/count_tokens", MESSAGES),
    ],
)
async def test_whole_answers(replica: Replica, capture: str, path: str, body: dict[str, Any]) -> None:
    theirs = orjson.loads((CAPTURES / capture).read_bytes())["response"]
    status, ours, _ = await replica.post(path, body)
    assert status == 200
    assert fields(theirs) - fields(ours) <= {".completed_at=number"}, ours


def frames(stream: bytes) -> list[tuple[str, Any]]:
    """(event, data) of a stream, of deltas in a row only the first."""
    found: list[tuple[str, Any]] = []
    for frame in stream.decode().strip().split("\n\n"):
        head, data = frame.split("\n")
        name = head.removeprefix("event: ")
        if not found or found[-1][0] != name:
            found.append((name, orjson.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize(
    ("capture", "path", "body"),
    [
        ("vllm/messages_anthropic_stream.sse", "/v1/messages", MESSAGES),
        ("llamacpp/messages_anthropic_stream.sse", "/v1/messages", MESSAGES),
        ("vllm/responses_stream.sse", "/v1/responses", RESPONSES),
    ],
)
async def test_streams(replica: Replica, capture: str, path: str, body: dict[str, Any]) -> None:
    theirs = frames((CAPTURES / capture).read_bytes())
    async with replica.http.post(replica.url + path, json=body | {"stream": True, "ignore_eos": True}) as response:
        ours = frames(await response.read())
    names = [name for name, _ in ours]
    assert names == [name.replace("response.completed", names[-1]) for name, _ in theirs]
    for (name, mine), (_, their) in zip(ours, theirs, strict=True):
        assert fields(their) <= fields(mine), name
