"""Settings for these tests."""

import pytest

pytest.register_assert_rewrite("tests.chaos.stage")
