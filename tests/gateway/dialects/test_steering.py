"""Members of bodies that steer engines are cut out, whatever surrounds them."""

from __future__ import annotations

import io
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_edits import apply, cuts
from gateway.dialects.steering import STEERING
from gateway.parser.parsing import SMALL_BYTES, UNCOUNTED_BYTES
from tests.gateway.conftest import BODY, running
from tests.support.fakes import FakeReplica

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/rerank"]
STEERED: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254"},
    "routed_dp_rank": 3,
    "priority": -9,
    "bootstrap_room": [1, 2],
}

names = st.sampled_from(["a", "b", "c", "priority", "kv_transfer_params"])
values = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda each: st.lists(each, max_size=3), max_leaves=4)


def of(path: str) -> dict[str, Any]:
    more = {"prompt": "text"} if path.endswith("/completions") and "chat" not in path else {"input": "text", "max_tokens": 9}
    return {**BODY, **more}


@given(st.lists(st.tuples(names, values), max_size=8), st.sampled_from(["", " ", "\n\t"]))
def test_what_is_left_is_the_object_without_them(members: list[tuple[str, Any]], space: str) -> None:
    pairs = [f"{space}{json.dumps(name)}{space}:{space}{json.dumps(value)}{space}" for name, value in members]
    raw = (space + "{" + (",".join(pairs) or space) + "}" + space).encode()
    left = json.loads(apply(raw, cuts(raw, STEERING)))  # orjson makes floats of large integers
    assert left == {name: value for name, value in members if name not in STEERING}


def test_names_with_escapes_are_cut_and_inner_ones_stay() -> None:
    raw = rb'{"\u0070riority":1,"x":{"priority":2},"priority":3}'
    assert apply(raw, cuts(raw, STEERING)) == b'{"x":{"priority":2}}'


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [0, SMALL_BYTES * 9, UNCOUNTED_BYTES * 9])
async def test_no_path_forwards_them(path: str, size: int) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        body = of(path) | {"user": "u" * size, **STEERED}
        data = io.BytesIO(orjson.dumps(body))
        assert (await run.post(data, path, headers={"Content-Type": "application/json"}))[0] == 200
        sent = replica.requests[-1].json
        assert STEERING.isdisjoint(sent)
        assert sent.keys() >= of(path).keys()


@pytest.mark.parametrize(("before", "after"), [("", ',"x":NaN'), ("\ufeff", ""), ("", r',"x":"\ud800"'), ("", r',"\ud800":1')])
async def test_nor_in_json_that_only_engines_read(before: str, after: str) -> None:
    raw = (before + orjson.dumps(of("/v1/embeddings") | STEERED).decode()[:-1] + after + "}").encode()
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(raw, "/v1/embeddings", headers={"Content-Type": "application/json"})
        assert not any(name.encode() in replica.requests[-1].body for name in STEERING)
        assert b'"input":"text"' in replica.requests[-1].body


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("size", [0, UNCOUNTED_BYTES])
async def test_nor_in_other_encodings_that_engines_read(encoding: str, size: int) -> None:
    body = of("/v1/embeddings") | {"user": "u" * size}
    raw = io.BytesIO(json.dumps(body | STEERED).encode(encoding))
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(raw, "/v1/embeddings", headers={"Content-Type": "application/json"})
        assert json.loads(replica.requests[-1].body) == body


@pytest.mark.parametrize("more", [{}, {"priority": 1}])
@pytest.mark.parametrize("path", PATHS[:4])
async def test_nor_inside_of_vllms_further_arguments(path: str, more: dict[str, int]) -> None:
    inner = {"session_id": "s", **STEERED}
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(of(path) | {"vllm_xargs": inner, **more})
        assert replica.requests[-1].json["vllm_xargs"] == {"session_id": "s"}
        assert "priority" not in replica.requests[-1].json


async def test_a_name_that_the_configuration_lists_passes() -> None:
    async with FakeReplica() as replica, running(replica, routing={"client_fields": ["priority"]}) as run:
        await run.post(of(PATHS[0]) | STEERED)
        assert replica.requests[-1].json["priority"] == -9
        assert STEERING & replica.requests[-1].json.keys() == {"priority"}


async def test_edits_of_the_body_stay_at_their_places() -> None:
    """A billing line is cut out, too, and a token is asked for where the client wants none."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=12345;"}
    body = {
        "priority": 1,
        "model": "m",
        "system": [billing, {"type": "text", "text": "Be brief."}],
        "kv_transfer_params": {"remote_host": "x"},
        "max_tokens": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "bootstrap_room": 1,
    }
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(body, "/v1/messages")
        await run.post({name: value for name, value in body.items() if name not in STEERING}, "/v1/messages")
        first, second = replica.requests[-2:]
        assert first.json == second.json


async def test_an_alias_and_a_body_of_them_only() -> None:
    async with FakeReplica() as replica, running(replica, model_aliases={"x": "m"}) as run:
        await run.post(STEERED | {**BODY, "model": "x"} | STEERED)
        assert replica.requests[-1].json["model"] == "m"
        assert STEERING.isdisjoint(replica.requests[-1].json)
        assert (await run.post(STEERED))[0] == 400


async def test_a_flood_of_duplicates_is_cut_in_one_pass() -> None:
    raw = b"{" + b'"priority":1,' * 20_000 + orjson.dumps(BODY)[1:]
    async with FakeReplica() as replica, running(replica) as run:
        assert (await run.post(raw, headers={"Content-Type": "application/json"}))[0] == 200
        assert replica.requests[-1].json == BODY
