"""Twenty answers and their invoices, worked out by hand: what /metrics has to show, and what each answer adds to it.

The prices are USD per million tokens, so tokens x price are millionths of a dollar, which is what the rows below have. Nothing
here is computed by code: not the rows, and not the sums of the last test.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, NamedTuple

import pytest

from tests.clients.sdk.engines import UNKNOWN
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.request.test_dialects import CREATED, DELTA, events, response
from tests.support.fakes import Behaviour, FakeReplica, answers, http, writes

PRICES: Final = {"m": {"input": 3.0, "cached_input": 0.3, "cache_write": 3.75, "cache_write_1h": 6.0, "output": 15.0}}


class Invoice(NamedTuple):
    """Tokens, then millionths of a dollar."""

    miss: int = 0
    hit: int = 0
    written: int = 0
    generated: int = 0
    input: float = 0
    cached_input: float = 0
    cache_write: float = 0
    output: float = 0
    saved: float = 0


class Never(asyncio.Event):
    """Is never set, in any event loop."""

    async def wait(self) -> Any:
        return await asyncio.get_running_loop().create_future()


def message_usage(fresh: int, read: int, hour: int, five_minutes: int, generated: int) -> dict[str, Any]:
    split = {"ephemeral_5m_input_tokens": five_minutes, "ephemeral_1h_input_tokens": hour}
    counts = {"input_tokens": fresh, "cache_read_input_tokens": read, "cache_creation_input_tokens": hour + five_minutes}
    return {**counts, "cache_creation": split, "output_tokens": generated}


def message(*counts: int) -> Behaviour:
    body: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello"}],
    }
    body |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": message_usage(*counts)}
    return writes(http(200, json.dumps(body).encode()))


def message_stream(start: Any, delta: Any, *, end: bytes | None = None, hold: asyncio.Event | None = None) -> Behaviour:
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": start}
    said = named("message_start", message={**begun, "stop_reason": None, "stop_sequence": None})
    said += named("content_block_start", index=0, content_block={"type": "text", "text": ""})
    said += named("content_block_delta", index=0, delta={"type": "text_delta", "text": "hello"})
    if hold:
        return events(said, then=hold)
    stop = named("content_block_stop", index=0)
    stop += named("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=delta)
    return events(said, end or stop + named("message_stop"))


def response_usage(prompt: int, cached: int, written: int, generated: int) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written}}
    return {
        **usage,
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def plain_response(status: str, *counts: int) -> Behaviour:
    return writes(http(200, json.dumps(response(status=status, usage=response_usage(*counts))).encode()))


def response_stream(status: str, usage: Any) -> Behaviour:
    return events(CREATED, DELTA, named(f"response.{status}", response=response(status=status, usage=usage), sequence_number=4))


BROKEN: Final = named("error", error={"type": "api_error", "message": "out of memory"})
NEVER: Final = Never()
VLLM: Final = ({"input_tokens": 845, "output_tokens": 0}, message_usage(13, 832, 0, 0, 8))
LLAMA: Final = ({"cache_read_input_tokens": 844, "input_tokens": 1, "output_tokens": 0}, {"output_tokens": 8})
LEFT: Final = {"input_tokens": 20, "cache_read_input_tokens": 680, "cache_creation_input_tokens": 0, "output_tokens": 1}
CASES: Final[dict[str, tuple[Behaviour, Invoice]]] = {
    # Messages
    "message, nothing cached": (message(1000, 0, 0, 0, 100), Invoice(1000, 0, 0, 100, 3000, 0, 0, 1500, 0)),
    "message, a hit": (message(50, 950, 0, 0, 20), Invoice(50, 950, 0, 20, 150, 285, 0, 300, 2565)),
    "message, 5 m written": (message(10, 0, 0, 2000, 7), Invoice(2010, 0, 2000, 7, 30, 0, 7500, 105, 0)),
    "message, 1 h written": (message(4, 0, 2000, 0, 3), Invoice(2004, 0, 2000, 3, 12, 0, 12000, 45, 0)),
    "message, all at once": (message(6, 4000, 1500, 300, 11), Invoice(1806, 4000, 1800, 11, 18, 1200, 10125, 165, 10800)),
    "stream as vLLM's": (message_stream(*VLLM), Invoice(13, 832, 0, 8, 39, 249.6, 0, 120, 2246.4)),
    "stream as llama.cpp's": (message_stream(*LLAMA), Invoice(1, 844, 0, 8, 3, 253.2, 0, 120, 2278.8)),
    "stream, both written": (
        message_stream(message_usage(2, 300, 200, 1000, 1), {"output_tokens": 40}),
        Invoice(1202, 300, 1200, 40, 6, 90, 4950, 600, 810),
    ),
    "stream that fails": (
        message_stream({"input_tokens": 500, "cache_read_input_tokens": 0, "output_tokens": 0}, {}, end=BROKEN),
        Invoice(500, 0, 0, 0, 1500, 0, 0, 0, 0),
    ),
    "stream as vLLM's that fails": (message_stream(VLLM[0], {}, end=BROKEN), Invoice()),  # nobody knows what was cached
    "stream, the client leaves": (message_stream(LEFT, {}, hold=NEVER), Invoice(20, 680, 0, 1, 60, 204, 0, 15, 1836)),
    # Responses
    "response, nothing cached": (plain_response("completed", 1000, 0, 0, 50), Invoice(1000, 0, 0, 50, 3000, 0, 0, 750, 0)),
    "response, a hit": (plain_response("completed", 2000, 1984, 0, 10), Invoice(16, 1984, 0, 10, 48, 595.2, 0, 150, 5356.8)),
    "response, written": (
        plain_response("completed", 1100, 64, 1024, 5),
        Invoice(1036, 64, 1024, 5, 36, 19.2, 3840, 75, 172.8),
    ),
    "response, incomplete": (plain_response("incomplete", 300, 0, 0, 16), Invoice(300, 0, 0, 16, 900, 0, 0, 240, 0)),
    "response, failed": (plain_response("failed", 400, 0, 0, 0), Invoice(400, 0, 0, 0, 1200, 0, 0, 0, 0)),
    "response stream, a hit": (
        response_stream("completed", response_usage(215, 192, 0, 4)),
        Invoice(23, 192, 0, 4, 69, 57.6, 0, 60, 518.4),
    ),
    "response stream, incomplete": (
        response_stream("incomplete", response_usage(300, 0, 0, 16)),
        Invoice(300, 0, 0, 16, 900, 0, 0, 240, 0),
    ),
    "response stream, failed": (response_stream("failed", None), Invoice()),
    "response stream, the client leaves": (events(CREATED, DELTA, then=NEVER), Invoice()),
    "response, translated": (
        answers(prompt=640, completion=9, cached=512),
        Invoice(128, 512, 0, 9, 384, 153.6, 0, 135, 1382.4),
    ),
}
ALL: Final = Invoice(11809, 10358, 8024, 308, 11355, 3107.4, 38415, 4620, 27966.6)


async def invoice(run: Running) -> Invoice:
    """What /metrics shows, as one invoice."""
    await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    page = await run.metrics()

    def of(name: str, label: str = "") -> float:
        found = [value for key, value in page.items() if key.startswith(f"warmroute_{name}{{") and label in key]
        return sum(found)

    hit, miss = of("prompt_tokens_total", 'cache="hit"'), of("prompt_tokens_total", 'cache="miss"')
    written, generated = of("cache_write_tokens_total"), of("completion_tokens_total")
    kinds = ("input", "cached_input", "cache_write", "output")
    cost = {kind: of("cost_usd_total", f'kind="{kind}"') * 1e6 for kind in kinds}
    saved = of("savings_usd_total") * 1e6
    return Invoice(int(miss), int(hit), int(written), int(generated), saved=saved, **cost)


async def ask(run: Running, name: str) -> None:
    """The client reads all, or leaves when it has read the first text."""
    messages = not name.startswith("response")
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": name}]}
    if not messages:
        body = {"model": "m", "input": name}
    path = "/v1/messages" if messages else "/v1/responses"
    async with run.session.post(run.url + path, json={**body, "stream": "stream" in name}) as answer:
        assert answer.status == 200, await answer.text()
        if "leaves" not in name:
            await answer.read()
            return
        while b"hello" not in await answer.content.readuntil(b"\n\n"):
            """The first text has not come."""


@pytest.mark.parametrize("name", CASES)
async def test_an_invoice(name: str) -> None:
    behaviour, expected = CASES[name]
    script = [UNKNOWN, behaviour] if "translated" in name else [behaviour]
    async with FakeReplica(script) as replica, running(replica, prices=PRICES) as run:
        await ask(run, name)
        assert tuple(await invoice(run)) == pytest.approx(tuple(expected))


async def test_all_of_them_together() -> None:
    """One gateway; the translated one comes last, for from then on the replica is known to speak chat alone."""
    script = [behaviour for behaviour, _ in CASES.values()]
    assert len(script) == 21
    async with FakeReplica([*script[:-1], UNKNOWN, script[-1]]) as replica, running(replica, prices=PRICES) as run:
        for name in CASES:
            await ask(run, name)
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert tuple(await invoice(run)) == pytest.approx(tuple(ALL))
        page = await run.metrics()
        assert not [key for key, value in page.items() if key.startswith("warmroute_unmetered") and value]
