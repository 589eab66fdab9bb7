"""What is wrong is found before the replica is ready: another way is taken, or the model is refused."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replica.engine import EngineRequest, PromptError, SetupError
from replica.torch_engine.attention import AttentionStep

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from replica.cli import main
from replica.torch_engine.batching import BatchRunner
from replica.torch_engine.checks import selftest
from replica.torch_engine.checks.selftest import ANSWER, Mismatch
from replica.torch_engine.continuous import ComputeMethod, ways
from replica.torch_engine.llama import PackedLlama
from tests.replica.architectures import KINDS
from tests.replica.tiny import answer, running, tiny_model
from tests.support.tiers import gate

pytestmark = pytest.mark.model
TEXT = [(7 * at * at + 3 * at) % 256 for at in range(100)]


class Shifted(PackedLlama):
    """Every other position is missing."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return super().__call__(ids, positions * 2, wanted, step)


class Forgetful(PackedLlama):
    """Loses what is cached when the first request has ended."""

    steps = 0

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        self.steps += bool(step.answers)
        if self.steps == ANSWER - 1 and step.prompts:
            step.allocator.get_cache_for_block_table(0)[1].zero_()
        return super().__call__(ids, positions, wanted, step)


class Confused(PackedLlama):
    """Mistakes one request for another."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return super().__call__(ids, positions, wanted, step).flip(0)


class Broken(PackedLlama):
    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        raise RuntimeError("no such kernel")


class Unfit(PackedLlama):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        raise RuntimeError("no such layout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


async def outcome_of(
    folder: Path, forward: Callable[[Any], PackedLlama] | None, block_size: int = 16, share: bool = True
) -> bool:
    """Whether prefixes were shared. Raises Mismatch."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = selftest.expect(model, TEXT, block_size, 4096)
    sizes = selftest.sizes(expected, block_size, share)
    batching = BatchRunner(model, forward and forward(model), sizes, [])
    await selftest.check(batching, expected, torch.float32)
    return batching.blocks is not None


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("forward", [PackedLlama, None])
@gate("PackedLlama-16", "None-4", reason="each way, two sizes")
async def test_what_is_right_passes(folder: Path, forward: type[PackedLlama] | None, block_size: int) -> None:
    assert await outcome_of(folder, forward, block_size)
    assert not await outcome_of(folder, None, block_size, share=False)


@pytest.mark.parametrize(
    ("forward", "reason", "cold"),
    [
        (Shifted, "12 of 12 tokens that are computed alone have other scores than in the plain model, from token 1 ", True),
        (Forgetful, "4 of 4 tokens that are computed again have other scores", False),
        (Confused, "of 8 tokens that are computed beside another have other scores", False),
        (Broken, "no such kernel", True),
    ],
)
async def test_what_is_wrong_is_found(folder: Path, forward: type[PackedLlama], reason: str, cold: bool) -> None:
    with pytest.raises(Mismatch, match=reason) as caught:
        await outcome_of(folder, forward)
    assert caught.value.cold == cold


async def test_scores_that_are_not_numbers_are_found(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ArithmeticError, match="plain model's scores for the next token are not numbers"):
        await outcome_of(tmp_path, None)


def test_the_long_text_crosses_blocks_and_a_short_window(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def lengths(block_size: int, context: int = 4096, window: int | None = None) -> list[int]:
        model.config.sliding_window = window
        return [len(each.prompt) for each in selftest.expect(model, TEXT, block_size, context)]

    assert [lengths(size) for size in (4, 16, 32, 256)] == [[37, 7], [37, 7], [69, 7], [261, 7]]
    assert lengths(16, window=128) == [133, 7]
    assert lengths(16, window=4096) == [37, 7]
    assert lengths(16, context=64) == [37, 7]
    assert lengths(16, context=40) == [28, 7]


@pytest.mark.parametrize("forward", [Shifted, Broken, Unfit])
async def test_another_way_is_taken_if_it_is_right(
    folder: Path, forward: type[PackedLlama], caplog: pytest.LogCaptureFixture
) -> None:
    request = EngineRequest(TEXT[:30], 8, ignore_eos=True)
    with caplog.at_level(logging.INFO, "replica.torch_engine.continuous"):
        async with running(folder) as right, running(folder, forward=forward) as other:
            assert (right.way, other.way) == (ComputeMethod(True, "sdpa"), ComputeMethod(False, "sdpa"))
            assert await answer(other, request) == await answer(right, request)
    assert "self-test: not with our own forward pass: " in caplog.text
    assert "cold, cached and batched, are the plain model's, with transformers' forward pass (sdpa)" in caplog.text


def test_the_ways_and_their_order() -> None:
    shared = [ComputeMethod(True, "sdpa"), ComputeMethod(False, "sdpa"), ComputeMethod(False, "eager")]
    assert list(ways(True, "sdpa")) == [*shared, *(replace(way, share=False) for way in shared[1:])]
    assert list(ways(False, "eager")) == [ComputeMethod(False, "eager"), ComputeMethod(False, "eager", share=False)]
    assert [way.attention for way in ways(False, "flash_attention_2") if way.share] == ["flash_attention_2", "sdpa", "eager"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("StableLM", r"cannot serve .* \(StableLmForCausalLM\): its attention is code of its own in transformers"),
        ("Falcon, ALiBi", r"\(FalconForCausalLM\): its attention is code of its own in transformers"),
        ("DeepSeek-V3", r"\(DeepseekV3ForCausalLM\): its keys and values differ in size"),
        ("Llama 4", "it has layers of the type chunked_attention, for which transformers has no paged cache"),
        ("Nemotron", "its layers do not pass the paged cache to their attention"),
        ("DiffLlama", "12 of 12 tokens that are computed alone have other scores than in the plain model"),
    ],
)
@gate("StableLM*", "Llama 4*", "DiffLlama*", reason="each kind of reason")
async def test_a_model_that_no_way_computes_right_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    made, config = KINDS[kind]()
    with pytest.raises(SetupError, match=reason):
        async with running(tiny_model(tmp_path, kind=made, config=config)):
            pass


@pytest.mark.parametrize("kind", ["Llama, dynamic NTK", "Phi-3, longrope"])
async def test_where_positions_depend_on_the_length_no_request_is_longer(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, config = KINDS[kind]()
    async with running(tiny_model(tmp_path, kind=made, config=config), max_model_len=200) as engine:
        assert engine.info.context == 64
        assert len((await answer(engine, EngineRequest(TEXT[:56], 8, ignore_eos=True)))[0]) == 8
        with pytest.raises(PromptError, match="more than the context of 64 tokens"):
            engine.submit(EngineRequest(TEXT[:57], 8))
    limited = "the context is limited to 64 of 2048 tokens: beyond, this model's rotary positions (longrope)"
    assert (limited in caplog.text) == (kind == "Phi-3, longrope")


def test_the_command_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made, config = KINDS["StableLM"]()
    tiny_model(tmp_path, kind=made, config=config)
    assert main(["--port", "0", "--kv-tokens", "1024", "--device", "cpu", "--model", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("warmroute replica: ")]
    assert len(lines) == 1
    assert "Traceback" not in printed
    assert "Traceback" not in caplog.text
    assert lines[0].startswith(f"warmroute replica: cannot serve {tmp_path} (StableLmForCausalLM): its attention is code of ")
