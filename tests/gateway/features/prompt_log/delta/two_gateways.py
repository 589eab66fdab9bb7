"""Two gateways on loopback: one that uploads deltas to another one, which keeps logs before a scripted engine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.features.prompt_log.delta.delta_form import DeltaForm
from tests.gateway.conftest import Running, running
from tests.gateway.features.prompt_log.kept import CHAT, LISTS, MESSAGES, body_of, kept_in
from tests.support.fakes import FakeReplica


@dataclass
class TwoGateways:
    """near: uploads deltas to `far`, which is before the engine."""

    near: Running
    far: Running
    engine: FakeReplica

    @property
    def form(self) -> DeltaForm:
        return self.near.gateway[DeltaForm]

    async def ask(self, path: str, turns: list[Any], key: str = "k", **more: Any) -> tuple[int, Any, bytes]:
        """(status, headers, body) of the near gateway's answer."""
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
        async with self.near.session.post(self.near.url + path, json=body_of(path, turns, **more), headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def counts(self) -> dict[str, int]:
        """Requests by result."""
        found = await self.near.metrics()
        name = "warmroute_delta_requests_total"
        pairs = ((result, found.get(f'{name}{{result="{result}"}}', 0)) for result in ("delta", "whole", "replayed", "off"))
        return {result: int(count) for result, count in pairs if count}

    async def bytes(self, kind: str) -> int:
        return int((await self.near.metrics()).get(f'warmroute_delta_bytes_total{{kind="{kind}"}}', 0))


def delta_config(*urls: str, **more: Any) -> dict[str, Any]:
    return {"pools": [{"replicas": list(urls), "delta": True, "strip_billing_header": False, **more}], "prompt_log": False}


@contextlib.asynccontextmanager
async def two_gateways(engine: FakeReplica, folder: Path, **far: Any) -> AsyncIterator[TwoGateways]:
    async with running(engine, **{**kept_in(folder), **far}) as kept, running(**delta_config(kept.url)) as near:
        yield TwoGateways(near, kept, engine)


def engine_turns(engine: FakeReplica, path: str, at: int = -1) -> list[Any]:
    turns: list[Any] = engine.requests[at].json[LISTS[path]]
    return turns


_ids = itertools.count()


def called(path: str, call: str, text: str, reasoning: str = "") -> Any:
    """A plain answer with a text and a call with this id."""
    if path == CHAT:
        function = {"name": "read", "arguments": '{"line": 1.0}'}
        said: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            said["reasoning_content"] = reasoning
        said["tool_calls"] = [{"id": call, "type": "function", "function": function}]
        return {"id": "c", "model": "m", "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}]}
    if path == MESSAGES:
        thought = [{"type": "thinking", "thinking": reasoning, "signature": "s"}] if reasoning else []
        use = {"type": "tool_use", "id": call, "name": "read", "input": {"line": 1.0}}
        body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
        return {**body, "content": [*thought, {"type": "text", "text": text}, use], "stop_reason": "tool_use"}
    item = {
        "id": "fc",
        "type": "function_call",
        "call_id": call,
        "name": "read",
        "arguments": '{"line":1}',
        "status": "completed",
    }
    thought = [{"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": reasoning}]}] if reasoning else []
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    body = {"id": f"resp_{next(_ids)}", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    return {**body, "output": [*thought, message, item]}


def history_of(path: str, answer: Any) -> list[Any]:
    """An answer as its client puts it into its next request."""
    if path == CHAT:
        return [answer["choices"][0]["message"]]
    if path == MESSAGES:
        return [{"role": "assistant", "content": answer["content"]}]
    return list(answer["output"])


def result_of(path: str, call: str, text: str) -> Any:
    if path == CHAT:
        return {"role": "tool", "tool_call_id": call, "content": text}
    if path == MESSAGES:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]}
    return {"type": "function_call_output", "call_id": call, "output": text}
