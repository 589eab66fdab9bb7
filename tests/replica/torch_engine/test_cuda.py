"""The real engine on a GPU: `python -m pytest tests/replica/torch_engine/test_cuda.py -s`; skipped where there is none.

It prints which attention was used and how fast a model of a billion parameters is; of speed nothing is asserted.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replica.engine import EngineRequest, Grammar

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from replica.torch_engine.loading import random_weights
from replica.torch_engine.model import cache_folder, prepared_smollm2
from tests.replica.tiny import VOCABULARY, answer, recorded_scores, running, tiny_model

DEVICE = "cuda"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Llama 3.2's smaller one, with SmolLM2's tokenizer.
BILLION = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
BILLION |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
BILLION |= {"max_position_embeddings": 131072, "rope_theta": 500000.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int, shared: int = 0) -> list[int]:
    """The first `shared` tokens are the same for all seeds."""
    head, tail = random.Random(0), random.Random(seed)
    return [(head if at < shared else tail).randrange(VOCABULARY - 10) for at in range(length)]


@pytest.mark.parametrize(("block_size", "kv_tokens"), [(4, 160), (16, 4096)])
async def test_a_cached_answer_is_the_uncached_one(model: Path, block_size: int, kv_tokens: int) -> None:
    """Against transformers' plain forward on the same GPU, in float32, three at a time, evicting all the time or never."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
    requests = [EngineRequest(prompt(20 + seed % 30, seed % 6, 17), 1 + seed % 8, ignore_eos=True) for seed in range(60)]
    hits = 0
    async with running(model, device=DEVICE, kv_tokens=kv_tokens, block_size=block_size) as engine:
        scores = recorded_scores(engine)
        for at in range(0, len(requests), 3):
            answers = await asyncio.gather(*(answer(engine, request) for request in requests[at : at + 3]))
            engine.batching.blocks.ledger.check()
            for number, (request, (tokens, cached)) in enumerate(zip(requests[at:], answers, strict=False), at):
                hits += cached
                with torch.no_grad():
                    whole = plain(torch.tensor([[*request.prompt, *tokens[:-1]]], device=DEVICE)).logits[0]
                expected = whole[len(request.prompt) - 1 :]
                assert tokens == expected.argmax(-1).tolist()
                assert (torch.stack(scores[f"r{number}"]) - expected).abs().max() < 1e-3
    assert hits > 300


async def test_in_bfloat16_with_the_fastest_attention_it_is_within_the_stated_tolerance(model: Path) -> None:
    worst = 0.0
    async with running(model, device=DEVICE, dtype="bfloat16", block_size=16) as engine:
        sys.stdout.write(f"\nattention: {engine._model.config._attn_implementation}\n")
        scores = recorded_scores(engine)
        for seed in range(20):
            for _ in range(2):
                await answer(engine, EngineRequest(prompt(40, seed), 1))
            cold, warm = (scores[f"r{2 * seed + at}"][0] for at in range(2))
            worst = max(worst, float((cold - warm).abs().max()))
    assert worst < 0.25


async def test_a_resend_hits_every_full_block_whatever_its_sampling(model: Path) -> None:
    chance = random.Random(2)
    async with running(model, device=DEVICE, dtype="bfloat16", kv_tokens=4096) as engine:
        for seed in range(200):
            length = chance.randrange(1, 60)
            await answer(engine, EngineRequest(prompt(length, seed), chance.randrange(1, 4)))
            again = EngineRequest(prompt(length, seed), 1, temperature=chance.random(), top_p=chance.uniform(0.1, 1), seed=seed)
            assert (await answer(engine, again))[1] == (length - 1) // 4 * 4


async def test_seeds_penalties_scores_and_shapes() -> None:
    """All that is drawn beside the GPU: alone, and beside others that are greedy."""
    async with running(prepared_smollm2(cache_folder()), device=DEVICE, block_size=16) as engine:
        ids = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}], None)
        hot = EngineRequest(
            ids, 12, temperature=1.2, top_p=0.9, seed=1, repetition_penalty=1.2, logit_bias={5: -3.0}, logprobs=2
        )
        alone, _ = await answer(engine, hot)
        greedy, beside = await asyncio.gather(answer(engine, EngineRequest(ids, 12)), answer(engine, hot))
        assert beside[0] == alone
        assert "Paris" in engine.decode(greedy[0])
        shaped = EngineRequest(ids, 8, grammar=Grammar("choice", json.dumps(["Rome", "Paris"])))
        assert engine.decode((await answer(engine, shaped))[0]) in {"Rome", "Paris"}


async def test_what_is_drawn_on_the_gpu_is_what_a_cpu_draws(model: Path) -> None:
    """In float32, alone and beside others: a mixture of shapes, and one that needs the host for its penalty."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.2}]
    requests = [
        EngineRequest(prompt(30, seed), 8, temperature=0.8, seed=seed, ignore_eos=True, **kinds[seed % 5]) for seed in range(20)
    ]
    drawn = {}
    for device, at_once in (("cpu", 1), (DEVICE, 1), (DEVICE, 4)):
        async with running(model, device=device) as engine:
            drawn[device, at_once] = [
                tokens
                for at in range(0, len(requests), at_once)
                for tokens, _ in await asyncio.gather(*(answer(engine, each) for each in requests[at : at + at_once]))
            ]
    assert drawn["cpu", 1] == drawn[DEVICE, 1] == drawn[DEVICE, 4]


async def test_a_restart_is_warm(model: Path, tmp_path: Path) -> None:
    for cached in (0, 396):
        async with running(model, device=DEVICE, cache_file=tmp_path / "cache") as engine:
            assert (await answer(engine, EngineRequest(prompt(400, 1), 1)))[1] == cached


async def test_a_billion_random_weights_fill_the_gpu_and_not_the_host(tmp_path: Path) -> None:
    shape = tmp_path / "billion.json"
    shape.write_text(json.dumps(BILLION))
    weights = random_weights(shape, lambda: prepared_smollm2(cache_folder()))
    options = {"kv_tokens": 0, "block_size": 16, "max_batch": 16, "batch_tokens": 2048}
    async with running(weights, device=DEVICE, dtype="bfloat16", **options) as engine:
        assert engine._model.device.type == DEVICE
        assert sum(each.numel() * each.element_size() for each in engine._model.parameters()) < 2.6e9
        tokens, begun = engine.info.num_blocks * 16, time.perf_counter()
        long = [number % 40_000 for number in range(8000)]
        _, cold = await answer(engine, EngineRequest(long, 1)), time.perf_counter() - begun
        begun = time.perf_counter()
        _, cached = await answer(engine, EngineRequest(long, 1))
        warm, begun = time.perf_counter() - begun, time.perf_counter()
        answers = await asyncio.gather(
            *(answer(engine, EngineRequest([*range(at, at + 99)], 200, ignore_eos=True)) for at in range(16))
        )
        rate = 16 * 200 / (time.perf_counter() - begun)
        sys.stdout.write(
            f"\n{tokens:,} tokens of KV; 8,000 tokens: cold {cold:.3f} s, cached {warm:.3f} s; 16 at once: {rate:.0f}/s\n"
        )
    assert cached == 7984
    assert [len(tokens) for tokens, _ in answers] == [200] * 16
