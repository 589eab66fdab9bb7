"""The two tiers of tests: `make test` runs at least one case of every behaviour, `make test-nightly` all cases.

Each use says what the gate has of the same behaviour.
"""

from __future__ import annotations

import pytest


def nightly(reason: str) -> pytest.MarkDecorator:
    """Of a test or one of its parameters: `make test` leaves it out."""
    return pytest.mark.nightly(reason)


def gate(*cases: str, reason: str) -> pytest.MarkDecorator:
    """Of a test with parameters: `make test` leaves out all but these cases, by their ids, as patterns of a shell."""
    return pytest.mark.gate(*cases, reason=reason)
