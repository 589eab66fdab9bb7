"""Thirty-seven answers and their invoices, worked out by hand: what /metrics and the ledger have to show.

The prices are USD per million tokens, so tokens x price are millionths of a dollar, which is what the rows below have. Nothing
here is computed by code: not the rows, and not the sums of the last test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from gateway.features.ledger.sums import MILL, MONEY
from tests.clients.sdk.engines import UNKNOWN
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.request.test_dialects import CREATED, DELTA, events, response
from tests.support.fakes import Behaviour, FakeReplica, answers, event, http, models, streams, writes

M: Final = {"input": 3.0, "cached_input": 0.3, "cache_write": 3.75, "cache_write_1h": 6.0, "output": 15.0}
PRICES: Final = {
    "m": M,
    "long": {**M, "tiers": [{"above": 1000, "input": 6.0, "output": 22.5}, {"above": 5000, "input": 9.0, "output": 30.0}]},
    "sees": {**M, "image": 0.001},
    "dated": [{**M, "input": 100.0}, {**M, "since": "2020-01-01"}, {**M, "since": "2999-01-01", "input": 100.0}],
    "night": {**M, "peak": [{"hours": "00:00-12:00", "factor": 2}, {"hours": "12:00-24:00", "factor": 2}]},
    "tiny": {"input": 0.000001, "cached_input": 0.003, "output": 0.000002},
}


class Invoice(NamedTuple):
    """Tokens, then millionths of a dollar. estimated: cached tokens that were predicted; guessed: cost of estimates."""

    miss: int = 0
    hit: int = 0
    written: int = 0
    generated: int = 0
    input: float = 0
    cached_input: float = 0
    cache_write: float = 0
    output: float = 0
    saved: float = 0
    image: float = 0
    estimated: int = 0
    guessed: float = 0


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
GUESSED: Final = (
    "x" * 394
)  # with its role and separators a canonical prompt of 400 bytes, which are 100 tokens to a new gateway
PICTURE: Final = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
CONTENT: Final[dict[str, Any]] = {"chat, two images": [{"type": "text", "text": "compare"}, PICTURE, PICTURE]}
MODELS: Final = {
    "chat, at a tier's bound": "long",
    "chat, a tier": "long",
    "chat stream, the second tier": "long",
    "chat, two images": "sees",
    "chat, dated": "dated",
    "chat, at night": "night",
    "chat, a tiny price": "tiny",
}
EXACT: Final[dict[str, tuple[Behaviour, Invoice]]] = {
    # Chat
    "chat, nothing cached": (answers(prompt=1000, completion=40, cached=0), Invoice(1000, 0, 0, 40, 3000, 0, 0, 600, 0)),
    "chat, a hit": (answers(prompt=1000, completion=1, cached=960), Invoice(40, 960, 0, 1, 120, 288, 0, 15, 2592)),
    "chat stream, a hit": (
        streams("a", "b", prompt=500, completion=2, cached=480),
        Invoice(20, 480, 0, 2, 60, 144, 0, 30, 1296),
    ),
    "chat, at a tier's bound": (answers(prompt=1000, completion=10, cached=0), Invoice(1000, 0, 0, 10, 3000, 0, 0, 150, 0)),
    "chat, a tier": (answers(prompt=1001, completion=10, cached=1000), Invoice(1, 1000, 0, 10, 6, 600, 0, 225, 5400)),
    "chat stream, the second tier": (
        streams("a", prompt=6000, completion=1, cached=5000),
        Invoice(1000, 5000, 0, 1, 9000, 4500, 0, 30, 40500),
    ),
    "chat, two images": (answers(prompt=2100, completion=2, cached=0), Invoice(2100, 0, 0, 2, 6300, 0, 0, 30, 0, 2000)),
    "chat, dated": (answers(prompt=10, completion=1, cached=0), Invoice(10, 0, 0, 1, 30, 0, 0, 15, 0)),
    "chat, at night": (answers(prompt=10, completion=1, cached=5), Invoice(5, 5, 0, 1, 30, 3, 0, 30, 27)),
    "chat, a tiny price": (
        answers(prompt=9, completion=3, cached=2),
        Invoice(7, 2, 0, 3, 0.000007, 0.006, 0, 0.000006, 0),
    ),
    # Completions
    "completion, a hit": (answers(prompt=64, completion=8, cached=48), Invoice(16, 48, 0, 8, 48, 14.4, 0, 120, 129.6)),
    "completion stream": (streams("a", prompt=64, completion=1, cached=0), Invoice(64, 0, 0, 1, 192, 0, 0, 15, 0)),
    # Messages
    "message, nothing cached": (message(1000, 0, 0, 0, 100), Invoice(1000, 0, 0, 100, 3000, 0, 0, 1500, 0)),
    "message, a hit": (message(50, 950, 0, 0, 20), Invoice(50, 950, 0, 20, 150, 285, 0, 300, 2565)),
    "message, 5 m written": (message(10, 0, 0, 2000, 7), Invoice(2010, 0, 2000, 7, 30, 0, 7500, 105, 0)),
    "message, 1 h written": (message(4, 0, 2000, 0, 3), Invoice(2004, 0, 2000, 3, 12, 0, 12000, 45, 0)),
    "message, all at once": (message(6, 4000, 1500, 300, 11), Invoice(1806, 4000, 1800, 11, 18, 1200, 10125, 165, 10800)),
    "message stream as vLLM's": (message_stream(*VLLM), Invoice(13, 832, 0, 8, 39, 249.6, 0, 120, 2246.4)),
    "message stream as llama.cpp's": (message_stream(*LLAMA), Invoice(1, 844, 0, 8, 3, 253.2, 0, 120, 2278.8)),
    "message stream, both written": (
        message_stream(message_usage(2, 300, 200, 1000, 1), {"output_tokens": 40}),
        Invoice(1202, 300, 1200, 40, 6, 90, 4950, 600, 810),
    ),
    "message stream, the client leaves": (message_stream(LEFT, {}, hold=NEVER), Invoice(20, 680, 0, 1, 60, 204, 0, 15, 1836)),
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
    "response, translated": (
        answers(prompt=640, completion=9, cached=512),
        Invoice(128, 512, 0, 9, 384, 153.6, 0, 135, 1382.4),
    ),
}
ROLE: Final = event("").replace(b'"content": ""', b'"role": "assistant"')
ESTIMATED: Final[dict[str, tuple[Behaviour, Invoice]]] = {
    "chat, cached tokens unknown": (
        answers(prompt=1000, completion=40),
        Invoice(1000, 0, 0, 40, 3000, 0, 0, 600, 0, guessed=3600),
    ),
    "chat stream, cut": (events(ROLE, event("a"), event("b"), event("c")), Invoice(100, 0, 0, 3, 300, 0, 0, 45, guessed=345)),
    "chat stream, the client leaves": (
        events(ROLE, event("hello"), event("b"), then=NEVER),
        Invoice(100, 0, 0, 2, 300, 0, 0, 30, guessed=330),
    ),
    "completion stream, cut": (
        events(event("a"), event("b")),
        Invoice(99, 0, 0, 2, 297, 0, 0, 30, guessed=327),
    ),
    "message stream that fails": (
        message_stream({"input_tokens": 500, "cache_read_input_tokens": 0, "output_tokens": 0}, {}, end=BROKEN),
        Invoice(500, 0, 0, 1, 1500, 0, 0, 15, 0, guessed=1515),
    ),
    # The split has not come: nobody knows what was cached.
    "message stream as vLLM's that fails": (
        message_stream(VLLM[0], {}, end=BROKEN),
        Invoice(100, 0, 0, 1, 300, 0, 0, 15, guessed=315),
    ),
    "response stream, failed": (response_stream("failed", None), Invoice(100, 0, 0, 1, 300, 0, 0, 15, guessed=315)),
    "response stream, the client leaves": (
        events(CREATED, DELTA, then=NEVER),
        Invoice(100, 0, 0, 1, 300, 0, 0, 15, guessed=315),
    ),
}
CASES: Final = EXACT | ESTIMATED
ALL: Final = Invoice(16572, 17853, 8024, 388, 31641.000007, 8656.806, 38415, 5880.000006, 77911.2, 2000)


async def invoice(run: Running) -> Invoice:
    """What /metrics shows, as one invoice."""
    await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    page = await run.metrics()

    def of(name: str, label: str = "") -> float:
        found = [value for key, value in page.items() if key.startswith(f"warmroute_{name}{{") and label in key]
        return sum(found)

    hit, miss = of("prompt_tokens_total", 'cache="hit"'), of("prompt_tokens_total", 'cache="miss"')
    written, generated = of("cache_write_tokens_total"), of("completion_tokens_total")
    kinds = ("input", "cached_input", "cache_write", "output", "image")
    cost = {kind: of("cost_usd_total", f'kind="{kind}"') * 1e6 for kind in kinds}
    saved, guessed = of("savings_usd_total") * 1e6, of("estimated_cost_usd_total") * 1e6
    estimated = int(of("prompt_tokens_total", 'cache="estimated"'))
    tokens = (int(miss), int(hit), int(written), int(generated))
    return Invoice(*tokens, saved=saved, estimated=estimated, guessed=guessed, **cost)


async def ask(run: Running, name: str) -> None:
    """The client reads all, or leaves when it has read the first text."""
    model, content = MODELS.get(name, "m"), CONTENT.get(name, GUESSED)
    kind = name.split(maxsplit=1)[0].rstrip(",")
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}),
        "completion": ("/v1/completions", {"prompt": content}),
        "message": ("/v1/messages", {"max_tokens": 100, "messages": [{"role": "user", "content": content}]}),
        "response": ("/v1/responses", {"input": content}),
    }[kind]
    async with run.session.post(run.url + path, json={"model": model, **body, "stream": "stream" in name}) as answer:
        assert answer.status == 200, await answer.text()
        if "leaves" not in name:
            await answer.read()
            return
        while b"hello" not in await answer.content.readuntil(b"\n\n"):
            """The first text has not come."""


def ledger_of(folder: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{folder}/ledger.sqlite"}


def written(folder: Path, table: str = "warmroute_usage") -> list[dict[str, Any]]:
    """The rows of the ledger of a gateway that has ended."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"SELECT * FROM {table}")]


def charged(row: dict[str, Any]) -> tuple[int, ...]:
    """Of a row: tokens, then picodollars."""
    tokens = (row["prompt"] - row["cached"], row["cached"], row["written"], row["completion"])
    return (*tokens, *(row[kind] for kind in MONEY))


def owed(expected: Invoice) -> tuple[int, ...]:
    """The same of an invoice."""
    tokens = (expected.miss, expected.hit, expected.written, expected.generated)
    return (*tokens, *(round(getattr(expected, kind) * 10**6) for kind in MONEY))


@pytest.mark.parametrize("name", CASES)
async def test_an_invoice(tmp_path: Path, name: str) -> None:
    behaviour, expected = CASES[name]
    script = [UNKNOWN, behaviour] if "translated" in name else [behaviour]
    config: dict[str, Any] = {"prices": PRICES, "ledger": ledger_of(tmp_path)}
    async with FakeReplica(script, models(*PRICES)) as replica, running(replica, **config) as run:
        await ask(run, name)
        assert tuple(await invoice(run)) == pytest.approx(tuple(expected))
    (row,) = written(tmp_path)
    assert charged(row) == owed(expected)
    assert bool(row["estimated"]) is (name in ESTIMATED)
    assert row["model"] == MODELS.get(name, "m")


async def test_all_of_them_together(tmp_path: Path) -> None:
    """One gateway; the translated one comes last, for from then on the replica is known to speak chat alone."""
    script = [behaviour for behaviour, _ in EXACT.values()]
    assert len(CASES) == 37
    async with (
        FakeReplica([*script[:-1], UNKNOWN, script[-1]], models(*PRICES)) as replica,
        running(replica, prices=PRICES, ledger=ledger_of(tmp_path)) as run,
    ):
        for name in EXACT:
            await ask(run, name)
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert tuple(await invoice(run)) == pytest.approx(tuple(ALL))
        page = await run.metrics()
        assert not [key for key, value in page.items() if key.startswith("warmroute_unmetered") and value]
    rows, days = written(tmp_path), written(tmp_path, "warmroute_usage_daily")
    assert tuple(map(sum, zip(*map(charged, rows), strict=True))) == owed(ALL)
    kinds = {kind: sum(day[f"{kind}_mills"] * MILL + day[f"{kind}_pico"] for day in days) for kind in MONEY}
    assert tuple(kinds.values()) == owed(ALL)[4:]
