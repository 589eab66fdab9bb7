"""Scripted answers, and slots that share nothing in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from replica.engine import EngineRequest, Grammar, Message, SetupError
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from replica.sim.script import Script
from tests.replica.fakes import FakeClock

HISTORY = "warm " * 200
LINES = [("policy", "No, says the critic: nothing of it\n(twice)."), ("", "An ordinary answer.")]


def engine_of(script: Script | None = None, *, slots: bool = False) -> tuple[SimEngine, FakeClock]:
    clock = FakeClock()
    return SimEngine(SimConfig(prefill_rate=1000.0, decode_rate=100.0, slots=slots), clock, script=script), clock


def chat(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


async def ask(engine: SimEngine, clock: FakeClock, prompt: list[int], grammar: Grammar | None = None) -> tuple[str, int]:
    """(text of the answer, cached tokens)."""
    sequence = engine.submit(EngineRequest(prompt, 500, grammar=grammar))
    detokenizer, text = engine.detokenizer(), ""
    while True:
        clock.advance(5)
        new = await sequence.next()
        text += detokenizer.push(new.tokens)
        if new.finish:
            assert new.finish == "stop"
            return text, sequence.cached_tokens or 0


async def test_the_first_line_whose_piece_is_in_the_last_message_is_the_answer() -> None:
    engine, clock = engine_of(Script(LINES))
    messages = chat(HISTORY + "What of the policy?", "Nothing.", "And else?")
    assert (await ask(engine, clock, engine.encode_chat(messages, None)))[0] == LINES[1][1]
    assert (await ask(engine, clock, engine.encode_chat(messages[:1], None)))[0] == LINES[0][1]
    assert (await ask(engine, clock, engine.encode("What of the policy?\nAssistant:")))[0] == LINES[1][1], (
        "of a text: its last line"
    )


async def test_a_scripted_answer_is_cached_for_the_prompt_that_goes_on_from_it() -> None:
    engine, clock = engine_of(Script(LINES))
    first = engine.encode_chat(chat(HISTORY), None)
    text, _ = await ask(engine, clock, first)
    _, cached = await ask(engine, clock, engine.encode_chat(chat(HISTORY, text, "Go on."), None))
    assert cached == (len(first) + len(engine.encode(text)) - 1) // 16 * 16


async def test_with_a_script_any_format_is_accepted() -> None:
    grammars = [Grammar("regex", "a+"), Grammar("json", '{"pattern": "x"}')]
    plain, _ = engine_of()
    scripted, clock = engine_of(Script(LINES))
    assert all(plain.grammar_error(each) for each in grammars[:1])
    assert not any(map(scripted.grammar_error, grammars[:1]))
    assert (await ask(scripted, clock, scripted.encode("policy"), grammars[0]))[0] == LINES[0][1]


async def test_a_choice_is_the_first_one_without_a_script() -> None:
    engine, clock = engine_of()
    grammar = Grammar("choice", '["Yes, it is", "No"]')
    assert engine.grammar_error(grammar) is None
    assert (await ask(engine, clock, engine.encode("Is it?"), grammar))[0] == "Yes, it is"


@pytest.mark.parametrize("slots", [False, True])
async def test_slots_share_a_prefix_once_its_request_has_ended(slots: bool) -> None:
    engine, clock = engine_of(slots=slots)
    prompts = [[*range(320), at] for at in (1, 2, 3)]
    sequences = [engine.submit(EngineRequest(prompt, 100, ignore_eos=True)) for prompt in prompts[:2]]
    clock.advance(0.9)  # both prompts are computed, and are being answered
    assert [each.cached_tokens for each in sequences] == [0, 0 if slots else 320]
    clock.advance(5)
    late = engine.submit(EngineRequest(prompts[2], 1))
    clock.advance(1)
    assert late.cached_tokens == 320
    engine.check()


@pytest.mark.parametrize("text", ["{", "a: 1", "[1]", "[{contains: a}]", '[{contains: a, say: ""}]', "[{contains: a, say: 1}]"])
def test_a_wrong_script_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"script\.yaml"):
        Script.read(path)
    with pytest.raises(SetupError, match=r"none\.yaml"):
        Script.read(tmp_path / "none.yaml")


def test_a_script_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text('[{contains: "", say: "Yes"}]')
    script, tokens = Script.read(path), [1, 2]
    script.note(tokens, "anything")
    assert len(script.answer(tokens)) == 1
    assert not script.answer([3])
