"""Outlines and plans against the names of whole bodies, for random conversations in three dialects."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_edits import apply, read_list, read_object
from gateway.features.prompt_log.delta.digests import DigestMemo, ElementDigests
from gateway.features.prompt_log.delta.job import outlined
from gateway.features.prompt_log.delta.outline import BodyOutline, ScannedBody, open_digest
from gateway.features.prompt_log.delta.planning import frame_key, log_key, plan_of
from gateway.features.prompt_log.delta.scanning import TooManyNewError
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import EMPTY
from gateway.features.prompt_log.naming.forms import FORMS, names_in
from gateway.features.prompt_log.turns.joining import frame_edits, joined
from gateway.features.prompt_log.turns.own_turn import LISTS, own_turn
from tests.gateway.features.prompt_log.conversations import CONVERSATIONS, Conversation, Writer

SEED = 5
MEMO = DigestMemo(256)  # of all examples: small, so that much is forgotten
BODIES = st.tuples(CONVERSATIONS, st.sampled_from(list(FORMS)), st.randoms(use_true_random=False))


def written(whole: Conversation, form: str, chance: random.Random) -> bytes:
    body = {"model": "m", **getattr(Writer(chance), form)(whole), "stream": True}
    members = list(body.items())
    chance.shuffle(members)
    return json.dumps(dict(members), indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5).encode()


def elements(body: bytes, form: str) -> list[Any]:
    found: list[Any] = unmarked(json.loads(body)[LISTS[form]])
    return found


def unmarked(value: Any) -> Any:
    """A value without cache markers, which are not kept."""
    if isinstance(value, dict):
        return {name: unmarked(each) for name, each in value.items() if name != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


@given(BODIES)
def test_an_outline_has_the_names_of_the_body(drawn: tuple[Conversation, str, random.Random]) -> None:
    whole, form, chance = drawn
    body = written(whole, form, chance)
    names = names_in(body, form)
    for memo in (MEMO, MEMO, DigestMemo()):
        outline = ScannedBody(body, form, memo, SEED).outline()
        assert (outline.frame, outline.chain, outline.length) == (names.frame, names.chain, names.length)
    named, fields, _ = outlined(body, form, 7)
    assert named
    assert fields == (*fields[:3], tuple(map(tuple, outline.places)), *fields[4:])
    assert (fields[0], fields[4]) == (names.frame, names.chain)


@given(BODIES, st.booleans())
def test_a_cut_body_is_joined_to_the_whole(drawn: tuple[Conversation, str, random.Random], knows_frame: bool) -> None:
    """At each place: the other gateway computes the same head, and its engine gets the same turns, with the same ids."""
    whole, form, chance = drawn
    body = written(whole, form, chance)
    outline = ScannedBody(body, form, MEMO, SEED).outline()
    for number, place in enumerate(outline.places):
        begin = read_object(body).spans[LISTS[form]][0]
        before = body[begin + 1 : place.at].rstrip(b", \n")
        spans = read_object(body).spans
        prefix = apply(body, [(*spans[LISTS[form]], b"[%b]" % before)])
        kept = own_turn(prefix, form, EMPTY, [], named=False)
        assert (kept.chain, open_digest(kept.open)) == (place.chain, place.open)
        known = {log_key(place.chain, place.open)} if number else set()
        plan = plan_of(outline, (known | ({frame_key(outline.frame)} if knows_frame else set())).__contains__)
        if plan.base is None and number:
            assert place.system, "what follows would be in the frame"
            assert not plan.named
            continue
        cut = apply(body, plan.edits)
        bases = [list(kept.open)] if plan.base is not None else []
        own = own_turn(cut, form, place.chain if plan.base is not None else EMPTY, bases, named=plan.named)
        assert own.chain == outline.chain
        assert len(body) - len(cut) == plan.saved
        edits, leading = frame_edits(read_object(cut), form, kept.framed) if plan.named and kept.framed else ([], b"")
        pieces = [piece for piece in (leading, kept.stored if plan.base is not None else b"") if piece]
        again = apply(cut, [*edits, *joined(own, pieces)])
        assert names_in(again, form) == names_in(body, form)
        assert elements(again, form) == elements(body, form)


@given(st.lists(BODIES, max_size=4))
def test_a_scan_finds_the_elements_whatever_it_remembers(drawn: list[tuple[Conversation, str, random.Random]]) -> None:
    memo = DigestMemo(64)
    for whole, form, chance in [*drawn, *drawn]:
        body = written(whole, form, chance)
        scanned = ScannedBody(body, form, memo, SEED)
        plain = read_object(body)
        assert scanned.members.spans == plain.spans
        assert [(start, end) for start, end, _ in scanned.elements] == read_list(body, plain.spans[LISTS[form]][0])[0]
        memo_free = ScannedBody(body, form, DigestMemo(), SEED).outline()
        assert scanned.outline() == memo_free


def agent(calls: int, size: int = 1000) -> bytes:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u" * size}]
    for number in range(calls):
        turns.append({"role": "assistant", "content": f"{number}" * size})
        turns.append({"role": "user", "content": f"{number + 1}" * size})
    return json.dumps({"model": "m", "messages": turns}).encode()


def test_a_conversation_that_goes_on_costs_its_new_turns() -> None:
    memo = DigestMemo()
    ScannedBody(agent(50), "chat", memo, SEED).outline()
    scanned = ScannedBody(agent(51), "chat", memo, SEED)
    assert len(agent(51)) > 100_000
    assert scanned.new < 4_500
    assert scanned.outline() == ScannedBody(agent(51), "chat", DigestMemo(), SEED).outline()


def test_a_body_with_many_new_bytes_or_elements_is_left_to_the_parser_process() -> None:
    with pytest.raises(TooManyNewError):
        ScannedBody(agent(50), "chat", DigestMemo(), SEED, most=10_000)
    many = json.dumps({"messages": [{"role": "user", "content": "x"}] * 1000}).encode()
    memo = DigestMemo()
    ScannedBody(many, "chat", memo, SEED)
    with pytest.raises(TooManyNewError):
        ScannedBody(many, "chat", memo, SEED, most=len(many))


def test_a_flood_of_elements_is_forgotten() -> None:
    memo = DigestMemo(100)
    for number in range(500):
        ScannedBody(json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode(), "chat", memo, SEED).outline()
        assert len(memo) <= 100


def test_a_flood_of_calls_without_ids_is_forgotten() -> None:
    """A record of an element holds a value for each call and result, and digests of the results."""
    memo, most = DigestMemo(1000), 0
    for number in range(50):
        blocks = [*[{"type": "tool_result"}] * 100, {"type": "text", "text": str(number)}]
        body = json.dumps({"messages": [{"role": "user", "content": blocks}]}).encode()
        ScannedBody(body, "messages", memo, SEED).outline()
        calls = [len(value.calls) for _, value in memo if isinstance(value, ElementDigests)]
        most = max(most, sum(calls))
    assert 100 <= most <= 1000
    blocks = [{"type": "tool_result"}] * 2000
    ScannedBody(json.dumps({"messages": [{"role": "user", "content": blocks}]}).encode(), "messages", memo, SEED).outline()
    assert max(len(value.calls) for _, value in memo if isinstance(value, ElementDigests)) == 100


def test_long_ids_are_not_remembered() -> None:
    """A record of an element holds ids, which clients choose."""
    call = {"id": "x" * 100_000, "type": "function", "function": {"name": "read", "arguments": "{}"}}
    body = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "u"}]}).encode()
    memo = DigestMemo()
    assert ScannedBody(body, "chat", memo, SEED).outline() == ScannedBody(body, "chat", memo, SEED).outline()
    assert all("x" * 1000 not in repr(value) for _, value in memo)


def test_there_is_no_place_with_many_open_calls() -> None:
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "read", "arguments": "{}"}} for at in range(65)]
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "v"}]
    outline = ScannedBody(json.dumps({"messages": turns}).encode(), "chat", DigestMemo(), SEED).outline()
    assert len(outline.places) == 2
    assert outline.chain == names_in(json.dumps({"messages": turns}).encode(), "chat").chain


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("responses", {"input": [], "previous_response_id": "r"}),
        ("responses", {"input": [], "background": True}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("chat", {"messages": ["text"]}),
        ("chat", {"messages": [{"role": "user", "content": 1}]}),
        ("messages", {"system": [{"type": "image"}], "messages": []}),
    ],
)
def test_a_body_without_a_name_has_no_outline(form: str, body: dict[str, Any]) -> None:
    with pytest.raises(NoNameError):
        ScannedBody(json.dumps(body).encode(), form, DigestMemo(), SEED).outline()


@pytest.mark.parametrize("text", ["", "Hello", "\u00e9\n"])
def test_a_text_stands_for_a_list_of_items(text: str) -> None:
    body = json.dumps({"input": text, "instructions": "Be brief."}).encode()
    outline, names = ScannedBody(body, "responses", DigestMemo(), SEED).outline(), names_in(body, "responses")
    assert (outline.frame, outline.chain, outline.length) == (names.frame, names.chain, names.length)
    assert not outline.places


def test_hostile_bodies_have_no_outline() -> None:
    for body in (b"", b"[]", b"{", b'{"messages": [}', b'{"messages": [1 2]}', b"\xff"):
        with pytest.raises(NoNameError):
            ScannedBody(body, "chat", DigestMemo(), SEED).outline()


def test_a_frame_without_a_part_that_is_known_goes_whole() -> None:
    body = agent(2)
    outline: BodyOutline = ScannedBody(body, "chat", DigestMemo(), SEED).outline()
    plan = plan_of(outline, lambda _key: False)
    assert (plan.cuts, plan.saved, apply(body, plan.edits)) == (False, 0, body)
    assert plan.header.startswith(b"Prompt-Log: keep, unbound, expect=")
