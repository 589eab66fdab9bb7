"""The journal of a run whose store does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.database.failures import StoreFailed
from gateway.features.workflows.background.journal import StoredRunJournal
from gateway.features.workflows.background.store import WorkflowRunStore


class LateStore(WorkflowRunStore):
    """Answers the third request."""

    def __init__(self) -> None:
        self.asked = 0

    async def record(self, *_row: Any) -> bool:
        self.asked += 1
        if self.asked < 3:
            raise StoreFailed("away")
        return True


async def test_a_run_that_waits_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    store = LateStore()
    journal = StoredRunJournal(store, ("o", "run_1"), "one", lambda: None, lambda: False, retry_s=0)
    await journal.call("a")
    assert (store.asked, caplog.messages) == (3, ["a run waits for its store"])
