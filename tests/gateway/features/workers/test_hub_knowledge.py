"""Snapshots that the hub collects and gives, and what a new worker begins with."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.messages import EventBatch, Reset, Want
from gateway.features.snapshots.frames import frames_of
from gateway.features.snapshots.keeper import Keeper, SnapshotFile
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.snapshot import Header, KnowledgeError, Snapshot
from gateway.features.table import new_metrics
from gateway.features.workers.hub import Hub
from gateway.features.workers.hub_knowledge import BEGIN_S, HISTORY_BYTES, MESSAGE_BYTES, SILENT_S, TRIES, BatchHistory
from gateway.features.workers.messages import (
    SNAPSHOT,
    Ask,
    CatchUpEnd,
    Heartbeat,
    Message,
    SnapshotPart,
    TopicAnswer,
    Welcome,
    decode_wanted,
    encode,
)
from gateway.features.workers.transfer import MAX_UNREAD_BYTES, SnapshotReceiver
from tests.gateway.conftest import BODY, eventually
from tests.gateway.features.workers.conftest import Worker, closed, pair, star
from tests.gateway.features.workers.test_hub import End, Now, batch, config_of, joined
from tests.support.compiled import uncompiled
from tests.support.fakes import FakeReplica, answers, streams

pytestmark = uncompiled

HEADER = Header("1/256", {})
STREAM = {**BODY, "stream": True}


def snapshot_of(*chunks: bytes) -> Snapshot:
    return Snapshot(HEADER, list(chunks), 1.0)


def hub_of(workers: int = 1, history_bytes: int = HISTORY_BYTES, begin_s: float = BEGIN_S) -> tuple[Hub, list[End]]:
    """A hub with workers that serve."""
    made = Hub(config_of(), Now(), lambda _: None, history_bytes, begin_s)
    ends = [joined(made)[1] for _ in range(workers)]
    for end in ends:
        end.receives(Heartbeat("serving"))
    return made, ends


async def asked(end: End, times: int = 1) -> int:
    """The number of the last one of so many questions for a snapshot."""
    await eventually(lambda: len(end.of(Ask)) == times)
    return int(end.of(Ask)[-1][1].number)


def answer(end: End, number: int, *chunks: bytes, header: Header = HEADER) -> None:
    for frame in frames_of(Snapshot(header, chunks, 1.0)):
        end.receives(SnapshotPart(number, frame))


def fails(end: End, number: int) -> None:
    end.receives(TopicAnswer(number, topic=SNAPSHOT, error="a bug"))


def given(end: End) -> list[tuple[int, Snapshot]]:
    """The snapshots that the worker was sent, with their numbers."""
    arrival = SnapshotReceiver()
    found = [arrival.receive(part) for _, part in end.of(SnapshotPart)]
    return [(arrived.number, arrived.snapshot) for arrived in found if arrived]


def chunks_given(end: End) -> list[bytes]:
    return [chunk for _, snapshot in given(end) for chunk in snapshot.chunks]


def kinds(end: End) -> list[type]:
    return [type(message) for _, message in end.sent]


def events(end: End) -> list[bytes]:
    return [message.events for _, message in end.of(EventBatch)]


# -- what is collected


async def test_a_late_answer_is_not_taken_for_that_to_the_next_question() -> None:
    made, (end,) = hub_of()
    first = asyncio.create_task(made.snapshots.collect(5.0))
    early = await asked(end)
    parts = [SnapshotPart(early, frame) for frame in frames_of(snapshot_of(b"of five seconds"))]
    end.receives(parts[0])
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(made.snapshots.collect())
    number = await asked(end, 2)
    for part in parts[1:]:
        end.receives(part)
    answer(end, early, b"of five seconds")
    end.receives(TopicAnswer(early, topic=SNAPSHOT))
    fails(end, early)
    assert not second.done()
    answer(end, number, b"of ", b"all time")
    assert await second == snapshot_of(b"of ", b"all time")
    assert [decode_wanted(message.question)[0] for _, message in end.of(Ask)] == [5.0, math.inf]


async def test_the_answer_of_another_worker_is_ignored() -> None:
    made, (end, other) = hub_of(2)
    collecting = asyncio.create_task(made.snapshots.collect())
    number = await asked(end)
    answer(other, number, b"no")
    answer(end, number, b"yes")
    assert await collecting == snapshot_of(b"yes")


class Broken:
    async def collect(self, _since_s: float, _most_bytes: int) -> None:
        raise ZeroDivisionError


async def test_a_bug_in_collecting_is_a_snapshot_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = new_metrics().of(SnapshotMetrics)
    async with FakeReplica() as replica, star(replica) as (made, (first, _)):
        first.peers.knowledge = Broken()  # type: ignore[assignment]
        with pytest.raises(KnowledgeError, match="ZeroDivisionError"):
            await made.hub.snapshots.collect()
        await Keeper(SnapshotFile(tmp_path / "s", 60.0), made.hub.snapshots.collect, metrics).write()
    assert metrics.written.values == {("good",): 0, ("failed",): 1}
    assert "snapshot not written" in caplog.text


# -- what is given to all


async def test_a_snapshot_is_given_when_the_one_before_was_taken_in() -> None:
    made, ends = hub_of(2)
    restoring = [asyncio.create_task(made.snapshots.restore(snapshot_of(b"x"))) for _ in range(2)]
    await eventually(lambda: len(given(ends[1])) == 1)
    assert len(given(ends[0])) == 1, "the second one waits"

    def restored(end: End) -> TopicAnswer:
        return TopicAnswer(given(end)[-1][0], topic=SNAPSHOT)

    ends[0].receives(restored(ends[0]))
    ends[1].receives(TopicAnswer(0, topic=SNAPSHOT))
    for _ in range(10):  # turns of the loop
        await asyncio.sleep(0)
    assert not restoring[0].done(), "that was about an earlier one"
    ends[1].receives(restored(ends[1]))
    await eventually(lambda: len(given(ends[1])) == 2)
    assert restoring[0].done()
    ends[0].receives(restored(ends[0]))
    made.leave(2)
    await restoring[1]


# -- what a new worker begins with


async def test_a_new_worker_gets_the_snapshot_of_another_one_and_the_events_since_it_joined() -> None:
    made, (end,) = hub_of()
    end.receives(batch("before"))
    _, late = joined(made)
    assert kinds(end)[-1] is Want
    end.receives(batch("what is open"))
    number = await asked(end)
    end.receives(batch("meanwhile"))
    made.publish(1 << 31, EventBatch(0.0, b"elsewhere"))
    made.end_router(1 << 31)
    answer(end, number, b"x")
    await eventually(lambda: CatchUpEnd in kinds(late))
    sent = [Welcome, SnapshotPart, SnapshotPart, SnapshotPart, EventBatch, EventBatch, EventBatch, Reset, CatchUpEnd]
    assert kinds(late) == sent
    assert events(late) == [b"what is open", b"meanwhile", b"elsewhere"]
    assert given(late)[0][1].source == "worker 1"
    end.receives(batch("after"))
    assert events(late)[-1] == b"after", "at once"


async def test_new_workers_share_a_collection() -> None:
    """It is work for the one that serves, and memory here."""
    made, (end,) = hub_of()
    ends = [joined(made)[1] for _ in range(3)]
    answer(end, await asked(end), b"x")
    await eventually(lambda: all(CatchUpEnd in kinds(late) for late in ends))
    assert [len(given(late)) for late in ends] == [1, 1, 1]
    assert len(end.of(Ask)) == 1


async def test_a_new_worker_that_gets_no_snapshot_begins_with_recent_events(caplog: pytest.LogCaptureFixture) -> None:
    made, (end,) = hub_of()
    end.receives(batch("before"))
    _, late = joined(made)
    for number in range(TRIES):
        fails(end, await asked(end, number + 1))
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert kinds(late) == [Welcome, EventBatch, CatchUpEnd]
    assert "a new worker gets no snapshot" in caplog.text


async def test_the_next_worker_is_asked_if_the_first_one_ends() -> None:
    made, (first, second) = hub_of(2)
    _, late = joined(made)
    await asked(first)
    made.leave(1)
    answer(second, await asked(second), b"x")
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert len(given(late)) == 1


async def test_a_new_worker_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    made, (end,) = hub_of(begin_s=0.01)
    made.snapshots.first = [snapshot_of(b"of the start")]
    end.receives(batch("before"))
    _, late = joined(made)
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert kinds(late) == [Welcome, SnapshotPart, SnapshotPart, SnapshotPart, EventBatch, CatchUpEnd]
    assert [record.__dict__["reason"] for record in caplog.records] == ["no worker has sent one within 0.01 s"]


async def test_a_new_worker_does_not_wait_for_those_that_hang(caplog: pytest.LogCaptureFixture) -> None:
    """Else nobody would serve."""
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    end = joined(made)[1]
    end.receives(Heartbeat("serving"))
    end.receives(batch("before"))
    _, late = joined(made)
    await asked(end)
    now.time += SILENT_S + 1
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert events(late) == [b"before"]
    assert [record.__dict__["reason"] for record in caplog.records] == ["no worker serves any more"]
    assert kinds(joined(made)[1]) == [Welcome, EventBatch, CatchUpEnd], "at once"


async def test_a_worker_that_ends_before_it_has_begun_is_forgotten() -> None:
    made, (end,) = hub_of()
    who, late = joined(made)
    number = await asked(end)
    made.leave(who)
    answer(end, number, b"x")
    end.receives(batch("after"))
    _, later = joined(made)
    answer(end, await asked(end, 2), b"y")
    await eventually(lambda: CatchUpEnd in kinds(later))
    assert kinds(late) == [Welcome]


async def test_where_none_serves_any_more_new_workers_begin_as_the_gateway_would() -> None:
    """With what another gateway knows, or the file: else a fragment of it would replace the file."""
    made = Hub(config_of(), Now(), lambda _: None)
    asked_again: list[int] = []

    async def again() -> list[Snapshot]:
        asked_again.append(1)
        await asyncio.sleep(0)
        return [snapshot_of(b"of the file"), snapshot_of(b"of a sibling")]

    made.snapshots.again = again
    ends = [joined(made)[1] for _ in range(2)]
    await eventually(lambda: all(CatchUpEnd in kinds(end) for end in ends))
    assert [chunks_given(end) for end in ends] == [[b"of the file", b"of a sibling"]] * 2
    assert len(asked_again) == 1, "for both"
    third = joined(made)[1]
    await eventually(lambda: CatchUpEnd in kinds(third))
    assert len(asked_again) == 2, "not the one from before"


async def test_a_part_of_what_is_known_is_worth_less_than_the_file() -> None:
    made, (end,) = hub_of()

    async def again() -> list[Snapshot]:
        return [snapshot_of(b"of the file")]

    made.snapshots.again = again
    _, late = joined(made)
    number = await asked(end)
    answer(end, number, header=Header("1/256", {}, partial=True))
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert chunks_given(late) == [b"of the file"]


async def test_a_worker_that_does_not_read_holds_up_no_other() -> None:
    """A snapshot is larger than what may be on its way to it."""
    made, (end,) = hub_of()
    stuck = joined(made)[1]
    stuck.unsent, stuck.closed = MAX_UNREAD_BYTES + 1, asyncio.Event()  # type: ignore[assignment]
    answer(end, await asked(end), b"x")
    await eventually(lambda: SnapshotPart in kinds(stuck))
    late = joined(made)[1]
    answer(end, await asked(end, 2), b"y")
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert CatchUpEnd not in kinds(stuck)
    stuck.unsent = 0
    await eventually(lambda: CatchUpEnd in kinds(stuck))


def test_while_none_serves_a_new_worker_begins_at_once() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    assert kinds(joined(made)[1]) == kinds(joined(made)[1]) == [Welcome, CatchUpEnd]


async def test_what_is_open_is_asked_for_again_if_too_much_came_meanwhile() -> None:
    made, (end,) = hub_of(history_bytes=3 * (MESSAGE_BYTES + 100))
    who, late = joined(made)
    end.receives(batch("what is open"))
    number = await asked(end)
    for name in "abcd":
        end.receives(batch(name))
    answer(end, number)
    await eventually(lambda: CatchUpEnd in kinds(late))
    assert len(events(late)) < 5
    assert end.of(Want) == [(who, Want())] * 2


def held(worker: Worker) -> dict[str, int]:
    return worker.gateway.router.trie.held()


def body(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"prompt {number} " * 100}]}


@pytest.mark.parametrize("history_bytes", [HISTORY_BYTES, 0])
async def test_a_worker_that_replaces_another_knows_what_the_others_know(history_bytes: int) -> None:
    """However old it is, and whatever runs meanwhile."""
    go_on = asyncio.Event()
    script = [*[answers()] * 10, streams("a", hold=go_on), answers()]
    async with FakeReplica(script) as one, star(one, history_bytes=history_bytes) as (made, (first, second)):
        for number in range(10):
            await first.run.post(body(number))
        # It hears nothing more once it has left: also of the ends of these requests, which come after what they cached.
        await eventually(lambda: held(second) == held(first) and second.gateway.router.ledger.open_leases == 0)
        made.hub.leave(second.who)
        async with first.run.session.post(f"{first.run.url}/v1/chat/completions", json=STREAM) as answer:
            await answer.content.readany()
            third = await made.join()
            await eventually(lambda: third.gateway.router.ledger.of(one.name).inflight == 1)
            assert held(third) == held(first)
            third.peers.replicator.follower.check()
            go_on.set()
            await answer.read()
        await eventually(lambda: third.gateway.router.ledger.of(one.name).inflight == 0)
        for number in range(10):
            assert int((await third.run.post(body(number)))[1]["X-Warmroute-Cached-Tokens"]) > 0


# -- recent events


def test_small_messages_count_with_the_memory_that_they_take() -> None:
    history = BatchHistory(10 * (MESSAGE_BYTES + len(encode(Reset(ended=True)))))
    for _ in range(1000):
        history.add(0.0, 1, encode(Reset(ended=True)))
    assert (history.begin, history.end, len(list(history.since(0)))) == (990, 1000, 10)
    assert list(history.since(998)) == [(1, encode(Reset(ended=True)))] * 2
    history.forget(1.0)
    assert (history.size, history.begin) == (0, 1000)


async def test_numbers_of_routers_may_be_large() -> None:
    """Others' routers come and go, and each gets a number of its own."""
    made = Hub(config_of(), Now(), lambda _: None)
    ours, its = await pair()
    received = list[tuple[int, Message]]()
    its.receive(lambda worker, message, _payload: received.append((worker, message)), lambda: None)
    made.join(ours)
    made.publish(1 << 32, EventBatch(0.0, b"x"))
    made.end_router(1 << 32)
    await eventually(lambda: received[-2:] == [(1 << 32, EventBatch(0.0, b"x")), (1 << 32, Reset(ended=True))])
    await closed(ours, its)
