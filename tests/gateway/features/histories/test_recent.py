"""What connections remember of their newest responses: any use of it, compared with a plain model, and its bounds."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from gateway.admission.memory import Budget
from gateway.features.histories.recent import MAX_HISTORY, MAX_LANES, SHARE, ConnectionResponses, RecentResponses
from tests.support.machines import STEPS, CountedMachine, steps_of

LIMIT = 10_000
MOST = int(LIMIT * 4 // 5 * SHARE)
CONNECTIONS = st.integers(0, 3)
LANES = st.sampled_from(["", "a", "b"])


class Connections(CountedMachine):
    """Four connections of two clients, and a model: what was used last is at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(LIMIT)
        self.recent = RecentResponses()
        self.holders = [self.budget.lease(f"client {number % 2}") for number in range(4)]
        self.newest = [self._opened(number) for number in range(4)]
        self.model: OrderedDict[tuple[int, str], tuple[str, bytes]] = OrderedDict()
        self.number = 0

    def _opened(self, at: int) -> ConnectionResponses:
        return ConnectionResponses(self.recent, self.holders[at].account)

    @rule(at=CONNECTIONS, lane=LANES, size=st.integers(0, MOST + 1))
    def remember(self, at: int, lane: str, size: int) -> None:
        self.number += 1
        id_, items = f"resp_{self.number}", bytes([self.number % 256]) * size
        self.newest[at].remember(lane, id_, items)
        self.model.pop((at, lane), None)
        if size <= MOST:
            self.model[at, lane] = id_, items
            while sum(len(kept) for _, kept in self.model.values()) > MOST:
                self.model.popitem(last=False)

    @rule(at=CONNECTIONS, back=st.integers(0, 12))
    def find(self, at: int, back: int) -> None:
        id_ = f"resp_{self.number - back}"
        key = next((key for key, (kept, _) in self.model.items() if kept == id_ and key[0] == at), None)
        found = self.newest[at].find(id_)
        assert found == (self.model[key][1] if key else None)
        if key:
            self.model.move_to_end(key)

    @rule(at=CONNECTIONS)
    def close(self, at: int) -> None:
        old = self.newest[at]
        old.close()
        old.remember("", "late", b"x")  # its answer is complete when the client has left
        assert old.find("late") is None
        self.newest[at] = self._opened(at)
        for key in [key for key in self.model if key[0] == at]:
            del self.model[key]

    @invariant()
    def holds(self) -> None:
        self.recent.check()
        self.budget.check()
        assert self.recent.held == self.budget.held == sum(len(kept) for _, kept in self.model.values()) <= MOST

    def teardown(self) -> None:
        for newest in self.newest:
            newest.close()
            newest.close()
        assert self.recent.held == self.budget.held == 0


def test_any_use() -> None:
    assert steps_of(Connections, examples=300, steps=40) >= STEPS


def test_a_connection_has_only_so_many_lanes() -> None:
    budget, recent = Budget(1 << 20), RecentResponses()
    newest = ConnectionResponses(recent, budget.lease("c").account)
    for number in range(1000):
        newest.remember(str(number), f"resp_{number}", b"xx")
    recent.check()
    assert recent.held == 2 * MAX_LANES
    assert newest.find("resp_999") == b"xx"
    assert newest.find(f"resp_{999 - MAX_LANES}") is None


def test_a_large_history_is_not_remembered_and_what_was_before_is_gone() -> None:
    budget, recent = Budget(1 << 30), RecentResponses()
    newest = ConnectionResponses(recent, budget.lease("c").account)
    newest.remember("", "resp_1", bytes(MAX_HISTORY))
    assert newest.find("resp_1")
    newest.remember("", "resp_2", bytes(MAX_HISTORY + 1))
    assert newest.find("resp_1") is newest.find("resp_2") is None
    assert recent.held == budget.held == 0


def test_a_client_that_holds_its_share_is_not_remembered() -> None:
    budget, recent = Budget(LIMIT), RecentResponses()
    lease = budget.lease("c")
    newest = ConnectionResponses(recent, lease.account)
    assert lease.grow(LIMIT * 4 // 5)
    newest.remember("", "resp_1", b"x" * 10)
    assert newest.find("resp_1") is None
    assert budget.refused == 0
