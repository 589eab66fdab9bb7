"""What befalls requests: drawn from a seed, as often as was asked for, and nothing unless it was."""

from itertools import islice
from random import Random

import pytest

from replica.faults import Fate, FaultConfig, fates, lifetime, no_fates

ALL = FaultConfig(latency_s=0.2, errors=0.25, breaks=0.5, death_s=60.0)


def drawn(config: FaultConfig, seed: int = 1, count: int = 2000) -> list[Fate]:
    return list(islice(fates(config, Random(seed)), count))


def test_nothing_happens_that_was_not_asked_for() -> None:
    assert set(drawn(FaultConfig())) == {Fate()} == set(islice(no_fates(), 5))
    assert lifetime(FaultConfig(), Random(1)) is None


def test_faults_are_as_frequent_and_as_long_as_asked() -> None:
    found = drawn(ALL)
    assert sum(fate.fails for fate in found) / len(found) == pytest.approx(0.25, abs=0.04)
    assert sum(fate.breaks is not None for fate in found) / len(found) == pytest.approx(0.5, abs=0.04)
    delays = [fate.delay_s for fate in found]
    assert sum(delays) / len(delays) == pytest.approx(0.2, rel=0.05)
    assert min(delays) >= 0.1
    assert max(delays) <= 0.3
    lives = [lifetime(ALL, Random(seed)) or 0 for seed in range(200)]
    assert min(lives) >= 30
    assert max(lives) <= 90
    assert len(set(lives)) == 200


def test_all_and_none_are_exact() -> None:
    assert all(fate.fails for fate in drawn(FaultConfig(errors=1.0)))
    assert all(fate.breaks is not None for fate in drawn(FaultConfig(breaks=1.0)))


def test_the_same_seed_has_the_same_faults_whatever_else_is_asked_for() -> None:
    assert drawn(ALL) == drawn(ALL) != drawn(ALL, seed=2)
    alone = drawn(FaultConfig(errors=0.25))
    assert [fate.fails for fate in alone] == [fate.fails for fate in drawn(ALL)]


def test_an_answer_breaks_within_itself() -> None:
    assert Fate().last_token(10) is None
    assert Fate(fails=True, breaks=0.5).last_token(10) == 0
    assert Fate(breaks=0.5).last_token(1) is None
    for answer in (2, 3, 50):
        assert Fate(breaks=0.0).last_token(answer) == 1
        assert Fate(breaks=0.999).last_token(answer) == answer - 1
