"""State machines with a guaranteed number of steps, each followed by every check, instead of a number of examples.

Machines are the expensive tests. The nightly profile has the full depth; the other profiles have a share of it.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

FULL_STEPS = 10_000
SHARES = {"nightly": 1, "mutants": 5, "compiled": 50}  # one step in this number; the other profiles: one in DEFAULT_SHARE
DEFAULT_SHARE = 10
SHARE = SHARES.get(settings.get_current_profile_name(), DEFAULT_SHARE)
STEPS = FULL_STEPS // SHARE


def share_of(examples: int) -> int:
    """The number of examples in this profile, of the number at full depth; a quarter more, because few examples differ more."""
    return examples if SHARE == 1 else examples * 5 // 4 // SHARE + 1


class CountedMachine(RuleBasedStateMachine):
    """taken: the steps of all its examples so far. Its other invariants are checked equally often."""

    taken = 0

    @invariant()
    def count(self) -> None:
        type(self).taken += 1


def steps_of(machine: type[CountedMachine], *, examples: int, steps: int) -> int:
    """Runs a machine at this profile's depth, and returns the number of its steps.

    Run and count are one test, so that no order or distribution of tests can separate them.
    """
    machine.taken = 0
    run_state_machine_as_test(machine, settings=settings(max_examples=share_of(examples), stateful_step_count=steps))
    return machine.taken
