"""A data-parallel rank that hangs: only its own requests move, although others share its connections."""

from __future__ import annotations

import asyncio

from gateway.features.hangs.hang_watch import HangWatch
from gateway.features.hangs.moving import running_at
from tests.gateway.conftest import eventually, running
from tests.support.fakes import FakeReplica, FakeRequest, answers, http, models, writes

HEADER = "x-data-parallel-rank"


async def test_only_requests_of_the_rank_move() -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 1.0' for rank in (0, 1)]
    page = writes(http(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4"))
    until = asyncio.Event()

    async def waits(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if len(replica.requests) <= 6:
            await until.wait()
        await answers()(request, writer)

    replica = FakeReplica([waits], listing=models("m", owner="vllm"), pages={"/metrics": page})
    async with replica, running(replica) as run:
        await run.gateway.fleet.probe_all(run.gateway.upstream)
        texts = [f"question {number} " * 99 for number in range(6)]
        bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in texts]
        posts = [asyncio.ensure_future(run.post(body)) for body in bodies]
        await eventually(lambda: len(replica.requests) == 6)
        states = {state.name: state for state in run.gateway.fleet.replicas}
        counts = {name: len(running_at(run.gateway.upstream, state)) for name, state in states.items()}
        sent = [f"{replica.name}#{request.headers[HEADER]}" for request in replica.requests]
        assert counts == {name: sent.count(name) for name in states}
        assert all(counts.values())
        hung = states[f"{replica.name}#0"]
        hung.hung = True
        run.gateway.fleet.suspect(hung)
        watch = run.gateway[HangWatch]
        watch._moving.move(hung, run.gateway.clock())
        await eventually(lambda: len(replica.requests) == 6 + counts[hung.name])
        assert {request.headers[HEADER] for request in replica.requests[6:]} == {"1"}
        until.set()
        assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * 6
