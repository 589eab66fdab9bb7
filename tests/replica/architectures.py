"""Tiny random models of many kinds, and whether the engine's answers are those of plain transformers."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from replica.engine import EngineError, EngineRequest, SetupError
from replica.torch_engine.checks.positions import constant_until
from tests.replica.tiny import VOCABULARY, answer, recorded_scores, running, tiny_model

TOLERANCE = 1e-3  # of scores, in float32
ANSWER = 8  # tokens
TIMEOUT_S = 60.0

Made = tuple[Any, Any]  # the class and its config
ENDS = {"eos_token_id": 299, "bos_token_id": 298, "pad_token_id": 297}
COMMON = ENDS | {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
DEEPSEEK |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ORIGINAL = {"original_max_position_embeddings": 64}


def model(name: str, config: str = "", **changed: Any) -> Callable[[], Made]:
    """`name`: of the class, without its end; `config`: of its config's, if that has another one."""

    def made() -> Made:
        kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, name)
        fields = {field: value for field, value in (COMMON | changed).items() if value is not ...}
        return kind, getattr(transformers, f"{config or name}Config")(**fields)

    return made


KINDS: Mapping[str, Callable[[], Made]] = {
    "Llama": model("Llama"),
    "Llama, biases": model("Llama", attention_bias=True, mlp_bias=True),
    "Llama, linear positions": model("Llama", rope_parameters=ROPE | {"rope_type": "linear"}),
    "Llama, llama3 positions": model("Llama", rope_parameters=LLAMA3 | ORIGINAL),
    "Llama, YaRN": model("Llama", rope_parameters=ROPE | ORIGINAL | {"rope_type": "yarn"}),
    "Llama, dynamic NTK": model("Llama", max_position_embeddings=64, rope_parameters=ROPE | {"rope_type": "dynamic"}),
    "Mistral": model("Mistral", sliding_window=None),
    "Mistral, sliding window": model("Mistral", sliding_window=16),
    "Ministral": model("Ministral", sliding_window=16, layer_types=["sliding_attention", "full_attention"], head_dim=16),
    "Mixtral": model("Mixtral", sliding_window=None, **LOCAL_EXPERTS),
    "Qwen2": model("Qwen2"),
    "Qwen2-MoE": model("Qwen2Moe", shared_expert_intermediate_size=32, **EXPERTS),
    "Qwen3": model("Qwen3", head_dim=16),
    "Qwen3-MoE": model("Qwen3Moe", head_dim=16, **EXPERTS),
    "Qwen3-Next": model("Qwen3Next", head_dim=16, **EXPERTS),
    "SmolLM3": model("SmolLM3", no_rope_layers=[1, 0], layer_types=None),
    "Gemma": model("Gemma", head_dim=16),
    "Gemma 2": model("Gemma2", head_dim=16, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "Gemma 3": model("Gemma3", "Gemma3Text", head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "Phi": model("Phi"),
    "Phi-3": model("Phi3"),
    "Phi-3, longrope": model("Phi3", rope_parameters=LONGROPE | ORIGINAL, **ORIGINAL),
    "Phi-3.5-MoE": model("Phimoe", **LOCAL_EXPERTS),
    "Olmo": model("Olmo"),
    "Olmo 2": model("Olmo2"),
    "Olmo 3": model("Olmo3", sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
    "OlmoE": model("Olmoe", **EXPERTS),
    "Granite": model("Granite", attention_multiplier=0.25, logits_scaling=2.0, residual_multiplier=0.5),
    "Granite-MoE": model("GraniteMoe", **LOCAL_EXPERTS),
    "Cohere": model("Cohere"),
    "Cohere 2": model("Cohere2", sliding_window=16, head_dim=16),
    "Starcoder 2": model("Starcoder2", sliding_window=None),
    "Nemotron": model("Nemotron", head_dim=16),
    "GLM-4": model("Glm4", head_dim=16),
    "Exaone 4": model("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "Ernie 4.5": model("Ernie4_5", head_dim=16),
    "Hunyuan": model("HunYuanDenseV1", head_dim=16),
    "Helium": model("Helium", head_dim=16),
    "Seed-OSS": model("SeedOss", head_dim=16),
    "Arcee": model("Arcee"),
    "Apertus": model("Apertus"),
    "gpt-oss": model("GptOss", head_dim=16, sliding_window=16, **LOCAL_EXPERTS),
    "GPT-2": model("GPT2LMHeadModel", "GPT2", n_positions=1024, n_inner=96, num_key_value_heads=..., intermediate_size=...),
    "GPT-NeoX": model("GPTNeoX", num_key_value_heads=...),
    "GPT-J": model("GPTJ", rotary_dim=16, num_key_value_heads=..., intermediate_size=...),
    "GPT-BigCode": model("GPTBigCode", num_key_value_heads=..., intermediate_size=...),
    "OPT": model("OPT", ffn_dim=96, word_embed_proj_dim=64, num_key_value_heads=..., intermediate_size=...),
    "StableLM": model("StableLm"),
    "Persimmon": model("Persimmon", num_key_value_heads=...),
    "Falcon": model("Falcon", new_decoder_architecture=False, alibi=False, intermediate_size=...),
    "Falcon, ALiBi": model("Falcon", new_decoder_architecture=False, alibi=True, intermediate_size=...),
    "Bloom": model("Bloom", num_key_value_heads=..., intermediate_size=...),
    "MPT": model("Mpt", d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=2048, no_bias=True),
    "DeepSeek-V2": model("DeepseekV2", **DEEPSEEK),
    "DeepSeek-V3": model("DeepseekV3", **DEEPSEEK),
    "Llama 4": model("Llama4", "Llama4Text", head_dim=16, attention_chunk_size=32, intermediate_size_mlp=96, **LOCAL_EXPERTS),
    "DiffLlama": model("DiffLlama"),
    "Mamba": model("Mamba", num_attention_heads=..., num_key_value_heads=...),
    "Mamba 2": model("Mamba2", num_heads=8, head_dim=16, n_groups=1, num_attention_heads=..., num_key_value_heads=...),
    "LFM2": model("Lfm2", layer_types=["conv", "full_attention"]),
    "RecurrentGemma": model("RecurrentGemma", num_hidden_layers=3),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one kind. `way`: how it is computed, or "" if it is refused; `cache`: whether prefixes are shared; `note`:
    the reason of a refusal, the limit of the context, or what differs."""

    kind: str
    way: str
    cache: bool
    right: bool
    note: str = ""


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY - 10) for _ in range(length)]


async def row(kind: str, folder: Path) -> Row:
    """Makes the model in the folder, and asks the engine and plain transformers (eager)."""
    made, config = KINDS[kind]()
    tiny_model(folder, kind=made, config=config)
    try:
        async with asyncio.timeout(TIMEOUT_S), running(folder, kv_tokens=2048) as engine:
            way, context = engine.way, engine.info.context
            assert way is not None
            computed = "our own pass" if way.own else f"transformers' pass, {way.attention}"
            scores = recorded_scores(engine)
            requests = _requests(context)
            answers = list(await asyncio.gather(*(answer(engine, request) for request in requests[:4])))
            answers += [await answer(engine, request) for request in requests[4:]]
            hit = min(cached for _, cached in answers[4:])
    except SetupError as error:
        return Row(kind, "", cache=False, right=False, note=str(error).partition("): ")[2] or str(error))
    except EngineError as error:
        return Row(kind, computed, way.share, right=False, note=f"answers fail: {error}")
    if way.share and not hit:
        return Row(kind, computed, way.share, right=False, note="nothing was found in the prefix cache")
    note = "within its original context; longer prompts are refused" if constant_until(config) else ""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for number, (request, (tokens, _)) in enumerate(zip(requests, answers, strict=True)):
        with torch.no_grad():
            text = torch.tensor([[*request.prompt, *tokens[:-1]]])
            expected = plain(text, use_cache=False).logits[0, len(request.prompt) - 1 :]
        worst = float((torch.stack(scores[f"r{number}"]) - expected).abs().max())
        if tokens != expected.argmax(-1).tolist() or worst > TOLERANCE:
            return Row(kind, computed, way.share, right=False, note=f"scores differ by {worst:.2g}")
    return Row(kind, computed, way.share, right=True, note=note)


def _requests(context: int) -> list[EngineRequest]:
    """Four at once, of unlike lengths; then two that begin like one of them."""
    long = min(120, context - ANSWER)
    prompts = [prompt(min(length, long), length) for length in (5, 40, 120, 30)]
    prompts += [prompts[2][: long * 5 // 6] + prompt(long // 6, 9), prompts[2]]
    return [EngineRequest(tokens, ANSWER, ignore_eos=True) for tokens in prompts]
