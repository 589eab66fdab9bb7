"""Discovery against a real API server: `make test-cluster` (the server: scripts/kube-apiserver.sh).

The last test takes a minute, or WARMROUTE_FLAP_MINUTES: `make test-cluster FLAP_MINUTES=10`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import compose
from gateway.core import Surroundings
from gateway.features.discovery.kubernetes.api import Api, ApiAccess, RelistNeeded
from gateway.features.discovery.kubernetes.source import KubernetesSource
from gateway.features.discovery.section import DiscoveryConfig, KubernetesConfig
from gateway.fleet.membership import Member
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, config_over, eventually, serving_runner
from tests.support.cluster import ADMIN, PODS, SLICES, Cluster, cluster
from tests.support.fakes import FakeReplica
from tests.support.flapping.api_servers import real_api_server
from tests.support.flapping.run import Clock, chance, follow, minutes
from tests.support.flapping.scenario import LASTING
from tests.support.tools import ROOT, tool

pytestmark = pytest.mark.cluster

MINUTES = minutes(1)
BETA = "apis/discovery.k8s.io/v1beta1/namespaces/{}/endpointslices"  # of 1.20


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as started:
        yield started


def source_of(real: Cluster, watch_s: float = 240, token_file: Path | None = None, **kubernetes: Any) -> KubernetesSource:
    config = DiscoveryConfig(kubernetes=KubernetesConfig(**(kubernetes or {"service": "vllm"})), pool="default")
    access = ApiAccess(real.url, "default", token_file=token_file or real.token_file, ca_file=real.ca_file)
    return KubernetesSource(config, access, watch_s, BETA)


class Seen:
    def __init__(self, source: KubernetesSource) -> None:
        self.source = source
        self.members: list[Member] | None = None

    @property
    def addresses(self) -> list[str] | None:
        return None if self.members is None else sorted(member.url.removeprefix("http://") for member in self.members)


@contextlib.asynccontextmanager
async def watching(source: KubernetesSource) -> AsyncIterator[Seen]:
    seen = Seen(source)

    async def watch() -> None:
        async for members in source.watch(expects=False):
            seen.members = list(members)

    task = asyncio.create_task(watch())
    try:
        yield seen
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_slices_are_listed_and_watched_through_an_outage_and_the_ends_of_watches(real: Cluster) -> None:
    await real.put_slice("a", "10.0.0.1", "10.0.0.2")
    await real.put_slice("other", "10.0.0.9", service="other")
    async with watching(source_of(real, watch_s=2)) as seen:
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
        await real.put_slice("b", "10.0.0.3")
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"])
        await real.send("DELETE", f"{SLICES}/b")
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
        await asyncio.sleep(6)  # two watches end
        assert not seen.source.problem
        await real.kill_server()
        await eventually(lambda: seen.source.problem)
        assert seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"]
        await real.start_server()
        await real.put_slice("a", "10.0.0.2")
        await eventually(lambda: seen.addresses == ["10.0.0.2:8000"] and not seen.source.problem)


async def test_a_version_that_has_expired_is_told_apart_from_other_errors(real: Cluster) -> None:
    await real.put_slice("a", "10.0.0.1")
    await real.kill_server()
    await real.start_server()  # it knows no events from before
    access = ApiAccess(real.url, "default", token_file=real.token_file, ca_file=real.ca_file)
    api = Api(access, BETA.format("default"), "", 240, lambda: 0.0)

    async def watch() -> None:
        async for _ in api.watch("1"):
            pass

    with pytest.raises(RelistNeeded, match="too old resource version") as gone:
        await asyncio.wait_for(watch(), 60)
    assert gone.value.expected
    await api.close()


async def test_what_is_deleted_while_the_token_is_revoked_and_the_server_restarts_is_noticed(real: Cluster) -> None:
    await real.put_slice("a", "10.0.0.1")
    await real.put_slice("b", "10.0.0.2")
    async with watching(source_of(real, watch_s=1)) as seen:
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
        real.token_file.write_text("revoked")
        await eventually(lambda: "401" in seen.source.problem)
        await real.send("DELETE", f"{SLICES}/b")
        await real.kill_server()
        await real.start_server()
        assert seen.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"]
        real.token_file.write_text(ADMIN)
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000"] and not seen.source.problem)


async def test_the_chart_s_role_is_enough_for_slices_and_allows_nothing_else(real: Cluster, tmp_path: Path) -> None:
    await real.put_slice("a", "10.0.0.1")
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"config": {"discovery": [{"kubernetes": "vllm"}]}}))
    arguments = "template", "gw", ROOT / "helm", "--namespace", "default", "--values", values
    helm = await asyncio.create_subprocess_exec(tool("helm"), *arguments, stdout=subprocess.PIPE)
    for item in yaml.safe_load_all((await helm.communicate())[0]):
        match item["kind"]:
            case "ServiceAccount":
                await real.send("POST", "/api/v1/namespaces/default/serviceaccounts", item)
            case "Role" | "RoleBinding" as kind:
                path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/default/{kind.lower()}s"
                await real.send("POST", path, item)
    account = "/api/v1/namespaces/default/serviceaccounts/gw-warmroute/token"
    made = await real.send("POST", account, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    token = tmp_path / "account-token"
    token.write_text(made["status"]["token"])
    async with watching(source_of(real, token_file=token)) as seen:
        await eventually(lambda: seen.addresses == ["10.0.0.1:8000"])
        await real.put_slice("a", "10.0.0.2")
        await eventually(lambda: seen.addresses == ["10.0.0.2:8000"])
    async with watching(source_of(real, token_file=token, pods="app=vllm")) as seen:
        await eventually(lambda: "403" in seen.source.problem and "pods is forbidden" in seen.source.problem)


async def test_a_gateway_drains_a_pod_that_is_deleted(real: Cluster) -> None:
    async with FakeReplica() as one, FakeReplica() as two:
        await real.send("POST", "/api/v1/nodes", {"metadata": {"name": "node"}})
        await real.run_pod("one", "127.0.0.1", one.port, {"warmroute.io/capacity-tokens": "1000"})
        around = Surroundings(members=lambda _config: [source_of(real, pods="app=vllm")])
        gateway = compose(
            config_over(pools=[{"name": "default"}], discovery=[{"kubernetes": {"pods": "app=vllm"}}]), LOGGED, around
        )
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            assert (await run.post())[0] == 200
            state = gateway.fleet.named("one")
            assert state
            assert (state.capacity_tokens, state.draining) == (1000, False)
            await real.run_pod("two", "127.0.0.1", two.port)
            await eventually(lambda: (joined := gateway.fleet.named("two")) and joined.up)
            await real.send("DELETE", f"{PODS}/one")
            await eventually(lambda: state.draining)
            assert [(await run.post())[0] for _ in range(4)] == [200] * 4
            assert (len(one.requests), len(two.requests)) == (1, 4)
            await real.finish_pod("one")
            await eventually(lambda: gateway.fleet.named("one") is None)


@pytest.mark.timeout(MINUTES * 180 + 300)
async def test_a_gateway_follows_pods_by_an_api_server_that_fails_now_and_then(tmp_path: Path) -> None:
    """As with the stand-in: tests/gateway/features/discovery/test_flapping.py."""
    random = chance(3)
    async with real_api_server(random, tmp_path) as server:
        await follow(server, random, LASTING, MINUTES * 60, Clock(), late_s=1.0)
