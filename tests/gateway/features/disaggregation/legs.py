"""Prefillers and decoders that follow a script, and a gateway over them.

The fields are those of vLLM 0.32: `request_finished` of the module distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler,
and `remote_prefill_cached_tokens` of v1.core.sched.scheduler.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.gateway.conftest import Running, running
from tests.support.fakes import Behaviour, FakeReplica, http, models, usage

TEXT = "hello " * 1000
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9], [1]],
    "remote_engine_id": "e0c1a9",
    "remote_request_id": "chatcmpl-1-a1b2c3d4",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 1504,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 640,
}


def prefills(params: Any = PARAMS, *, cached: int | None = None, prompt: int = 1504, written: str = "") -> Behaviour:
    """A prefiller's answer. written: replaces its parameters as JSON."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
    counts = usage(prompt=prompt, completion=1, cached=cached)
    body = {"id": "p", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": counts}
    text = json.dumps({**body, "kv_transfer_params": "HERE"}).replace('"HERE"', written or json.dumps(params))

    async def behave(_request: Any, writer: Any) -> None:
        writer.write(http(200, text.encode()))

    return behave


def replica(*script: Behaviour, owner: str = "vllm") -> FakeReplica:
    return FakeReplica(script, listing=models("m", owner=owner))


@contextlib.asynccontextmanager
async def split(
    prefill: list[FakeReplica], decode: list[FakeReplica], *unified: FakeReplica, **config: Any
) -> AsyncIterator[Running]:
    """A gateway over these prefillers and decoders, which it has all probed."""
    async with contextlib.AsyncExitStack() as stack:
        for each in (*prefill, *decode, *unified):
            if each.port == 0:
                await stack.enter_async_context(each)
        pool = {
            "name": "p",
            "prefill": [{"url": each.url, "name": f"p{number}"} for number, each in enumerate(prefill)],
            "decode": [{"url": each.url, "name": f"d{number}"} for number, each in enumerate(decode)],
            "replicas": [{"url": each.url, "name": f"u{number}"} for number, each in enumerate(unified)],
        }
        yield await stack.enter_async_context(running(pools=[pool], **config))


async def ways(run: Running) -> dict[str, float]:
    """The counts of `disaggregated_prompts_total` by way."""
    begin = 'warmroute_disaggregated_prompts_total{pool="p",way="'
    return {name[len(begin) : -2]: value for name, value in (await run.metrics()).items() if name.startswith(begin)}
