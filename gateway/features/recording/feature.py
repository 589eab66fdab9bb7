"""Recordings of traffic, while a recorder asks."""

from __future__ import annotations

import random

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.core import Core
from gateway.features.recording.endpoints import RecordingEndpoints
from gateway.features.recording.observer import RecordTraffic
from gateway.features.recording.recording import TOPIC, Recording
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    recording = Recording(lambda: f"{random.SystemRandom().getrandbits(64):016x}")
    RecordTraffic(recording, core.observers)
    core.work.sweeps.append(recording.sweep)
    core.topics.answers(TOPIC, lambda question: recording.answer(question, core.clock()))

    def endpoints(operator: Operator, local: LocalControl, control: ControlPlane) -> list[Route]:
        return RecordingEndpoints(operator, local, control).routes()

    core.endpoints.append(endpoints)
    core.put(recording)
