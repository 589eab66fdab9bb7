"""A data-parallel rank that is a replica of its own follows the events of its own publisher only."""

from __future__ import annotations

import json

from gateway.features.kv_events.sources import sources_of
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica, answers, http, models, writes


async def test_each_rank_has_its_own_publisher() -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 0.0' for rank in (0, 1)]
    page = writes(http(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4"))
    named = {str(rank): {"publisher": "zmq", "endpoint": f"tcp://*:{5557 + rank}"} for rank in (0, 1)}
    answer = writes(http(200, json.dumps(named).encode()))
    replica = FakeReplica([answer], listing=models("m", owner="vllm"), pages={"/metrics": page})
    async with replica, running(replica) as run:
        await run.gateway.fleet.probe_all(run.gateway.upstream)
        found = [await sources_of(run.gateway.upstream, state) for state in run.gateway.fleet.replicas]
        assert [[(source.replica, source.rank) for source in each] for each in found] == [
            [(f"{replica.name}#0", 0)],
            [(f"{replica.name}#1", 1)],
        ]
    async with replica, running({"url": replica.url, "ranks": 1}) as run:
        (state,) = run.gateway.fleet.replicas
        assert len(await sources_of(run.gateway.upstream, state)) == 2, "one that cannot be addressed has all of them"
    plain = FakeReplica([answers()])
    async with plain, running(plain) as run:
        (state,) = run.gateway.fleet.replicas
        assert await sources_of(run.gateway.upstream, state) == []
