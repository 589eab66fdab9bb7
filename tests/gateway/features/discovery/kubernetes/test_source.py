"""A gateway that finds its replicas by Kubernetes, and requests meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.app import compose
from gateway.config.schema import Config
from gateway.core import Surroundings
from gateway.features.discovery.kubernetes.source import KubernetesSource
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import BODY, LOGGED, Running, config_over, eventually, serving_runner
from tests.gateway.features.disaggregation.legs import PARAMS, prefills
from tests.support.fakes import FakeReplica, answers, models, streams
from tests.support.kubernetes import PODS, SLICES, FakeKubernetes, endpoint, pod_of, slice_of


@contextlib.asynccontextmanager
async def discovering(server: FakeKubernetes, *pools: dict[str, Any], **kubernetes: Any) -> AsyncIterator[Running]:
    """A gateway without any replica of its own. pools: the first one is that of replicas which name none."""
    named = pools or ({"name": "default"},)
    source = {"kubernetes": {"server": server.url, **(kubernetes or {"service": "vllm"})}, "pool": named[0]["name"]}
    config = config_over(pools=list(named), discovery=[source])
    gateway = compose(config, LOGGED, Surroundings(members=impatient))
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        yield run


async def at_once(seconds: float) -> None:
    await asyncio.sleep(seconds / 20)


def impatient(config: Config) -> list[KubernetesSource]:
    """Sources whose pauses are short."""
    return [KubernetesSource(each, sleep=at_once) for each in config.discovery]


async def put(server: FakeKubernetes, name: str, replica: FakeReplica, **conditions: bool) -> None:
    """The pod of this name is at this replica, in a slice of its own."""
    await server.put(SLICES, slice_of(name, endpoint("127.0.0.1", name, **conditions), port=replica.port))


def at(run: Running) -> dict[str, str]:
    """Replicas that are no longer joining, by name: up, draining or down."""
    states = run.gateway.fleet.replicas
    return {state.name: "draining" if state.draining else "up" if state.up else "down" for state in states}


async def test_the_first_request_finds_the_replicas_that_there_are() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving():
        await put(server, "vllm-0", one)
        async with discovering(server) as run:
            status, _, _ = await run.post()
            assert status == 200
            assert len(one.requests) == 1
            shown = json.loads((await run.get("/warmroute/replicas"))[2])
            source = f"kubernetes service vllm at {server.url}"
            assert [(row["name"], row["source"]) for row in shown["replicas"]] == [("vllm-0", source)]
            assert shown["sources"] == [{"name": source, "replicas": 1, "problem": None, "note": None}]


async def test_without_replicas_it_says_so_and_goes_on_once_there_are_some() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving(), discovering(server) as run:
        status, headers, error = await run.post()
        assert (status, error["error"]["code"]) == (503, "no_replica_available")
        assert int(headers["Retry-After"]) > 0
        assert (await run.get("/ready"))[0] == 503
        await put(server, "vllm-0", one)
        await eventually(lambda: at(run) == {"vllm-0": "up"})
        assert (await run.post())[0] == 200


async def test_a_pod_that_terminates_gets_no_new_request_and_finishes_its_stream() -> None:
    server, go_on = FakeKubernetes(), asyncio.Event()
    old, new = FakeReplica([streams("a", "b", hold=go_on), answers()]), FakeReplica()
    async with old, new, server.serving():
        await put(server, "old", old)
        async with discovering(server) as run:
            parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
            assert (await anext(parts)).choices[0].delta.content == "a"
            await put(server, "new", new)
            await put(server, "old", old, ready=False, terminating=True)
            await eventually(lambda: at(run) == {"old": "draining", "new": "up"})
            assert [(await run.post())[0] for _ in range(4)] == [200] * 4
            assert len(old.requests) == 1
            await server.delete(SLICES, "old")
            await eventually(lambda: at(run) == {"new": "up"})
            go_on.set()
            assert [part.choices[0].delta.content async for part in parts] == ["b"]
            await eventually(lambda: run.gateway.fleet.named("old") is None)


async def test_a_server_that_is_away_leaves_the_replicas_and_a_metric_says_so() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one:
        async with server.serving():
            await put(server, "vllm-0", one)
            url = server.url
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(server.serving())
            async with discovering(server) as run:
                up = f'warmroute_discovery_up{{source="kubernetes service vllm at {url}"}}'
                assert (await run.metrics())[up] == 1
                await stack.aclose()
                (watch,) = run.gateway.local.membership.watches.all
                await eventually(lambda: watch.problem)
                assert (await run.metrics())[up] == 0
                assert (await run.metrics())[up.replace("_up", "_replicas")] == 1
                assert (await run.post())[0] == 200
                async with server.serving():
                    assert server.url == url
                    await eventually(lambda: not watch.problem)
                    assert (await run.metrics())[up] == 1


async def removal(run: Running, name: str) -> tuple[int, str]:
    """(status, message) of an operator who removes a replica."""
    async with run.session.delete(f"{run.admin_url}/warmroute/replicas/{name}") as answer:
        return answer.status, (await answer.json())["error"]["message"]


async def test_what_no_operator_has_added_is_removed_where_it_comes_from() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving():
        await put(server, "vllm-0", one)
        async with discovering(server) as run:
            status, message = await removal(run, "vllm-0")
            assert status == 409
            source = f"'kubernetes service vllm at {server.url}'"
            assert f"has been found by the source {source}: remove it there, or drain it here" in message


async def test_what_is_kept_until_a_source_answers_cannot_be_removed_meanwhile() -> None:
    async with FakeReplica() as one:
        gateway = compose(config_over(one), LOGGED, Surroundings(members=impatient, first_probes_s=0.05))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            nobody = {"kubernetes": {"server": "http://127.0.0.1:1", "service": "vllm"}}
            await gateway.local.reload.take(config_over(pools=[{"name": "default"}], discovery=[nobody]))
            status, message = await removal(run, one.name)
            assert status == 409
            assert "is kept from before the last reload, until a source of the new configuration answers" in message


async def test_pods_name_their_pools() -> None:
    server = FakeKubernetes()
    small, large = FakeReplica(listing=models("s")), FakeReplica(listing=models("l"))
    pools = ({"name": "small", "models": ["s"]}, {"name": "large", "models": ["l"]})
    async with small, large, server.serving():
        await server.put(PODS, pod_of("a", "127.0.0.1", small.port, capacity_tokens="123456"))
        await server.put(PODS, pod_of("b", "127.0.0.1", large.port, pool="large"))
        await server.put(PODS, pod_of("c", "127.0.0.1", 1, pool="none"))
        async with discovering(server, *pools, pods="app=vllm") as run:
            assert at(run) == {"a": "up", "b": "up"}
            for model, replica in (("s", small), ("l", large)):
                assert (await run.post({**BODY, "model": model}))[0] == 200
                assert len(replica.requests) == 1
            (state,) = run.gateway.fleet.pools[0].replicas
            assert state.capacity_tokens == 123_456
            await server.put(PODS, pod_of("a", "127.0.0.1", small.port, drain="true"))
            await eventually(lambda: at(run) == {"a": "draining", "b": "up"})


async def test_pods_name_their_models_and_go_to_the_pools_that_take_them() -> None:
    server = FakeKubernetes()
    small, large = FakeReplica(listing=models("s")), FakeReplica(listing=models("l-7b"))
    pools = ({"name": "small", "models": ["s"]}, {"name": "large", "models": ["l"]})
    async with small, large, server.serving():
        await server.put(PODS, pod_of("a", "127.0.0.1", small.port, model="unknown"))
        await server.put(PODS, pod_of("b", "127.0.0.1", large.port, model="l-7b"))
        async with discovering(server, *pools, pods="app=vllm") as run:
            assert [[state.name for state in pool.replicas] for pool in run.gateway.fleet.pools] == [["a"], ["b"]]
            assert (await run.post({**BODY, "model": "l-7b"}))[0] == 200
            await server.put(PODS, pod_of("b", "127.0.0.1", large.port, model="l-7b", pool="small"))
            await eventually(lambda: not run.gateway.fleet.pools[1].replicas)
            assert at(run) == {"a": "up", "b": "up"}


async def test_a_pod_s_weight_is_its_share_of_requests() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, FakeReplica() as two, server.serving():
        await server.put(PODS, pod_of("one", "127.0.0.1", one.port))
        await server.put(PODS, pod_of("two", "127.0.0.1", two.port, weight="1"))
        async with discovering(server, pods="app=vllm") as run:
            fleet = run.gateway.fleet
            state, now = fleet.named("two"), run.gateway.clock()
            assert state
            assert state.share == 0.01
            shown = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
            assert {row["name"]: row["weight"] for row in shown} == {"one": 100, "two": 1}

            def chosen() -> int:
                """Of 200 requests, how many could go there."""
                return sum("two" in fleet.candidates(fleet.target("m"), now) for _ in range(200))

            assert chosen() < 50
            await server.put(PODS, pod_of("two", "127.0.0.1", two.port, weight="100"))
            await eventually(lambda: state.share == 1)
            assert chosen() == 200
            await server.put(PODS, pod_of("two", "127.0.0.1", two.port, weight="1"))
            await eventually(lambda: state.share == 0.01)
            assert chosen() < 50


async def test_pods_divide_the_work_by_their_roles() -> None:
    server = FakeKubernetes()
    long = {**BODY, "messages": [{"role": "user", "content": "hello " * 2000}]}
    listing = models("m", owner="vllm")
    async with FakeReplica([prefills()], listing) as one, FakeReplica([answers()], listing) as two, server.serving():
        pods = pod_of("one", "127.0.0.1", one.port), pod_of("two", "127.0.0.1", two.port)
        for pod, role in zip(pods, ("prefill", "decode"), strict=True):
            pod["metadata"]["labels"]["llm-d.ai/role"] = role
            await server.put(PODS, pod)
        async with discovering(server, pods="app=vllm") as run:
            assert (await run.post(long))[0] == 200
            assert [len(each.requests) for each in (one, two)] == [1, 1]
            assert two.requests[0].json["kv_transfer_params"] == PARAMS
            shown = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
            assert {row["name"]: row["role"] for row in shown} == {"one": "prefill", "two": "decode"}
            await server.put(PODS, pod_of("one", "127.0.0.1", one.port, role="decode"))
            await eventually(lambda: len(run.gateway.fleet.target("m").replicas) == 2)


async def test_a_conversation_stays_at_a_pod_of_little_weight() -> None:
    server = FakeKubernetes()
    long = {**BODY, "messages": [{"role": "user", "content": "hello " * 2000}]}
    async with FakeReplica([answers(prompt=3000)]) as one, FakeReplica([answers(prompt=3000)]) as two, server.serving():
        await server.put(PODS, pod_of("two", "127.0.0.1", two.port, weight="1"))
        async with discovering(server, pods="app=vllm") as run:
            await run.post(long)
            await server.put(PODS, pod_of("one", "127.0.0.1", one.port))
            await eventually(lambda: len(run.gateway.fleet.target("m").replicas) == 2)
            number = 0
            while not one.requests and number < 9:  # of 100 new ones, one goes to the other pod
                number += 1
                other = {**BODY, "messages": [{"role": "user", "content": f"{number} other " * 2000}]}
                await run.post(other)
            before = len(two.requests)
            for _ in range(20):
                await run.post(long)
                await run.post(other)
            assert (len(two.requests) - before, len(one.requests)) == (20, 21)


async def test_a_pod_that_the_configuration_lists_drains_too() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, FakeReplica() as two, server.serving():
        await server.put(PODS, pod_of("one", "127.0.0.1", one.port))
        config = config_over(one, two, discovery=[{"kubernetes": {"server": server.url, "pods": "app=vllm"}}])
        gateway = compose(config, LOGGED, Surroundings(members=impatient))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            assert at(run) == {one.name: "up", two.name: "up"}
            await server.put(PODS, pod_of("one", "127.0.0.1", one.port, ready=False))
            await eventually(lambda: at(run) == {one.name: "draining", two.name: "up"})
            assert [(await run.post())[0] for _ in range(4)] == [200] * 4
            assert not one.requests
            await server.put(PODS, pod_of("one", "127.0.0.1", one.port))
            await eventually(lambda: at(run) == {one.name: "up", two.name: "up"})


@pytest.mark.parametrize("seed", range(3))
async def test_requests_follow_pods_that_come_go_and_flap(seed: int) -> None:
    """After each change, all requests are answered, by pods that are ready."""
    chance, server = random.Random(seed), FakeKubernetes(window=10)
    replicas = [FakeReplica() for _ in range(5)]
    now: dict[str, tuple[FakeReplica, bool]] = {}  # pod -> its replica, ready
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        await stack.enter_async_context(server.serving())
        run = await stack.enter_async_context(discovering(server))
        born = 0
        for _ in range(40):
            match chance.choice(["come", "come", "go", "flap", "flap", "cut", "compact"]):
                case "come":
                    free = [each for each in replicas if each not in [used for used, _ in now.values()]]
                    if free:
                        born += 1
                        now[f"pod-{born}"] = (free[0], True)
                        await put(server, f"pod-{born}", free[0])
                case "go" if now:
                    await server.delete(SLICES, gone := chance.choice(sorted(now)))
                    del now[gone]
                case "flap" if now:
                    pod = chance.choice(sorted(now))
                    replica, ready = now[pod]
                    now[pod] = replica, not ready
                    await put(server, pod, replica, ready=not ready)
                case "cut":
                    server.cut_streams()
                case "compact":
                    server.version += 1
                    await server.compact()
            expected = {pod: "up" if ready else "draining" for pod, (_, ready) in now.items()}
            await eventually(lambda expected=expected: at(run) == expected)
            ready = [replica for replica, well in now.values() if well]
            before = [len(each.requests) for each in replicas]
            answered = [status for status, _, _ in await asyncio.gather(*(run.post() for _ in range(4)))]
            asked = [replica for replica, had in zip(replicas, before, strict=True) if len(replica.requests) > had]
            assert all(replica in ready for replica in asked)
            assert answered == [200 if ready else 503] * 4


async def test_a_pool_that_is_scaled_to_zero_keeps_the_others_ready_and_asks_clients_to_retry() -> None:
    server = FakeKubernetes()
    small = FakeReplica(listing=models("s"))
    async with small, server.serving():
        await server.put(PODS, pod_of("a", "127.0.0.1", small.port, pool="small"))
        async with discovering(server, {"name": "large", "models": ["l"]}, {"name": "small"}, pods="app=vllm") as run:
            assert (await run.get("/ready"))[0] == 200
            assert (await run.post({**BODY, "model": "s"}))[0] == 200
            status, headers, error = await run.post({**BODY, "model": "l"})
            assert (status, error["error"]["code"]) == (503, "no_replica_available")
            assert "there are none at present" in error["error"]["message"]
            assert "Retry-After" in headers
            await server.delete(PODS, "a")
            await eventually(lambda: not at(run))
            assert (await run.get("/ready"))[0] == 503


async def test_wrong_annotations_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving():
        await server.put(PODS, pod_of("a", "127.0.0.1", one.port, capacity_tokens="400k"))
        async with discovering(server, pods="app=vllm") as run:
            assert at(run) == {"a": "up"}
            await server.put(PODS, pod_of("a", "127.0.0.1", one.port, capacity_tokens="400k", drain="true"))
            await eventually(lambda: at(run) == {"a": "draining"})
    errors = [getattr(record, "error", "") for record in caplog.records if record.message == "pod has a problem"]
    assert errors == [f"a: the annotation warmroute.io/capacity-tokens is not a number from 1 to {1 << 40}"]


async def test_names_of_pods_that_come_and_go_leave_nothing_behind() -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving(), discovering(server) as run:
        for number in range(12):
            await put(server, f"pod-{number}", one)
            await eventually(lambda number=number: at(run) == {f"pod-{number}": "up"})
            assert (await run.post())[0] == 200
            await server.delete(SLICES, f"pod-{number}")
            await eventually(lambda: not at(run))
        await eventually(lambda: not run.gateway.fleet.leaving)
        assert not run.gateway.router.ledger.loads
        run.gateway.router.check()
