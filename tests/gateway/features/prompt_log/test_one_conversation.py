"""One conversation in the words of three dialects has one name, and any change that a model sees has another."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.features.prompt_log.naming.canonical import canonical
from gateway.features.prompt_log.naming.chain import extended, head_name
from gateway.features.prompt_log.naming.forms import names_in
from tests.gateway.features.prompt_log.conversations import (
    CONVERSATIONS,
    VALUES,
    Conversation,
    Writer,
    changed,
    is_distinct,
    seen,
)


def names_of(whole: Conversation, form: str, chance: random.Random) -> tuple[str, str]:
    body = getattr(Writer(chance), form)(whole)
    names = names_in(json.dumps(body).encode(), form)
    return names.frame, head_name(names.chain)


@given(CONVERSATIONS, st.randoms(use_true_random=False))
def test_one_conversation_has_one_name_in_all_dialects(whole: Conversation, chance: random.Random) -> None:
    found = {names_of(whole, form, chance) for form in ("chat", "messages", "responses") for _ in range(2)}
    assert len(found) == 1


@given(st.data(), CONVERSATIONS, st.randoms(use_true_random=False))
def test_a_change_that_a_model_sees_has_another_name(data: st.DataObject, whole: Conversation, chance: random.Random) -> None:
    other = data.draw(changed(whole))
    assume(is_distinct(other))
    one, two = seen(whole), seen(other)
    frame, head = names_of(whole, "chat", chance)
    other_frame, other_head = names_of(other, chance.choice(["chat", "messages", "responses"]), chance)
    assert (frame == other_frame, head == other_head) == (one[0] == two[0], one[1] == two[1])


@given(CONVERSATIONS, st.integers(0, 6))
def test_a_log_that_goes_on_extends_its_head(whole: Conversation, cut: int) -> None:
    body = Writer(random.Random(1)).chat(whole)["messages"][len(whole.system) :]
    first, rest = [{"messages": part} for part in (body[:cut], body[cut:])]
    entries = [{"role": message["role"], "content": [{"text": json.dumps(message)}]} for message in rest["messages"]]
    before = names_in(json.dumps(first).encode(), "chat")
    texts = [{"role": entry["role"], "content": entry["content"][0]["text"]} for entry in entries]
    both = names_in(json.dumps({"messages": [*first["messages"], *texts]}).encode(), "chat")
    assert extended(before.chain, entries) == both.chain


@given(VALUES)
def test_canonical_json_is_the_same_after_it_was_read(value: Any) -> None:
    written = canonical(value)
    assert canonical(json.loads(written)) == written
