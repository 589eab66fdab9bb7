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

from replica.engine import Grammar, Request
from replica.torch_engine.grammar import GrammarState
from tests.replica.tiny import answer, running, spoken_model
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


async def test_shapes_that_cannot_be_are_refused(client: openai.AsyncOpenAI) -> None:
    for extra in ({"guided_regex": "(["}, {"guided_json": {"type": "nothing"}}):
        with pytest.raises(openai.BadRequestError, match="cannot be constrained to this format"):
            await made(client, **extra)


async def test_others_are_left_alone(model: Path) -> None:
    async with running(model) as engine:
        plain = Request([1, 2, 3], 8, ignore_eos=True)
        alone = await answer(engine, plain)
        sequence = engine.submit(Request([1, 2, 3], 50, grammar=Grammar("choice", '["yes"]')))
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


def test_a_grammar_that_fails_ends_its_answer_and_nothing_else() -> None:
    guide = GrammarState(Stuck(), [2])
    assert guide.masked(torch.zeros(4)).tolist() == [float("-inf"), float("-inf"), 0.0, float("-inf")]
    guide.advance(2)
