"""Which tokens are left: those that are allowed, without the ends of bad words, and never none."""

from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from replica.torch_engine.sampling.masks import TokenMask
from tests.replica.tiny import VOCABULARY, spoken_model
from tests.replica.torch_engine.test_sampled import client

__all__ = ["client"]  # a fixture; its model is the one below
pytestmark = pytest.mark.model
TOKENS = 6
END = TOKENS - 1
words = st.lists(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4).map(tuple), max_size=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))


def left(mask: TokenMask) -> set[int]:
    scores = torch.zeros(TOKENS)
    kept = mask.masked(scores)
    assert bool((scores == 0).all()), "the scores themselves stay"
    return {token for token, score in enumerate(kept.tolist()) if score == 0}


@given(st.sets(st.integers(0, TOKENS - 1)), words, st.lists(st.integers(0, TOKENS - 1), max_size=8))
def test_what_is_not_allowed_and_the_ends_of_bad_words_are_masked(
    allowed: set[int], bad_words: list[tuple[int, ...]], drawn: list[int]
) -> None:
    mask = TokenMask(sorted(allowed), bad_words, [END])
    for at in range(len(drawn) + 1):
        wanted = set(allowed or range(TOKENS))
        for *before, last in bad_words:
            if len(before) <= at and drawn[at - len(before) : at] == before:
                wanted.discard(last)
        assert left(mask) == (wanted or {END})
        if at < len(drawn):
            mask.advance(drawn[at])


def test_without_an_end_all_are_left_rather_than_none() -> None:
    assert left(TokenMask([1], [(1,)], [])) == set(range(TOKENS))


async def made(client: openai.AsyncOpenAI, seed: int = 1, **extra: Any) -> Any:
    body = {"ignore_eos": True, "return_token_ids": True} | extra
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=1.0, seed=seed, extra_body=body
    )
    return answer.choices[0]


async def test_only_allowed_tokens_are_drawn(client: openai.AsyncOpenAI) -> None:
    allowed = [7, 40, 50]
    for seed in range(3):
        assert set((await made(client, seed, allowed_token_ids=allowed)).token_ids) <= set(allowed)
    assert set((await made(client, allowed_token_ids=[50], temperature=0)).token_ids) == {50}


async def test_words_that_are_bad_are_never_completed(client: openai.AsyncOpenAI) -> None:
    letters = await made(client, allowed_token_ids=[64, 65, 66])  # the tokenizer has one for each byte
    assert letters.text.count(letters.text[0]) < 40
    for seed in range(5):
        pair = letters.text[:2]
        free = await made(client, seed, allowed_token_ids=[64, 65, 66])
        kept = await made(client, seed, allowed_token_ids=[64, 65, 66], bad_words=[pair])
        assert pair not in kept.text
        assert kept.text[0] == free.text[0]
    one = letters.text[0]
    assert one not in (await made(client, allowed_token_ids=[64, 65, 66], bad_words=["  " + one])).text, "spaces before it go"


async def test_where_nothing_is_left_the_answer_ends(client: openai.AsyncOpenAI) -> None:
    stuck = await made(
        client, allowed_token_ids=[64], bad_words=[" " + 3 * (await made(client, allowed_token_ids=[64])).text[0]]
    )
    assert len(stuck.token_ids) == 40
    ended = await made(client, ignore_eos=False, allowed_token_ids=[64], bad_words=["aa", 2 * stuck.text[0]])
    assert (ended.text, ended.finish_reason) == (stuck.text[0], "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_it_ends_before_min_tokens_too_where_the_end_is_all_that_is_allowed(
    client: openai.AsyncOpenAI, temperature: float
) -> None:
    extra: dict[str, Any] = {"allowed_token_ids": [299], "min_tokens": 3, "ignore_eos": False, "return_token_ids": True}
    ended = await made(client, temperature=temperature, **extra)
    assert (ended.token_ids, ended.finish_reason) == ([299], "stop")


async def test_allowed_tokens_are_of_the_vocabulary(client: openai.AsyncOpenAI) -> None:
    for token in (-1, VOCABULARY, 1 << 40):
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids has token ids outside 0 to 299"):
            await made(client, allowed_token_ids=[0, token])


async def test_the_largest_lists_are_served(client: openai.AsyncOpenAI) -> None:
    many = [f"word number {at}" for at in range(1024)]
    assert (
        len((await made(client, bad_words=many, allowed_token_ids=[at % VOCABULARY for at in range(100_000)])).token_ids) == 40
    )
