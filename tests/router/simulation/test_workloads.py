"""Recorded traces become prompts and arrivals; a garbled row is an error."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from router import Prompt
from router.simulation.workloads import START_S, ClosedLoop, OpenLoop, SimulatedRequest, TraceError, Turn, agents, mooncake
from router.types import KEY_BYTES
from tests.support.paths import TRACES


class Still:
    """Chance that always returns the same value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def row(**other: Any) -> dict[str, Any]:
    """A request in Mooncake's format: two full blocks and a part of a third."""
    return {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 1 << 40], **other}


def request(tokens: int, keep: int, *new: list[int], think: float = 0.0, **other: Any) -> dict[str, Any]:
    return {"in": tokens, "out": 9, "keep": keep, "new": list(new), "think_time": think, **other}


def session(*requests: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Blocks of 10 tokens, a head of 2 blocks."""
    return {"id": "s", "block_size": 10, "tool_tokens": 15, "system_tokens": 9, "requests": list(requests), **other}


def only(*rows: dict[str, Any], max_input: int = 1000) -> list[list[Turn]]:
    return list(agents(rows, max_input))


def blocks(request: SimulatedRequest) -> list[bytes]:
    keys = request.prompt.keys
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


# -- Mooncake


def test_a_mooncake_row_becomes_a_prompt_of_its_full_blocks() -> None:
    [(at, request)] = mooncake([row()], Still(0.0))
    keys = (5).to_bytes(KEY_BYTES, "little") + (6).to_bytes(KEY_BYTES, "little")
    assert at == 3.0
    assert request == SimulatedRequest(Prompt(keys, 1100, 512, "", session=""), 7, "1"), "the trace names no sessions"


def test_a_batch_is_spread_within_its_seconds() -> None:
    arrivals = [at for at, _ in mooncake([row()] * 500, random.Random(1))]
    assert 3 <= min(arrivals) < 3.1
    assert 5.9 < max(arrivals) < 6
    assert 4.3 < sum(arrivals) / 500 < 4.7


def test_speed_shortens_the_times_and_the_batches() -> None:
    slow = [at for at, _ in mooncake([row(), row(timestamp=6000)], random.Random(1))]
    fast = [at for at, _ in mooncake([row(), row(timestamp=6000)], random.Random(1), speed=4.0)]
    assert fast == [at / 4 for at in slow]


def test_an_open_loop_waits_for_no_answer() -> None:
    arrivals = list(mooncake([row(), row()], Still(0.5)))
    source = OpenLoop(arrivals)
    assert list(source.begin()) == arrivals == list(source.begin())
    assert len(source) == 2
    assert source.after(arrivals[0][1], 9.0) is None


# -- coding agents


def test_keep_and_new_make_prompts_that_extend_each_other() -> None:
    [turns] = only(session(request(45, 0, [1, 4]), request(61, 4, [9, 1], [20, 1]), request(60, 3, [30, 3])))
    first, second, third = (request for _, request in turns)
    assert [request.prompt.blocks for request in (first, second, third)] == [4, 6, 6]
    assert (first.prompt.units, first.prompt.block_units, first.output_tokens) == (45, 10, 9)
    assert blocks(second)[:4] == blocks(first)
    assert blocks(third)[:3] == blocks(first)[:3]
    assert not set(blocks(third)[3:]) & set(blocks(second))


def test_the_head_is_shared_between_sessions_of_the_same_sizes_and_only_there() -> None:
    same = [request(50, 0, [1, 5])]
    [[(_, one)], [(_, other)], [(_, stranger)]] = only(session(*same), session(*same), session(*same, tool_tokens=16))
    assert blocks(one)[:2] == blocks(other)[:2], "2 blocks of tools and system prompt"
    assert not set(blocks(one)[2:]) & set(blocks(other)), "ids are local to a session, even to one of the same name"
    assert not set(blocks(one)) & set(blocks(stranger))


def test_a_subagent_stands_in_its_place_with_prompts_of_its_own() -> None:
    inner = {"requests": [request(30, 0, [1, 3]), request(40, 3, [4, 1])], "tool_tokens": 3, "system_tokens": 0}
    [turns] = only(session(request(20, 0, [1, 2]), inner, request(50, 2, [3, 3])))
    asks = [request for _, request in turns]
    assert [request.prompt.units for request in asks] == [20, 30, 40, 50]
    assert blocks(asks[2])[:3] == blocks(asks[1])
    assert not set(blocks(asks[1])) & set(blocks(asks[3]))
    assert blocks(asks[3])[:2] == blocks(asks[0]), "the session goes on where it was"
    assert len({request.session for request in asks}) == 1, "one user waits for all of them"
    assert {request.prompt.session for request in asks} == {asks[0].session}, "which the client names"


def test_think_times_are_capped() -> None:
    [turns] = only(
        session(request(10, 0, [1, 1], think=4.0), request(20, 1, [2, 1], think=9000.0), request(20, 2, think_time=None))
    )
    assert [think for think, _ in turns] == [4.0, 300.0, 0.0]


def test_sessions_with_a_long_prompt_are_left_out() -> None:
    small, large = session(request(40, 0, [1, 4])), session(request(10, 0, [1, 1]), request(41, 1, [2, 3]))
    assert len(only(small, large, session(), max_input=41)) == 2
    assert [turns[0][1].prompt.units for turns in only(small, large, session(), max_input=40)] == [40]


# -- closed loop


def turns_of(name: str, *thinks: float) -> list[Turn]:
    return [(think, SimulatedRequest(Prompt(b"", 10, 10, ""), 1, name)) for think in thinks]


def test_the_next_request_comes_a_think_time_after_the_answer() -> None:
    a, b = turns_of("a", 99.0, 5.0, 7.0), turns_of("b", 99.0, 1.0)
    source = ClosedLoop([a, b], users=1, horizon_s=1e9, chance=Still(0.5))
    assert list(source.begin()) == [(START_S / 2, a[0][1])], "nobody thinks before the first"
    assert source.after(a[0][1], 40.0) == (45.0, a[1][1])
    assert source.after(a[1][1], 50.0) == (57.0, a[2][1])
    assert source.after(a[2][1], 60.0) == (60.0, b[0][1]), "the next user takes the seat"
    assert source.after(b[0][1], 61.0) == (62.0, b[1][1])
    assert source.after(b[1][1], 70.0) is None


def test_users_begin_within_the_first_minute_and_each_with_a_session() -> None:
    sessions = [turns_of(str(number), 0.0) for number in range(50)]
    begun = list(ClosedLoop(sessions, 30, 1e9, random.Random(1)).begin())
    assert {request.session for _, request in begun} == {str(number) for number in range(30)}
    assert begun == sorted(begun, key=lambda arrival: arrival[0])
    assert all(0 <= at < START_S for at, _ in begun)
    assert len({at for at, _ in begun}) == 30
    assert len(list(ClosedLoop(sessions, 90, 1e9, random.Random(1)).begin())) == 50


def test_nothing_comes_after_the_horizon() -> None:
    a, b = turns_of("a", 0.0, 50.0), turns_of("b", 0.0)
    source = ClosedLoop([a, [], b], users=1, horizon_s=100.0, chance=Still(0.0))
    [(_, first)] = source.begin()
    assert source.after(first, 50.0) is None
    assert source.after(a[1][1], 99.0) == (99.0, b[0][1])
    assert source.after(b[0][1], 200.0) is None
    assert list(ClosedLoop([a], 1, 30.0, Still(0.5)).begin()) == []


# -- what a file can hold


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": None},
        {"timestamp": -1},
        {"timestamp": float("nan")},
        {"input_length": 0},
        {"input_length": -600},
        {"input_length": 600.5},
        {"output_length": -1},
        {"output_length": "9"},
        {"hash_ids": None},
        {"hash_ids": [1, -2]},
        {"hash_ids": [1, 1 << 64]},
        {"hash_ids": ["a", "b"]},
    ],
)
def test_a_wrong_mooncake_row_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="row 2 is not as its format says"):
        list(mooncake([row(), row(**change)], Still(0.0)))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(TraceError, match=r"row 1 .*output_length"):
        list(mooncake([{"timestamp": 0, "input_length": 5, "hash_ids": []}], Still(0.0)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: session(request(10, 1, [1, 1])),  # keeps what was not there
        lambda: session(request(10, -1, [1, 1])),
        lambda: session(request(50, 0, [1, 4])),  # a block is missing
        lambda: session(request(50, 0, [1, 1 << 50])),  # must not be built
        lambda: session(request(10, 0, [1])),
        lambda: session(request(10, 0, [1, 1], think=-1.0)),
        lambda: session(request(10, 0, [1, 1], think=float("nan"))),
        lambda: session(request(0, 0)),
        lambda: session(request(10, 0, [1, 1], out=-1)),
        lambda: session({"in": 10}),
        lambda: session(block_size=0),
        lambda: session(block_size=64),  # not that of the row before
        lambda: session(requests=7),
        lambda: session(requests=[7]),
        lambda: {"id": "s", "block_size": 10},
    ],
)
def test_a_wrong_session_is_named(wrong: Callable[[], dict[str, Any]]) -> None:
    with pytest.raises(TraceError, match="row 2 is not as its format says"):
        only(session(request(10, 0, [1, 1])), wrong())


@pytest.mark.skipif(not TRACES.exists(), reason="no recorded traces beside the repository")
def test_real_sessions_repeat_most_of_their_prompts() -> None:
    with gzip.open(TRACES / "claude_code_agentic.jsonl.gz") as lines:
        rows = [json.loads(next(lines)) for _ in range(10)]
    total = repeated = 0
    seen = set[bytes]()
    for turns in agents(rows, 1 << 30):
        for _, request in turns:
            total += request.prompt.blocks
            repeated += sum(block in seen for block in blocks(request))
            seen.update(blocks(request))
    assert repeated / total > 0.9
