"""What goes wrong inside the real engine is reported to the requests that it concerns; all others are served."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replica.engine import EngineError, EngineRequest, Grammar

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from tests.replica.tiny import WatchedContinuousEngine, answer, running, tiny_model

pytestmark = pytest.mark.model
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def request(first: int = 40, **more: Any) -> EngineRequest:
    return EngineRequest([first, *PROMPT], 10, ignore_eos=True, **more)


async def outcomes(engine: WatchedContinuousEngine, *requests: EngineRequest) -> list[Any]:
    """Tokens, or the error; all at once."""
    ends = await asyncio.gather(*(answer(engine, one) for one in requests), return_exceptions=True)
    return [end if isinstance(end, BaseException) else end[0] for end in ends]


def check_idle(engine: WatchedContinuousEngine) -> None:
    assert engine.failure() is None
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    assert engine.batching.blocks is not None
    assert engine.batching.blocks.unused.wait(60)  # a request that failed alone leaves with the next step
    ledger = engine.batching.blocks.ledger
    ledger.check()
    assert (ledger.used, ledger.spare) == (0, ledger.capacity)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate"), MemoryError()]
)
@pytest.mark.parametrize("good_steps", [0, 3])
async def test_a_step_that_fails_takes_its_requests_and_no_more(model: Path, error: Exception, good_steps: int) -> None:
    async with running(model) as engine:
        expected = (await outcomes(engine, request()))[0]
        runner = engine.router.manager.batch_processor.model_runner
        compute, left = runner.compute_batch, iter([True] * good_steps)

        def compute_until(*args: Any) -> None:
            # Those that were not there yet would be served.
            if len(runner.inputs_and_outputs.requests_in_batch) < 3 or next(left, False):
                return compute(*args)
            runner.compute_batch = compute
            raise error

        runner.compute_batch = compute_until
        lost = [replace(request(at, temperature=1.0, seed=at), max_tokens=200) for at in range(3)]
        ends = await outcomes(engine, *lost)
        assert all(isinstance(end, EngineError) for end in ends)
        assert {str(end) for end in ends} == {str(error) or "MemoryError"}
        check_idle(engine)
        assert await outcomes(engine, request(), request(5)) == [expected, (await outcomes(engine, request(5)))[0]]
        check_idle(engine)


async def test_an_accelerator_that_is_lost_ends_the_engine_which_reports_it(model: Path) -> None:
    async with running(model) as engine:

        def lost(*_: object) -> None:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        engine.router.manager.batch_processor.model_runner.compute_batch = lost
        assert "device-side assert" in str((await outcomes(engine, request()))[0])
        assert "device-side assert" in (engine.failure() or "")
        assert isinstance((await outcomes(engine, request()))[0], EngineError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1, "logprobs": 2}])
async def test_scores_that_are_no_numbers_fail_their_request_alone(model: Path, value: float, sampling: dict[str, Any]) -> None:
    async with running(model) as engine:
        expected = await outcomes(engine, request(1), request(2))

        def spoil(ids: list[str], scores: torch.Tensor) -> None:
            for row in (row for row, name in enumerate(ids) if name == "r3"):
                scores[0, row, 7] = value

        engine.router.spoil = spoil
        first, failed, last = await outcomes(engine, request(1), request(3, **sampling), request(2))
        assert [first, last] == expected
        assert "not numbers" in str(failed)
        check_idle(engine)
        assert (await answer(engine, request(3)))[1] == 0  # what it computed is not shared


async def test_a_sampler_that_fails_fails_its_request_alone(model: Path) -> None:
    async with running(model) as engine:
        expected = await outcomes(engine, request(1))
        # No body may ask for it: scores divided by this are infinite, and chances no chances.
        end, good = await outcomes(engine, request(2, temperature=1.0, repetition_penalty=1e-38), request(1))
        assert isinstance(end, EngineError)
        assert [good] == expected
        check_idle(engine)


class Broken:
    """A grammar that raises at its second token."""

    def __init__(self) -> None:
        self._left = 1

    def start(self, _: Grammar) -> "Broken":
        return Broken()

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def advance(self, _: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("no way on")


async def test_a_grammar_that_fails_fails_its_request_alone(model: Path) -> None:
    async with running(model, grammars=lambda *_: Broken()) as engine:
        expected = await outcomes(engine, request(1))
        end, good = await outcomes(engine, request(2, grammar=Grammar("regex", "a")), request(1))
        assert str(end) == "no way on"
        assert [good] == expected
        check_idle(engine)


async def test_what_is_no_number_does_not_stay_in_the_blocks_of_a_request_that_failed(tmp_path: Path) -> None:
    """Those that get its blocks read them whole, and mask what is not theirs."""
    folder, bad = tiny_model(tmp_path), 7
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network.model.embed_tokens.weight.data[bad] = torch.nan
    network.save_pretrained(folder)
    async with running(folder, kv_tokens=1024, block_size=16) as engine:
        good = [EngineRequest([100 + at, *[50] * length], 4, ignore_eos=True) for at, length in enumerate((3, 20, 900))]
        expected = [await outcomes(engine, one) for one in good]
        assert await engine.reset_prefix_cache()
        (failed,) = await outcomes(engine, EngineRequest([bad] * 1000, 4, ignore_eos=True))  # in every block
        assert "not numbers" in str(failed)
        assert await engine.reset_prefix_cache()
        assert [await outcomes(engine, one) for one in good] == expected
