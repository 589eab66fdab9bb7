"""A gateway without a server in front of it, whose replica is a function; and answers of such a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson

from gateway.app import Gateway, compose
from gateway.core import Surroundings
from tests.gateway.conftest import LOGGED
from tests.support.configs import load
from tests.support.in_memory import Answer, MemoryDials, framed

CHAT = "/v1/chat/completions"


def chat(**more: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 100}], **more})


def completion(_request: bytes) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
    return framed(orjson.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}))


def stream(_request: bytes) -> bytes:
    events = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in "abc"]
    data = b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in events)
    usage = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    return framed(data + b"data: %b\n\ndata: [DONE]\n\n" % usage, "text/event-stream")


@asynccontextmanager
async def composed(answer: Answer, around: Surroundings | None = None, **pool: Any) -> AsyncIterator[Gateway]:
    """A gateway whose replicas are a function, without a server in front of it."""
    config = load(None, {"pools": [{"replicas": ["http://replica.memory:1"], **pool}]}, env={})
    around = around or Surroundings()
    if around.dials is None:
        around = replace(around, dials=lambda address: MemoryDials(address, answer))
    gateway = compose(config, LOGGED, around)
    async with gateway.background():
        yield gateway
    assert gateway.router.ledger.open_leases == 0
    gateway.router.check()
