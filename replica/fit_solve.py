"""What a replica's answers tell about the costs of its steps.

Theory of operation. The size of the prefill chunk comes first: a prompt beside a stream makes as many of the stream's gaps long
as it has chunks. With it the steps of each measurement are known, and its time is the sum of their amounts times costs
that are the same everywhere: linear equations, of which the relative errors are made least, with no cost below zero.
Engines have steps that are not like this, and machines have other work: what does not fit counts less.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from statistics import fmean

from replica.engine import SetupError
from replica.fit_measure import Beside, Decode, Measured, Prefill
from replica.sim_cost import Costs, SimConfig, Step

SWEEPS, ROUNDS = 20_000, 4
OUTLIER = 0.2  # a relative error from which on a measurement counts less
LEAST_S = 1e-9  # of a prompt's token and of a step: a rate has to be a number


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement, and what the fit makes of it. Seconds: to the first token, or of a decoding step."""

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
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    what: str
    seconds: float
    amounts: tuple[float, ...]


def solve(measured: Measured) -> Fit:
    """Raises SetupError if the measurements fit to no costs at all."""
    chunk = chunk_of(measured.besides)
    rows = [*(_prefill_row(sample, chunk) for sample in measured.prefills), *map(_decode_row, measured.decodes)]
    if chunk:
        rows += [_beside_row(sample, chunk) for sample in measured.besides]
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
    return Fit(config, [Sample(row.kind, row.what, row.seconds, costs.times(row.amounts)) for row in rows])


def chunk_of(besides: Items[Beside]) -> int:
    """The roundest number of tokens that explains how many of a stream's steps each prompt has made longer; 0: none at all.

    A prompt that is done in one step tells only that a chunk is no smaller than it.
    """
    low, high = 1, 1 << 30
    for sample in (sample for sample in besides if sample.batch == 1):
        steps = sample.long_gaps
        if not steps:
            return 0
        at_least = -(-sample.prompt // steps)
        at_most = (sample.prompt - 1) // (steps - 1) if steps > 1 else 1 << 30
        if max(low, at_least) <= min(high, at_most):
            low, high = max(low, at_least), min(high, at_most)
    if not besides:
        return 0
    unit = 1 << (high.bit_length() - 1)
    while -(-low // unit) * unit > high:
        unit //= 2
    if high == 1 << 30:
        return 1 << (low - 1).bit_length()
    return -(-low // unit) * unit


def _pieces(prompt: int, cached: int, chunk: int) -> list[tuple[int, int]]:
    """The pieces of a prompt, one a step."""
    size = chunk or prompt
    return [(min(size, prompt - begin), min(begin + size, prompt)) for begin in range(cached, prompt, size)]


def _prefill_row(sample: Prefill, chunk: int) -> _Row:
    steps = [Step.of([piece], ()) for piece in _pieces(sample.prompt, sample.cached, chunk)]
    kind = "resent" if sample.cached else "cold"
    what = f"{sample.prompt} tokens" + (f", {sample.cached} of them cached" if sample.cached else "")
    return _Row(kind, what, sample.seconds, _sum(steps))


def _decode_row(sample: Decode) -> _Row:
    step = Step.of((), [sample.context] * sample.batch)
    return _Row("decoding", f"{sample.batch} at once, {sample.context} tokens each", sample.seconds, step.amounts)


def _beside_row(sample: Beside, chunk: int) -> _Row:
    """The half of a step that it meets on average, then its own."""
    others = [sample.context] * sample.batch
    met = tuple(amount / 2 for amount in Step.of((), others).amounts)
    own = _sum([Step.of([piece], others) for piece in _pieces(sample.prompt, 0, chunk)])
    amounts = tuple(one + other for one, other in zip(met, own, strict=True))
    return _Row("beside", f"{sample.prompt} tokens, {sample.batch} x {sample.context} decode", sample.seconds, amounts)


def _means(rows: Items[_Row]) -> list[_Row]:
    """Of what was measured several times, the mean: it is what many requests take, whatever the machine did beside."""
    same = dict[tuple[str, str], list[_Row]]()
    for row in rows:
        same.setdefault((row.kind, row.what), []).append(row)
    return [replace(several[0], seconds=fmean(row.seconds for row in several)) for several in same.values()]


def _sum(steps: Items[Step]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*(step.amounts for step in steps), strict=True)))


def _costs(rows: Items[_Row]) -> Costs:
    """Pairs that nobody needs cost at most what the others do: if they seem to cost more, all cost the same."""
    amounts, seconds = [row.amounts for row in rows], [row.seconds for row in rows]
    costs = Costs(*_fitted(amounts, seconds))
    if costs.dense_s > costs.pair_s:
        found = _fitted([(*row[:-2], row[-2] + row[-1]) for row in amounts], seconds)
        costs = Costs(*found, *found[-1:])
    if costs.decode_s < LEAST_S:
        raise SetupError("decoding seems to take no time at all: its streams came in one piece, so nothing can be fitted")
    return costs


def _fitted(rows: Items[tuple[float, ...]], seconds: Items[float]) -> list[float]:
    """Costs >= 0 with the least relative errors: squares, but that large ones count by their size alone (OUTLIER and more)."""
    weights, costs = [1.0] * len(rows), list[float]()
    for _ in range(ROUNDS):
        scaled = [weight / second for weight, second in zip(weights, seconds, strict=True)]
        weighted = [tuple(amount * scale for amount in row) for row, scale in zip(rows, scaled, strict=True)]
        costs = _least_squares(weighted, weights)
        found = [sum(cost * amount for cost, amount in zip(costs, row, strict=True)) for row in rows]
        errors = [abs(value / second - 1) for value, second in zip(found, seconds, strict=True)]
        weights = [(OUTLIER / max(OUTLIER, error)) ** 0.5 for error in errors]
    return costs


def _least_squares(rows: Items[tuple[float, ...]], wanted: Items[float]) -> list[float]:
    """What is >= 0 and comes nearest; by coordinate descent, each in turn. O(SWEEPS)."""
    columns = list(zip(*rows, strict=True))
    scales = [max(*column, LEAST_S) for column in columns]
    columns = [tuple(value / scale for value in column) for column, scale in zip(columns, scales, strict=True)]
    gram = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
    right = [sum(a * b for a, b in zip(column, wanted, strict=True)) for column in columns]
    found = [0.0] * len(columns)
    for _ in range(SWEEPS):
        moved = 0.0
        for at, row in enumerate(gram):
            if row[at]:
                better = max(0.0, found[at] + (right[at] - sum(a * b for a, b in zip(row, found, strict=True))) / row[at])
                moved, found[at] = max(moved, abs(better - found[at])), better
        if moved < 1e-12:
            break
    return [value / scale for value, scale in zip(found, scales, strict=True)]
