"""A gateway of one process: its prefix index in a file and shared with other gateways, if configured."""

from __future__ import annotations

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.core import Core
from gateway.features.sharing.endpoints import SharingEndpoints
from gateway.features.sharing.single_process import single_process
from gateway.features.snapshots.keeper import file_of
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    snapshot = file_of(core.config) if core.around.lasts else None
    core.control_plane = lambda local: single_process(local, snapshot=snapshot)

    def endpoints(operator: Operator, _local: LocalControl, control: ControlPlane) -> list[Route]:
        return SharingEndpoints(operator, control).routes()

    core.endpoints.append(endpoints)
