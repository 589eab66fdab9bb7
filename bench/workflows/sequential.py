"""A client that sends the calls of a workflow one after another, in the order of the document, as applications do today."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from gateway.features.workflows.language.document import ConnectorCall
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.language.scheduling import RUNNING
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.messages import ModelAnswer, StartCall
from gateway.features.workflows.running.scheduler import COMPLETED, RunScheduler

MAX_TOKENS: Final = 1024


class FailedRunError(Exception):
    """A run has not completed: its step and code."""


@dataclass(slots=True)
class ClientRun:
    """What one run took. Tokens are the engines' counts."""

    seconds: float = 0.0
    calls: int = 0
    prompt: int = 0
    cached: int = 0


async def run_sequentially(
    http: aiohttp.ClientSession, gateway: str, connectors: Mapping[str, str], workflow: Workflow, inputs: Mapping[str, Any]
) -> ClientRun:
    """connectors: URLs by name. Raises FailedRunError."""
    scheduler = RunScheduler(workflow, read_inputs(workflow.inputs, dict(inputs)), MAX_TOKENS)
    spent, begun, waiting = ClientRun(), time.perf_counter(), deque[StartCall]()
    scheduler.begin(0.0, {})
    while scheduler.status == RUNNING:
        turn = scheduler.turn(time.perf_counter() - begun)
        for call in turn.calls:
            if isinstance(call, StartCall):
                waiting.append(call)
            else:
                waiting = deque(each for each in waiting if each.name != call.name)
        if waiting and not turn.more:
            await _send(http, gateway, connectors, scheduler, waiting.popleft(), spent)
    spent.seconds = time.perf_counter() - begun
    if scheduler.status != COMPLETED:
        raise FailedRunError(f"step {scheduler.failed_step}, {scheduler.error.code if scheduler.error else scheduler.status}")
    return spent


async def _send(
    http: aiohttp.ClientSession,
    gateway: str,
    connectors: Mapping[str, str],
    scheduler: RunScheduler,
    call: StartCall,
    spent: ClientRun,
) -> None:
    work = call.step.work
    if isinstance(work, ConnectorCall):
        async with http.post(connectors[work.use], json=call.body["with"]) as answer:
            scheduler.connected(call.name, await answer.json(), 0.0)
        return
    chat = work.kind == CHAT
    url = f"{gateway}/v1/chat/completions" if chat else f"{gateway}/v1/completions"
    async with http.post(url, json={**call.body, "stream": False}) as answer:
        if answer.status != 200:
            raise FailedRunError(f"step {call.name}, {answer.status}")
        body = await answer.json()
    usage, choice = body["usage"], body["choices"][0]
    spent.calls += 1
    spent.prompt += usage["prompt_tokens"]
    spent.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = choice["message"]["content"] if chat else choice["text"]
    message = {"role": "assistant", "content": text}
    scheduler.answered(call.name, ModelAnswer(text, message, finish_reason=choice["finish_reason"]), 0.0)
