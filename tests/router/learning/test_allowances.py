"""The memory of credits that no engine has counted."""

from __future__ import annotations

from router.learning.allowances import CLIENT_SHARE, TOTAL_SHARE, UncountedMemory

MOST = 8000
SHARE = MOST // CLIENT_SHARE


def test_each_client_has_a_share_and_all_have_one_together() -> None:
    memory = UncountedMemory()
    assert memory.admit(0, SHARE, MOST, 0.0, 60.0)
    assert memory.admit(1, SHARE, MOST, 0.0, 60.0)
    assert not memory.admit(1, 1, MOST, 0.0, 60.0)
    assert not memory.admit(2, 1, MOST, 0.0, 60.0), "together"
    assert 2 * SHARE == MOST // TOTAL_SHARE
    memory.clients.check()


def test_a_client_of_any_number_has_its_own_share() -> None:
    memory = UncountedMemory()
    assert memory.admit(1, SHARE, MOST, 0.0, 60.0)
    assert memory.admit(0, SHARE, MOST, 0.0, 60.0)
