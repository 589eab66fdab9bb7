"""Real processes under load, one failure after the other: nothing is lost, and nothing is left behind."""

import pytest

pytest.register_assert_rewrite("tests.chaos.stage")
