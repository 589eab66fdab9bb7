"""Outlines add up to their prompts, are the same in all dialects, and show what is volatile."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agents.dialogues import Assistant, Dialogue, Shape, head, words
from bench.agents.kinds import KINDS
from gateway.dialects.prompt.outline import MAX_SEGMENTS, Outliner, pieces
from gateway.dialects.prompt.segments import TOOL, TURNS, packed, unpacked
from gateway.dialects.prompt.volatile import ID, MAX_LISTED, NONCE, PATH, TIME, masked
from gateway.dialects.table import DIALECTS

MARKS = st.sampled_from(
    [b"\x1c", b"\x1d", b"\x1e", b"\x1f", b"\x1a", b"tools", b"[{", b"user", b"\n", b"\n\n", b"7", b" a ", b"\xff"]
)


@given(st.lists(st.one_of(MARKS, st.binary(max_size=30)), max_size=40).map(b"".join))
def test_sizes_add_up_whatever_a_prompt_is(prompt: bytes) -> None:
    outline = Outliner().outline(prompt)
    assert sum(segment.size for segment in outline) == len(prompt)
    assert unpacked(packed(outline)) == outline


@pytest.mark.parametrize(
    "prompt", [b"\x1euser\x1fx" * 5000, b"line\n\n" * 5000, b"\x1ctools" + json.dumps([{}] * 5000).encode()]
)
def test_the_number_of_segments_is_bounded(prompt: bytes) -> None:
    found = pieces(prompt)
    assert len(found) <= MAX_SEGMENTS
    assert sum(size for *_, size in found) == len(prompt)


def test_one_conversation_has_one_outline_in_all_dialects() -> None:
    shape = Shape(3000, 2000, 1000)
    dialogue = Dialogue(1, shape, 1)
    dialogue.ask()
    dialogue.answered(Assistant("Yes.", None), "")
    dialogue.ask()
    outlines = set()
    for kind in KINDS[:5]:
        body, _ = kind.write(dialogue, head(shape, 1), 10, random.Random(1))
        prompt = DIALECTS[kind.path].parse(json.dumps(body).encode()).prompt
        assert isinstance(prompt, bytes)
        outlines.add(Outliner().outline(prompt))
    (outline,) = outlines
    assert [each.name for each in outline if each.kind == TURNS] == ["system", "user", "assistant", "user"]
    assert [each.name for each in outline if each.kind == TOOL][:2] == ["Bash", "Tool1"]


@pytest.mark.parametrize(
    ("text", "other", "kind"),
    [
        ("Today is 2026-11-27.", "Today is 2026-11-28.", TIME),
        ("Now: 2026-11-27T04:45:01Z", "Now: 2026-11-27T04:45:02Z", TIME),
        ("It is Friday, November 27, 2026, 04:45 PM", "It is Monday, November 30, 2026, 11:05 AM", TIME),
        ("Fri Nov 27 04:58:01 2026", "Sat Nov 28 14:00:00 2026", TIME),
        ("at 1732682700", "at 1732682701", TIME),
        ("Today is Friday", "Today is Monday", TIME),
        ("Request 3f2504e0-4f89-11d3-9a0c-0305e82c3301", "Request 3f2504e0-4f89-11d3-9a0c-0305e82c3302", ID),
        ("user id: ab12cd", "user id: ef34ab", ID),
        ("Customer 4711 asks", "Customer 4712 asks", ID),
        ("x 8f3ab2c1e9", "x 77ab21c0ff", NONCE),
        ("v=2.1; cch=36ee5;", "v=2.1; cch=9a0b1;", NONCE),
        ("in /home/dev1/project", "in /home/dev2/project", PATH),
        ("in /tmp/tmp8f3ab2/home/", "in /tmp/tmp77ab21/home/", PATH),
        (r"in C:\Users\dev-1", r"in C:\Users\dev-2", PATH),
        ("log /var/2026-11-27", "log /var/2026-11-28", TIME),
        ("nonce Zk-abC4_ddDdke92kq", "nonce 9k-abC4_xxDdke92kq-77", NONCE),
    ],
)
def test_volatile_texts_are_masked_and_have_a_kind(text: str, other: str, kind: str) -> None:
    one, two = masked(text.encode()), masked(other.encode())
    assert one[0] == two[0], "equal but for what is volatile"
    first = next(a for a, b in zip(one[1], two[1], strict=True) if a.digest != b.digest)
    assert first.kind == kind


@pytest.mark.parametrize(("text", "other"), [("one two", "one three"), ("You are kind.", "You are brief."), ("a", "")])
def test_words_are_never_masked(text: str, other: str) -> None:
    assert masked(text.encode())[0] != masked(other.encode())[0]
    assert masked(text.encode())[1] == ()


@pytest.mark.parametrize(
    "unit", [b"a", b"1", b"1:", b"a-", b"a+/", b"Mon ", b"Jan 1", b"0-", b"12345678-", b"=", b"1." * 9, b"Nov 27, "]
)
def test_hostile_texts_end_soon(unit: bytes) -> None:
    """No pattern looks back: else this would not end within the time that a test has."""
    text = unit * (200_000 // len(unit))
    digest, found = masked(text)
    assert digest == masked(text)[0]
    assert len(found) <= MAX_LISTED


def test_turns_that_come_again_are_remembered_within_bounds() -> None:
    outliner = Outliner(most=10, most_volatile=30)
    for number in range(100):
        outliner.outline(f"\x1euser\x1fnumber {number} of {number}\x1eassistant\x1f{words(random.Random(number), 50)}".encode())
        outliner.check()
    assert 0 < len(outliner) <= 10
    outliner.clear()
    outliner.check()
    assert len(outliner) == 0
