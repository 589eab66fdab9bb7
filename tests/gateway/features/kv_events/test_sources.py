"""The publishers that replicas name: vLLM's and SGLang's answers, and others."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.config.kinds import MAX_RANKS
from gateway.features.kv_events.following import AGAIN_S, PublisherSet
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica, FakeRequest, http, models

ON = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:21577",
    "replay_endpoint": "tcp://*:21578",
    "topic": "t",
}


def engine(owner: str, answers: dict[str, object]) -> FakeReplica:
    """An engine with these answers, by path."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        found = answers.get(request.path)
        writer.write(http(200, json.dumps(found).encode()) if found is not None else http(404, b"{}"))

    return FakeReplica(script=(behave,), listing=models("m", owner=owner), pages=dict.fromkeys(answers, behave))


async def followed(run: Running) -> list[tuple[int, str, str, str]]:
    """(rank, endpoint, replay endpoint, topic) of each publisher of the first replica, once it was asked."""
    publishers = run.gateway[PublisherSet]
    (state,) = run.gateway.fleet.replicas

    def is_answered() -> bool:
        publishers.sweep(publishers._core.clock())
        asked = publishers._asked.get(state)
        return asked is not None and asked.task is None and asked.asked_at > float("-inf")

    await eventually(is_answered)
    return sorted((each.rank, each.endpoint, each.replay, each.topic) for each in publishers._asked[state].sources)


@pytest.mark.parametrize(
    ("owner", "answers", "expected"),
    [
        ("vllm", {"/kv_event_sources": {"0": ON}}, [(0, "tcp://127.0.0.1:21577", "tcp://127.0.0.1:21578", "t")]),
        ("vllm", {"/kv_event_sources": {"0": {**ON, "replay_endpoint": None}}}, [(0, "tcp://127.0.0.1:21577", "", "t")]),
        ("vllm", {"/kv_event_sources": {"0": {**ON, "enable_kv_cache_events": False}}}, []),
        ("vllm", {"/kv_event_sources": {"0": {**ON, "endpoint": "tcp://10.0.0.1:5557"}}}, []),
        ("vllm", {"/kv_event_sources": {"0": {**ON, "endpoint": "ipc:///tmp/x"}}}, []),
        ("vllm", {"/kv_event_sources": {"0": {**ON, "endpoint": "tcp://*:99999"}}}, []),
        ("vllm", {"/kv_event_sources": {"x": ON, "1": 5, "1" * 5000: ON}}, []),
        ("vllm", {"/kv_event_sources": [ON]}, []),
        ("vllm", {"/kv_event_sources": {str(rank): ON for rank in range(MAX_RANKS + 1)}}, []),
        ("vllm", {}, []),
        ("vllm", {"/server_info": {"kv_events_config": json.dumps(ON)}}, []),
        (
            "sglang",
            {"/server_info": {"dp_size": 2, "kv_events_config": json.dumps({**ON, "topic": "", "replay_endpoint": None})}},
            [(0, "tcp://127.0.0.1:21577", "", ""), (1, "tcp://127.0.0.1:21578", "", "")],
        ),
        (
            "sglang",
            {"/get_server_info": {"kv_events_config": ON}},
            [(0, "tcp://127.0.0.1:21577", "tcp://127.0.0.1:21578", "t")],
        ),
        ("sglang", {"/server_info": {"kv_events_config": "{"}}, []),
        ("sglang", {"/server_info": {"kv_events_config": ON, "dp_size": MAX_RANKS + 1}}, []),
    ],
)
async def test_publishers_that_a_replica_names(
    owner: str, answers: dict[str, object], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with engine(owner, answers) as replica, running(replica, kv_events={"follow": True}) as run:
            assert await followed(run) == expected
    assert ("replica names no event publisher that can be followed" in caplog.text) == (not expected)


async def test_a_replica_without_publishers_is_asked_again_after_a_while() -> None:
    answers: dict[str, object] = {"/kv_event_sources": {}}
    async with engine("vllm", answers) as replica, running(replica, kv_events={"follow": True}) as run:
        assert await followed(run) == []
        answers["/kv_event_sources"] = {"0": ON}
        publishers = run.gateway[PublisherSet]
        publishers.sweep(publishers._core.clock() + AGAIN_S + 1)
        await eventually(lambda: publishers._followed)


async def test_a_publisher_that_two_replicas_name_is_followed_for_neither(caplog: pytest.LogCaptureFixture) -> None:
    answers: dict[str, object] = {"/kv_event_sources": {"0": ON}}
    following = {"follow": True}
    async with (
        engine("vllm", answers) as left,
        engine("vllm", answers) as right,
        running(left, right, kv_events=following) as run,
    ):
        publishers = run.gateway[PublisherSet]

        def both() -> bool:
            publishers.sweep(publishers._core.clock())
            return [len(asked.sources) for asked in publishers._asked.values()] == [1, 1]

        await eventually(both)
        assert not publishers._followed
    assert caplog.text.count("several replicas name one event publisher: it is not followed") == 2
