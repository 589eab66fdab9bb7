"""Recordings of traffic, while somebody records."""

from __future__ import annotations

import random

from gateway.core import Core
from gateway.features.recording.observer import RecordTraffic
from gateway.features.recording.recording import Recording


def install(core: Core) -> None:
    recording = Recording(lambda: f"{random.SystemRandom().getrandbits(64):016x}")
    RecordTraffic(recording, core.observers)
    core.work.sweeps.append(recording.sweep)
    core.put(recording)
