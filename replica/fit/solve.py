"""Fits the costs of the simulated engine's steps to the measurements of a replica.

Theory of operation. The size of the prefill chunk comes first: a prompt beside a stream makes as many of the stream's gaps
long as it has chunks. The chunk size determines the steps of each measurement, and a measurement's time is the sum of the
amounts of work in its steps, each times a cost that is the same for all measurements: linear equations, solved for the
smallest relative errors with no cost below zero. Engines have steps that do not follow this model, and machines have other
work: large errors count less (Huber's loss).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from statistics import fmean

from replica.engine import SetupError
from replica.fit.measure import DecodeSample, Measurements, MixedSample, PrefillSample
from replica.sim.cost import SimConfig, StepCosts, StepWork

OUTLIER = 0.2  # relative errors above this count less
TINY = 1e-3  # a mean relative error so small that no further cost is added
SIMPLER = 1.1  # a cost is left out if the mean error without it is at most this many times as large
NEGLIGIBLE = 1e-6  # a cost with a smaller share of every measurement's time counts as zero
TOLERANCES = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14}
LEAST_S = 1e-9  # the least time of a prompt token and of a step, so that rates are finite


@dataclass(frozen=True, slots=True)
class FittedSample:
    """One measurement and its fitted value, in seconds: the time to the first token, or of a decoding step."""

    kind: str
    what: str
    seconds: float
    fitted: float

    @property
    def error(self) -> float:
        return self.fitted / self.seconds - 1


@dataclass(frozen=True, slots=True)
class Fit:
    config: SimConfig
    samples: list[FittedSample]


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    what: str
    seconds: float
    amounts: tuple[float, ...]


def solve(measured: Measurements) -> Fit:
    """Fit the costs. Raises SetupError if no costs fit the measurements."""
    chunk = chunk_of(measured.mixed)
    rows = [*(_prefill_row(sample, chunk) for sample in measured.prefills), *map(_decode_row, measured.decodes)]
    if chunk:
        rows += [_mixed_row(sample, chunk) for sample in measured.mixed]
    rows = _means(rows)
    costs = _costs(rows)
    default = SimConfig()
    config = SimConfig(
        kv_tokens=measured.kv_tokens or default.kv_tokens,
        block_size=measured.block_size or default.block_size,
        max_batch=measured.max_batch or default.max_batch,
        prefill_rate=1 / max(LEAST_S, costs.prompt_s),
        decode_rate=1 / costs.decode_s,
        decode_slowdown=costs.further_s / costs.decode_s,
        prefill_chunk=chunk,
        step_s=costs.step_s,
        context_s=costs.context_s,
        attention_s=costs.pair_s,
        attention_dense=costs.dense_s / costs.pair_s if costs.pair_s else 0.0,
    )
    return Fit(config, [FittedSample(row.kind, row.what, row.seconds, costs.times(row.amounts)) for row in rows])


def chunk_of(samples: Items[MixedSample]) -> int:
    """The roundest chunk size (tokens) that explains the number of a stream's steps that each prompt has made longer; 0: none,
    or unknown.

    A prompt that is computed in one step only shows that a chunk is not smaller than it. A token of each stream is in a chunk,
    too: prompts beside several streams count only if there are no others. A sample that no chunk size explains does not count.
    """
    low, high = 0, 1 << 30
    for sample in [sample for sample in samples if sample.batch == 1] or samples:
        steps = sample.long_gaps
        if not steps:
            return 0
        at_least = -(-sample.prompt // steps)
        at_most = (sample.prompt - 1) // (steps - 1) if steps > 1 else 1 << 30
        if max(low, at_least) <= min(high, at_most):
            low, high = max(low, at_least), min(high, at_most)
    if not low:
        return 0
    unit = 1 << (high.bit_length() - 1)
    while -(-low // unit) * unit > high:
        unit //= 2
    if high == 1 << 30:
        return 1 << (low - 1).bit_length()
    return -(-low // unit) * unit


def _pieces(prompt: int, cached: int, chunk: int) -> list[tuple[int, int]]:
    """The pieces of a prompt, one per step."""
    size = chunk or prompt
    return [(min(size, prompt - begin), min(begin + size, prompt)) for begin in range(cached, prompt, size)]


def _prefill_row(sample: PrefillSample, chunk: int) -> _Row:
    steps = [StepWork.of([piece], ()) for piece in _pieces(sample.prompt, sample.cached, chunk)]
    kind = "resent" if sample.cached else "cold"
    what = f"{sample.prompt} tokens" + (f", {sample.cached} of them cached" if sample.cached else "")
    return _Row(kind, what, sample.seconds, _sum(steps))


def _decode_row(sample: DecodeSample) -> _Row:
    step = StepWork.of((), [sample.context] * sample.batch)
    return _Row("decoding", f"{sample.batch} at once, {sample.context} tokens each", sample.seconds, step.amounts)


def _mixed_row(sample: MixedSample, chunk: int) -> _Row:
    """The row of a mixed sample: half of a running step, on average, then its own steps."""
    others = [sample.context] * sample.batch
    waited = tuple(amount / 2 for amount in StepWork.of((), others).amounts)
    own = _sum([StepWork.of([piece], others) for piece in _pieces(sample.prompt, 0, chunk)])
    amounts = tuple(one + other for one, other in zip(waited, own, strict=True))
    return _Row("beside", f"{sample.prompt} tokens, {sample.batch} x {sample.context} decode", sample.seconds, amounts)


def _means(rows: Items[_Row]) -> list[_Row]:
    """The mean of repeated measurements: the mean is the expected time of a request on a machine with other work."""
    groups = dict[tuple[str, str], list[_Row]]()
    for row in rows:
        groups.setdefault((row.kind, row.what), []).append(row)
    return [replace(several[0], seconds=fmean(row.seconds for row in several)) for several in groups.values()]


def _sum(steps: Items[StepWork]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*(step.amounts for step in steps), strict=True)))


def _costs(rows: Items[_Row]) -> StepCosts:
    """The costs with the smallest errors. Attention pairs that are not needed cost nothing if the measurements can be explained
    as well without: contexts longer than the measured ones have very many of them. And they cost at most as much as the others:
    if the fit has them cost more, all cost the same.
    """
    amounts, seconds = [row.amounts for row in rows], [row.seconds for row in rows]
    found, without = _fitted(amounts, seconds), _fitted([row[:-1] for row in amounts], seconds)
    costs = StepCosts(*found)
    if _error(without, amounts, seconds) <= SIMPLER * _error(found, amounts, seconds) + TINY:
        costs = StepCosts(*[*without, 0.0])
    elif costs.dense_s > costs.pair_s:
        found = _fitted([(*row[:-2], row[-2] + row[-1]) for row in amounts], seconds)
        costs = StepCosts(*found, *found[-1:])
    if costs.decode_s < LEAST_S:
        raise SetupError("decoding seems to take no time: its streams arrived in one piece, so no costs can be fitted")
    return costs


def _error(costs: Items[float], rows: Items[tuple[float, ...]], seconds: Items[float]) -> float:
    """The mean relative error of all measurements. `rows`: the amounts of each; the last amount may have no cost."""
    times = (sum(cost * amount for cost, amount in zip(costs, row, strict=False)) for row in rows)
    return fmean(abs(time / taken - 1) for time, taken in zip(times, seconds, strict=True))


def _fitted(rows: Items[tuple[float, ...]], seconds: Items[float]) -> list[float]:
    """Costs >= 0 with the least relative errors: squared, but linear above OUTLIER (Huber's loss). Columns are scaled to 1."""
    import numpy
    from scipy.optimize import least_squares, nnls

    relative = numpy.array(rows) / numpy.array(seconds)[:, None]
    scales = numpy.maximum(relative.max(axis=0), LEAST_S)
    relative /= scales
    start, _ = nnls(relative, numpy.ones(len(rows)))
    found = least_squares(
        lambda costs: relative @ costs - 1,
        start,
        jac=lambda _: relative,
        bounds=(0, numpy.inf),
        loss="huber",
        f_scale=OUTLIER,
        **TOLERANCES,
    ).x
    # The solver stays inside the bounds: a cost that explains no measurement is zero.
    return [float(cost) for cost in numpy.where(found < NEGLIGIBLE, 0.0, found) / scales]
