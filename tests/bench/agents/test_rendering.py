"""The stand-ins' prompts: one conversation has one, by whatever API it comes."""

from __future__ import annotations

import random

import pytest

from bench.agents import rendering
from bench.agents.answers import Call
from bench.agents.dialogues import Assistant, Dialogue, Shape, head
from bench.agents.kinds import KINDS, Kind
from bench.agents.rendering import BILLING, BadRequest, Conversation, Turn

SHAPE = Shape(tools=2000, system=500, turn=200)
READERS = {
    "/v1/chat/completions": rendering.chat,
    "/v1/messages": rendering.messages,
    "/v1/responses": rendering.responses,
}
BY_NAME = {kind.name: kind for kind in KINDS}


def grown(turns: int) -> Dialogue:
    """A conversation before the answer of this turn; every other answer has a call."""
    dialogue = Dialogue(0, SHAPE, seed=1)
    dialogue.ask()
    for number in range(1, turns):
        call = Call(f"call_{number}", "Bash", '{"command":"ls"}') if number % 2 else None
        dialogue.answered(Assistant(f"answer {number}", call), f"resp_{number}")
        dialogue.ask()
    return dialogue


def read(kind: Kind, dialogue: Dialogue, chance: int = 0, *, verbatim: bool = False) -> Conversation:
    body, _ = kind.write(dialogue, head(SHAPE, 1), 8, random.Random(chance))
    return READERS[kind.path](body, verbatim=verbatim)


@pytest.mark.parametrize("name", ["messages", "messages-claude-code", "responses", "responses-list"])
def test_a_conversation_has_the_prompt_that_it_has_as_chat(name: str) -> None:
    for turns in range(1, 5):
        chat = read(BY_NAME["chat"], grown(turns))
        assert read(BY_NAME[name], grown(turns)).prompt() == chat.prompt()
        assert [turn.role for turn in chat.turns[:2]] == ["system", "user"]
        assert sum(len(turn.calls) for turn in chat.turns) == turns // 2
        assert sum(turn.role == "tool" for turn in chat.turns) == turns // 2


def test_new_items_go_on_from_the_turns_that_were_kept() -> None:
    chat = read(BY_NAME["chat"], grown(4))
    body, _ = BY_NAME["responses-previous"].write(grown(4), head(SHAPE, 1), 8, random.Random(0))
    assert body["previous_response_id"] == "resp_3"
    assert len(body["input"]) == 2, "a result and a reminder"
    before = read(BY_NAME["chat"], grown(3)).turns[1:]
    answered = (*before, Turn("assistant", "answer 3", (("Bash", '{"command": "ls"}'),)))
    assert rendering.responses(body, before=answered).prompt() == chat.prompt()


def test_a_turn_s_prompt_begins_with_the_one_before_and_its_answer() -> None:
    before = read(BY_NAME["chat"], grown(2))
    answer = Turn("assistant", "answer 2")
    assert read(BY_NAME["chat"], grown(3)).prompt().startswith(before.answered(answer))
    assert before.answered(answer).startswith(before.prompt())


def test_the_billing_header_changes_with_each_request_and_only_a_verbatim_prompt_has_it() -> None:
    kind = BY_NAME["messages-claude-code"]
    texts = {read(kind, grown(3), chance).prompt() for chance in range(3)}
    assert len(texts) == 1
    assert BILLING.encode() not in texts.pop()
    verbatim = {read(kind, grown(3), chance, verbatim=True).prompt() for chance in range(3)}
    assert len(verbatim) == 3
    for text in verbatim:
        assert text.index(BILLING.encode()) < text.index(b"You are an agent")


@pytest.mark.parametrize(
    "body",
    [
        {"system": f"{BILLING} cch=1;\nBe brief.", "messages": [{"role": "user", "content": "hi"}]},
        {
            "system": [{"type": "text", "text": f"{BILLING} cch=2;"}, {"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "hi"}],
        },
        {
            "messages": [
                {"role": "system", "content": f"{BILLING} cch=3;\nBe brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            ]
        },
    ],
)
def test_the_header_is_found_wherever_a_client_puts_it(body: dict[str, object]) -> None:
    plain = rendering.chat({"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]})
    assert rendering.messages(body).prompt() == plain.prompt()
    assert rendering.messages(body, verbatim=True).prompt() != plain.prompt()


def test_what_templates_do_not_print_is_in_no_prompt() -> None:
    """Ids of calls, earlier thinking, reasoning items; a result's list of texts is its lines; an image stands for itself."""
    said = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "before"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}, {"type": "image"}]},
            ],
        },
    ]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "other", "name": "f", "arguments": '{"a":1}'},
        {"role": "user", "content": "before"},
        {"type": "function_call_output", "call_id": "other", "output": "x\n<image>"},
    ]
    messages = rendering.messages({"messages": said})
    assert messages == rendering.responses({"input": items})
    assert b"t1" not in messages.prompt()
    assert rendering.responses({"input": "hi"}).prompt() == b"<|user|>\nhi<|end|>\n<|assistant|>\n"


def test_what_is_no_prompt_is_refused() -> None:
    for read_body, body in [
        (rendering.chat, {"messages": []}),
        (rendering.messages, {"system": "s"}),
        (rendering.responses, {"input": []}),
        (rendering.responses, {"input": [{"type": "item_reference", "id": "x"}]}),
        (rendering.responses, {"input": ["x"]}),
    ]:
        with pytest.raises(BadRequest):
            read_body(body)
