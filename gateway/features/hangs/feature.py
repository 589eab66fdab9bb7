"""The watch for replicas that hang."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.hangs.hang_watch import SILENCE, TOPIC, HangWatch


def install(core: Core) -> None:
    watch = HangWatch(core)
    core.put(watch)
    core.topics.receives(TOPIC, watch.receive)
    core.topics.receives(SILENCE, watch.receive_silence)
    core.gauges.append(watch.set_gauges)
    core.work.sweeps.append(watch.sweep)
    core.work.closes.append(watch.close)
