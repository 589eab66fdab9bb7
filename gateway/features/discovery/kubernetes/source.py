"""Discovery in Kubernetes: the replicas are the endpoints of a Service (EndpointSlices), or the pods with certain labels.

EndpointSlices need the fewest rights (list and watch of endpointslices). Pods need the same rights for pods. Their annotations
set their pool, port and capacity, or drain them (`objects.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from gateway.features.discovery.kubernetes.api import WATCH_S, Api, ApiAccess, access_of
from gateway.features.discovery.kubernetes.objects import members_of, read_pod, read_slice
from gateway.features.discovery.kubernetes.watcher import Watcher
from gateway.features.discovery.section import DiscoveryConfig
from gateway.fleet.membership import Member

log = logging.getLogger("warmroute.discovery")

PAUSE_S: Final = 0.1  # between two changes of the members, so that many events are applied together
SLICES: Final = "apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
PODS: Final = "api/v1/namespaces/{}/pods"
_MAX_NOTES: Final = 20  # logged per change


class KubernetesSource:
    """A MemberSource. config: with `kubernetes`. access: default: by the configuration and the service account. watch_s: see
    `api.py`. slices: the path of EndpointSlices (before 1.21, v1beta1). sleep, chance: see Watcher.
    """

    def __init__(
        self,
        config: DiscoveryConfig,
        access: ApiAccess | None = None,
        watch_s: float = WATCH_S,
        slices: str = SLICES,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        assert config.kubernetes
        self.name = config.source
        self.pool = config.pool
        self.problem = ""
        self.settings = replace(config, pool="")
        self._kubernetes = config.kubernetes
        self._access = access
        self._watch_s = watch_s
        self._slices = slices
        self._sleep = sleep
        self._chance = chance
        self._noted = frozenset[str]()

    async def watch(self, *, expects: bool) -> AsyncIterator[Iterable[Member]]:
        """See MemberSource."""
        access = self._access or access_of(self._kubernetes)
        path = PODS if self._kubernetes.pods else self._slices
        labels = self._kubernetes.pods or f"kubernetes.io/service-name={self._kubernetes.service}"
        read = read_pod if self._kubernetes.pods else read_slice
        api = Api(access, path.format(access.namespace), labels, self._watch_s, self._chance)
        watcher = Watcher(
            self.name,
            api,
            lambda object_: read(object_, self._kubernetes.port),
            self._report_problem,
            clock=time.monotonic,
            sleep=self._sleep,
            chance=self._chance,
        )
        try:
            async for objects in watcher.watch(expects=expects):
                members, notes = members_of(objects, self.settings, access.prefix)
                self._note(notes)
                yield members
                await self._sleep(PAUSE_S)
        finally:
            await api.close()

    def _note(self, notes: Sequence[str]) -> None:
        """Logs new notes."""
        for note in [note for note in notes if note not in self._noted][:_MAX_NOTES]:
            log.warning("pod has a problem", extra={"source": self.name, "error": note})
        self._noted = frozenset(notes)

    def _report_problem(self, problem: str) -> None:
        self.problem = problem
