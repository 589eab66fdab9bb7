"""Our own forward pass against transformers' plain one, for each kind of model that takes it."""

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from replica.engine import EngineRequest, SetupError

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner

from replica.torch_engine import attention
from replica.torch_engine.llama import PackedLlama
from replica.torch_engine.paged import check_signatures
from tests.replica.tiny import VOCABULARY, answer, recorded_scores, running, tiny_model

pytestmark = pytest.mark.model
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "eos_token_id": 299}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2}
STRETCHED = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, **HEADS)),
    "biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, **HEADS, attention_bias=True, mlp_bias=True)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, **HEADS, tie_word_embeddings=True)),
    "each head its own keys": (LlamaForCausalLM, LlamaConfig(**SHAPE, **(HEADS | {"num_key_value_heads": 4}))),
    "one key head of odd size": (LlamaForCausalLM, LlamaConfig(**SHAPE, **(HEADS | {"num_key_value_heads": 1}), head_dim=48)),
    "stretched positions": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, **HEADS, rope_parameters=STRETCHED | {"original_max_position_embeddings": 256}),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, **HEADS, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, **HEADS)),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "Qwen3ForCausalLM is not one of the supported classes": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, **HEADS, head_dim=16)),
    "its activation is gelu": (LlamaForCausalLM, LlamaConfig(**SHAPE, **HEADS, hidden_act="gelu")),
    "some of its layers have a sliding window": (
        MistralForCausalLM,
        MistralConfig(**SHAPE, **HEADS, sliding_window=8),
    ),
}


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY - 10) for _ in range(length)]


def made(folder: Path, kind: tuple[Any, Any]) -> Path:
    """With norms that are not all one and biases that are not all zero, as they begin."""
    tiny_model(folder, kind=kind[0], config=kind[1])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return folder


async def worst_difference(folder: Path, ours: bool = True) -> float:
    """From plain scores in float32, over prompts of one token and of several steps, answers of unlike lengths beside
    each other, some of them long ones, and prompts that begin with them."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [EngineRequest(prompt(length, length), 6, ignore_eos=True) for length in (1, 17, 600, 3, 257, 128, 129, 40)]
    requests += [EngineRequest(prompt(length, length), 6, ignore_eos=True) for length in (attention.WIDE - 2, 1500)]
    requests += [EngineRequest(requests[2].prompt[:401] + (prompt(300, 5)), 3, ignore_eos=True), requests[4], requests[4]]
    worst = 0.0
    async with running(folder, kv_tokens=16_384, batch_tokens=256, max_batch=8) as engine:
        assert (engine.way is not None and engine.way.own) == ours
        scores = recorded_scores(engine)
        answers = await asyncio.gather(*(answer(engine, request) for request in requests))
    for number, (request, (tokens, _)) in enumerate(zip(requests, answers, strict=True)):
        with torch.no_grad():
            expected = plain(torch.tensor([[*request.prompt, *tokens[:-1]]])).logits[0, len(request.prompt) - 1 :]
        assert tokens == expected.argmax(-1).tolist()
        worst = max(worst, float((torch.stack(scores[f"r{number}"]) - expected).abs().max()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
async def test_the_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    assert await worst_difference(made(tmp_path, KINDS[kind])) < 1e-4


@pytest.mark.parametrize("why", OTHERS)
async def test_other_models_are_computed_by_transformers(tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = made(tmp_path, OTHERS[why])
    with caplog.at_level(logging.INFO, "replica.torch_engine.llama"):
        assert await worst_difference(folder, ours=False) < 1e-4
    assert why in caplog.text


async def test_in_bfloat16_it_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    """Mean differences of all scores of some prompts, each beside the plain forward in float32.

    Which of the two is nearer, by a thousandth, depends on the CPU's instructions.
    """
    folder, requests = tiny_model(tmp_path), [EngineRequest(prompt(200, seed), 1) for seed in range(20)]
    exact: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    differences = torch.zeros(2)
    async with running(folder, dtype="bfloat16") as engine:
        scores = recorded_scores(engine)
        for number, request in enumerate(requests):
            await answer(engine, request)
            with torch.no_grad():
                expected, rounded = (plain(torch.tensor([request.prompt])).logits[0, -1].float() for plain in (exact, theirs))
            pair = (scores[f"r{number}"][0], rounded)
            differences += torch.stack([(found - expected).abs().mean() for found in pair])
    assert differences[0] < 1.02 * differences[1]


def test_what_we_rely_on_is_there_with_the_parameters_that_we_know() -> None:
    for owner, methods in attention.PATCHED.items():
        check_signatures(owner, owner.__name__, methods)
    moved = type("ModelRunner", (ModelRunner,), {"_sample": lambda self, scores: None})
    with pytest.raises(SetupError, match=r"has another ModelRunner\._sample"):
        check_signatures(moved, "ModelRunner", attention.PATCHED[ModelRunner])


class Scaled(torch.nn.Linear):
    """As quantised layers are: its weight is worth nothing without its scale."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = 0.5 * super().forward(rows)
        return product


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj", "lm_head"])
def test_linear_layers_with_more_than_a_weight_are_not_packed(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def reason(changed: torch.nn.Module) -> str:
        model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path), dtype=torch.float32)
        assert PackedLlama.supports(model)
        model.set_submodule(name, changed)
        with caplog.at_level(logging.INFO, "replica.torch_engine.llama"):
            assert not PackedLlama.supports(model)
        return caplog.messages[-1]

    assert f"{name} is no plain linear layer of torch.float32: Scaled" in reason(Scaled(4, 4, bias=False))
    assert f"{name} is no plain linear layer of torch.float32: Linear" in reason(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    hooked = torch.nn.Linear(4, 4, bias=False)
    hooked.register_forward_hook(lambda layer, rows, product: 0.5 * product)
    assert f"{name} is no plain linear layer" in reason(hooked)


def test_a_model_is_in_memory_once(tmp_path: Path) -> None:
    """But for the embedding, which is read row by row."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path), dtype=torch.float32)
    assert PackedLlama.supports(model)
    PackedLlama(model)
    kept = {name for name, _ in model.named_parameters() if "norm" not in name}
    assert kept == {"model.embed_tokens.weight"}
