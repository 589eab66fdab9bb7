"""Token ids of prompts: the kept ones, and questions to engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.features.kv_events.tokenizing import ENTRY_BYTES, KEPT_BYTES, RUNNING, UNABLE_S, EngineTokenizer, KeptTokens
from tests.gateway.conftest import eventually, running
from tests.support.fakes import Behaviour, FakeReplica, dies, http, status, writes
from tests.support.strategies import keys_of


def test_ids_are_found_by_the_body_and_by_the_beginning_of_a_prompt_within_their_memory() -> None:
    kept = KeptTokens()
    kept.put(1, b"first", keys_of(b"ab"))
    kept.put(2, b"second", keys_of(b"abc"))
    assert (kept.get(1), kept.get(2), kept.get(3)) == (b"first", b"second", None)
    assert [kept.prefix(keys_of(text)) for text in (b"abcd", b"abx", b"x")] == [b"second", b"first", None]
    quarter = bytes(KEPT_BYTES // 4 - ENTRY_BYTES)
    for number in range(3, 7):
        kept.put(number, quarter, keys_of(bytes([number])))
    kept.put(7, bytes(KEPT_BYTES // 4 + 1), b"")
    assert [kept.get(number) is not None for number in range(1, 8)] == [False] * 2 + [True] * 4 + [False]
    assert kept.prefix(keys_of(b"abcd")) is None


async def test_an_engine_is_asked_once_for_equal_bodies_and_for_few_at_a_time() -> None:
    go = asyncio.Event()

    async def tokenizes(_request: Any, writer: Any) -> None:
        await go.wait()
        writer.write(http(200, b'{"tokens":[1,258]}'))

    async with FakeReplica([tokenizes]) as replica, running(replica) as run:
        tokenizer = EngineTokenizer(run.gateway.upstream)
        asked = [tokenizer.ask(number // 2, replica.url, b"{}", 0.0, listed=True) for number in range(2 * RUNNING)]
        await eventually(lambda: len(replica.requests) == RUNNING)
        assert not tokenizer.able(replica.url, 0.0)
        go.set()
        assert set(await asyncio.gather(*asked)) == {b"\1\0\0\0\2\1\0\0"}
        assert tokenizer.able(replica.url, 0.0)
        assert len(replica.requests) == RUNNING


@pytest.mark.parametrize(
    ("answer", "able"),
    [
        (status(404), False),
        (status(503), True),
        (dies, True),
        *((writes(http(200, b'{"tokens":[%b]}' % odd)), True) for odd in (b"-1", b'"x"', b"4294967296")),
    ],
)
async def test_an_engine_without_a_tokenizer_is_asked_again_after_a_while(answer: Behaviour, able: bool) -> None:
    async with FakeReplica([answer]) as replica, running(replica) as run:
        tokenizer = EngineTokenizer(run.gateway.upstream)
        assert await tokenizer.ask(1, replica.url, b"{}", 100.0, listed=True) is None
        assert tokenizer.able(replica.url, 100.0 + UNABLE_S / 2) is able
        assert tokenizer.able(replica.url, 101.0 + UNABLE_S)


def test_kept_prompts_are_bounded_also_if_they_have_few_tokens() -> None:
    kept, most = KeptTokens(), KEPT_BYTES // ENTRY_BYTES
    for number in range(2 * most):
        kept.put(-number, b"", number.to_bytes(8, "little"))
        kept.put(number, b"1234", number.to_bytes(8, "big"))
    assert len(kept) <= most
    assert kept.get(2 * most - 1) == b"1234"
