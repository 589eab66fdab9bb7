"""A few seconds of `scripts/fuzz.py`, always the same bytes, and every input of the corpus."""

from __future__ import annotations

from random import Random
from types import ModuleType

import pytest

from scripts.fuzz import WHOLE, Run, batches, loop, seeds
from scripts.fuzzing import answers, streams

PLAIN = {"answers": answers, "tap": streams}
# Of each fuzzer of a whole gateway: inputs, and kinds of outcomes that these and the corpus lead to at least.
MADE = {"requests": (240, 10), "shapes": (30, 20), "headers": (240, 20), "salts": (40, 20), "models": (6, 3)}


def turns(run: Run, most: int) -> bool:
    return run.tried >= most


@pytest.mark.parametrize("mode", PLAIN)
def test_bytes_at_random(mode: str) -> None:
    module: ModuleType = PLAIN[mode]
    run = Run(mode, Random(1), seeds(mode))
    assert run.corpus
    loop(run, module.one, lambda: turns(run, 1000))
    assert len(run.kinds) > 5, run.report(0)


@pytest.mark.parametrize("mode", WHOLE)
async def test_clients_at_random(mode: str) -> None:
    run = Run(mode, Random(1), seeds(mode))
    assert run.corpus
    inputs, kinds = MADE[mode]
    await batches(run, lambda: turns(run, inputs))
    assert len(run.kinds) > kinds, run.report(0)


def test_the_corpus_is_small() -> None:
    assert sum(len(data) for mode in (*PLAIN, *WHOLE) for data in seeds(mode)) < 200_000
