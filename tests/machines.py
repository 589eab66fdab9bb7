"""State machines that count: what is promised is a number of steps, each followed by every check, not a number of examples."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

STEPS = 10_000


class CountedMachine(RuleBasedStateMachine):
    """taken: the steps of all its examples so far. Its other invariants are checked as often as this one."""

    taken = 0

    @invariant()
    def count(self) -> None:
        type(self).taken += 1


def steps_of(machine: type[CountedMachine], *, examples: int, steps: int) -> int:
    """Run a machine here and now, and say how many steps it took.

    Run and count are one test, so that no order of tests and no distribution over processes can part them.
    """
    machine.taken = 0
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))
    return machine.taken
