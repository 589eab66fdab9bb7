"""Pods in an API server of Kubernetes: those of the pool "pods" are found by their labels, those of "slices" by a Service.

The gateway reaches the server through a cable. The scenario reaches it directly, also while the cable is out; while the server
itself is down, changes wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from gateway.cluster.member_source import MemberSource
from gateway.config.schema import Config
from gateway.features.discovery.kubernetes.api import ApiAccess
from gateway.features.discovery.kubernetes.source import SLICES as SLICES_V1
from gateway.features.discovery.kubernetes.source import KubernetesSource
from tests.support import cluster, kubernetes
from tests.support.cluster import Cluster
from tests.support.flapping.cable import Cable
from tests.support.flapping.pods import Place, Pod, at_addresses
from tests.support.kubernetes import FakeKubernetes, endpoint, pod_of, slice_of

PODS, SLICES = POOLS = "pods", "slices"
DISCOVERY: Final[Sequence[dict[str, Any]]] = (
    {"kubernetes": {"pods": "app=vllm"}, "pool": PODS},
    {"kubernetes": {"service": "vllm"}, "pool": SLICES},
)
SLICE_NAMES: Final = ("a", "b", "c")
BETA: Final = "apis/discovery.k8s.io/v1beta1/namespaces/{}/endpointslices"  # of 1.20

Outage = Callable[[], contextlib.AbstractAsyncContextManager[None]]
Disturbance = Callable[[], Awaitable[None]]


class ApiServer:
    """See the top of this file. One of the two below."""

    def __init__(self, chance: Random, access: Callable[[Cable], ApiAccess], port: int, slices: str, watch_s: float) -> None:
        self.pools: tuple[str, ...] = POOLS
        self.discovery: Sequence[dict[str, Any]] = DISCOVERY
        self.most_s: Mapping[str, float] = {}
        self.cable = Cable(port)
        self._chance = chance
        self._access = access
        self._path = slices
        self._watch_s = watch_s
        self._up = asyncio.Lock()  # held by each change, and while the server is down
        self._members: dict[str, dict[str, Pod]] = {name: {} for name in SLICE_NAMES}  # of each slice, by name

    def sources(self, config: Config) -> Sequence[MemberSource]:
        access = self._access(self.cable)
        return [KubernetesSource(each, access, self._watch_s, self._path) for each in config.discovery]

    @property
    def outages(self) -> Mapping[str, Outage]:
        return {"refused": self.cable.refusing, "silent": self.cable.silent, "killed": self._killed}

    @property
    def disturbances(self) -> Mapping[str, Disturbance]:
        """After them the gateway knows all as soon as without."""
        return {"cut": self._cut}

    async def _cut(self) -> None:
        self.cable.cut()

    @contextlib.asynccontextmanager
    async def _killed(self) -> AsyncIterator[None]:
        async with self._up:
            await self.kill()
            try:
                yield
            finally:
                await self.start()

    def places(self, number: int, clock: Callable[[], float]) -> Mapping[str, Sequence[Place]]:
        return {pool: at_addresses(number, pool, clock, self._chance) for pool in POOLS}

    def expected(self, pods: Sequence[Pod]) -> Mapping[str, str]:
        found, taken = dict[str, str](), set[Place]()
        for pod in sorted(pods, key=lambda pod: not pod.serving):
            if pod.place not in taken:
                taken.add(pod.place)
                found[pod.name] = "draining" if not pod.serving else "up" if pod.place.runs else "down"
        return found

    async def show(self, pod: Pod) -> None:
        """It is as it is: made, or changed."""
        async with self._up:
            if pod.pool == PODS:
                await self.put_pod(pod)
            else:
                name = next((name for name, pods in self._members.items() if pods.get(pod.name) is pod), "")
                name = name or self._chance.choice(SLICE_NAMES)
                self._members[name][pod.name] = pod
                await self._put_slice(name)

    async def remove(self, pod: Pod) -> None:
        async with self._up:
            if pod.pool == PODS:
                await self.remove_pod(pod)
            for name, pods in self._members.items():
                if pods.get(pod.name) is pod:
                    del pods[pod.name]
                    await self._put_slice(name)

    async def _put_slice(self, name: str) -> None:
        await self.put_slice(name, list(self._members[name].values()))

    # -- of each kind of server

    async def kill(self) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def put_pod(self, pod: Pod) -> None:
        raise NotImplementedError

    async def remove_pod(self, pod: Pod) -> None:
        raise NotImplementedError

    async def put_slice(self, name: str, pods: Sequence[Pod]) -> None:
        raise NotImplementedError


class FakeApiServer(ApiServer):
    """Repeats events, too, sends late ones, and forgets what it has sent."""

    def __init__(self, server: FakeKubernetes, port: int, stack: contextlib.AsyncExitStack, chance: Random) -> None:
        """stack: holds the server's `serving`."""
        super().__init__(chance, lambda cable: ApiAccess(f"http://127.0.0.1:{cable.port}", "default"), port, SLICES_V1, 2.0)
        self._server = server
        self._serving = stack

    @property
    def disturbances(self) -> Mapping[str, Disturbance]:
        return {**super().disturbances, "compacted": self._compact, "late": self._late}

    async def _compact(self) -> None:
        self._server.version += 1
        await self._server.compact()

    async def _late(self) -> None:
        """The next watches begin with old events of everything that there is or was, twice, in any order."""
        late = [*self._server.history[-20:]] * 2
        self._chance.shuffle(late)
        self._server.late = late
        self.cable.cut()

    async def kill(self) -> None:
        await self._serving.aclose()

    async def start(self) -> None:
        await self._serving.enter_async_context(self._server.serving())

    async def put_pod(self, pod: Pod) -> None:
        made = pod_of(pod.name, *pod.address, ready=pod.ready, uid=pod.uid)
        if pod.deleting:
            made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await self._server.put(kubernetes.PODS, made)

    async def remove_pod(self, pod: Pod) -> None:
        await self._server.delete(kubernetes.PODS, pod.name)

    async def put_slice(self, name: str, pods: Sequence[Pod]) -> None:
        port = pods[0].place.port if pods else 1
        endpoints = [
            endpoint(each.place.host, each.name, each.uid, ready=each.serving, terminating=each.deleting) for each in pods
        ]
        await self._server.put(kubernetes.SLICES, slice_of(name, *endpoints, port=port))


class RealApiServer(ApiServer):
    """kube-apiserver 1.20: an endpoint has no condition for a pod that terminates, and leaves its slice instead."""

    def __init__(self, real: Cluster, chance: Random) -> None:
        port = int(real.url.rpartition(":")[2])
        super().__init__(
            chance,
            lambda cable: ApiAccess(
                f"https://127.0.0.1:{cable.port}", "default", token_file=real.token_file, ca_file=real.ca_file
            ),
            port,
            BETA,
            20.0,
        )
        self._real = real
        self._known = dict[str, Pod]()  # by name
        self._slices = set[str]()

    async def kill(self) -> None:
        await self._real.kill_server()

    async def start(self) -> None:
        await self._real.start_server()

    async def put_pod(self, pod: Pod) -> None:
        if self._known.get(pod.name) is not pod:
            made = await self._real.run_pod(pod.name, *pod.address, ready=pod.ready)
            pod.uid = made["metadata"]["uid"]
            self._known[pod.name] = pod
        elif pod.deleting:
            await self._real.send("DELETE", f"{cluster.PODS}/{pod.name}", {"gracePeriodSeconds": 600})
        else:
            await self._real.set_ready(pod.name, ready=pod.ready)

    async def remove_pod(self, pod: Pod) -> None:
        await self._real.finish_pod(pod.name)
        del self._known[pod.name]

    async def put_slice(self, name: str, pods: Sequence[Pod]) -> None:
        port = pods[0].place.port if pods else 1
        endpoints = [
            {
                "addresses": [each.place.host],
                "conditions": {"ready": each.ready},
                "targetRef": {"kind": "Pod", "namespace": "default", "name": each.name, "uid": each.uid},
            }
            for each in pods
            if not each.deleting
        ]
        about = {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}}
        ports = [{"name": "http", "port": port, "protocol": "TCP"}]
        if name in self._slices:
            await self._real.patch(f"{cluster.SLICES}/{name}", {"endpoints": endpoints, "ports": ports})
        else:
            self._slices.add(name)
            whole = {"metadata": about, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
            await self._real.send("POST", cluster.SLICES, whole)


@contextlib.asynccontextmanager
async def fake_api_server(chance: Random) -> AsyncIterator[FakeApiServer]:
    server = FakeKubernetes(window=40)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server.serving())
        made = FakeApiServer(server, int(server.url.rpartition(":")[2]), stack, chance)
        async with made.cable.plugged():
            yield made


@contextlib.asynccontextmanager
async def real_api_server(chance: Random, folder: Path) -> AsyncIterator[RealApiServer]:
    async with cluster.cluster(folder) as real:
        await real.send("POST", "/api/v1/nodes", {"metadata": {"name": "node"}})
        made = RealApiServer(real, chance)
        async with made.cable.plugged():
            yield made
