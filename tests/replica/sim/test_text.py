"""The simulated language: stable, prefix-preserving, and the same after a round trip."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.engine import Message, PromptError, PromptTooLong
from replica.output.tool_calls import ToolCallText, parts_of
from replica.sim import text as sim_text

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What  is it?\n\tSay."}]


@given(st.text(max_size=80), st.text(max_size=40))
def test_an_extension_keeps_all_tokens_but_the_last(text: str, more: str) -> None:
    tokens = sim_text.encode(text)
    assert sim_text.encode(text + more)[: max(0, len(tokens) - 1)] == tokens[:-1]


def test_an_answer_sent_back_has_the_tokens_that_were_generated() -> None:
    prompt = sim_text.encode_chat(MESSAGES, None)
    answer, _ = sim_text.answer(prompt, 40, endless=True)
    turn = [*MESSAGES, {"role": "assistant", "content": sim_text.decode(answer)}, {"role": "user", "content": "And now?"}]
    assert sim_text.encode_chat(turn, None)[: len(prompt) + 40] == prompt + answer


@given(st.integers(1, 60), st.booleans())
def test_a_prompt_that_ends_with_the_beginning_of_an_answer_is_answered_with_its_rest(sent: int, endless: bool) -> None:
    prompt = sim_text.encode_chat(MESSAGES, None)
    answer, ended = sim_text.answer(prompt, 60, endless=endless)
    head, rest = answer[:sent], answer[sent:]
    if rest:
        assert sim_text.answer(prompt + head, 60 - sent, endless=endless) == (rest, ended)
    opened = [*MESSAGES, {"role": "assistant", "content": sim_text.decode(head)}]
    assert sim_text.encode_chat(opened, None, "open") == prompt + head


def test_a_completion_goes_on_from_any_of_its_tokens() -> None:
    prompt = "Once upon a time,"
    answer, _ = sim_text.answer(sim_text.encode(prompt), 50, endless=True)
    for sent in range(50):
        again = sim_text.encode(prompt + sim_text.decode(answer[:sent]))
        assert sim_text.answer(again, 50 - sent, endless=True) == (answer[sent:], False)


def test_the_three_ends_of_a_chat_prompt() -> None:
    headed, plain, opened = (sim_text.encode_chat(MESSAGES, None, tail) for tail in ("answer", "none", "open"))
    assert headed == plain + sim_text.encode("<|assistant|>\n")
    assert plain == opened + sim_text.encode("\n")


def test_an_answer_depends_on_the_prompt_alone() -> None:
    assert sim_text.answer([1, 2, 3], 30, endless=True) == sim_text.answer([1, 2, 3], 30, endless=True)
    assert sim_text.answer([1, 2, 3], 30, endless=True) != sim_text.answer([1, 2, 4], 30, endless=True)


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 100))
def test_an_answer_ends_by_itself_or_at_max_tokens(prompt: list[int], max_tokens: int) -> None:
    tokens, ended = sim_text.answer(prompt, max_tokens, endless=False)
    assert 1 <= len(tokens) <= max_tokens
    assert ended or len(tokens) == max_tokens


def test_a_token_is_about_four_bytes_of_english() -> None:
    text = "The quick brown fox jumps over the lazy dog, and nobody remembers why it ever wanted to. " * 20
    assert 3.2 < len(text) / len(sim_text.encode(text)) < 4.8


def test_tools_change_the_prompt_and_odd_roles_are_refused() -> None:
    assert sim_text.encode_chat(MESSAGES, [{"name": "f"}]) != sim_text.encode_chat(MESSAGES, None)
    with pytest.raises(PromptError, match="unknown role 'A B'"):
        sim_text.encode_chat([{"role": "A B", "content": ""}], None)


def test_the_tokenizer_gives_the_same_ids_in_every_process() -> None:
    assert sim_text.encode("Hello wide world\n") == [
        3165958109,
        252678980,
        2319748071,
        3951950374,
        2564639436,
        852952723,
    ]  # crc32 of the pieces


TOOLS = [{"type": "function", "function": {"name": "find"}}]
ASKED = 'Look.\n<|call|>find {"what": "é"} <|call|>find {}\n<|call|>end no JSON'


def test_a_marked_message_is_answered_with_its_calls_step_by_step() -> None:
    messages: list[Message] = [{"role": "user", "content": ASKED}]
    texts = []
    for _ in range(3):
        prompt = sim_text.encode_chat(messages, TOOLS)
        answer = sim_text.requested_calls(prompt)
        texts.append(sim_text.decode(answer))
        parts = parts_of(texts[-1])
        calls = [
            {"function": {"name": one.name, "arguments": json.loads(one.arguments)}}
            for one in parts
            if isinstance(one, ToolCallText)
        ]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "<|call|>x {}"}]
        if answer:  # sent back it has the tokens that were generated
            assert sim_text.encode_chat(messages, TOOLS)[: len(prompt) + len(answer)] == prompt + answer
    assert [parts_of(text) for text in texts] == [
        [ToolCallText("find", '{"what":"é"}'), ToolCallText("find", "{}")],
        [ToolCallText("end", "{}")],
        [],
    ]


@pytest.mark.parametrize(
    ("messages", "tools", "end"),
    [
        ([{"role": "user", "content": ASKED}], None, "answer"),
        ([{"role": "user", "content": ASKED}], TOOLS, "none"),
        ([{"role": "user", "content": ASKED}, {"role": "user", "content": "And now?"}], TOOLS, "answer"),
        ([{"role": "system", "content": ASKED}], TOOLS, "answer"),
        ([{"role": "user", "content": ASKED}, {"role": "assistant", "content": "I"}], TOOLS, "open"),
    ],
)
def test_calls_are_made_only_for_the_last_users_message_and_with_tools(messages: Any, tools: Any, end: Any) -> None:
    assert sim_text.requested_calls(sim_text.encode_chat(messages, tools, end)) == []


@given(st.text(max_size=40), st.text(max_size=40))
def test_tokens_that_contain_their_text_give_it_back(name: str, value: str) -> None:
    text = sim_text.call_text(name, {"a": value})
    assert sim_text.decode(sim_text.spelled(text)) == text


@pytest.mark.parametrize("depth", range(100, 1100, 10))
def test_calls_that_are_nested_too_deeply_have_no_arguments(depth: int) -> None:
    asked = "<|call|>f " + '{"a": ' + "[" * depth + "]" * depth + "}"
    assert sim_text.requested_calls(sim_text.encode_chat([{"role": "user", "content": asked}], [{"type": "function"}]))


def test_a_message_that_is_too_long_asks_for_no_call() -> None:
    for length, asks in ((4 * sim_text.MAX_CALLS - 200, True), (4 * sim_text.MAX_CALLS + 200, False)):
        asked = f'<|call|>f {{"a": "{"x" * length}"}}'
        prompt = sim_text.encode_chat([{"role": "user", "content": asked}], [{"type": "function"}])
        assert bool(sim_text.requested_calls(prompt)) == asks


def test_lines_are_counted_before_they_are_made() -> None:
    with pytest.raises(PromptTooLong):
        sim_text.encode_chat([{"role": "user", "content": "<|call|>" + "\n" * 1000}], None, most=500)
