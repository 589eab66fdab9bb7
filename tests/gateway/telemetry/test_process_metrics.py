"""process_* and the build, as Prometheus gets them; of several workers added up."""

from __future__ import annotations

import os
import platform
import time

from gateway import __version__
from gateway.telemetry.exposition import merge, packed
from gateway.telemetry.metrics import Metrics
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica


async def test_a_scrape_has_the_process_and_the_build() -> None:
    async with FakeReplica() as one, running(one) as run:
        found = await run.metrics()
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_virtual_memory_bytes"] >= found["process_resident_memory_bytes"]
    assert 0 < found["process_open_fds"] <= found["process_max_fds"]
    assert 0 < found["process_cpu_seconds_total"] <= sum(os.times()[:2]) + 1
    assert 0 < found["process_start_time_seconds"] < time.time() + 60
    (build,) = [name for name in found if name.startswith("warmroute_build_info")]
    assert f'version="{__version__}"' in build
    assert f'python="{platform.python_version()}"' in build


async def test_workers_are_added_up_and_one_that_has_ended_leaves_its_cpu_time() -> None:
    page, worker, ended = Metrics(), Metrics(), Metrics()
    for each in (page, worker, ended):
        each.set_process_gauges()
    cpu, memory, started = "process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"
    parts = {name: [_value(each, name) for each in (page, worker, ended)] for name in (cpu, memory, started)}
    await merge(page.instruments, packed(worker.instruments))
    await merge(page.instruments, packed(ended.instruments), ended=True)
    assert _value(page, cpu) == sum(parts[cpu])
    assert _value(page, memory) == sum(parts[memory][:2])
    assert _value(page, started) == min(parts[started])


def _value(metrics: Metrics, name: str) -> float:
    (instrument,) = [each for each in metrics.instruments.all if each.name == name]
    value = instrument.values[()]
    assert isinstance(value, float)
    return value
