"""Routing by the cache events of engines."""

from __future__ import annotations

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.core import Core
from gateway.features.kv_events.endpoints import KvEventEndpoints
from gateway.features.kv_events.following import PublisherSet
from gateway.features.kv_events.prompts import PromptReader
from gateway.request.extensions import Preparer
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    following = PublisherSet(core)
    reader = PromptReader(core, following.residency)
    core.router.residency = following.residency
    core.extensions.preparers.append(Preparer(reader.concerns, reader.prepare))  # the last of them: the body is final
    core.extensions.chosen.append(reader.chosen)
    core.extensions.delivered.append(reader.delivered)
    core.work.starts.append(following.start)
    core.work.sweeps.append(following.sweep)
    core.work.closes.append(reader.engines.close)
    core.work.closes.append(following.close)
    core.gauges.append(following.set_gauges)

    def endpoints(operator: Operator, _local: LocalControl, _control: ControlPlane) -> list[Route]:
        return KvEventEndpoints(operator, following).routes()

    core.endpoints.append(endpoints)
    core.put(following)
