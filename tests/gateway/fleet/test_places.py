"""Places: learned from reports and first tokens, over sockets with an engine of a small batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.breaker import Breaker
from gateway.fleet.membership import Member
from gateway.fleet.places import FIRST, MOST, STALE_S, Places, with_spare
from gateway.fleet.pool_places import PoolPlaces
from gateway.fleet.state import ReplicaState
from router.load import BookingLedger
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica, FakeRequest, http, models, streams

LOW, HIGH, BATCH = 60, 5, 8


def taught(*reports: tuple[int | None, int | None, int]) -> Places:
    """Places after reports of (running, waiting, in flight), one a second."""
    places = Places()
    for second, (runs, waits, inflight) in enumerate(reports):
        places.learn(runs, waits, (inflight, inflight), float(second))
    return places


def test_nothing_is_held_back_before_an_engine_has_reported_its_load() -> None:
    assert Places().value == MOST
    assert taught((None, None, 0)).value == MOST
    assert taught((3, None, 3)).value == MOST


def test_places_are_what_runs_while_others_wait_in_the_engine() -> None:
    assert taught((0, 0, 0)).value == FIRST
    assert taught((0, 0, 0), (8, 22, 30)).value == FIRST  # more may be running soon
    assert taught((0, 0, 0), (8, 22, 30), (8, 22, 30)).value == 10
    assert taught((0, 0, 0), (64, 9, 73), (64, 9, 73)).value == 80
    assert taught((0, 0, 0), (8, 22, 30), (9, 21, 30)).value == FIRST


def test_places_grow_while_the_engine_runs_them_all() -> None:
    full = (FIRST, 0, FIRST)
    assert taught((0, 0, 0), full).value == FIRST * 3 // 2
    assert taught((0, 0, 0), full, full).value == FIRST * 3 // 2  # not all were taken
    assert taught((0, 0, 0), (2, 0, 2)).value == FIRST


def test_first_tokens_show_that_an_engine_runs_more() -> None:
    places = taught((0, 0, 0))
    places.began(FIRST - 2)
    assert places.value == FIRST
    places.began(FIRST)
    assert places.value == with_spare(FIRST)


def test_places_are_unknown_where_others_send_requests_too() -> None:
    assert taught((0, 0, 0), (8, 40, 20), (8, 40, 20)).value == MOST
    assert taught((0, 0, 0), (8, 15, 20), (8, 15, 20)).value == 10  # `n`, and requests that came while it was asked


def test_requests_that_an_engine_does_not_count_take_no_place() -> None:
    """Idle sessions, figures that are behind, requests on their way."""
    assert taught((0, 0, 0), (2, 0, 30)).idle == 28
    assert taught((0, 0, 0), (8, 22, 30)).idle == 0
    places = taught((0, 0, 0))
    places.learn(3, 0, (10, 14), 1.0)
    assert places.idle == 7


FIGURES = st.one_of(st.none(), st.integers(0, 1_000_000))


@given(st.lists(st.tuples(FIGURES, FIGURES, st.integers(0, 5000)), max_size=30))
def test_absurd_reports_leave_a_usable_number(reports: list[tuple[int | None, int | None, int]]) -> None:
    assert 3 <= taught(*reports).value <= MOST


class BatchEngine:
    """An engine that runs BATCH requests at once, each until `finish`. reports: it has figures. uncounted: they are 0.
    arrived: in order. each: sequences of a request.
    """

    def __init__(self) -> None:
        self.reports = True
        self.uncounted = False
        self.each = 1
        self.arrived: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.waiting: dict[str, asyncio.Event] = {}
        self.replica = FakeReplica([self._answer], models("m", owner="vllm"), {"/metrics": self._page})

    async def _page(self, _request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        counts = (0, 0) if self.uncounted else (self.each * len(self.running), self.each * len(self.waiting))
        figures = dict(zip(("running", "waiting"), counts, strict=True)) if self.reports else {}
        lines = [f'vllm:num_requests_{name}{{engine="0"}} {value}\n' for name, value in figures.items()]
        lines.append("process_start_time_seconds 1000\n")
        writer.write(http(200, "".join(lines).encode(), "text/plain"))

    async def _answer(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        name = request.json["messages"][0]["content"]
        self.arrived.append(name)
        if len(self.running) >= BATCH:
            self.waiting[name] = begins = asyncio.Event()
            await begins.wait()
        self.running[name] = ends = asyncio.Event()
        await streams("one", "two", hold=ends)(request, writer)

    def finish(self) -> None:
        """The oldest of the batch ends, and the next one begins."""
        self.running.pop(next(iter(self.running))).set()
        if self.waiting:
            self.waiting.pop(next(iter(self.waiting))).set()


@asynccontextmanager
async def before(engine: BatchEngine, **config: Any) -> AsyncIterator[Running]:
    async with engine.replica, running(pools=[{"replicas": [engine.replica.url], **config}]) as run:
        await eventually(lambda: not engine.reports or places_of(run).value == FIRST)
        yield run


def places_of(run: Running) -> Places:
    return next(iter(run.gateway.fleet.replicas)).places


def reports_of(run: Running) -> Callable[[], bool]:
    """True once some reports have come."""
    seen = set[float]()

    def reported() -> bool:
        seen.add(places_of(run).at)
        return len(seen) > 6

    return reported


async def send(run: Running, name: str, priority: int, **more: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": name}], "stream": True, **more}
    async with run.session.post(run.url + "/v1/chat/completions", json=body, headers={"X-Priority": str(priority)}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def finish_all(engine: BatchEngine, *tasks: asyncio.Task[None]) -> None:
    while not all(task.done() for task in tasks):
        if engine.running:
            engine.finish()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)


async def test_urgent_requests_overtake_those_that_an_engine_cannot_run_yet() -> None:
    """With all settings as they are by default."""
    engine = BatchEngine()
    async with before(engine) as run:
        admission = run.gateway.fleet.pools[0].admission
        low = [asyncio.create_task(send(run, f"low {number}", -10)) for number in range(LOW)]
        await eventually(lambda: len(engine.running) == BATCH and admission.inflight + admission.waiting == LOW)
        high = [asyncio.create_task(send(run, f"high {number}", 10)) for number in range(HIGH)]
        await eventually(lambda: admission.inflight + admission.waiting == LOW + HIGH)
        await finish_all(engine, *low, *high)
    ranks = [rank for rank, name in enumerate(engine.arrived) if name.startswith("high")]
    assert len(engine.arrived) == LOW + HIGH
    assert max(ranks) < LOW // 3


async def test_a_request_takes_a_place_for_each_of_its_answers() -> None:
    """Also if it has more than there are places."""
    engine = BatchEngine()
    engine.each = answers = 3 * FIRST
    async with before(engine) as run:
        admission = run.gateway.fleet.pools[0].admission
        low = [asyncio.create_task(send(run, f"low {number}", -10, n=answers)) for number in range(LOW)]
        await eventually(lambda: len(engine.running) == BATCH and admission.inflight + admission.waiting == LOW)
        await eventually(reports_of(run))
        sent = len(engine.arrived)
        high = [asyncio.create_task(send(run, f"high {number}", 10, n=answers)) for number in range(HIGH)]
        await eventually(lambda: admission.inflight + admission.waiting == LOW + HIGH)
        await finish_all(engine, *low, *high)
    ranks = [rank for rank, name in enumerate(engine.arrived) if name.startswith("high")]
    assert sent <= with_spare(BATCH)
    assert max(ranks) < sent + HIGH + 3


async def test_nothing_is_refused_for_want_of_a_place() -> None:
    engine = BatchEngine()
    async with before(engine, max_queue=4, queue_s=0.2) as run:
        tasks = [asyncio.create_task(send(run, f"{number}", 0)) for number in range(LOW)]
        await eventually(lambda: len(engine.arrived) == LOW)  # the queue is full, and those in it have waited long enough
        await finish_all(engine, *tasks)


async def crowd(engine: BatchEngine, run: Running, count: int) -> list[asyncio.Task[None]]:
    """So many long prompts at an engine that is proven to compute one at a time: sent, in line, or in the queue."""
    admission = run.gateway.fleet.pools[0].admission
    texts = [f"{number} " + "word " * 30_000 for number in range(count)]
    tasks = [asyncio.create_task(send(run, text, 0)) for text in texts[: BATCH + 1]]
    await eventually(lambda: len(engine.running) == BATCH and len(engine.waiting) == 1)
    [load] = run.gateway.router.ledger.loads.values()
    while not load.serial.proven:
        load.serial.learn(10_000, 10_000 / load.rate.value, load.rate.value)
    tasks += [asyncio.create_task(send(run, text, 0)) for text in texts[BATCH + 1 :]]
    await eventually(lambda: admission.inflight + admission.waiting == count)
    return tasks


async def test_of_requests_without_a_place_the_shortest_goes_first() -> None:
    """Where the engine computes one prompt at a time."""
    engine = BatchEngine()
    async with before(engine) as run:
        admission, tasks = run.gateway.fleet.pools[0].admission, await crowd(engine, run, 30)
        tasks.append(asyncio.create_task(send(run, "short", 0)))
        await eventually(lambda: admission.inflight + admission.waiting == len(tasks))
        await finish_all(engine, *tasks)
    assert engine.arrived.index("short") < FIRST + 8


async def test_requests_in_line_take_places() -> None:
    """Else one tenant would fill the line, where tenants take no turns (`router/late.py`)."""
    engine = BatchEngine()
    async with before(engine) as run:
        admission, ledger = run.gateway.fleet.pools[0].admission, run.gateway.router.ledger
        tasks = await crowd(engine, run, LOW)
        [load] = ledger.loads.values()
        await eventually(reports_of(run))
        assert len(load.line) > 0
        assert admission.inflight <= FIRST + 4
        engine.waiting["of others"] = asyncio.Event()
        await eventually(lambda: ledger.shared(engine.replica.name, run.gateway.clock()))
        assert len(load.line) > 0, "those in line do not hide them"
        load.serial.forget()
        await finish_all(engine, *tasks)


async def test_idle_sessions_do_not_keep_requests_waiting() -> None:
    """Requests that the engine does not count, as those of an open WebSocket."""
    engine = BatchEngine()
    async with before(engine) as run:
        sessions = [asyncio.create_task(send(run, f"session {number}", 0)) for number in range(2 * FIRST)]
        await eventually(lambda: len(engine.arrived) >= BATCH)
        engine.uncounted = True
        await eventually(lambda: len(engine.arrived) == 2 * FIRST)
        engine.uncounted = False
        await finish_all(engine, *sessions)


@pytest.mark.parametrize(("wanted", "counted", "others"), [(12, 12, False), (1, 12, True), (100_000, 2000, True)])
async def test_several_answers_to_one_request_are_no_load_of_others(wanted: int, counted: int, others: bool) -> None:
    engine = BatchEngine()
    engine.each = counted
    async with before(engine) as run:
        task = asyncio.create_task(send(run, "several", 0, n=wanted, temperature=1))
        await eventually(lambda: engine.running)
        await run.gateway.fleet.probe_all(run.gateway.upstream)
        assert (places_of(run).value == MOST) is others
        assert run.gateway.router.ledger.shared(engine.replica.name, run.gateway.clock()) is others
        await finish_all(engine, task)


async def test_an_engine_without_figures_gets_requests_at_once() -> None:
    engine = BatchEngine()
    engine.reports = False
    async with before(engine) as run:
        tasks = [asyncio.create_task(send(run, f"{number}", 0)) for number in range(LOW)]
        await eventually(lambda: len(engine.arrived) == LOW)
        await finish_all(engine, *tasks)


async def test_an_engine_that_stops_reporting_gets_all_that_wait() -> None:
    engine = BatchEngine()
    async with before(engine) as run:
        tasks = [asyncio.create_task(send(run, f"{number}", 0)) for number in range(LOW)]
        await eventually(lambda: len(engine.arrived) >= BATCH)
        engine.reports = False
        await eventually(lambda: len(engine.arrived) == LOW)
        await finish_all(engine, *tasks)


@pytest.mark.parametrize("age_s", [0.0, 2 * STALE_S])
def test_old_figures_hold_nothing_back(age_s: float) -> None:
    state = ReplicaState(Member("r", "http://r", "pool"), Breaker(Random(1)), up=True)
    state.places.learn(0, 0, (0, 0), 100.0)
    gate = PoolPlaces([state], {}, lambda: 100.0 + age_s, asyncio.Event())
    assert gate.total == FIRST
    assert gate.free(FIRST - 1)
    assert gate.free(FIRST) == (age_s > STALE_S)


@pytest.mark.parametrize("silent", [False, True])
def test_the_estimated_end_of_a_prefill_is_no_first_token(silent: bool) -> None:
    state, ledger = ReplicaState(Member("r", "http://r", "pool"), Breaker(Random(1)), up=True), BookingLedger()
    state.places.learn(0, 0, (0, 0), 100.0)
    leases = [ledger.open("r", 9, 9, 100.0, silent=silent) for _ in range(FIRST)]
    for lease in leases:
        lease.prefilled(101.0)
    PoolPlaces([state], ledger.loads, lambda: 101.0, asyncio.Event()).look()
    assert state.places.value == (FIRST if silent else with_spare(FIRST))
    for lease in leases:
        lease.close(102.0)
    ledger.check()
