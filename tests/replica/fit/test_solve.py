"""StepCosts from made-up measurements: what went in comes out."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from replica.engine import SetupError
from replica.fit.measure import DecodeSample, Measurements, MixedSample, PrefillSample, long_gaps
from replica.fit.solve import chunk_of, solve
from replica.sim.cost import SimConfig, StepWork

CHUNK = 512


def measured(config: SimConfig, noise: Callable[[], float] = lambda: 1.0) -> Measurements:
    """An engine of these costs, measured; `noise` is what each time is multiplied with."""

    def seconds(prompt: int, cached: int, others: list[int]) -> float:
        size = config.prefill_chunk or prompt
        pieces = [(min(size, prompt - begin), min(begin + size, prompt)) for begin in range(cached, prompt, size)]
        return noise() * sum(config.costs.seconds(StepWork.of([piece], others)) for piece in pieces)

    def decode(batch: int, context: int) -> float:
        return noise() * config.costs.seconds(StepWork.of((), [context] * batch))

    found = Measurements(block_size=16)
    for length in (64, 128, 256, 512, 1024, 2048):
        for prompt, cached in ((length, 0), (length, length - 16), (length + 32, length)):
            found.prefills.append(PrefillSample(prompt, cached, seconds(prompt, cached, [])))
    for batch, context in ((1, 76), (2, 76), (4, 76), (8, 76), (16, 76), (1, 500), (4, 500), (8, 500), (1, 2000)):
        found.decodes.append(DecodeSample(batch, context, decode(batch, context)))
    for batch, context, prompt in ((1, 76, 1920), (1, 76, 1408), (4, 260, 960)):
        gaps = -(-prompt // (config.prefill_chunk - batch)) if config.prefill_chunk else 0
        took = decode(batch, context) / 2 + seconds(prompt, 0, [context] * batch)
        found.mixed.append(MixedSample(prompt, batch, context, took, gaps))
    return found


def costing(**options: float) -> SimConfig:
    rates = {"prefill_rate": 1400.0, "decode_rate": 30.0, "prefill_chunk": CHUNK, "block_size": 16, "kv_tokens": 100_000}
    return SimConfig(**(rates | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        costing(),
        costing(prefill_chunk=0),
        costing(decode_slowdown=0.03, step_s=0.03),
        costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6),
        costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6, attention_dense=0.5),
        costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6, attention_dense=1.0),
    ],
)
def test_what_went_in_comes_out(config: SimConfig) -> None:
    fit = solve(measured(config))
    assert fit.config.prefill_chunk == config.prefill_chunk
    assert all(abs(sample.error) < 0.01 for sample in fit.samples), fit.samples
    assert fit.config.prefill_rate == pytest.approx(config.prefill_rate, rel=0.03)
    assert fit.config.decode_rate == pytest.approx(config.decode_rate, rel=0.03)
    assert fit.config.attention_s == pytest.approx(config.attention_s, rel=0.05, abs=2e-8)
    assert fit.config.attention_dense == pytest.approx(config.attention_dense, abs=0.05) or config.attention_s == 0


def test_noise_is_averaged_out_and_no_cost_is_below_zero() -> None:
    config = costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6, attention_dense=1.0)
    chance = random.Random(3)
    fit = solve(measured(config, lambda: chance.uniform(0.9, 1.1)))
    assert fit.config.prefill_rate == pytest.approx(config.prefill_rate, rel=0.2)
    assert fit.config.attention_s == pytest.approx(config.attention_s, rel=0.2)
    assert fit.config.attention_dense <= 1
    assert min(fit.config.context_s, fit.config.step_s, fit.config.decode_slowdown) >= 0


@pytest.mark.parametrize("seed", range(6))
def test_pairs_that_are_not_needed_cost_nothing_unless_that_is_clear(seed: int) -> None:
    """A little, explained by noise, would be much where contexts are long."""
    chance = random.Random(seed)
    config = costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6)
    assert solve(measured(config, lambda: chance.uniform(0.95, 1.05))).config.attention_dense == 0
    dense = replace(config, attention_dense=1.0)
    assert solve(measured(dense, lambda: chance.uniform(0.95, 1.05))).config.attention_dense > 0.5


def test_a_measurement_that_was_disturbed_changes_little() -> None:
    config = costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6, attention_dense=1.0)
    found = measured(config)
    found.prefills[0] = replace(found.prefills[0], seconds=4 * found.prefills[0].seconds)
    found.decodes[7] = replace(found.decodes[7], seconds=2 * found.decodes[7].seconds)
    fit = solve(found)
    assert fit.config.prefill_rate == pytest.approx(config.prefill_rate, rel=0.05)
    assert fit.config.step_s == pytest.approx(config.step_s, rel=0.1)
    assert fit.config.attention_s == pytest.approx(config.attention_s, rel=0.05)


@pytest.mark.parametrize(
    ("long_gaps", "chunk"),
    [((4, 3), 512), ((8, 6), 256), ((2, 2), 1024), ((1, 1), 2048), ((0, 0), 0), ((7, 5), 288)],
)
def test_the_roundest_chunk_that_explains_the_long_gaps(long_gaps: tuple[int, int], chunk: int) -> None:
    samples = [MixedSample(prompt, 1, 76, 1.0, gaps) for prompt, gaps in zip((1920, 1408), long_gaps, strict=True)]
    assert chunk_of(samples) == chunk
    assert chunk_of([]) == 0


def test_a_chunk_that_only_several_streams_show_is_found_beside_them() -> None:
    """The streams beside which the two longest prompts were measured had ended too early."""
    found = measured(costing())
    found.mixed = [sample for sample in found.mixed if sample.batch > 1]
    fit = solve(found)
    assert fit.config.prefill_chunk == CHUNK
    assert all(abs(sample.error) < 0.01 for sample in fit.samples), fit.samples


def test_steps_that_no_chunk_explains_give_none() -> None:
    """Thirty long steps while 40 tokens were computed: something else was slow."""
    found = measured(costing(prefill_chunk=0))
    found.mixed = [MixedSample(40, 1, 76, 1.0, 30)]
    fit = solve(found)
    assert fit.config.prefill_chunk == 0
    assert "beside" not in {sample.kind for sample in fit.samples}


def test_streams_that_take_no_time_are_refused() -> None:
    found = measured(costing())
    found.decodes = [DecodeSample(batch, 76, 1e-12) for batch in (1, 2, 4)]
    found.mixed = []
    with pytest.raises(SetupError, match="in one piece"):
        solve(found)


def test_what_is_measured_several_times_counts_with_its_mean() -> None:
    """Half of all measurements met a machine that was a third slower: the mean comes out, reported once."""
    config = costing(decode_slowdown=0.03, step_s=0.03, context_s=1e-5, attention_s=1e-6)
    both, slow = measured(config), measured(config, lambda: 4 / 3)
    both.prefills += slow.prefills
    both.decodes += slow.decodes
    both.mixed += slow.mixed
    fit = solve(both)
    assert fit.config.prefill_rate == pytest.approx(config.prefill_rate * 6 / 7, rel=0.02)
    assert fit.config.decode_rate == pytest.approx(config.decode_rate * 6 / 7, rel=0.02)
    assert len({(sample.kind, sample.what) for sample in fit.samples}) == len(fit.samples) == len(solve(slow).samples)


@pytest.mark.parametrize(
    ("gaps", "count"),
    [
        ([0.02, 0.021, 0.029], 0),
        ([], 0),
        ([0.033, 0.49, 0.747, 1.5, 0.3, 0.02], 4),  # 0.033: slow by itself
        ([0.05], 1),
        ([0.02, 0.035, 0.035, 0.03], 2),
    ],
)
def test_the_steps_that_a_prompt_made_longer(gaps: list[float], count: int) -> None:
    assert long_gaps(gaps, 0.02) == count
