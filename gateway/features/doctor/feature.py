"""The prefix doctor: inactive until an operator asks."""

from __future__ import annotations

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.core import Core
from gateway.features.doctor.endpoints import DoctorEndpoints
from gateway.features.doctor.observer import DoctorObserver
from gateway.features.doctor.watch import TOPIC, DoctorWatch
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    watch = DoctorWatch(core.parsing.outliner)
    DoctorObserver(core.fleet, watch, core.extensions, core.observers)
    core.work.sweeps.append(watch.expire)
    core.topics.answers(TOPIC, lambda _question: watch.answer(core.clock()))

    def endpoints(operator: Operator, _local: LocalControl, control: ControlPlane) -> list[Route]:
        return DoctorEndpoints(operator, control, core.live, core.clock).routes()

    core.endpoints.append(endpoints)
    core.put(watch)
