"""Streams of a run's events: comments in their silence, and nothing left in the log."""

from __future__ import annotations

import asyncio

from gateway.admission.memory import Budget
from gateway.features.workflows.running.event_stream import COMMENT, EventSender, unread_logs
from tests.gateway.conftest import eventually
from tests.support.compiled import uncompiled
from tests.support.in_memory import BytesReply


@uncompiled
async def test_a_silent_stream_has_comments_between_its_events() -> None:
    logs, reply = unread_logs(), BytesReply()
    log = logs.open(("", "run_1"), Budget(1 << 20).lease("192.0.2.1"))
    sender = EventSender(log, reply, logs=logs, every_s=0.01)
    logs.add(log, b"one")
    sending = asyncio.create_task(sender.run(60.0))
    await eventually(lambda: reply.body.count(COMMENT) >= 2)
    logs.add(log, b"two")
    log.end()
    await sending
    assert (reply.body.replace(COMMENT, b""), sender.sent, logs.size) == (b"onetwo", 1, 0)
