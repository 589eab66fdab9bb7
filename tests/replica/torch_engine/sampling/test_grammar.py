"""Answers of a model of random weights that keep to a shape: without it they are noise."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

import torch
from transformers import AutoTokenizer

from replica.engine import EngineRequest, Grammar
from replica.torch_engine.sampling.grammar import CACHED, Grammars, GrammarState
from tests.replica.tiny import VOCABULARY, answer, running, spoken_model
from tests.replica.torch_engine.test_sampled import client

__all__ = ["client"]  # a fixture; its model is the one below
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))  # a grammar has to know the end token


async def made(client: openai.AsyncOpenAI, seed: int = 1, **extra: Any) -> Any:
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=200, temperature=1.0, seed=seed, extra_body=extra
    )
    return answer.choices[0]


async def test_a_choice_a_regex_and_an_object(client: openai.AsyncOpenAI) -> None:
    for seed in range(5):
        choice = await made(client, seed, guided_choice=["yes", 'no "maybe"', "é"])
        assert choice.text in ("yes", 'no "maybe"', "é")
        assert choice.finish_reason == "stop"
        number = await made(client, seed, guided_regex="[1-9][0-9]{2,4}")
        assert re.fullmatch("[1-9][0-9]{2,4}", number.text)
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "on": {"type": "boolean"}},
        "required": ["size", "on"],
        "additionalProperties": False,
    }
    shaped = await made(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    value = json.loads(shaped.text)
    assert set(value) == {"size", "on"}
    assert value["size"] in ("small", "large")
    assert isinstance(value["on"], bool)
    begun = await made(client, response_format={"type": "json_object"})
    assert begun.text.lstrip().startswith("{")


async def test_a_context_free_grammar_in_both_notations(client: openai.AsyncOpenAI) -> None:
    lark = 'start: "<" start ">" | /[ab]/'
    gbnf = 'root ::= "<" root ">" | [ab]'
    for extra in ({"guided_grammar": lark}, {"guided_grammar": gbnf}, {"structured_outputs": {"grammar": lark}}):
        for seed in range(3):
            nested = await made(client, seed, **extra)
            assert re.fullmatch("(<*)[ab](>*)", nested.text)
            assert nested.text.count("<") == nested.text.count(">")
            assert nested.finish_reason == "stop"


def references(levels: int) -> dict[str, Any]:
    defined: dict[str, Any] = {f"a{at}": {"items": {"$ref": f"#/$defs/a{at + 1}"}} for at in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": defined | {f"a{levels}": {"type": "string"}}}


HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "(["},
    {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"guided_regex": "a" * 70_000},
    {"guided_json": {"type": "nothing"}},
    {"guided_json": {"enum": ["x" * 300_000]}},
    {"guided_choice": [f"choice number {at}" for at in range(100_000)]},
    {"guided_grammar": ""},
    {"guided_grammar": "start: " + "(" * 16_000 + '"a"' + ")" * 16_000},
    {"guided_grammar": "root ::= " + "(" * 16_000 + '"a"' + ")" * 16_000},
    {"guided_grammar": 'start: "' + "a" * 40_000 + '"'},
]


async def test_formats_that_cannot_be_are_refused_in_a_few_words(client: openai.AsyncOpenAI) -> None:
    for extra in HOSTILE:
        with pytest.raises(openai.BadRequestError, match=r"cannot be constrained to this format|can be followed") as refused:
            await made(client, **extra)
        assert len(refused.value.message) < 600
    assert (await made(client, guided_choice=["yes"])).text == "yes", "the engine goes on"


BELOW = {"type": "integer", "minimum": -1e19, "maximum": -1e19}  # ended the process


TAG = "<|290|>"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"guided_choice": [f"a{TAG}b"]}, f"a{TAG}b"),
        ({"guided_regex": "[<][|]290[|]>"}, TAG),
        ({"guided_regex": TAG.replace("|", "\\|") + "c"}, f"{TAG}c"),
        ({"guided_grammar": f'start: "a{TAG}b"'}, f"a{TAG}b"),
        ({"guided_grammar": 'start: "<|2" "90|>" // "<|291|>"'}, TAG),
        ({"guided_json": {"const": f"{TAG}é"}}, f'"{TAG}é"'),
        ({"guided_json": {"type": "string", "pattern": "^<[|]290[|]>$"}}, f'"{TAG}"'),
    ],
    ids=str,
)
async def test_a_text_that_reads_like_a_special_token_is_spelled(
    client: openai.AsyncOpenAI, extra: dict[str, Any], text: str
) -> None:
    """Its token would be left out of the answer; and llguidance would fail after it."""
    assert (await made(client, **extra)).text == text


async def test_a_special_token_that_a_grammar_asks_for_is_given(client: openai.AsyncOpenAI) -> None:
    answer = await made(client, guided_grammar=f'start: "a" {TAG} "b"', skip_special_tokens=False, max_tokens=3)
    assert answer.text == f"a{TAG}b"


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": BELOW},
        {"guided_json": {"anyOf": [{"items": {"type": "number", "multipleOf": 1e300}}]}},
        {"guided_json": {"type": "integer", "exclusiveMinimum": (1 << 53) + 1}},
        {"guided_grammar": "start: %json " + json.dumps(BELOW)},
        {"guided_grammar": 'start: %json {"type": "integer", "minimum": -10000000000000000000}'},
    ],
)
async def test_bounds_that_are_not_held_exactly_are_refused(client: openai.AsyncOpenAI, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"more than 2\^53|15 digits"):
        await made(client, **body)


async def test_bounds_of_a_call_too(client: openai.AsyncOpenAI) -> None:
    function: Any = {"name": "f", "parameters": {"type": "object", "properties": {"a": BELOW}}}
    with pytest.raises(openai.BadRequestError, match=r"more than 2\^53"):
        await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )


async def test_bounds_that_are_held_are_followed(client: openai.AsyncOpenAI) -> None:
    exact = 1 << 53
    assert json.loads((await made(client, guided_json={"type": "integer", "minimum": exact, "maximum": exact})).text) == exact
    properties = {"minimum": {"const": 1 << 60}}  # a name, and no bound
    assert json.loads((await made(client, guided_json={"properties": properties, "required": ["minimum"]})).text)


async def test_a_chain_of_references_does_not_end_the_process(client: openai.AsyncOpenAI) -> None:
    """llguidance calls itself for each of them."""
    chains: list[dict[str, Any]] = [
        {"guided_json": references(5_000)},
        {"guided_grammar": "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(2_500)) + 'r2500: "b"'},
        {"guided_grammar": "start: T0\n" + "".join(f"T{at}: T{at + 1}\n" for at in range(2_500)) + 'T2500: "b"'},
    ]
    for extra in chains:
        assert (await made(client, **extra)).finish_reason == "stop"


def test_a_grammar_is_compiled_once_however_many_come_between_its_check_and_its_answers(model: Path) -> None:
    """Answers begin on the event loop, where nothing may take seconds."""
    compiled = []

    class Counting(Grammars):
        def compile(self, grammar: Grammar) -> Any:
            compiled.append(grammar)
            return super().compile(grammar)

    grammars = Counting(AutoTokenizer.from_pretrained(model), VOCABULARY, [299])
    all_of_them = [Grammar("regex", f"a{{{at}}}") for at in range(1, CACHED + 10)]
    assert not any(map(grammars.error, all_of_them))
    assert len(compiled) == len(all_of_them)
    for grammar in all_of_them:
        grammars.start(grammar)
    assert len(compiled) == len(all_of_them)
    assert not grammars.error(Grammar("regex", "a{1}"))
    assert len(compiled) == len(all_of_them) + 1, "the cache is bounded"


async def test_others_are_left_alone(model: Path) -> None:
    async with running(model) as engine:
        plain = EngineRequest([1, 2, 3], 8, ignore_eos=True)
        alone = await answer(engine, plain)
        sequence = engine.submit(EngineRequest([1, 2, 3], 50, grammar=Grammar("choice", '["yes"]')))
        assert (await answer(engine, plain))[0] == alone[0]
        tokens, step = list[int](), None
        while step is None or step.finish is None:
            step = await sequence.next()
            tokens += step.tokens
        assert engine.decode(tokens) == "yes"
        assert step.end_token == tokens[-1]


class Stuck:
    """A matcher that has failed."""

    def is_stopped(self) -> bool:
        return True


def test_a_grammar_that_has_ended_leaves_the_end_alone() -> None:
    guide = GrammarState(Stuck(), [2], None)
    assert guide.masked(torch.zeros(4)).tolist() == [float("-inf"), float("-inf"), 0.0, float("-inf")]
    guide.advance(2)


async def test_a_schema_that_cannot_be_followed_to_its_end_is_an_error_and_no_broken_json(client: openai.AsyncOpenAI) -> None:
    """After the first quotation mark it has more alternatives than llguidance looks at."""
    names = {f"p{at}": {"type": "string", "pattern": "[a-z]{1,50}"} for at in range(1000)}
    with pytest.raises(openai.InternalServerError, match="cannot follow this format any further: Parser Error"):
        await made(client, guided_json={"type": "object", "properties": names, "required": ["p999"]})
    assert (await made(client, guided_choice=["yes"])).text == "yes", "the engine goes on"
