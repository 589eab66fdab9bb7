"""One client's bodies do not fill the event loop."""

from __future__ import annotations

import json

from gateway.dialects.openai.generations import ChatBody
from gateway.parser.parsing import SMALL_BYTES, Parsing
from gateway.parser.process import ParserProcess
from gateway.parser.shares import BURST_S, COUNTED_S, MAX_CLIENTS, SHARE, LoopShares


def test_a_client_has_a_share_after_a_burst() -> None:
    shares = LoopShares()
    shares.spent("a", BURST_S, 0.0)
    assert not shares.is_used_up("a", 0.0)
    shares.spent("a", BURST_S, 0.0)
    assert shares.is_used_up("a", 0.0)
    assert not shares.is_used_up("b", 0.0)
    assert shares.is_used_up("a", BURST_S / SHARE - 0.1)
    assert not shares.is_used_up("a", BURST_S / SHARE + 0.1)
    shares.spent("a", BURST_S / 2, 100.0)
    assert not shares.is_used_up("a", 100.0), "what was long ago is forgotten"


def test_short_work_and_many_clients_take_no_memory() -> None:
    shares = LoopShares()
    for number in range(3 * MAX_CLIENTS):
        shares.spent(f"short {number}", COUNTED_S / 2, 0.0)
    assert not shares._debts
    for number in range(3 * MAX_CLIENTS):
        shares.spent(f"long {number}", 10.0, 0.0)
    assert len(shares._debts) == MAX_CLIENTS
    shares.spent("later", 10.0, 1000.0)
    assert list(shares._debts) == ["later"]


async def test_bodies_of_a_client_beyond_its_share_are_parsed_elsewhere() -> None:
    parsing, chat = Parsing(ParserProcess(), 256, 16), ChatBody()

    def body(size: int) -> bytes:
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}]}).encode()

    assert parsing.at_once(chat, body(SMALL_BYTES), client="a")
    parsing.shares.spent("a", 1e9, 0.0)
    assert parsing.at_once(chat, body(SMALL_BYTES), client="a") is None
    assert parsing.at_once(chat, body(SMALL_BYTES), client="b")
    assert parsing.at_once(chat, body(10), client="a")
