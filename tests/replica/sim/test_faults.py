"""What befalls requests: drawn from a seed, as often as was asked for, and nothing unless it was."""

from itertools import islice
from random import Random

import pytest

from replica.sim.faults import Fault, FaultConfig, fault_sequence, lifetime, no_faults

ALL = FaultConfig(latency_s=0.2, errors=0.25, breaks=0.5, death_s=60.0)


def drawn(config: FaultConfig, seed: int = 1, count: int = 2000) -> list[Fault]:
    return list(islice(fault_sequence(config, Random(seed)), count))


def test_nothing_happens_that_was_not_asked_for() -> None:
    assert set(drawn(FaultConfig())) == {Fault()} == set(islice(no_faults(), 5))
    assert lifetime(FaultConfig(), Random(1)) is None


def test_faults_are_as_frequent_and_as_long_as_asked() -> None:
    found = drawn(ALL)
    assert sum(fault.fails for fault in found) / len(found) == pytest.approx(0.25, abs=0.04)
    assert sum(fault.breaks is not None for fault in found) / len(found) == pytest.approx(0.5, abs=0.04)
    delays = [fault.delay_s for fault in found]
    assert sum(delays) / len(delays) == pytest.approx(0.2, rel=0.05)
    assert min(delays) >= 0.1
    assert max(delays) <= 0.3
    lives = [lifetime(ALL, Random(seed)) or 0 for seed in range(200)]
    assert min(lives) >= 30
    assert max(lives) <= 90
    assert len(set(lives)) == 200


def test_all_and_none_are_exact() -> None:
    assert all(fault.fails for fault in drawn(FaultConfig(errors=1.0)))
    assert all(fault.breaks is not None for fault in drawn(FaultConfig(breaks=1.0)))


def test_the_same_seed_has_the_same_faults_whatever_else_is_asked_for() -> None:
    assert drawn(ALL) == drawn(ALL) != drawn(ALL, seed=2)
    alone = drawn(FaultConfig(errors=0.25))
    assert [fault.fails for fault in alone] == [fault.fails for fault in drawn(ALL)]


def test_an_answer_breaks_within_itself() -> None:
    assert Fault().fails_after(10) is None
    assert Fault(fails=True, breaks=0.5).fails_after(10) == 0
    assert Fault(breaks=0.5).fails_after(1) is None
    for answer in (2, 3, 50):
        assert Fault(breaks=0.0).fails_after(answer) == 1
        assert Fault(breaks=0.999).fails_after(answer) == answer - 1
