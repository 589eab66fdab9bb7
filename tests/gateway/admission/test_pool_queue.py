from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from gateway.admission.fair_queue import FairQueue, ReleaseRate, Waiter
from gateway.admission.pool_queue import MAX_PLACE, REASONS, Admission, Permit, Place, PlaceGate, priority_of
from gateway.errors import GatewayError
from tests.gateway.conftest import eventually
from tests.support.machines import STEPS, CountedMachine, steps_of

TENANTS = st.sampled_from("abcd")
PRIORITIES = st.integers(-1, 1)
ROOM = 8


@pytest.mark.parametrize(
    ("header", "priority"), [(None, 0), ("0", 0), ("7", 7), ("+7", 7), (" -100 ", -100), ("100", 100), ("007", 7)]
)
def test_a_priority_is_read(header: str | None, priority: int) -> None:
    assert priority_of(header) == priority


@pytest.mark.parametrize("header", ["", "high", "1.5", "101", "-101", "1_0", "٣", "1 2", "--1", "9" * 5000])
def test_nonsense_is_not_taken_for_a_priority(header: str) -> None:
    with pytest.raises(GatewayError, match=r"\(X-Priority\) is not a whole number from -100 to 100") as caught:
        priority_of(header)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_priority", "priority")
    assert len(caught.value.message) < 200


# -- the queue


class QueueMachine(CountedMachine):
    """The queue against a plain list. since: when a tenant last entered the queue at a priority, or was served there."""

    @initialize()
    def start(self) -> None:
        self.queue = FairQueue[None]()
        self.all: list[Waiter[None]] = []
        self.since: dict[tuple[int, str], int] = {}
        self.step = 0

    def of(self, tenant: str, priority: int) -> list[Waiter[None]]:
        found = [waiter for waiter in self.all if (waiter.tenant, waiter.priority) == (tenant, priority)]
        return sorted(found, key=lambda waiter: waiter.turn)

    def expected_last(self) -> Waiter[None] | None:
        if not self.all:
            return None
        lowest = min(waiter.priority for waiter in self.all)
        tenants = {waiter.tenant for waiter in self.all if waiter.priority == lowest}
        loser = max(tenants, key=lambda tenant: (len(self.of(tenant, lowest)), self.since[lowest, tenant]))
        return self.of(loser, lowest)[-1]

    @rule(tenant=TENANTS, priority=PRIORITIES, turn=st.sampled_from([0.0, 0.5, 1.0]))
    def enter(self, tenant: str, priority: int, turn: float) -> None:
        self.step += 1
        if len(self.all) >= ROOM:
            return
        waiter = Waiter(tenant, priority, None, turn=turn)
        if not self.of(tenant, priority):
            self.since[priority, tenant] = self.step
        self.queue.add(waiter)
        self.all.append(waiter)

    @precondition(lambda self: self.all)
    @rule()
    def serve(self) -> None:
        self.step += 1
        waiter = self.queue.first()
        assert waiter is not None
        assert all(other.priority <= waiter.priority for other in self.all)
        self.queue.served(waiter)
        self.all.remove(waiter)
        self.since[waiter.priority, waiter.tenant] = self.step

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.all)))

    def leave(self, waiter: Waiter[None]) -> None:
        self.all.remove(waiter)
        assert self.queue.remove(waiter)
        assert not self.queue.remove(waiter)

    @invariant()
    def it_is_the_plain_list(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.all)
        assert self.queue.last() is self.expected_last()

        def place(waiter: Waiter[None]) -> tuple[int, int, float]:
            return -waiter.priority, self.since[waiter.priority, waiter.tenant], waiter.turn

        assert self.queue.first() is min(self.all, key=place, default=None)


def test_a_queue_behaves_as_a_plain_list() -> None:
    assert steps_of(QueueMachine, examples=40, steps=100) >= STEPS // 4


@given(st.lists(st.tuples(st.sampled_from(["enter", "serve", "leave"]), TENANTS, PRIORITIES, st.booleans())))
def test_between_two_constant_waiters_turns_differ_by_at_most_one(story: list[tuple[str, str, int, bool]]) -> None:
    queue, served = FairQueue[None](), Counter[str]()
    waiting = {tenant: [Waiter(tenant, 0, None) for _ in range(1 + 1000 * (tenant == "b"))] for tenant in "ab"}
    for waiter in (*waiting["b"], *waiting["a"]):
        queue.add(waiter)
    for what, tenant, priority, newest in story:
        if what == "enter":
            queue.add(Waiter(tenant, priority, None))
            continue
        first = queue.first()
        assert first is not None
        if what == "serve":
            queue.served(first)
            served[first.tenant] += first.priority == 0
        for steady in "ab":  # one more comes before any leaves
            waiting[steady] = [waiter for waiter in waiting[steady] if waiter is not first or what != "serve"]
            waiting[steady].append(Waiter(steady, 0, None))
            queue.add(waiting[steady][-1])
        if what == "leave" and tenant in waiting:
            assert queue.remove(waiting[tenant].pop(-1 if newest else 0))
        assert abs(served["a"] - served["b"]) <= 1


def test_a_queue_shows_its_waiters() -> None:
    queue = FairQueue[None]()
    assert repr(queue) == "<FairQueue empty>"
    for tenant, priority in (("a", 0), ("b", 5), ("a", 0), ("b", 0)):
        queue.add(Waiter(tenant, priority, None))
    assert repr(queue) == "<FairQueue 5: b 1; 0: a 2, b 1>"


@given(
    st.lists(st.tuples(st.sampled_from(["add", "serve", "leave"]), TENANTS, PRIORITIES), max_size=60),
    st.integers(1, 20),
)
def test_places_are_the_order_of_service(steps: list[tuple[str, str, int]], most: int) -> None:
    queue, here = FairQueue[None](), list[Waiter[None]]()
    for what, tenant, priority in steps:
        if what == "add" or not here:
            here.append(Waiter(tenant, priority, None))
            queue.add(here[-1])
        elif what == "serve" and (first := queue.first()):
            queue.served(first)
            here.remove(first)
        else:
            queue.remove(here.pop(len(here) // 2))
    told = {id(waiter): queue.place(waiter, most) for waiter in here}
    for place in range(1, len(here) + 1):
        first = queue.first()
        assert first is not None
        assert told[id(first)] == (place if place <= most else 0)
        queue.served(first)
    assert queue.place(Waiter("a", 0, None), most) == 0


SHORT_5, SHORT_12, SHORT_16 = ((at, f"short at {at:.0f}", 0.1) for at in (5.0, 12.0, 16.0))
COMING = [(0.0, "100 s", 100.0), (0.1, "0.9 s", 0.9), SHORT_5, SHORT_12, SHORT_16]


@pytest.mark.parametrize(
    ("slots", "order"), [(1000, [SHORT_5, COMING[1], SHORT_12, COMING[0], SHORT_16]), (1, COMING)], ids=["places", "slots"]
)
async def test_the_shortest_goes_first_while_only_places_are_missing(slots: int, order: list[tuple[float, str, float]]) -> None:
    """Ten seconds of waiting count as much as one of work, and none comes before an older one for more than 15 s."""
    now, gate, served = 0.0, Gate(1), list[str]()
    pool = Admission(max_inflight=slots, max_queue=9, queue_s=30, clock=lambda: now)
    pool.set_gate(gate)
    held = await pool.wait("a", 0)
    gate.booked = 1

    async def wait(name: str, work_s: float) -> None:
        permit = await pool.wait("a", 0, work_s=work_s)
        served.append(name)
        permit.release()

    waiting = list[asyncio.Task[None]]()
    for at, name, work_s in COMING:
        now = at
        waiting.append(asyncio.create_task(wait(name, work_s)))
        await eventually(lambda: pool.waiting == len(waiting))
    gate.booked = 0
    held.release()
    await asyncio.gather(*waiting)
    assert served == [name for _, name, _ in order]


async def test_a_request_that_comes_while_all_slots_are_taken_overtakes_nobody() -> None:
    """Requests that came when only places were missing may be refused now."""
    pool, gate = gated(1, max_inflight=2)
    held = await pool.wait("a", 0)
    gate.booked = 1
    waiting = [asyncio.create_task(pool.wait("a", 0, work_s=100.0))]
    await eventually(lambda: pool.waiting == 1)
    pool.resize(max_inflight=1, max_queue=9, queue_s=3600)
    waiting.append(asyncio.create_task(pool.wait("a", 0, work_s=0.1)))
    await eventually(lambda: pool.waiting == 2)
    gate.booked = 0
    held.release()
    served, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert served == {waiting[0]}


async def test_the_place_of_a_request_is_known_while_it_waits() -> None:
    now = 0.0
    pool, place = Admission(max_inflight=1, max_queue=9, queue_s=60, clock=lambda: now), Place()
    held = await pool.wait("a", 0)
    ahead = asyncio.create_task(pool.wait("a", 0))
    await eventually(lambda: pool.waiting == 1)
    assert place.found() is None
    waits = asyncio.create_task(pool.wait("a", 0, place))
    await eventually(lambda: pool.waiting == 2)
    assert place.found() == (2, None)  # no slot has come free so far
    now = 3.0
    held.release()
    assert place.found() == (1, 2.0)  # the mean of the prior second and 3 s
    (await ahead).release()
    (await waits).release()
    assert place.found() is None


async def test_a_wait_whose_slot_is_expected_too_late_ends_with_a_refusal() -> None:
    now = 0.0
    pool, places = Admission(max_inflight=1, max_queue=9, queue_s=60, clock=lambda: now), (Place(), Place())
    for _ in range(100):  # a slot each 10 s, so the second waits for 20 s
        held = await pool.wait("a", 0)
        now += 10.0
        held.release()
    held = await pool.wait("a", 0)
    first, second = (asyncio.create_task(pool.wait("a", 0, place)) for place in places)
    await eventually(lambda: pool.waiting == 2)
    now += 30.0
    assert [place.refuse_if_hopeless() for place in places] == [False, False]
    now += 15.0
    assert [place.refuse_if_hopeless() for place in places] == [False, True]
    with pytest.raises(GatewayError, match=r"would wait too long for a replica \(1 running, 1 waiting\)") as refused:
        await second
    assert (refused.value.status, refused.value.code) == (429, "queue_timeout")
    assert refused.value.retry_after_s
    held.release()
    assert places[0].refuse_if_hopeless(), "it has just got its slot, and waits no more"
    (await first).release()
    assert (pool.inflight, pool.waiting, pool.refused["queue_timeout"]) == (0, 0, 1)


async def test_a_wait_of_unknown_length_is_taken_for_as_long_as_nothing_has_come_free() -> None:
    now = 0.0
    pool, place = Admission(max_inflight=1, max_queue=999, queue_s=30, clock=lambda: now), Place()
    held = await pool.wait("a", 0)
    waits = asyncio.create_task(pool.wait("a", 0, place))
    await eventually(lambda: pool.waiting == 1)
    now = 14.0
    assert not place.refuse_if_hopeless()
    now = 15.0
    assert place.refuse_if_hopeless()
    with pytest.raises(GatewayError, match="would wait too long"):
        await waits
    held.release()


async def test_a_stream_with_signs_of_life_waits_for_longer_than_others() -> None:
    pool, place = Admission(max_inflight=1, max_queue=9, queue_s=0.01, stream_queue_s=3600), Place()
    held = await pool.wait("a", 0)
    stream = asyncio.create_task(pool.wait("a", 0, place, pulsed=True))
    await eventually(lambda: pool.waiting == 1)
    with pytest.raises(GatewayError, match="waited too long"):
        await pool.wait("a", 0)
    assert not place.refuse_if_hopeless()
    held.release()
    (await stream).release()


async def test_a_place_far_behind_is_not_counted() -> None:
    pool, place = Admission(max_inflight=1, max_queue=999, queue_s=60), Place()
    held = await pool.wait("a", 0)
    others = [asyncio.create_task(pool.wait("a", 0)) for _ in range(MAX_PLACE)]
    await eventually(lambda: pool.waiting == MAX_PLACE)
    waits = asyncio.create_task(pool.wait("a", 0, place))
    await eventually(lambda: pool.waiting == MAX_PLACE + 1)
    assert place.found() == (0, None)
    assert place.refuse_if_hopeless(), "a slot a second is too slow for a place behind 100"
    with pytest.raises(GatewayError, match="would wait too long"):
        await waits
    waits = asyncio.create_task(pool.wait("a", 0, place))
    await eventually(lambda: pool.waiting == MAX_PLACE + 1)
    held.release()
    (await others[0]).release()
    assert place.found() is not None
    assert place.found() != (0, None)
    for task in (*others[1:], waits):
        task.cancel()
    await asyncio.gather(*others, waits, return_exceptions=True)


class Gate(PlaceGate):
    """So many places. booked: requests that are at replicas. crowded: how often requests began to wait."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.booked = self.crowded = 0

    def free(self, granted: int) -> bool:
        return self.total - self.booked > granted

    def crowds(self) -> None:
        self.crowded += 1


def gated(total: int, **bounds: Any) -> tuple[Admission, Gate]:
    pool, gate = Admission(**{"max_inflight": 9, "max_queue": 9, "queue_s": 3600, **bounds}), Gate(total)
    pool.set_gate(gate)
    return pool, gate


async def test_a_request_waits_for_a_place_though_slots_are_free() -> None:
    pool, gate = gated(1)
    held, gate.booked = await pool.wait("a", 0), 1
    low, high = (asyncio.create_task(pool.wait("a", priority)) for priority in (0, 5))
    await eventually(lambda: pool.waiting == 2)
    assert pool.crowded
    assert gate.crowded == 1
    gate.booked = 0
    held.release()
    await eventually(lambda: pool.waiting == 1)
    await eventually(high.done)
    gate.booked, gate.total = 1, 2
    pool.set_gate(gate)  # an engine shows that it runs more
    (await low).release()
    (await high).release()
    assert (pool.inflight, pool.waiting, pool.crowded) == (0, 0, False)
    pool.check()


async def test_a_place_that_is_granted_counts_until_its_request_is_booked() -> None:
    pool, gate = gated(2)
    gate.booked = 2
    held = [await pool.wait("a", 0) for _ in range(2)]
    waiting = [asyncio.create_task(pool.wait("a", 0)) for _ in range(3)]
    await eventually(lambda: pool.waiting == 3)
    gate.booked = 1
    held[0].release()
    assert pool.waiting == 2
    pool.set_gate(gate)
    assert pool.waiting == 2, "the one place is granted"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held[1].release()
    assert (pool.inflight, pool.waiting) == (0, 0)
    pool.check()


async def test_want_of_a_place_refuses_nobody() -> None:
    pool, gate = gated(1, max_queue=2)
    gate.booked = 1
    permits = [await pool.wait("a", 0)]
    place = Place()
    waiting = [asyncio.create_task(pool.wait("a", 0, place if first else None)) for first in (True, False)]
    await eventually(lambda: pool.waiting == 2)
    permits.append(await pool.wait("a", 0))  # the queue is full
    assert not place.refuse_if_hopeless()
    assert place.hurry()
    permits.append(await waiting[0])
    pool.resize(max_inflight=9, max_queue=0, queue_s=3600)
    permits.append(await waiting[1])
    assert pool.inflight == len(permits) == 4
    assert pool.expected_s is None
    assert not pool.refuses
    assert not any(pool.refused.values())
    for permit in permits:
        permit.release()


async def test_the_end_of_a_wait_for_a_place_sends_the_request() -> None:
    pool, gate = gated(1, queue_s=0.001)
    gate.booked = 1
    held = await pool.wait("a", 0)
    (await pool.wait("a", 0)).release()
    assert not any(pool.refused.values())
    held.release()


async def test_a_full_pool_refuses_as_before() -> None:
    pool, gate = gated(1, max_inflight=1)
    gate.booked, place = 1, Place()
    held = await pool.wait("a", 0)
    waits = asyncio.create_task(pool.wait("a", 0, place))
    await eventually(lambda: pool.waiting == 1)
    assert not pool.crowded
    assert not place.hurry()
    pool.resize(max_inflight=1, max_queue=0, queue_s=3600)
    with pytest.raises(GatewayError, match="overloaded"):
        await waits
    held.release()


def test_the_pace_is_that_of_full_times_and_forgets() -> None:
    rate = ReleaseRate()
    assert rate.seconds_to_next(0.0) == 1.0
    rate.saturated(1000.0)
    for number in range(1, 1000):
        rate.released(1000.0 + number / 10)
    assert rate.seconds_to_next(1099.9) == pytest.approx(0.1, rel=0.05)
    assert rate.seconds_to_next(1199.9) > 1, "nothing has come free for long"
    rate.saturated(9000.0)
    for number in range(1, 200):
        rate.released(9000.0 + number * 2)
    assert rate.seconds_to_next(9398.0) == pytest.approx(2.0, rel=0.1)
    assert repr(rate) == "<ReleaseRate 0.506/s>"


# -- in the event loop


class SetLoop(asyncio.SelectorEventLoop):
    """Its clock is set by hand, and it knows its timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[asyncio.TimerHandle] = []
        super().__init__()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.TimerHandle:
        self.timers.append(super().call_at(when, callback, *args, context=context))
        return self.timers[-1]


async def ticks() -> None:
    """Whatever can happen now happens: nothing here takes more than four."""
    for _ in range(4):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Request:
    tenant: str
    task: asyncio.Task[Permit]
    until: float


@dataclass
class World:
    """An admission, its loop, and all who came. served: the tenants, in order. refused: what the others got."""

    admission: Admission
    loop: SetLoop
    queue_s: float = 10.0
    waiting: list[Request] = field(default_factory=list)
    permits: list[Permit] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    refused: list[GatewayError] = field(default_factory=list)

    @classmethod
    def of(cls, max_inflight: int, max_queue: int) -> World:
        loop = SetLoop()
        return cls(Admission(max_inflight=max_inflight, max_queue=max_queue, queue_s=10.0, clock=loop.time), loop)

    def arrive(self, tenant: str = "a", priority: int = 0) -> Request:
        task = self.loop.create_task(self._come(tenant, priority))
        self.waiting.append(Request(tenant, task, self.loop.now + self.queue_s))
        return self.waiting[-1]

    async def _come(self, tenant: str, priority: int) -> Permit:
        permit = await self.admission.wait(tenant, priority)
        self.served.append(tenant)
        return permit

    def settle(self, seconds: float = 0.0) -> None:
        """Time passes, everything due happens, and who has been answered takes the answer."""
        self.loop.run_until_complete(ticks())
        if seconds:
            self.loop.now += seconds
            self.loop.run_until_complete(ticks())
        for request in [request for request in self.waiting if request.task.done()]:
            self.waiting.remove(request)
            if request.task.cancelled():
                continue
            error = request.task.exception()
            if isinstance(error, GatewayError):
                self.refused.append(error)
            else:
                self.permits.append(request.task.result())

    def come(self, *tenants: str, priority: int = 0) -> None:
        for tenant in tenants:
            self.arrive(tenant, priority)
        self.settle()

    def release(self, index: int = 0) -> None:
        permit = self.permits.pop(index)
        permit.release()
        permit.release()

    def leave(self) -> None:
        """Everybody leaves; no slot is lost, no timer is left."""
        for request in self.waiting:
            request.task.cancel()
        while self.permits:
            self.release()
        self.settle()
        self.settle()
        assert not self.waiting
        while self.permits:
            self.release()
        assert (self.admission.inflight, self.admission.waiting) == (0, 0)
        assert all(timer.cancelled() or timer.when() <= self.loop.now for timer in self.loop.timers)

    def close(self) -> None:
        self.leave()
        self.loop.close()


class AdmissionMachine(CountedMachine):
    """Any order of events, also several in one tick of the loop (where `settled` is False)."""

    @initialize(max_inflight=st.integers(1, 3), max_queue=st.integers(0, 5))
    def start(self, max_inflight: int, max_queue: int) -> None:
        self.world = World.of(max_inflight, max_queue)
        self.places, self.settled, self.left = max_inflight, True, 0

    @rule(tenant=TENANTS, priority=PRIORITIES)
    def arrive(self, tenant: str, priority: int) -> None:
        self.world.arrive(tenant, priority)
        self.settled = False

    @rule()
    def pass_by(self) -> None:
        free = self.world.admission.inflight < self.places
        permit = self.world.admission.try_admit()
        assert (permit is not None) is free
        if permit is not None:
            self.world.permits.append(permit)

    @precondition(lambda self: self.world.permits)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(data.draw(st.integers(0, len(self.world.permits) - 1)))
        self.settled = False

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.waiting)).task.cancel()
        self.settled = False
        self.left += 1

    @rule(max_inflight=st.integers(1, 3), max_queue=st.integers(0, 5))
    def resize(self, max_inflight: int, max_queue: int) -> None:
        self.world.admission.resize(max_inflight=max_inflight, max_queue=max_queue, queue_s=10.0)
        self.places, self.settled = max_inflight, False

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 4.0, 10.0]))
    def settle(self, seconds: float) -> None:
        self.world.settle(seconds)
        self.settled = True

    @invariant()
    def no_place_and_no_request_is_lost(self) -> None:
        world = self.world
        world.admission.check()
        if not self.settled:
            return
        assert world.admission.inflight == len(world.permits)
        assert world.admission.waiting == len(world.waiting)
        unheard = sum(world.admission.refused.values()) - len(world.refused)  # of those who left just then
        assert 0 <= unheard <= self.left
        assert all(world.loop.now < request.until for request in world.waiting)
        for error in world.refused[-5:]:
            assert (error.status, error.code) in [(429, "overloaded"), (429, "queue_timeout")]
            assert error.retry_after_s in range(1, 61)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


def test_no_order_of_events_loses_a_place() -> None:
    assert steps_of(AdmissionMachine, examples=100, steps=200) >= STEPS


@pytest.fixture
def world() -> Iterator[World]:
    """One slot, a queue of three."""
    world = World.of(1, 3)
    yield world
    world.close()


def test_a_request_that_finds_a_free_slot_does_not_wait(world: World) -> None:
    permit = world.admission.try_admit()
    assert permit is not None
    assert world.admission.try_admit() is None
    assert (repr(permit), repr(world.admission)) == ("<Permit>", "<Admission 1/1 running, 0/3 waiting>")
    permit.release()
    permit.release()
    assert (repr(permit), repr(world.admission)) == ("<Permit released>", "<Admission 0/1 running, 0/3 waiting>")
    world.come("a")
    assert world.served == ["a"]


def test_one_tenant_with_many_does_not_hold_up_another(world: World) -> None:
    world.admission.resize(max_inflight=1, max_queue=10, queue_s=10.0)
    world.come("a", "a", "a", "a", "b", "b")
    world.come("c", priority=1)
    for _ in range(6):
        world.release()
        world.settle()
    assert "".join(world.served) == "acababa"


def test_a_request_that_finds_the_queue_full_is_refused(world: World) -> None:
    world.come(*"abcde")
    (error,) = world.refused
    assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1)
    assert error.message == "The replicas are overloaded (1 running, 3 waiting). Retry after 1 s."
    assert world.admission.refused == dict(zip(REASONS, (1, 0), strict=True))


def test_a_full_queue_refuses_a_higher_priority_and_another_tenant_too(world: World) -> None:
    world.come(*"aaaa")
    world.come("b", priority=1)
    assert [error.code for error in world.refused] == ["overloaded"]
    assert repr(world.admission) == "<Admission 1/1 running, 3/3 waiting>"


def test_a_smaller_queue_keeps_the_oldest_of_the_highest_priority(world: World) -> None:
    world.come("a")
    old, new = world.arrive("x", -1), world.arrive("x", -1)
    world.come("z", priority=0)
    world.admission.resize(max_inflight=1, max_queue=2, queue_s=10.0)
    world.settle()
    assert (old.task.done(), new.task.done()) == (False, True)
    assert [error.code for error in world.refused] == ["overloaded"]
    assert world.admission.refused == dict(zip(REASONS, (1, 0), strict=True))


def test_a_request_that_waits_too_long_is_refused(world: World) -> None:
    world.come("a", "b")
    world.settle(9.5)
    assert not world.refused
    world.settle(0.5)
    (error,) = world.refused
    assert (error.status, error.code, error.retry_after_s) == (429, "queue_timeout", 11)
    assert error.message.startswith("The request has waited too long for a replica (1 running, 0 waiting)")
    assert world.admission.refused == dict(zip(REASONS, (0, 1), strict=True))


def test_retry_after_is_the_wait_of_the_first_and_stays_in_its_bounds(world: World) -> None:
    """Not of the whole queue: who returns is its last again."""
    world.come(*"aaaa")
    for _ in range(100):
        world.release()
        world.settle(1.9)
        world.come("a")
    world.come("a")
    assert world.refused.pop().retry_after_s == 2, "a place each 1.9 s, and three wait"
    world.settle(10_000.0)
    assert {error.retry_after_s for error in world.refused} == {60}


def test_retry_after_is_at_least_a_second(world: World) -> None:
    world.come(*"aaaa")
    for _ in range(100):
        world.release()
        world.settle(0.01)
        world.come("a")
    world.come("a")
    assert world.refused.pop().retry_after_s == 1


def test_idle_times_do_not_count_as_slow(world: World) -> None:
    world.come("a")
    world.release()
    world.settle(10_000.0)
    world.come("a")
    world.release()
    world.settle(10_000.0)
    world.come(*"aaaaa")
    assert world.refused.pop().retry_after_s == 1, "a belief of one second, and two that took none"
    world.leave()
    world.admission.resize(max_inflight=2, max_queue=3, queue_s=10.0)
    world.come("a")
    world.settle(10_000.0)
    world.admission.resize(max_inflight=1, max_queue=0, queue_s=10.0)
    world.come("a")
    assert world.refused.pop().retry_after_s == 1, "it is full only now"


def test_the_slot_of_a_waiter_that_leaves_as_it_is_handed_over_goes_to_the_next(world: World) -> None:
    world.come("a")
    leaver = world.arrive("b")
    world.come("c")
    world.release()  # b gets its result
    leaver.task.cancel()  # before it reads it
    world.settle()
    assert world.served == ["a", "c"]


def test_a_waiter_that_left_in_this_very_tick_takes_no_turn(world: World) -> None:
    world.come("a")
    leaver = world.arrive("b")
    world.come("c", "b")
    leaver.task.cancel()
    world.release()
    world.settle()
    assert world.served == ["a", "b"], "the turn is still b's"


def test_a_request_whose_client_leaves_is_out_of_the_queue_at_once(world: World) -> None:
    world.come("a", "b", "c", "d")
    world.waiting[1].task.cancel()
    world.settle()
    assert world.admission.waiting == 2
    world.come("e")
    assert not world.refused


def test_a_refusal_that_nobody_receives_any_more_makes_no_noise(world: World) -> None:
    world.come(*"abcd")
    world.waiting[-1].task.cancel()
    world.admission.resize(max_inflight=1, max_queue=0, queue_s=10.0)
    world.settle()
    assert len(world.refused) == 2
    assert world.admission.refused == dict(zip(REASONS, (2, 0), strict=True)), "a waiter that has left is not refused"


def test_new_bounds_hold_at_once(world: World) -> None:
    world.come(*"abcd")
    world.admission.resize(max_inflight=2, max_queue=1, queue_s=1.0)
    world.settle()
    assert (world.served, len(world.refused)) == (["a", "b"], 1)
    world.admission.resize(max_inflight=1, max_queue=2, queue_s=1.0)
    world.come("e")
    world.release()
    world.settle()
    assert world.served == ["a", "b"], "two run where one may"
    world.release()
    world.settle(1.0)
    assert (world.served, [error.code for error in world.refused]) == (["a", "b", "c"], ["overloaded", "queue_timeout"])


# -- several processes


async def test_slots_that_others_take_are_taken_and_come_free() -> None:
    pool = Admission(max_inflight=3, max_queue=4, queue_s=60)
    pool.set_remote_inflight(2)
    first = pool.try_admit()
    assert first
    assert pool.try_admit() is None
    waiting = [asyncio.create_task(pool.wait("a", 0)) for _ in range(2)]
    await eventually(lambda: pool.waiting == 2)
    pool.set_remote_inflight(3)  # for a moment there are more than there should be
    first.release()
    pool.check()
    assert pool.waiting == 2
    pool.set_remote_inflight(1)
    assert [await task for task in waiting]
    pool.check()
    assert (pool.inflight, pool.waiting) == (2, 0)


async def test_requests_of_others_take_as_many_places_as_they_have_sequences() -> None:
    pool, gate = gated(8)
    gate.booked = 8
    pool.set_remote_inflight(1, 7)
    assert pool.try_admit() is None
    gate.booked = 0
    pool.set_remote_inflight(0)
    assert pool.try_admit()
    pool.check()


async def test_a_refusal_counts_what_others_run_and_its_wait_is_by_their_pace() -> None:
    now = 0.0
    pool = Admission(max_inflight=2, max_queue=0, queue_s=60, clock=lambda: now)
    pool.set_remote_inflight(2)
    for taken in (1, 2) * 40:
        now += 2.0 * (taken == 1)
        pool.set_remote_inflight(taken)
    with pytest.raises(GatewayError, match="2 running, 0 waiting") as refused:
        await pool.wait("a", 0)
    assert refused.value.retry_after_s == 2
