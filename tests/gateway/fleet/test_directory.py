"""Which pool takes a model, which replicas are candidates, what probes find out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

from gateway.app import compose
from gateway.errors import GatewayError, ReplicaFailure
from gateway.fleet.catalog import MAX_SHOWN, warn_of_misfits
from gateway.fleet.engine_client import ModelEntry
from tests.gateway.conftest import BODY, LOGGED, Running, config_over, eventually, running
from tests.support.configs import load
from tests.support.fakes import FakeReplica, answers, dies, hangs, http, models, status, writes


def pool(*replicas: FakeReplica, models: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"replicas": [replica.url for replica in replicas], "models": list(models)}


def names(run: Running, model: str) -> set[str]:
    return set(run.gateway.fleet.target(model).replicas)


async def test_the_longest_prefix_takes_the_model() -> None:
    async with FakeReplica() as small, FakeReplica() as large, FakeReplica() as rest:
        pools = [pool(small, models=("org/llama",)), pool(large, models=("org/llama-70b",)), pool(rest, models=("*",))]
        async with running(pools=pools) as run:
            assert names(run, "org/llama-8b") == {small.name}
            assert names(run, "org/llama-70b-instruct") == {large.name}
            assert names(run, "gpt") == {rest.name}
            assert run.gateway.fleet.target("org/llama-8b").label == "org/llama", "labels stay bounded: nobody lists this name"
            assert run.gateway.fleet.target("m").label == "m"


async def test_without_prefixes_a_pool_serves_what_its_replicas_list() -> None:
    one, two = FakeReplica(listing=models("a", "b")), FakeReplica(listing=models("c"))
    async with one, two, running(pools=[pool(one), pool(two)]) as run:
        assert (names(run, "b"), names(run, "c")) == ({one.name}, {two.name})
        with pytest.raises(GatewayError, match="'nope' does not exist here; this gateway serves: a, b, c") as caught:
            run.gateway.fleet.target("nope")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        with pytest.raises(GatewayError, match="'model' is needed"):
            run.gateway.fleet.target("")


async def test_a_pool_with_prefixes_does_not_keep_a_model_from_the_pool_that_serves_it() -> None:
    """A replica behind a prefix may list more than its pool serves."""
    one, two = FakeReplica(listing=models("llama", "qwen")), FakeReplica(listing=models("qwen"))
    async with one, two, running(pools=[pool(one, models=("llama",)), pool(two)]) as run:
        assert names(run, "llama") == {one.name}
        assert names(run, "qwen") == {two.name}
        assert list(run.gateway.fleet.catalog.names) == ["llama", "qwen"]


async def test_in_a_pool_the_replicas_that_list_the_model_are_the_candidates() -> None:
    async with FakeReplica(listing=models("a")) as one, FakeReplica(listing=models("a", "b")) as two, running(one, two) as run:
        assert names(run, "a") == {one.name, two.name}
        assert names(run, "b") == {two.name}


async def test_a_model_whose_only_replica_is_down_is_unavailable_not_unknown() -> None:
    async with FakeReplica(listing=models("a")) as one, FakeReplica(listing=models("b")) as two, running(one, two) as run:
        await one.stop()
        await eventually(lambda: "a" not in run.gateway.fleet.catalog.names)
        assert (await run.post({"model": "a", "messages": [{"role": "user", "content": "x"}]}))[0] == 503
        assert not two.requests


async def test_what_no_pool_would_take_is_not_listed() -> None:
    async with FakeReplica(listing=models("a", "b")) as one, running(pools=[pool(one, models=("a",))]) as run:
        assert [model.id for model in (await run.client.models.list()).data] == ["a"]


async def test_the_model_list_is_the_union() -> None:
    async with (
        FakeReplica(listing=models("a", "b")) as one,
        FakeReplica(listing=models("b", "org/c")) as two,
        running(one, two) as run,
    ):
        listed = await run.client.models.list()
        assert [model.id for model in listed.data] == ["a", "b", "org/c"]
        assert (await run.client.models.retrieve("org/c")).owned_by == "fake"
        assert (await run.get("/v1/models/none"))[0] == 404


async def test_a_pool_that_serves_none_of_its_replicas_models_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    one, two, three = FakeReplica(listing=models("sim")), FakeReplica(listing=models("llama")), FakeReplica(listing=models("x"))
    async with one, two, three, running(pools=[pool(one, models=("llama", "qwen")), pool(two), pool(three)]) as run:
        found = [record for record in caplog.records if "the replica's pool serves none of its models" in record.getMessage()]
        logged = [(record.replica, record.models, record.pool_models) for record in found]  # type: ignore[attr-defined]
        assert sorted(logged) == sorted(
            [(one.name, ["sim"], "llama, qwen"), (two.name, ["llama"], "any that no other pool names")]
        )
        status, _, answer = await run.post({**BODY, "model": "sim"})
        assert (status, answer["error"]["message"]) == (404, "The model 'sim' does not exist here; this gateway serves: x.")


async def test_a_reload_that_makes_a_pool_serve_none_of_its_replicas_models_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica(listing=models("sim")) as one, FakeReplica(listing=models("sim")) as two:
        async with running(pools=[pool(one)]) as run:
            assert "the replica's pool serves none of its models" not in caplog.text
            await run.gateway.local.reload.take(config_over(pools=[pool(one, models=("llama",))]))
            await run.gateway.local.reload.take(config_over(pools=[pool(one, two, models=("llama",))]))
        found = [record for record in caplog.records if "the replica's pool serves none of its models" in record.getMessage()]
        assert [record.replica for record in found] == [one.name, two.name]  # type: ignore[attr-defined]


async def test_a_reload_in_which_one_pool_takes_anothers_models_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica(listing=models("sim")) as one, FakeReplica(listing=models("llama", "sim")) as two:
        async with running(pools=[pool(one), pool(two, models=("llama",))]) as run:
            await run.gateway.local.reload.take(config_over(pools=[pool(one), pool(two, models=("llama", "sim"))]))
        found = [record for record in caplog.records if "the replica's pool serves none of its models" in record.getMessage()]
        assert [record.replica for record in found] == [one.name]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("replicas", "listed", "logged", "asked"), [(1000, 1, 100, 100), (1000, 300, 6, 2000), (3, 1500, 1, 2000)]
)
async def test_warnings_of_replicas_that_do_not_fit_are_bounded(
    replicas: int, listed: int, logged: int, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By their number, and by the models that are looked at: 2,000 of all."""
    urls = [f"http://127.0.0.1:{10_000 + number}" for number in range(replicas)]
    fleet = compose(config_over(pools=[{"replicas": urls, "models": ["llama"]}]), LOGGED).fleet
    for state in fleet.replicas:
        state.up, state.models = True, {f"sim-{number}": ModelEntry(b"{}", True, "", None) for number in range(listed)}
    looked_at = list[str]()
    warn_of_misfits(set(fleet.replicas), fleet.pools, looked_at.append)
    assert sum("the replica's pool serves none of its models" in record.getMessage() for record in caplog.records) == logged
    assert len(looked_at) == asked


async def test_a_list_that_changes_to_what_its_pool_does_not_serve_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica(listing=models("llama")) as one:
        async with running(pools=[pool(one, models=("llama",))], health={"interval_s": 0.02}) as run:
            assert "the replica's pool serves none of its models" not in caplog.text
            one.listing = models("sim")
            await eventually(lambda: "the replica's pool serves none of its models" in caplog.text)
            await eventually(lambda: not run.gateway.fleet.catalog.names)
            status, _, body = await run.get("/v1/models/sim")
            assert status == 404
            assert b"no model that a replica lists fits its pool (pools[].models)" in body
        assert caplog.text.count("the replica's pool serves none of its models") == 1


async def test_a_model_of_a_pool_that_is_down_is_unavailable_not_unknown() -> None:
    async with running(pools=[{"replicas": ["http://127.0.0.1:9"], "models": ["llama"]}]) as run:
        status, headers, body = await run.get("/v1/models/llama-70b")
        assert (status, "Retry-After" in headers) == (503, True)
        assert b"no_replica_available" in body
        assert (await run.get("/v1/models/other"))[0] == 404


async def test_a_replica_that_never_answered_makes_models_unknown_not_absent() -> None:
    async with FakeReplica(listing=models("a")) as one, running(one, "http://127.0.0.1:9") as run:
        assert names(run, "a") == {one.name}
        with pytest.raises(GatewayError, match=r"no list of models came so far from 127\.0\.0\.1:9 \(.+\)") as caught:
            run.gateway.fleet.target("b")
        assert caught.value.status == 503


LIARS = [
    writes(b"garbage\r\n\r\n"),
    writes(http(200, b"[]")),
    writes(http(200, b'{"data": [1]}')),
    writes(http(200, b"<html>")),
    status(500),
    dies,
]


@pytest.mark.parametrize("listing", LIARS)
async def test_what_lists_no_models_is_not_up(listing: Any) -> None:
    async with FakeReplica(listing=listing) as liar, running(liar) as run:
        assert not run.gateway.fleet.pools[0].ready
        (row,) = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
        assert row["up"] is False
        assert row["error"]


async def test_a_replica_that_wants_a_key_is_up() -> None:
    async with FakeReplica(listing=status(401)) as keyed, running(pools=[pool(keyed, models=("m",))]) as run:
        assert names(run, "m") == {keyed.name}
    async with FakeReplica(listing=status(401)) as keyed, running(keyed) as run:
        assert names(run, "any") == {keyed.name}, "it may serve any model; who has the key will see"
        assert run.gateway.fleet.target("any").label == "unlisted"


async def test_a_failed_request_makes_the_prober_look_at_once() -> None:
    async with FakeReplica(script=(dies,)) as replica, running(replica) as run:
        (state,) = run.gateway.fleet.replicas
        replica.listing = status(500)
        await run.post()
        await eventually(lambda: state.failed_probes == 1)
        assert state.up


async def test_one_failed_probe_is_forgiven_and_two_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    async with FakeReplica() as replica, running(replica, health={"interval_s": 0.01}) as run:
        (state,) = run.gateway.fleet.replicas
        replica.listing = status(500)
        await eventually(lambda: state.failed_probes == 1 or not state.up)
        await eventually(lambda: not state.up)
        assert state.failed_probes >= 2
        replica.listing = models("m", "new")
        await eventually(lambda: state.up)
        assert list(state.models) == ["m", "new"]
        assert [record.message for record in caplog.records] == ["replica up", "replica down", "replica up"]
        assert (await run.metrics())[f'warmroute_replica_up{{replica="{replica.name}"}}'] == 1


async def test_of_very_many_models_the_first_are_shown_and_all_are_served() -> None:
    """The list is made in one go, and replicas choose how long it is."""
    async with contextlib.AsyncExitStack() as stack:
        lists = [[f"r{replica}-{number}" for number in range(4096)] for replica in range(4)]
        replicas = [await stack.enter_async_context(FakeReplica(listing=models(*names))) for names in lists]
        run = await stack.enter_async_context(running(*replicas))
        assert len(run.gateway.fleet.catalog.names) == MAX_SHOWN == 8192
        last = lists[3][-1]
        assert last not in run.gateway.fleet.catalog.names
        status, _, body = await run.get(f"/v1/models/{last}")
        assert (status, json.loads(body)["id"]) == (200, last)
        assert (await run.post({**BODY, "model": last}))[0] == 200


async def test_the_error_for_an_unknown_model_has_a_few_names_of_many() -> None:
    """Sorted, and from a list that is made once: a request for an unknown model costs nothing that grows with the lists."""
    listed = [f"m{number:04}" for number in range(4000)]
    async with FakeReplica(listing=models(*reversed(listed))) as replica, running(replica) as run:
        fleet = run.gateway.fleet
        catalog = fleet.catalog
        status, _, body = await run.post({**BODY, "model": "nope"})
        text = f"this gateway serves: {', '.join(listed[:20])} and 3980 more in GET /v1/models."
        assert (status, body["error"]["message"]) == (404, f"The model 'nope' does not exist here; {text}")
        status, _, body = await run.get("/v1/models/nope")
        assert (status, json.loads(body)["error"]["message"]) == (404, f"The model 'nope' does not exist here; {text}")
        assert fleet.catalog is catalog
        replica.listing = models("other")
        await fleet.probe_all(run.gateway.upstream)
        assert fleet.catalog.names == ["other"]
        fleet.drain(next(iter(fleet.replicas)), on=True)
        assert fleet.catalog.names == []


async def test_a_failure_at_the_url_that_a_replica_had_is_not_that_of_its_new_one() -> None:
    async with (
        FakeReplica() as old,
        FakeReplica() as new,
        running(pools=[{"replicas": [{"name": "a", "url": old.url}]}]) as run,
    ):
        before = run.gateway.fleet.named("a")
        assert before
        await run.gateway.local.reload.take(config_over({"name": "a", "url": new.url}))
        after = run.gateway.fleet.named("a")
        assert after
        run.gateway.fleet.failed(before, ReplicaFailure("refused", "nobody listens"))
        assert (after.url, after.up) == (new.url, True)
        run.gateway.fleet.failed(after, ReplicaFailure("refused", "nobody listens"))
        assert not after.up


async def test_the_metrics_show_how_much_of_a_pool_is_in_use() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([hangs(go_on), answers()]) as one, FakeReplica() as two, FakeReplica() as other:
        pools = [{"name": "a", "max_inflight": 8, **pool(one, two, models=("m",))}, {"name": "b", **pool(other, models=("n",))}]
        async with running(pools=pools) as run:
            state = run.gateway.fleet.named(two.name)
            assert state
            run.gateway.fleet.drain(state, on=True)
            prefills_slowly(run, one)
            request = asyncio.create_task(run.post())
            await eventually(lambda: one.requests)
            page = await run.metrics()
            booked = page[f'warmroute_replica_booked_tokens{{replica="{one.name}"}}']
            rate = page[f'warmroute_replica_prefill_tokens_per_second{{replica="{one.name}"}}']
            assert {name: of_pool(page, name) for name in OF_POOLS} == {
                "inflight": [1, 0],
                "slots_taken": [1, 0],
                "inflight_limit": [8, 4096],
                "replicas": [2, 1],
                "replicas_live": [1, 1],
            }
            busy, idle = of_pool(page, "prefill_backlog_seconds")
            assert 0 < busy <= booked / rate
            assert idle == 0
            go_on.set()
            assert (await request)[0] == 200
            assert of_pool(await run.metrics(), "prefill_backlog_seconds") == [0, 0]


def prefills_slowly(run: Running, replica: FakeReplica) -> None:
    """The prefill of a prompt lasts longer than any test."""
    pool = run.gateway.router.ledger.rates.of(replica.name).pool
    pool.value, pool.known = 1.0, True  # tokens per second
    pool.members[replica.name].settle()


OF_POOLS = ("inflight", "slots_taken", "inflight_limit", "replicas", "replicas_live")


def of_pool(page: dict[str, float], name: str) -> list[float]:
    """The gauge of the pools a and b."""
    return [page[f'warmroute_pool_{name}{{pool="{each}"}}'] for each in "ab"]


async def test_a_replica_that_lists_another_pools_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The first pool gets the model's requests. A prefix decides instead of the lists."""
    one, two = FakeReplica(listing=models("public", "secret")), FakeReplica(listing=models("secret"))
    async with one, two:
        for prefixes in ((), ("secret",)):
            caplog.clear()
            async with running(pools=[pool(one), pool(two, models=prefixes)]):
                found = [record for record in caplog.records if "lists models of another pool" in record.getMessage()]
                assert all(record.models == ["secret"] for record in found)  # type: ignore[attr-defined]
                assert bool(found) == (not prefixes)


async def test_a_weight_is_a_share_of_new_work_and_a_reload_changes_it() -> None:
    async with FakeReplica() as one, FakeReplica() as two:

        def weighed(weight: int) -> dict[str, Any]:
            return {"pools": [{"replicas": [one.url, {"url": two.url, "weight": weight}]}]}

        async with running(**weighed(1)) as run:
            fleet, now = run.gateway.fleet, run.gateway.clock()

            def candidacies() -> int:
                """Of 300 requests, for how many it is a candidate."""
                return sum(two.name in fleet.candidates(fleet.target("m"), now) for _ in range(300))

            assert candidacies() < 60
            await run.gateway.local.reload.take(load(None, {"listen": "127.0.0.1:0", **weighed(100)}, env={}))
            assert candidacies() == 300
            await run.gateway.local.reload.take(load(None, {"listen": "127.0.0.1:0", **weighed(1)}, env={}))
            assert candidacies() < 60
