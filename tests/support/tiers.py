"""The two tiers of tests: `make test` runs at least one case of every behaviour, `make test-nightly` all cases.

Each use says which gate cases cover the same behaviour.
"""

from __future__ import annotations

import pytest


def nightly(reason: str) -> pytest.MarkDecorator:
    """Marks a test or one of its parameters that `make test` leaves out."""
    return pytest.mark.nightly(reason)


def gate(*cases: str, reason: str) -> pytest.MarkDecorator:
    """Marks a parametrized test of which `make test` runs only these cases, by their ids, as shell patterns."""
    return pytest.mark.gate(*cases, reason=reason)
