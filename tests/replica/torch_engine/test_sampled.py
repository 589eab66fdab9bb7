"""What the real engine draws, on a model of random weights: the same whatever else runs; scores; several endings."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from replica.engine import EngineError, EngineRequest, TemplateOverride

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from tests.replica.tiny import VOCABULARY, answer, recorded_scores, running, serving, tiny_model

pytestmark = pytest.mark.model
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model) as asking:
        yield asking


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(model: Path) -> None:
    def request(seed: int, **more: Any) -> EngineRequest:
        return EngineRequest(PROMPT, 20, temperature=1.0, seed=seed, ignore_eos=True, **more)

    async with running(model) as engine:
        alone = [(await answer(engine, request(seed, frequency_penalty=0.5)))[0] for seed in (1, 2, 1)]
        assert alone[0] == alone[2] != alone[1]
        others = [EngineRequest([at] * 30, 40, temperature=2.0, ignore_eos=True) for at in range(3)]
        busy = [asyncio.create_task(answer(engine, other)) for other in others]
        beside = await asyncio.gather(answer(engine, request(1, frequency_penalty=0.5)), *busy)
    assert beside[0][0] == alone[0]


async def test_rows_that_are_drawn_together_have_the_same_tokens(model: Path) -> None:
    """As on a GPU: beside a greedy request, one with a penalty, and one whose scores are no numbers, which fails alone."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.2}]
    requests = [EngineRequest(PROMPT, 12, temperature=0.9, seed=at, ignore_eos=True, **kinds[at % 5]) for at in range(10)]
    requests.append(EngineRequest(PROMPT, 12, ignore_eos=True))
    drawn = []
    for together in (False, True):
        async with running(model, max_batch=16) as engine:
            engine.router.together = together
            drawn.append([tokens for tokens, _ in await asyncio.gather(*(answer(engine, each) for each in requests))])
            engine.router.spoil = lambda ids, scores: scores[0, ids.index("r12")].fill_(math.nan) if "r12" in ids else None
            beside, failed = await asyncio.gather(
                *(answer(engine, request) for request in requests[:2]), return_exceptions=True
            )
            assert isinstance(failed, EngineError)
            assert isinstance(beside, tuple)
            assert beside[0] == drawn[0][0]
    assert drawn[0] == drawn[1]


async def test_scores_are_the_models(model: Path) -> None:
    async with running(model) as engine:
        recorded = recorded_scores(engine)
        sequence = engine.submit(EngineRequest(PROMPT, 6, temperature=0.8, seed=4, logprobs=3, ignore_eos=True))
        scores, finish = [], None
        while finish is None:
            step = await sequence.next()
            scores, finish = scores + step.scores, step.finish
    expected = [torch.log_softmax(one, dim=-1) for one in recorded["r0"]]
    assert len(scores) == len(expected) == 6
    for score, logprobs in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(float(logprobs[score.token]), abs=1e-5)
        assert [token for token, _ in score.top] == logprobs.topk(3).indices.tolist()


async def test_openais_client_reads_scores_of_chats_and_completions(client: openai.AsyncOpenAI) -> None:
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "ignore_eos": True}
    messages: Any = [{"role": "user", "content": "abc"}]
    chat = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, logprobs=True, top_logprobs=2, extra_body=template
    )
    scores = chat.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert len(scores.content) == 5
    for one in scores.content:
        assert one.logprob == max(top.logprob for top in one.top_logprobs)  # greedy
        assert bytes(one.bytes or []).decode() == one.token
    asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = (await client.completions.create(**asked)).choices[0]
    stream = await client.completions.create(stream=True, **asked)
    streamed = [chunk.choices[0] async for chunk in stream]
    assert whole.logprobs is not None
    assert [token for one in streamed if one.logprobs for token in one.logprobs.tokens or []] == whole.logprobs.tokens
    assert [at for one in streamed if one.logprobs for at in one.logprobs.text_offset or []] == whole.logprobs.text_offset
    assert whole.logprobs.token_logprobs is not None
    assert all(value <= 0 and math.isfinite(value) for value in whole.logprobs.token_logprobs)
    # By their text, so that two halves of characters are one; the token that was drawn is always among them.
    assert [max(top.values()) for top in whole.logprobs.top_logprobs or []] == whole.logprobs.token_logprobs


async def test_a_bias_and_stop_tokens_reach_the_engine(client: openai.AsyncOpenAI) -> None:
    made = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=8, logit_bias={"66": 100}, extra_body={"ignore_eos": True}
    )
    letter = made.choices[0].text[0]
    assert made.choices[0].text == letter * 8
    ended = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=8, logit_bias={"66": 100}, extra_body={"stop_token_ids": [66]}
    )
    choice: Any = ended.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", 66)
    assert ended.usage is not None
    assert ended.usage.completion_tokens == 1
    ended = await client.completions.create(model="tiny", prompt="abc", max_tokens=8, logit_bias={"299": 100})
    choice = ended.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", None)  # the model's own end


async def test_n_answers_compute_their_prompt_once(client: openai.AsyncOpenAI) -> None:
    made = await client.completions.create(
        model="tiny", prompt="abc" * 40, n=3, seed=1, temperature=1.0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert len({choice.text for choice in made.choices}) == 3
    response = await client._client.get(str(client.base_url).removesuffix("v1/") + "metrics")
    hits = [line for line in response.text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits[0].rsplit(" ", 1)[1]) == 2 * 116  # 120 tokens in blocks of 4, the last one never


async def test_a_template_of_the_request_and_its_variables(client: openai.AsyncOpenAI) -> None:
    base = str(client.base_url).removesuffix("v1/")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    body = {"messages": [{"role": "user", "content": "ab"}], "chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    tokens = (await client._client.post(base + "tokenize", json=body)).json()
    plain = (await client._client.post(base + "tokenize", json={"prompt": "ab!"})).json()
    assert tokens["tokens"] == plain["tokens"]
    assert tokens["count"] == 3
    assert max(tokens["tokens"]) < VOCABULARY
    broken = await client._client.post(base + "tokenize", json=body | {"chat_template": "{{ nope("})
    assert broken.status_code == 400


@pytest.mark.parametrize("name", ["return_tensors", "padding", "tokenizer_kwargs", "tools", "conversation", "kwargs"])
async def test_what_is_not_the_templates_cannot_be_set_through_it(client: openai.AsyncOpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"may not set {name}"):
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ab"}], extra_body={"chat_template_kwargs": {name: "pt"}}
        )


async def test_a_template_in_the_place_of_the_models_own(model: Path) -> None:
    async with running(model, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}") as engine:
        assert engine.encode_chat([{"role": "user", "content": "ab"}], None) == engine.encode("[ab]")
        assert engine.encode_chat([{"role": "user", "content": "ab"}], None, template=TemplateOverride("!")) == engine.encode(
            "!"
        )
