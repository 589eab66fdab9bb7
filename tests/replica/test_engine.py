"""A sequence ends exactly once, and loses no token on the way."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from replica.cache.prefix import Prefix, Scope
from replica.engine import EngineError, EngineRequest, NewTokens, Sequence

REQUEST = EngineRequest(prompt=[1, 2, 3], max_tokens=5)


def sequence_and_closed() -> tuple[Sequence, list[Sequence]]:
    closed: list[Sequence] = []
    return Sequence(REQUEST, closed.append), closed


async def test_tokens_that_nobody_took_are_merged() -> None:
    sequence, _ = sequence_and_closed()
    sequence.push([1])
    sequence.push([2, 3])
    assert repr(sequence) == "<Sequence open, 3 prompt tokens, 3 not taken>"
    assert await sequence.next() == NewTokens([1, 2, 3], None)
    sequence.push([4], "stop")
    assert await sequence.next() == NewTokens([4], "stop")


async def test_a_waiting_reader_wakes() -> None:
    sequence, _ = sequence_and_closed()
    reading = asyncio.create_task(sequence.next())
    asyncio.get_running_loop().call_soon(sequence.push, [1], "length")  # runs after the reader has begun to wait
    assert await reading == NewTokens([1], "length")


async def test_a_failure_reaches_the_reader() -> None:
    sequence, closed = sequence_and_closed()
    reading = asyncio.create_task(sequence.next())
    asyncio.get_running_loop().call_soon(sequence.fail, "gone")
    with pytest.raises(EngineError, match="gone"):
        await reading
    sequence.close()
    assert closed == []


async def test_what_came_before_a_failure_is_not_lost() -> None:
    sequence, _ = sequence_and_closed()
    sequence.push([1, 2])
    sequence.fail("gone")
    assert await sequence.next() == NewTokens([1, 2], None)
    with pytest.raises(EngineError, match="gone"):
        await sequence.next()


def test_the_engine_is_called_for_a_close_once_and_only_before_the_end() -> None:
    sequence, closed = sequence_and_closed()
    sequence.close()
    sequence.close()
    assert closed == [sequence]
    sequence.push([1])
    sequence.fail("late")
    assert repr(sequence) == "<Sequence closed, 3 prompt tokens, 0 not taken>"
    finished, closed = sequence_and_closed()
    finished.push([1], "stop")
    finished.close()
    assert closed == []


def test_what_was_hashed_before_is_used_only_for_the_same_blocks() -> None:
    tokens, scope = array("I", range(40)), Scope(salt="a")
    known = Prefix(tokens, 16, scope)
    known.keys[0] = b"known"
    request = EngineRequest(known.tokens, 5, scope=scope, hashed=known)
    assert request.prefix(16).keys == known.keys
    assert request.prefix(8).keys == Prefix(tokens, 8, scope).keys
    assert replace(request, scope=Scope()).prefix(16).keys == Prefix(tokens, 16).keys
    assert replace(request, prompt=tokens[:20]).prefix(16).keys == Prefix(tokens[:20], 16, scope).keys
    one, other = request.prefix(16), request.prefix(16)
    one.extend(range(100))
    assert (len(known.keys), len(known.tokens), other.tokens) == (2, 40, tokens)
    assert one.keys[2:] == Prefix([*tokens, *range(100)], 16, scope).keys[2:]
