"""The bodies of both legs, beside recorded ones of the engines' own routers.

`recorded.jsonl`: the client's body, and both bodies that vllm-router 0.1.17 and sglang-router 0.3.2 (with and without
--mini-lb) made of it on 30 November 2026, as two listening sockets got them. These routers write a body anew, with all defaults
of their own fields; only fields of the client's body and of transfers are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.json_edits import read_object
from gateway.dialects.steering import STEERING
from gateway.dialects.table import Dialects
from gateway.errors import ReplicaFailure
from gateway.features.disaggregation.bodies import (
    MAX_ROOM,
    batch_size,
    bootstrap_body,
    decode_body,
    prefill_body,
    read_answer,
)
from tests.gateway.features.disaggregation.legs import PARAMS

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "recorded.jsonl").read_text("utf-8").splitlines()]
VLLM = [each for each in RECORDED if each["source"].startswith("vllm")]
SGLANG = [each for each in RECORDED if each["source"].startswith("sglang")]
CHAT = Dialects().at("/v1/chat/completions")


def compared(body: dict[str, Any], client: dict[str, Any]) -> dict[str, Any]:
    """The fields of the client and of transfers; null is the same as no field."""
    names = {*client, *STEERING, "max_tokens"}
    return {name: value for name, value in body.items() if name in names and value is not None}


def own(body: bytes) -> Any:
    return json.loads(body)


@pytest.mark.parametrize("recorded", VLLM, ids=lambda each: ",".join(each["client"]))
def test_vllms_legs_are_the_recorded_ones(recorded: dict[str, Any]) -> None:
    client, theirs = recorded["client"], recorded["prefill"]
    members = read_object(json.dumps(client).encode())
    ours = own(prefill_body(members, recorded["path"]))
    asked = {name: value for name, value in theirs["kv_transfer_params"].items() if value is not None}
    expected = {**compared(theirs, client), "kv_transfer_params": asked}
    cap = "max_completion_tokens" if "max_completion_tokens" in client else "max_tokens"
    assert ours[cap] == theirs[cap] == 1
    for name in ("max_tokens", "min_tokens"):  # the router sends both limits, and a least of 1, where the cap is enough
        expected.pop(name, None)
        ours.pop(name, None)
    if "stream" not in client:
        expected.pop("stream", None)
    assert compared(ours, client) == expected
    second = own(decode_body(members, json.dumps(recorded["decode"]["kv_transfer_params"]).encode()))
    assert compared(second, client) == compared(recorded["decode"], client)


@pytest.mark.parametrize("recorded", SGLANG, ids=lambda each: each["path"])
def test_sglangs_legs_are_the_recorded_ones(recorded: dict[str, Any]) -> None:
    client = recorded["client"]
    members, theirs = read_object(json.dumps(client).encode()), compared(recorded["decode"], client)
    assert compared(recorded["prefill"], client) == theirs, "the same for both"
    count = batch_size(members)
    rooms = theirs["bootstrap_room"]
    assert count == (len(rooms) if isinstance(rooms, list) else 0)
    assert all(0 <= room <= MAX_ROOM for room in (rooms if count else [rooms]))
    assert own(bootstrap_body(members, "127.0.0.1", 8998, rooms)) == theirs


@pytest.mark.parametrize(
    ("path", "body", "changed"),
    [
        ("/v1/completions", {"prompt": "p"}, {"max_tokens": 1}),
        ("/v1/completions", {"prompt": "p", "max_tokens": 7}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": 8, "max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/messages", {"max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/responses", {"input": "p"}, {"max_output_tokens": 1}),
        ("/v1/responses?x=1", {"input": "p", "max_output_tokens": None}, {"max_output_tokens": 1}),
        ("/v1/completions", {"min_tokens": 4, "stream": True, "stream_options": {}}, {"max_tokens": 1, "min_tokens": 0}),
    ],
)
def test_the_prefill_leg_is_capped(path: str, body: dict[str, Any], changed: dict[str, Any]) -> None:
    made = own(prefill_body(read_object(json.dumps(body).encode()), path))
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    stream = {"stream": False, "stream_options": None} if "stream" in body else {}
    assert made == {**body, **stream, **changed, "kv_transfer_params": asked}


def test_only_whole_parameters_are_used() -> None:
    def read(params: Any) -> bytes:
        body = {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 1}, "kv_transfer_params": params}
        return read_answer(json.dumps(body).encode(), CHAT).params

    assert json.loads(read(PARAMS)) == PARAMS
    for name in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
        assert read({key: value for key, value in PARAMS.items() if key != name}) == b"", name
        assert read({**PARAMS, name: None}) == b""
    for odd in (None, [], "x", 7, True):
        assert read(odd) == b""
    assert read({"transfer_id": "x"}) == b'{"transfer_id": "x"}', "of another connector: opaque"


def test_forged_counts_are_not_believed() -> None:
    def cached(told: Any, counted: Any = 30) -> int | None:
        details = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": counted}}
        body = {"choices": [], "usage": details, "kv_transfer_params": {**PARAMS, "remote_prefill_cached_tokens": told}}
        return read_answer(json.dumps(body).encode(), CHAT).cached

    assert cached(64) == 64
    for odd in (-5, 9999, "7", None, 1.5, True):
        assert cached(odd) == 30, "the prefiller's own usage"
    assert cached(None, None) is None
    with pytest.raises(ReplicaFailure):
        read_answer(b"what?", CHAT)


def test_batches() -> None:
    for prompt, count in (("p", 0), ([1, 2], 0), (["p"], 1), ([[1], [2]], 2), ([], 0)):
        assert batch_size(read_object(json.dumps({"prompt": prompt}).encode())) == count
    made = own(bootstrap_body(read_object(b'{"prompt":["a","b"]}'), "h", 1, [5, 6]))
    assert [made[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")] == [["h", "h"], [1, 1], [5, 6]]
