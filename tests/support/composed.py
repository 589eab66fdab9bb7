"""A gateway without configuration that serves a chat and a stream from memory, in a separate process, without some features.

python -m tests.support.composed NAME...     fails if the section of one of these features is known, or the feature is imported;
                                             writes the metrics and the commands that there are, as JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys

import pytest

from gateway.app import compose
from gateway.config.parse import ConfigError
from gateway.core import Surroundings
from gateway.features.table import new_metrics, read
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.request_log import RequestLog
from tests.support.in_memory import BytesReply, BytesRequest, MemoryDials, framed, replica

CHAT = "/v1/chat/completions"
PLAIN = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
UNKNOWN_PATH = b'{"detail":"Not Found"}'
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'


POOLS = {"pools": [{"replicas": ["http://replica.memory:1"]}]}
SECTIONS = {
    "adoption": {"limits": {"adopt_s": 1}},
    "disaggregation": {"disaggregation": {"local_tokens": 1}},
    "discovery": {"discovery": [{"file": "replicas.yaml"}]},
    "keys": {"keys": {"url": "sqlite"}},
    "kv_events": {"kv_events": {"follow": True}},
    "ledger": {"ledger": {"url": "sqlite"}},
    "prompt_log": {"prompt_log": False},
    "responses": {"state": {"url": "sqlite"}},
    "retention": {"routing": {"retain": True}},
    "savings": {"routing": {"compare": True}},
    "sharing": {"sharing": {"url": "redis://h"}},
    "snapshots": {"snapshot": {"file": "auto"}},
    "tracing": {"tracing": {"sample": 1}},
    "waking": {"health": {"wake": True}},
    "workers": {"workers": 2},
    "workflows": {"workflows": {"max_calls": 2}},
}


def answer(request: bytes) -> bytes:
    if request.startswith(b"POST /v1/messages "):
        return framed(UNKNOWN_PATH).replace(b"200 OK", b"404 Not Found", 1)
    return framed(EVENTS, "text/event-stream") if b'"stream": true' in request else framed(PLAIN)


async def main() -> None:
    config = read(None, {**POOLS, **({} if "responses" in sys.argv else {"state": {"url": "off"}})}, env={}).config
    around = Surroundings(dials=lambda address: MemoryDials(address, replica(answer)))
    gateway = compose(config, RequestLog(LogOutput(len), logging.INFO), around)
    async with gateway.background():
        for stream in (False, True):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream})
            reply = await gateway.lifecycle.serve(BytesRequest(body.encode(), CHAT))
            assert isinstance(reply, BytesReply)
            assert (reply.status, reply.whole) == (200, True), reply.body
            assert b"hi" in reply.body
        if "translation" in sys.argv:
            message = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}'
            reply = await gateway.lifecycle.serve(BytesRequest(message, "/v1/messages"))
            assert isinstance(reply, BytesReply)
            assert (reply.status, reply.body) == (404, UNKNOWN_PATH), "as the replica says it"
    assert gateway.router.ledger.open_leases == 0


if __name__ == "__main__":
    asyncio.run(main())
    for name in SECTIONS.keys() & {*sys.argv}:
        with pytest.raises(ConfigError, match="unknown key"):
            read(None, {**POOLS, **SECTIONS[name]}, env={})
    imported = {name for name in sys.argv[1:] if f"gateway.features.{name}" in sys.modules}
    assert not imported, imported
    helped = subprocess.run([sys.executable, "-m", "gateway", "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^    (\w+) ", helped, re.MULTILINE)
    sys.stdout.write(json.dumps({"metrics": [each.name for each in new_metrics().instruments.all], "commands": commands}))
