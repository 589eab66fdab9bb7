"""Requests with the header `Prompt-Log`, turns that are kept, and engines that answer them, in each API."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

from gateway.dialects.events.sse import events_of, object_of
from gateway.features.prompt_log.structured_field import dictionary
from tests.gateway.conftest import Running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.request.test_dialects import BEGUN, CREATED, DELTA, ENDS, SAYS, events, message, response
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, http, streams, writes

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FORMS = {CHAT: "chat", MESSAGES: "messages", RESPONSES: "responses"}
USER = {"role": "user", "content": "hi"}


def told_in(headers: Any) -> dict[str, Any]:
    members = dictionary(headers["Prompt-Log"])
    assert members is not None
    return {name: value == "?1" if value in ("?0", "?1") else json.loads(value) for name, value in members.items()}


def told_in_stream(path: str, raw: bytes) -> tuple[int, Any]:
    """(index of the event from the end, its names)."""
    found = [object_of(each) for each in events_of(raw)]
    held = [each.get("response", each).get("prompt_log") for each in found]
    at = next(at for at, each in enumerate(held) if each)
    return at - len(held), held[at]


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """For several replicas: the first request gets the first behaviour, at any replica."""
    left = list(behaviours)

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await left.pop(0)(request, writer)

    return behave


LISTS = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
SAID = {"role": "assistant", "content": "hello"}
NOW = {"role": "user", "content": "and now?"}
SYSTEM: dict[str, dict[str, Any]] = {
    CHAT: {},
    MESSAGES: {"system": "Be brief."},
    RESPONSES: {"instructions": "Be brief."},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": "read"}}],
    MESSAGES: [{"name": "read", "input_schema": {}}],
    RESPONSES: [{"type": "function", "name": "read", "parameters": {}}],
}


async def responds(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """An engine of Responses, with an id of its own for each response."""
    made = response(id=f"resp_{next(_numbers)}")
    if request.json.get("stream"):
        await events(CREATED, DELTA, named("response.completed", response=made, sequence_number=4))(request, writer)
    else:
        await writes(http(200, json.dumps(made).encode()))(request, writer)


_numbers = itertools.count()


def engine(path: str, *, stream: bool) -> Behaviour:
    if path == CHAT:
        return streams("hel", "lo") if stream else answers()
    if path == MESSAGES:
        return events(BEGUN + SAYS, ENDS) if stream else message()
    return responds


def kept_in(path: Path, **more: Any) -> dict[str, Any]:
    return {"state": {"url": f"sqlite:///{path}/state.db", **more}}


def body_of(path: str, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": "m", **({"max_tokens": 9} if path == MESSAGES else {}), LISTS[path]: turns, **more}


async def asked(
    run: Running, path: str, header: str | None, turns: list[dict[str, Any]], key: str = "k", **more: Any
) -> tuple[int, dict[str, Any], bytes]:
    """(status, the names at the end of the answer or the error, body)."""
    headers = {"Authorization": f"Bearer {key}"} | ({} if header is None else {"Prompt-Log": header})
    async with run.session.post(run.url + path, json=body_of(path, turns, **more), headers=headers) as answer:
        raw = await answer.read()
        if answer.status != 200:
            return answer.status, json.loads(raw)["error"], raw
        told = told_in(answer.headers) if header and "Prompt-Log" in answer.headers else {}  # a head after pulses has none
        if more.get("stream") and header:
            told |= told_in_stream(path, raw)[1]
        return 200, told, raw


def seen(replica: FakeReplica, path: str) -> list[Any]:
    """The turns that the replica got last: (role, text)."""
    found = []
    for turn in replica.requests[-1].json[LISTS[path]]:
        content = turn.get("content")
        found.append((turn["role"], content if isinstance(content, str) else "".join(part["text"] for part in content)))
    return found


ALL = [(path, stream) for path in FORMS for stream in (False, True)]


async def called(
    run: Running, method: str, path: str, key: str = "k", body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    where = f"{run.url}/v1/logs/{path}".rstrip("/")
    async with run.session.request(method, where, headers=headers, json=body) as answer:
        found = await answer.json(content_type=None)
        return answer.status, found.get("error", found)
