"""Which device, which attention, how much memory: what of it can be decided without a GPU."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replica.engine import EngineRequest, SetupError

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from replica.torch_engine.device import (
    CPU_KV_TOKENS,
    batching_config,
    default_kv_tokens,
    device_named,
    fastest_attention,
    kv_tokens_that_fit,
    use_fastest_attention,
)
from replica.torch_engine.patches import OutputRouter
from tests.replica.tiny import answer, running, tiny_model
from tests.support.tiers import gate

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def batching(page_size: int = 4) -> ContinuousBatchingConfig:
    return batching_config(page_size, 0, batch_tokens=64, max_batch=4)


def test_a_cpu_when_it_is_asked_for() -> None:
    assert device_named("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    assert device_named("auto") == torch.device("cpu")
    with pytest.raises(SetupError, match=r"--device cuda: torch .* finds no CUDA device"):
        device_named("cuda")


@pytest.mark.parametrize(
    ("generation", "flash_2", "flash_3", "fastest"),
    [
        (9, True, True, "flash_attention_3"),
        (9, True, False, "flash_attention_2"),
        (8, True, True, "flash_attention_2"),
        (10, False, True, "sdpa"),
        (7, True, True, "sdpa"),
        (9, False, False, "sdpa"),
    ],
)
def test_the_fastest_attention(generation: int, flash_2: bool, flash_3: bool, fastest: str) -> None:
    assert fastest_attention(generation, lambda: flash_2, lambda: flash_3) == fastest


def test_what_the_gpu_cannot_run_is_not_fetched() -> None:
    def fetched() -> bool:
        raise AssertionError

    assert fastest_attention(7, fetched, fetched) == "sdpa"
    assert fastest_attention(8, lambda: True, fetched) == "flash_attention_2"


def test_the_attention_that_plans_each_shape_is_not_used_on_a_gpu() -> None:
    """H100: a step of an answer took 55 ms with it, 13 ms without."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        model: Any = SimpleNamespace(
            device=torch.device("cuda", 0), dtype=torch.float32, config=SimpleNamespace(_attn_implementation="sdpa")
        )
        with contextlib.suppress(AssertionError, RuntimeError):  # here there is no GPU whose name could be logged
            use_fastest_attention(model)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_on_a_cpu_the_cache_has_a_fixed_size(model: Path) -> None:
    assert default_kv_tokens(AutoModelForCausalLM.from_pretrained(model), batching()) == CPU_KV_TOKENS


def test_the_cache_has_four_blocks_at_least(model: Path) -> None:
    with pytest.raises(SetupError, match="32768 tokens of KV memory are not four blocks"):
        default_kv_tokens(AutoModelForCausalLM.from_pretrained(model), batching(8193))


async def test_without_a_size_the_engine_takes_the_devices(model: Path) -> None:
    async with running(model, kv_tokens=0) as engine:
        assert engine.info.num_blocks == CPU_KV_TOKENS // 4


@pytest.mark.parametrize(("asked", "told"), [(5000, True), (1000, False)])
async def test_a_context_for_which_there_is_no_room_is_told(
    model: Path, caplog: pytest.LogCaptureFixture, asked: int, told: bool
) -> None:
    async with running(model, max_model_len=asked) as engine:
        assert engine.info.context == min(asked, 1024)
    assert ("--max-model-len 5000: there is room for 1024 tokens" in caplog.text) == told


@pytest.mark.parametrize("page_size", [4, 5, 16])
@gate("5", reason="a size that divides nothing")
def test_the_room_is_what_transformers_would_take(model: Path, page_size: int) -> None:
    loaded: Any = LlamaForCausalLM.from_pretrained(model)
    tokens = kv_tokens_that_fit(loaded, batching(page_size), 0.001)
    own = batching(page_size)
    own.max_memory_percent = 0.001
    manager = loaded.init_continuous_batching(GenerationConfig(do_sample=False), own)
    manager.warmup()
    assert tokens == pytest.approx(manager.batch_processor.cache.num_blocks * page_size, rel=0.01)
    assert tokens > 1000


def test_no_room_is_an_error(model: Path) -> None:
    with pytest.raises(SetupError, match="there is no room for KV memory beside the model"):
        kv_tokens_that_fit(AutoModelForCausalLM.from_pretrained(model), batching(), 1e-9)


async def test_a_cache_that_does_not_fit_is_an_error(model: Path) -> None:
    with pytest.raises(SetupError, match="there is no memory for --kv-tokens 100000000000"):
        async with running(model, kv_tokens=100_000_000_000):
            pass


class Stream:
    """A stream as transformers makes one on a GPU. `waited`: how often somebody waited for it."""

    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes no other streams than its own")
async def test_the_stream_that_is_taken_away_is_the_one_that_transformers_computes_on(model: Path) -> None:
    """A CPU has none: with one given to it, steps are computed and drawn on that one, and waited for."""
    stream, seen = Stream(), list[object]()
    async with running(model, device="cpu") as engine:
        engine.router.manager.batch_processor.inputs_and_outputs.compute_stream = stream
        engine.router.spoil = lambda ids, scores: seen.append(torch.cpu.current_stream())
        await answer(engine, EngineRequest([1, 2, 3], 3, ignore_eos=True))
    assert seen == [stream] * 3
    assert stream.waited >= 3


async def test_the_stream_is_taken_away(model: Path) -> None:
    loaded: Any = LlamaForCausalLM.from_pretrained(model)
    manager = loaded.init_continuous_batching(GenerationConfig(do_sample=False), batching_config(4, 64, 64, 4))
    manager.warmup()
    manager.batch_processor.inputs_and_outputs.compute_stream = Stream()
    OutputRouter(asyncio.get_running_loop(), lambda outputs: None, {}).install(manager)
    assert manager.batch_processor.inputs_and_outputs.compute_stream is None
