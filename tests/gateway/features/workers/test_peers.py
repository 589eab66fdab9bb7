"""Several workers, one view."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable

import pytest

from gateway.cluster.messages import EventBatch, Reconfigure, RejectConfig
from gateway.config.schema import Config
from gateway.features.workers.channel import HUB
from gateway.features.workers.messages import COUNTERS, Ask, Message, TopicAnswer, from_hub
from gateway.features.workers.peers import worker_share
from gateway.features.workers.questions import PeerLimits
from gateway.telemetry.exposition import unpacked_slices
from router.events import Event, decode
from tests.gateway.conftest import BODY, eventually
from tests.gateway.features.workers.conftest import Star, Worker, closed, pair, star
from tests.support.configs import load
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, hangs, models, streams

STREAM = {**BODY, "stream": True}
HEALTH = {"interval_s": 60, "timeout_s": 2}
PATIENT = {"interval_s": 60, "timeout_s": 60}


def inflight(worker: Worker, replica: FakeReplica) -> int:
    return worker.gateway.router.ledger.of(replica.name).inflight


def held(worker: Worker, replica: FakeReplica) -> int:
    return worker.gateway.router.trie.held_by(replica.name)


async def test_what_one_worker_places_another_finds() -> None:
    async with FakeReplica() as one, FakeReplica() as two, star(one, two) as (_, (first, second)):
        _, headers, _ = await first.run.post()
        await eventually(lambda: second.gateway.router.trie.held() == first.gateway.router.trie.held())
        for _ in range(5):
            _, again, _ = await second.run.post()
            assert again["X-Warmroute-Replica"] == headers["X-Warmroute-Replica"]
            assert int(again["X-Warmroute-Cached-Tokens"]) > 0
        await eventually(lambda: sum(first.gateway.metrics.worker_replication_lag_seconds.values[()][:-1]) >= 1)


async def test_the_doctor_sees_a_conversation_whose_requests_went_to_different_workers() -> None:
    async with FakeReplica() as one, star(one) as (_, (first, second)):
        assert json.loads((await first.run.get("/warmroute/doctor"))[2])["requests"] == 0
        for turn, worker in enumerate((first, second, first, second)):
            system = f"Time: 04:45:0{turn}. " + "Be kind to all. " * 400
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}]
            assert (await worker.run.post({"model": "m", "messages": messages}))[0] == 200
        found = json.loads((await second.run.get("/warmroute/doctor"))[2])
        assert found["requests"] == 4
        assert [(each["cause"], each["requests"]) for each in found["causes"] if not each["delivery"]] == [("timestamp", 3)]


async def test_what_runs_at_one_worker_is_seen_by_all_until_it_is_over() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as one, star(one) as (_, (first, second)):
        async with first.run.session.post(f"{first.run.url}/v1/chat/completions", json=STREAM) as answer:
            await answer.content.readany()
            await eventually(lambda: second.gateway.router.ledger.of(one.name).decoding == 1)
            rows = json.loads((await second.run.get("/warmroute/replicas"))[2])["replicas"]
            assert [(row["inflight"], row["decoding"]) for row in rows] == [(1, 1)]
            for worker in (first, second):
                seen = await worker.run.metrics()
                assert seen[f'warmroute_replica_inflight{{replica="{one.name}"}}'] == 1
                assert seen['warmroute_pool_inflight{pool="default"}'] == 1
                assert seen['warmroute_pool_slots_taken{pool="default"}'] == 1
            go_on.set()
            await answer.read()
        await eventually(lambda: inflight(second, one) == 0)


async def test_what_waits_at_the_replicas_is_counted_once_by_all_workers() -> None:
    """Each worker books what all of them book, and a page is of all of them."""
    hold = asyncio.Event()
    async with FakeReplica([hangs(hold)] * 3) as one, star(one) as (_, (first, second)):
        asking = [asyncio.create_task(worker.run.post()) for worker in (first, second, second)]
        await eventually(lambda: inflight(first, one) == inflight(second, one) == 3)
        page, load = await first.run.metrics(), first.gateway.router.ledger.of(one.name)
        assert page[f'warmroute_replica_inflight{{replica="{one.name}"}}'] == 3
        assert page[f'warmroute_replica_booked_tokens{{replica="{one.name}"}}'] == load.booked_tokens > 0
        assert page['warmroute_pool_prefill_backlog_seconds{pool="default"}'] <= load.booked_tokens / load.rate.value
        assert (page['warmroute_pool_inflight{pool="default"}'], page['warmroute_pool_slots_taken{pool="default"}']) == (3, 3)
        hold.set()
        await asyncio.gather(*asking)


async def test_a_failover_at_one_worker_is_followed_by_the_other() -> None:
    hold = asyncio.Event()
    async with FakeReplica([hangs(hold)]) as one, FakeReplica([hangs(hold)]) as two, star(one, two) as (_, (first, second)):
        asking = asyncio.create_task(first.run.post())
        await eventually(lambda: inflight(second, one) + inflight(second, two) == 1)
        failing, other = (one, two) if inflight(second, one) else (two, one)
        await failing.stop()
        await eventually(lambda: (inflight(second, failing), inflight(second, other)) == (0, 1))
        assert second.gateway.router.trie.held()[failing.name] == 0, "it did not compute the prompt"
        await other.stop()
        await asking
        await eventually(lambda: inflight(second, other) == 0)


# -- one page


async def test_the_page_is_the_sum_of_what_all_count_whoever_is_asked() -> None:
    async with FakeReplica() as one, star(one) as (_, workers):
        for count, worker in enumerate(workers, start=1):
            for _ in range(count):
                await worker.run.post()
        pages = [await worker.run.metrics() for worker in workers]
        for page in pages:
            assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 3
            assert page['warmroute_request_seconds_count{endpoint="/v1/chat/completions",model="m"}'] == 3
            assert page["warmroute_workers"] == 2
            assert page[f'warmroute_replica_up{{replica="{one.name}"}}'] == 1
            assert page["warmroute_trie_blocks"] == workers[0].gateway.router.trie.blocks, "the same index, seen twice"
            assert page['warmroute_config_reloads_total{result="good"}'] == 0
        assert pages[0].keys() == pages[1].keys()


async def test_what_a_worker_had_counted_stays_counted_when_it_is_gone() -> None:
    async with FakeReplica() as one, star(one) as (made, (first, second)):
        await first.run.post()
        await second.run.post()
        await eventually(lambda: counted(made.hub.workers[first.who].counters) == 1)
        made.hub.leave(first.who)
        made.hub.count_restart()
        page = await second.run.metrics()
        assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 2
        assert page["warmroute_workers"] == 1
        assert page["warmroute_worker_restarts_total"] == 1
        third = await made.join()
        await third.run.post()
        assert (await third.run.metrics())[
            'warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'
        ] == 3


async def test_a_worker_that_was_held_up_while_it_sent_its_counters_sends_them_again_soon() -> None:
    """Else what it counts meanwhile is lost if it is killed: `eventually` would wait in vain."""
    held_up = True
    loop = asyncio.get_running_loop()

    def hold() -> None:
        if held_up:
            time.sleep(0.05)
            loop.call_soon(hold)

    async with FakeReplica() as one, star(one) as (made, (first, _)):
        for number in range(10_000):  # 20 turns and more to send
            first.gateway.metrics.requests.add((f"m{number}", "other", "200"), 0)
            first.gateway.metrics.broken_responses.add((f"m{number}", "r"), 0)
        hold()
        await first.run.post()
        await eventually(lambda: counted(made.hub.workers[first.who].counters) == 1)
        held_up = False
        await first.run.post()
        await eventually(lambda: counted(made.hub.workers[first.who].counters) == 2)


def counted(counters: bytes) -> float:
    parts = list(unpacked_slices(counters)) if counters else []
    return float(sum(sum(part.get("warmroute_requests_total", {}).values()) for part in parts))


async def test_a_worker_that_does_not_answer_is_counted_by_its_last_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, star(one, peer_limits=PeerLimits(scrape_s=0.05)) as (made, (first, second)):
        await first.run.post()
        await eventually(lambda: counted(made.hub.workers[first.who].counters) == 1)
        first.channel.receive(lambda *_: None, lambda: None)  # it receives nothing any more
        assert (await second.run.metrics())[
            'warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'
        ] == 1
        assert "not all workers answer" in caplog.text


async def test_a_worker_that_ends_within_a_scrape_is_counted_by_its_last_snapshot() -> None:
    key = 'warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'
    async with FakeReplica() as one, star(one) as (made, (first, second)):
        for worker in (first, second):
            await worker.run.post()
        await eventually(lambda: all(counted(made.hub.workers[worker.who].counters) == 1 for worker in (first, second)))
        asked = asyncio.Event()
        first.channel.receive(lambda *_: asked.set(), lambda: None)  # it is stopped, and will be killed
        scraping = asyncio.create_task(second.run.metrics())
        await asked.wait()
        made.hub.leave(first.who)
        page = await scraping
        assert (page[key], page["warmroute_workers"]) == (2, 1)
        assert (await second.run.metrics())[key] == 2


# -- who comes late


async def test_a_worker_that_comes_late_knows_what_is_held_and_what_is_open() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([answers(), streams("a", hold=go_on)]) as one, star(one) as (made, (first, second)):
        await second.run.post()
        async with first.run.session.post(f"{first.run.url}/v1/chat/completions", json=STREAM) as answer:
            await answer.content.readany()
            third = await made.join()
            await eventually(lambda: inflight(third, one) == 1)
            assert third.gateway.router.trie.held() == first.gateway.router.trie.held()
            third.peers.replicator.follower.check()
            go_on.set()
            await answer.read()
        await eventually(lambda: inflight(third, one) == 0)


async def test_a_worker_that_comes_late_does_not_believe_in_what_replicas_have_lost_since() -> None:
    async with FakeReplica() as one, FakeReplica() as two, star(one, two, pool={"name": "p"}) as (made, (first, second)):
        for number in range(4):
            await first.run.post({**BODY, "messages": [{"role": "user", "content": f"{number}" * 4000}]})
        workers = [first, second]
        for worker in workers:
            await eventually(lambda worker=worker: all(held(worker, replica) for replica in (one, two)))
        await one.stop()
        for worker in workers:
            worker.gateway.fleet.named(one.name).probe_now.set()
            await eventually(lambda worker=worker: not held(worker, one))
        first.peers.replicator.flush()
        third = await made.join()
        assert [held(third, replica) for replica in (one, two)] == [0, held(first, two)]


async def test_what_a_worker_had_open_when_it_ended_is_closed_for_the_others() -> None:
    never = asyncio.Event()
    async with FakeReplica([hangs(never)]) as one, star(one) as (made, (first, second)):
        asking = asyncio.create_task(first.run.post())
        await eventually(lambda: inflight(second, one) == 1)
        made.hub.leave(first.who)
        await eventually(lambda: inflight(second, one) == 0)
        asking.cancel()
        third = await made.join()
        assert inflight(third, one) == 0


# -- operators


async def test_what_operators_want_happens_in_all_workers_and_in_those_to_come() -> None:
    async with FakeReplica() as one, FakeReplica() as two, star(one) as (made, (first, second)):
        status, _, row = await second.run.post({"url": two.url, "name": "late"}, path="/warmroute/replicas")
        assert (status, row["replica"]["up"]) == (201, True)
        assert "late" in first.gateway.fleet.target("m").replicas
        assert (await first.run.post({"name": one.name}, path="/warmroute/drain"))[2]["draining"] is True
        third = await made.join()
        for worker in (first, second, third):
            assert list(worker.gateway.fleet.target("m").replicas) == ["late"]
            assert (await worker.run.post())[1]["X-Warmroute-Replica"] == "late"
        await third.run.post({"name": one.name}, path="/warmroute/undrain")
        assert all(len(worker.gateway.fleet.target("m").replicas) == 2 for worker in (first, second, third))


async def test_all_workers_leave_together_and_those_to_come_with_them() -> None:
    async with FakeReplica() as one, star(one) as (hub, workers):
        for worker in workers:
            assert (await worker.run.get("/ready"))[0] == 200
        hub.hub.begin_leaving()
        workers.append(await hub.join())
        for worker in workers:
            await eventually(lambda worker=worker: worker.gateway.served.running.leaving)  # type: ignore[misc]
            assert (await worker.run.get("/ready"))[0] == 503
            status, headers, _ = await worker.run.post()
            assert (status, headers["Connection"]) == (200, "close")


async def test_the_operator_gets_an_error_for_an_impossible_command() -> None:
    async with FakeReplica() as one, star(one) as (_, (first, second)):
        status, _, result = await first.run.post({"url": one.url, "name": "x", "pool": 7}, path="/warmroute/replicas")
        problem = "'pool' is no pool's name: it must be the name of a pool, which is one of default."
        assert (status, result["error"]["message"]) == (400, problem)
        assert (await second.run.post({"url": one.url}, path="/warmroute/replicas"))[0] == 409


def config_of(*replicas: FakeReplica, workers: int = 2) -> Config:
    return load(None, {"pools": [{"replicas": [replica.url for replica in replicas]}], "workers": workers}, env={})


async def test_another_configuration_reaches_all_and_leaves_what_operators_added() -> None:
    async with FakeReplica() as one, FakeReplica() as two, star(one) as (made, (first, second)):
        await first.run.post({"url": two.url, "name": "added"}, path="/warmroute/replicas")
        made.hub.command(RejectConfig("pools: no"))
        made.hub.command(Reconfigure.to(config_of(two)))
        both = [two.name, "added"]
        await eventually(lambda: all(list(w.gateway.fleet.target("m").replicas) == both for w in (first, second)))
        page = await first.run.metrics()
        assert page['warmroute_config_reloads_total{result="good"}'] == 1, "one reload, however many took it"
        assert page['warmroute_config_reloads_total{result="invalid"}'] == 1
        third = await made.join()
        assert list(third.gateway.fleet.target("m").replicas) == both
        async with second.run.session.delete(f"{second.run.admin_url}/warmroute/replicas/added") as answer:
            assert answer.status == 200
        assert all(list(w.gateway.fleet.target("m").replicas) == [two.name] for w in (first, second, third))
        assert list((await made.join()).gateway.fleet.target("m").replicas) == [two.name]


async def test_a_bug_in_one_command_ends_neither_the_obeying_nor_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = logging.getLogger("warmroute.replicas")

    def bug(_record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    async with FakeReplica() as one, star(one) as (_, (first, _)):
        fleet.addFilter(bug)  # in the middle of what drains a replica, which logs it
        try:
            status, _, result = await first.run.post({"name": one.name}, path="/warmroute/drain")
        finally:
            fleet.removeFilter(bug)
        assert (status, result["error"]["code"]) == (500, "internal_error")
        assert "command failed" in caplog.text
        assert (await first.run.post({"name": one.name}, path="/warmroute/drain"))[0] == 200


async def test_replicas_that_hang_do_not_keep_a_new_worker_from_serving() -> None:
    hung, released = False, asyncio.Event()

    async def lists(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (hangs(released) if hung else models("m"))(request, writer)

    async with (
        FakeReplica() as one,
        FakeReplica([lists]) as two,
        star(one, first_probes_s=0.2, health=HEALTH) as (made, (first, _)),
    ):
        for number in range(10):
            command = {"url": f"{two.url}/{number}", "name": f"added-{number}"}
            assert (await first.run.post(command, path="/warmroute/replicas"))[0] == 201
        assert (await first.run.post({"name": "added-3"}, path="/warmroute/drain"))[0] == 200
        hung = True
        async with asyncio.timeout(10):  # one after the other they would take 20 s
            third = await made.join()
        rows = {row["name"]: row for row in json.loads((await third.run.get("/warmroute/replicas"))[2])["replicas"]}
        assert rows.keys() == {one.name, *(f"added-{number}" for number in range(10))}
        assert [name for name, row in rows.items() if row["up"]] == [one.name]
        assert [name for name, row in rows.items() if row["draining"]] == ["added-3"]
        released.set()


async def test_replicas_that_hang_when_they_are_added_hold_up_no_other_command_in_any_worker() -> None:
    released = asyncio.Event()
    async with (
        FakeReplica() as one,
        FakeReplica([hangs(released)]) as two,
        star(one, first_probes_s=60, health=PATIENT) as (made, (first, second)),
    ):
        names = [f"added-{number}" for number in range(20)]
        added = [first.run.post({"url": f"{two.url}/{name}", "name": name}, path="/warmroute/replicas") for name in names]
        adding = asyncio.gather(*added)
        await eventually(lambda: all(second.gateway.fleet.named(name) for name in names))
        async with asyncio.timeout(30):
            for command, name in (("drain", one.name), ("undrain", one.name), ("drain", "added-3"), ("drain", "added-4")):
                assert (await second.run.post({"name": name}, path=f"/warmroute/{command}"))[0] == 200
            async with second.run.session.delete(f"{second.run.admin_url}/warmroute/replicas/added-4") as answer:
                assert answer.status == 200
        assert not adding.done()
        third = asyncio.create_task(made.join())  # it executes them in the order in which they were given
        released.set()
        statuses = [status for status, _, _ in await adding]
        assert statuses == [201] * 4 + [409] + [201] * 15
        for worker in (first, second, await third):
            found = {state.name: state.draining for state in worker.gateway.fleet.replicas}
            assert found == {one.name: False} | {name: name == "added-3" for name in names if name != "added-4"}


async def test_a_new_worker_answers_the_commands_that_are_pending_and_waits_for_its_first_probes() -> None:
    released = asyncio.Event()
    async with (
        FakeReplica() as one,
        FakeReplica(listing=hangs(released)) as slow,
        star(one, first_probes_s=60, health=PATIENT) as (made, (first, _)),
    ):
        adding = asyncio.create_task(first.run.post({"url": slow.url, "name": "slow"}, path="/warmroute/replicas"))
        await eventually(lambda: first.gateway.fleet.named("slow"))
        third = asyncio.create_task(made.join())
        await eventually(lambda: len(made.hub.workers) == 3)
        released.set()
        assert (await adding)[0] == 201
        await third
        await eventually(lambda: repr(made.hub._commands) == "<CommandLog: 1 in force, 0 pending>")


async def test_a_replica_of_two_with_one_name_is_the_same_for_all_workers_and_their_successors() -> None:
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three, star(one) as (made, workers):
        added = [
            worker.run.post({"url": url, "name": "x"}, path="/warmroute/replicas")
            for worker, url in zip(workers, (two.url, three.url), strict=True)
        ]
        statuses = sorted(status for status, _, _ in await asyncio.gather(*added))
        assert statuses[0] == 201
        assert statuses[1] in (400, 409)
        late = await made.join()
        urls = {replica.url for each in (*workers, late) if (replica := each.gateway.fleet.named("x"))}
        assert len(urls) == 1


# -- a supervisor that hangs


def drains(worker: Worker, replica: FakeReplica) -> bool:
    state = worker.gateway.fleet.named(replica.name)
    assert state is not None
    return state.draining


def pause_hub(made: Star, worker: Worker) -> Callable[[], None]:
    """The hub does not read from this worker any more. Returns what makes it go on."""
    transport = made.hub.workers[worker.who].channel._transport
    assert transport is not None
    transport.pause_reading()  # type: ignore[attr-defined]
    return transport.resume_reading  # type: ignore[attr-defined, no-any-return]


async def test_without_a_supervisor_operators_get_an_error_and_nothing_is_changed() -> None:
    async with FakeReplica() as one, star(one, peer_limits=PeerLimits(forwarded_s=0.1)) as (made, (first, second)):
        go_on = pause_hub(made, first)
        draining = first.run.post({"name": one.name}, path="/warmroute/drain")
        asking = [first.run.get(path) for path in ("/metrics", "/warmroute/sharing")]
        (drained, _, error), *answers = await asyncio.gather(draining, *asking)
        assert (drained, error["error"]["code"]) == (503, "supervisor_silent")
        assert [(status, json.loads(body)["error"]["code"]) for status, _, body in answers] == [(503, "supervisor_silent")] * 2
        go_on()
        assert json.loads((await first.run.get("/warmroute/sharing"))[2])["configured"] is False
        assert (await first.run.metrics())["warmroute_workers"] == 2
        assert [drains(worker, one) for worker in (first, second)] == [False, False]


async def test_a_command_that_not_all_workers_confirm_is_no_success() -> None:
    async with FakeReplica() as one, star(one, peer_limits=PeerLimits(command_s=0.5)) as (_, (first, second)):
        second.channel.receive(lambda *_: None, lambda: None)  # it receives nothing any more
        status, _, error = await first.run.post({"name": one.name}, path="/warmroute/drain")
        assert (status, error["error"]["code"]) == (503, "workers_silent")
        assert f": {second.who} did not answer" in error["error"]["message"]


def answers_after(event: asyncio.Event) -> Behaviour:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await event.wait()
        await answers()(request, writer)

    return behave


async def test_events_that_the_supervisor_does_not_read_are_bounded_and_made_up_for() -> None:
    before, after = asyncio.Event(), asyncio.Event()
    script = [answers_after(before), *[answers()] * 100, answers_after(after)]
    async with FakeReplica(script) as one, star(one, peer_limits=PeerLimits(unsent_bytes=100_000)) as (made, (first, second)):
        opened_before = asyncio.create_task(first.run.post())
        await eventually(lambda: inflight(second, one) == 1)
        go_on = pause_hub(made, first)
        peak = 0
        for number in range(100):
            await first.run.post({**BODY, "messages": [{"role": "user", "content": f"{number} " * 120_000}]})
            peak = max(peak, first.channel.unsent)
        assert 0 < peak < 300_000, "without a bound it comes to 860 kB"
        before.set()
        assert (await opened_before)[0] == 200
        opened_after = asyncio.create_task(first.run.post())
        await eventually(lambda: len(one.requests) == 102)
        assert inflight(first, one) == inflight(second, one) == 1, "that from before, which is closed"
        go_on()
        await eventually(lambda: not first.channel.unsent and second.gateway.router.ledger.of(one.name).remote_inflight == 1)
        await first.run.post({"name": one.name}, path="/warmroute/drain")  # all that was sent before has been read
        second.peers.replicator.follower.check()
        after.set()
        assert (await opened_after)[0] == 200
        await eventually(lambda: inflight(second, one) == 0)


# -- bounds


def test_a_worker_has_its_part_of_what_is_bounded_but_all_places() -> None:
    raw = {
        "pools": [
            {"replicas": ["http://a:1"], "max_queue": 5, "max_inflight": 9},
            {"replicas": ["http://b:1"], "max_queue": 0},
        ],
        "limits": {"connections": 7},
        "workers": 4,
    }
    part = worker_share(load(None, raw, env={}))
    assert [pool.max_queue for pool in part.pools] == [2, 0]
    assert part.pools[0].max_inflight == 9
    assert part.limits.connections == 2


async def test_the_places_of_a_pool_are_shared() -> None:
    go_on = asyncio.Event()
    pool = {"max_inflight": 1, "max_queue": 4}
    async with FakeReplica([hangs(go_on), answers()]) as one, star(one, pool=pool) as (_, (first, second)):
        running = asyncio.create_task(first.run.post())
        await eventually(lambda: inflight(second, one) == 1 and one.requests)
        waiting = asyncio.create_task(second.run.post())
        await eventually(lambda: second.gateway.fleet.pools[0].admission.waiting == 1)
        assert len(one.requests) == 1, "the one place is taken elsewhere"
        page = await first.run.metrics()
        assert (page['warmroute_pool_inflight{pool="default"}'], page['warmroute_pool_waiting{pool="default"}']) == (1, 1)
        await one.stop()
        go_on.set()
        statuses = [answer[0] for answer in await asyncio.gather(running, waiting)]
        assert statuses[0] == 502
        assert statuses[1] in (502, 503), "its turn came when the place was free; the end of the replica may be known by then"
        assert second.gateway.fleet.pools[0].admission.waiting == 0


# -- what is on the way


async def test_events_go_in_batches_and_in_order() -> None:
    async with FakeReplica() as one, star(one) as (made, (first, second)):
        batches: list[list[Event]] = []
        state = made.hub.workers[second.who]

        class Spy:
            """Sees what goes to the second worker."""

            def forward(self, payload: bytes, worker: int) -> None:
                if isinstance(message := from_hub(payload), EventBatch):
                    batches.append(decode(message.events))
                channel.forward(payload, worker)

            def send(self, message: Message, worker: int = HUB) -> None:
                channel.send(message, worker)

            def close(self) -> None:
                channel.close()

        channel, state.channel = state.channel, Spy()  # type: ignore[assignment]
        await asyncio.gather(*(first.run.post() for _ in range(20)))
        await eventually(lambda: sum(map(len, batches)) >= 40)
        assert len(batches) < 40
        await eventually(lambda: second.gateway.router.ledger.open_leases == 0)
        state.channel = channel


async def test_an_answer_to_nobody_is_passed_over() -> None:
    async with FakeReplica() as one, star(one) as (_, (first, second)):
        first.channel.send(TopicAnswer(99), second.who)
        first.channel.send(TopicAnswer(99, b"", COUNTERS), second.who)
        first.channel.send(TopicAnswer(1), 1000)
        assert (await second.run.metrics())["warmroute_workers"] == 2


async def test_counters_that_do_not_decode_are_left_out_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica() as one, star(one) as (made, (first, _)):
        await first.run.post()
        ours, its = await pair()
        broken = made.hub.join(ours)

        def receive(worker: int, message: Message, _payload: bytes) -> None:
            if isinstance(message, Ask) and message.topic == COUNTERS:
                its.send(TopicAnswer(message.number, b"junk", COUNTERS), worker)

        its.receive(receive, lambda: None)
        page = await first.run.metrics()
        assert page['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 1
        assert page["warmroute_workers"] == 2, "of three"
        assert "counters are left out" in caplog.text
        await closed(its, ours)
        made.hub.leave(broken)
