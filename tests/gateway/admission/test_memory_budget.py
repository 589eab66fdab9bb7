"""The budget of bytes in flight against a simple oracle, and what it promises each client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from gateway.admission.memory import SHARE, Budget, MemoryLease, client_of
from gateway.errors import GatewayError
from tests.support.machines import STEPS, CountedMachine, steps_of

clients = st.sampled_from(["a", "b", "c"])
sizes = st.integers(0, 400) | st.sampled_from([1, 800, 801, 1000])


class Machine(CountedMachine):
    """Random leases beside a list of what each holds: the sums are made anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(1000)
        self.leases: list[tuple[str, MemoryLease, list[int]]] = []

    def held_by(self, client: str | None = None) -> int:
        return sum(held[0] for name, _, held in self.leases if client in (None, name))

    @rule(client=clients)
    def lease(self, client: str) -> None:
        self.leases.append((client, self.budget.lease(client), [0]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=sizes)
    def grow(self, data: st.DataObject, size: int) -> None:
        client, lease, held = data.draw(st.sampled_from(self.leases))
        free = self.budget.limit - self.held_by() - size
        granted = self.held_by(client) + size <= SHARE * free
        assert lease.grow(size) is granted
        if granted:
            held[0] += size

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=sizes)
    def shrink(self, data: st.DataObject, size: int) -> None:
        _, lease, held = data.draw(st.sampled_from(self.leases))
        lease.shrink(size)
        held[0] = max(0, held[0] - size)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=sizes)
    def resize(self, data: st.DataObject, size: int) -> None:
        _, lease, held = data.draw(st.sampled_from(self.leases))
        if lease.resize(size):
            held[0] = size

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), head=st.integers(0, 100))
    def drop_body(self, data: st.DataObject, head: int) -> None:
        _, lease, held = data.draw(st.sampled_from(self.leases))
        lease.head = head
        lease.drop_body()
        held[0] = min(held[0], head)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.leases))
        self.leases.remove(entry)
        for _ in range(2):  # the second time does nothing
            entry[1].close()
        assert entry[1].grow(10)
        entry[1].shrink(10)
        assert entry[1].held == 0

    @rule(limit=st.integers(500, 1500))
    def change_the_limit(self, limit: int) -> None:
        self.budget.limit = limit

    @invariant()
    def sums_agree(self) -> None:
        self.budget.check()
        assert self.budget.held == self.held_by()
        assert self.budget.clients == len({client for client, _, _ in self.leases})
        for _, lease, held in self.leases:
            assert lease.held == held[0]


def test_the_budget_agrees_with_its_oracle() -> None:
    assert steps_of(Machine, examples=280, steps=50) >= STEPS


@given(st.lists(st.tuples(clients, st.integers(1, 300)), max_size=60))
def test_the_limit_is_never_exceeded(charges: list[tuple[str, int]]) -> None:
    budget = Budget(1000)
    for client, size in charges:
        budget.lease(client).grow(size)
        assert budget.held <= budget.limit


@pytest.mark.parametrize("greedy", [1, 2, 5])
def test_greedy_clients_leave_room_for_the_next_one(greedy: int) -> None:
    budget = Budget(100_000)
    leases = [budget.lease(f"greedy {number}") for number in range(greedy)]
    for _ in range(budget.limit):
        grown = [lease.grow(10) for lease in leases]
        if not any(grown):
            break
    free = budget.limit - budget.held
    assert free == pytest.approx(budget.limit / (1 + greedy * SHARE), rel=0.02)
    for lease in leases:
        assert lease.held == pytest.approx(SHARE * free, rel=0.02)
    assert budget.lease("modest").grow(free // 2)
    if greedy == 1:
        assert leases[0].held == pytest.approx(budget.largest, rel=0.02)


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("odd:name", 5), "odd:name"),
        ("", "local"),
        (None, "local"),
    ],
)
def test_who_counts_as_one_client(peer: object, client: str) -> None:
    assert client_of(peer) == client


def test_a_charge_without_room_is_an_error_and_holds_nothing() -> None:
    budget = Budget(1000)
    lease, other = budget.lease("a"), budget.lease("b")
    lease.charge(500)
    other.charge(300)
    with pytest.raises(GatewayError) as caught:
        lease.charge(300)
    assert (caught.value.status, caught.value.code, lease.held) == (503, "gateway_overloaded", 500)
    with pytest.raises(GatewayError) as caught:
        lease.charge(301)
    assert (caught.value.status, caught.value.code, lease.held) == (413, "request_too_large", 500), "more than it may ever hold"
