"""The live page: requests, sums, decisions and the prefix index in real time."""

from __future__ import annotations

import random
import time

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.core import Core
from gateway.features.live_page.broadcast import Broadcast
from gateway.features.live_page.feed import Feed
from gateway.features.live_page.live import LiveEndpoints
from gateway.features.live_page.pages import Pages
from gateway.features.live_page.requests import LiveRequests
from gateway.features.live_page.sums import PoolLoad, RollingSums
from gateway.features.live_page.view import TOPIC, LiveView
from gateway.fleet.directory import Fleet
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    sums = RollingSums(core.metrics, lambda: _loads(core.fleet), time.perf_counter)
    view = LiveView(_new_id(), Feed(_new_id), sums, core.running, core.wall_clock)
    LiveRequests(view.feed, core.extensions.explainers, core.observers, core.wall_clock)

    def endpoints(operator: Operator, local: LocalControl, control: ControlPlane) -> list[Route]:
        broadcast = Broadcast(local, control, core.wall_clock)
        core.running.tell(broadcast.close)
        core.put(broadcast)
        return LiveEndpoints(operator, local, broadcast).routes()

    core.endpoints.append(endpoints)
    core.pages.append(Pages().routes)
    core.topics.answers(TOPIC, lambda question: view.answer(question, core.clock()))
    core.work.sweeps.append(view.sweep)
    core.put(view)


def _new_id() -> str:
    return f"{random.SystemRandom().getrandbits(64):016x}"


def _loads(fleet: Fleet) -> dict[str, PoolLoad]:
    return {pool.name: (pool.admission.waiting, pool.admission.inflight, pool.admission.max_inflight) for pool in fleet.pools}
