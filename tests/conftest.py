"""For all tests: signals, time limits, and hypothesis profiles by HYPOTHESIS_PROFILE (CONTRIBUTING.md lists them)."""

from __future__ import annotations

import faulthandler
import fnmatch
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.rules import nodes_of, tree_of
from tests.support.tiers import nightly

pytest.register_assert_rewrite("tests.chaos.stage")
# A shell without job control starts what is in the background with SIGINT ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no reason to fail: pytest-timeout limits a test's time.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
_CI = settings.get_profile("ci")
# Forty times the examples of every property test that does not choose a number, and state machines at full depth.
settings.register_profile("nightly", parent=_CI, max_examples=1000)
# State machines take a few steps only: enough to find a value of a type that compiled code refuses.
settings.register_profile("compiled", parent=_CI)
# For `make mutants`: only whether a test fails counts there, not the smallest failing example.
settings.register_profile("mutants", parent=_CI, phases=[Phase.explicit, Phase.generate], database=None, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Workers share the cores: threads of torch would wait for each other, and spin meanwhile. Tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # while a test runs, its output is captured


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that `tests.support.tiers.gate` leaves to the nightly tier. Refuses patterns without a matching case."""
    unseen = dict[str, set[str]]()
    for item in items:
        function, bracket, case = item.nodeid.removesuffix("]").partition("[")
        if bracket and (mark := item.get_closest_marker("gate")):
            found = {name for name in mark.args if fnmatch.fnmatchcase(case, name)}
            unseen[function] = unseen.get(function, set(mark.args)) - found
            if not found:
                item.add_marker(nightly(mark.kwargs["reason"]))
    if not any("::" in argument for argument in config.args):
        wrong = [f"{function} has no case {name}" for function, names in unseen.items() for name in names]
        if wrong:
            raise pytest.UsageError("\n".join(wrong))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Excludes the tests and their imports from garbage collection, because they have millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps files that gateways write by default (snapshots, responses) out of the user's folder."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="module")
def trees() -> Iterator[None]:
    """For modules that read syntax trees: no garbage collection, which goes through all nodes often; then they go."""
    gc.disable()
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ends the process if a test's end hangs: an event loop waits for its threads, possibly for ever. After a failed test
    nothing else would: pytest-timeout has given its signal, and pytest has cancelled faulthandler_timeout.
    """
    config = item.config
    faulthandler.dump_traceback_later(float(config.getini("faulthandler_timeout")), exit=True, file=config.stash[_STDERR])
    return (yield)
