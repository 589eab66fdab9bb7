"""What a trace's line says of a row: numbers only, of whole conversations, from bounded memory."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.recording.command.anonymous import (
    KNOWN_NAMES,
    Anonymizer,
    NumberedConversations,
    NumberedNames,
    RecentNumbers,
)
from gateway.features.recording.command.rows import TraceRow
from router.simulation.recorded import FORMAT, read
from tests.support.strategies import keys_of, letters

HEADER = {"format": FORMAT, "version": 1}


def row_of(prompt: bytes = b"abc", session: int = 0, **more: Any) -> TraceRow:
    """A block for each letter."""
    row = TraceRow(
        begun=1.0,
        ttft=0.5,
        seconds=2.0,
        prompt_tokens=64 * len(prompt) + 1,
        estimated_tokens=60,
        completion_tokens=5,
        cached=0,
        predicted=0,
        units=256 * len(prompt) + 3,
        block=256,
        ids=False,
        keys=keys_of(prompt),
        session_key=session,
        client=0xFEDC_BA98_7654_3210,
        status=200,
        model="secret-model",
        pool="secret-pool",
        replica="secret-replica:1",
        tenant="secret-tenant",
    )
    return msgspec.structs.replace(row, **more)


def test_a_line_has_no_name_and_no_key() -> None:
    lines = Anonymizer(1.0, random.Random(1))
    row = row_of(session=0x1234_5678_9ABC_DEF0)
    line = lines.line(row, 3.25)
    text = json.dumps(line)
    assert "secret" not in text
    assert str(row.session_key) not in text
    assert str(row.client) not in text
    assert all(type(value) in (int, float, type(None)) for value in (line or {}).values())
    keys = [row.keys[at : at + 8] for at in range(0, len(row.keys), 8)]
    for key in (*keys, row.session_key.to_bytes(8, "little")):
        numbers = {int.from_bytes(key, order) for order in ("little", "big")}
        assert not numbers & set((line or {}).values())
    assert line == {
        "t": 3.25,
        "seconds": 2.0,
        "ttft": 0.5,
        "in": 193,
        "out": 5,
        "cached": 0,
        "predicted": 0,
        "units": 771,
        "block": 256,
        "parent": 0,
        "new": 3,
        "session": 1,
        "pool": 1,
        "replica": 1,
        "model": 1,
        "client": 1,
        "tenant": 1,
        "status": 200,
    }


def test_names_are_for_those_who_ask() -> None:
    lines = Anonymizer(1.0, random.Random(1))
    lines.line(row_of(), 0.0)
    lines.line(row_of(model="other"), 0.0)
    assert lines.names()["model"] == {"1": "secret-model", "2": "other"}


def test_without_the_engines_counts_they_are_estimates() -> None:
    line = Anonymizer(1.0, random.Random(1)).line(row_of(prompt_tokens=None, completion_tokens=None, cached=None), 0.0)
    assert line is not None
    assert (line["in"], line["out"], line["cached"], line["estimated"]) == (60, None, None, True)


def test_absurd_counts_of_an_engine_are_cut() -> None:
    lines = Anonymizer(1.0, random.Random(1))
    line = lines.line(row_of(cached=10**9, ttft=-1.0, seconds=-5.0), 0.0)
    assert line is not None
    assert (line["cached"], line["ttft"], line["seconds"]) == (193, 0.0, 0.0)
    assert read([HEADER, line])


PROMPTS = st.lists(st.tuples(letters, st.integers(0, 3), st.sampled_from([0, 0, 1, 1 << 63])), max_size=30)


@given(PROMPTS)
def test_what_is_written_is_read_with_the_same_prefixes(prompts: list[tuple[bytes, int, int]]) -> None:
    lines, rows = Anonymizer(1.0, random.Random(1)), [row_of(text, session) for text, _, session in prompts]
    made = [lines.line(row, float(at)) for at, row in enumerate(rows)]
    recording = read([HEADER, *(line for line in json.loads(json.dumps(made)))])
    keys = [recording.tree.keys(one.last) for one in recording.requests]
    for one, its in zip(rows, keys, strict=True):
        for other, others in zip(rows, keys, strict=True):
            assert others.startswith(its) == other.keys.startswith(one.keys)


def test_prompts_that_go_on_are_a_conversation_without_a_session() -> None:
    conversations = NumberedConversations(1.0, random.Random(1))

    def of(prompt: bytes) -> int:
        return conversations.of(row_of(prompt))[1]

    assert [of(b"sab"), of(b"sxy"), of(b"sabcd"), of(b"sxyz"), of(b"sabcde"), of(b"sab"), of(b"s")] == [1, 2, 1, 2, 1, 3, 4]
    assert conversations.of(row_of(b"sab", session=5)) == ("session", 5)
    assert [of(b""), of(b"")] == [6, 7], "prompts without a block have nothing in common"


def test_a_sample_is_of_whole_conversations() -> None:
    lines = Anonymizer(0.3, random.Random(1))
    kept = {0: 0, 1: 0}
    for number in range(1000):
        for named in (0, 1):
            session = number * (1 << 64) // 1000 + 1 if named else 0
            turns = [b"%b%d" % (b"ab"[named : named + 1], number), b"%b%d and so on" % (b"ab"[named : named + 1], number)]
            found = [lines.line(row_of(turn, session), 0.0) is not None for turn in turns]
            assert found[0] == found[1]
            kept[named] += found[0]
    assert kept[1] == 300
    assert 240 < kept[0] < 360


def test_a_flood_of_clients_choices_takes_bounded_memory() -> None:
    names, recent = NumberedNames(), RecentNumbers[int](100)
    for number in range(3 * KNOWN_NAMES):
        names.number(f"tenant {number}")
        recent.put(number, number)
        assert len(recent) <= 100
    assert len(names.known) == KNOWN_NAMES
    assert names.number("one more") == 0
    assert names.number("tenant 7") == 8
    assert recent.get(3 * KNOWN_NAMES - 1) is not None
    assert recent.get(3 * KNOWN_NAMES - 101) is None
    conversations = NumberedConversations(1.0, random.Random(1), max_keys=10)
    for number in range(1, 1000):
        conversations.of(row_of(b"%d" % number, session=number))
        conversations.of(row_of(b"%d" % number))
    assert conversations.of(row_of(session=1))[1] == conversations.seen, "it is forgotten, and new"
    lines = Anonymizer(1.0, random.Random(1), known_blocks=20)
    for number in range(200):
        lines.line(row_of(b"%d" % (number * 7919)), 0.0)
    assert len(lines.blocks) <= 20
    assert lines.blocks.forgotten > 500


def test_what_is_used_again_is_remembered() -> None:
    recent = RecentNumbers[str](10)
    recent.put("kept", 1)
    for number in range(1000):
        recent.put(str(number), number)
        assert recent.get("kept") == 1
    assert recent.pop("kept") == 1
    assert recent.get("kept") is None
