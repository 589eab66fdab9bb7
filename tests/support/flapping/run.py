"""A gateway, and the whole scenario with it: from no pod to no pod."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from random import Random
from typing import Final

from gateway.app import compose
from gateway.core import Surroundings
from gateway.fleet.membership import SHOWN_S
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, OUTPUT, Running, config_over, eventually, serving_runner
from tests.support.flapping.leftovers import held, open_files, texts_in
from tests.support.flapping.load import Load
from tests.support.flapping.pods import Truth
from tests.support.flapping.scenario import Directory, Pace, Scenario, state_of

log = logging.getLogger("tests.flapping")

PLACES: Final = 12  # of each pool
PROBE_S: Final = 0.5
SPARE_FILES: Final = 8  # connections to the server beside a watch
SPARE_TASKS: Final = 4  # of the fake server, for a watch each that has begun since
SPARE_OBJECTS: Final = 5000  # label sets of requests, and the like
SWEEPS: Final = 10
NAMES: Final = r"pod-\d+|127\.\d+\.\d+\.\d+:\d+|localhost:\d+"  # of pods and of their addresses


def minutes(default: float) -> float:
    """How long to go on: WARMROUTE_FLAP_MINUTES."""
    return float(os.environ.get("WARMROUTE_FLAP_MINUTES", default))


def chance(seed: int) -> Random:
    """Another one: WARMROUTE_FLAP_SEED."""
    return Random(int(os.environ.get("WARMROUTE_FLAP_SEED", seed)))


class Clock:
    """Monotonic seconds, and those that were added."""

    added = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added


async def follow(directory: Directory, random: Random, pace: Pace, seconds: float, clock: Clock, *, late_s: float) -> None:
    """late_s: after a pod was marked, how long requests may reach it."""
    late_s *= pace.patience
    truth, places = Truth(clock, late_s, known_s=late_s + 1.5 * PROBE_S + 0.5), directory.places(PLACES, clock)
    pools = [{"name": name, "models": [name]} for name in directory.pools]
    config = config_over(pools=pools, discovery=list(directory.discovery), health={"interval_s": PROBE_S})
    gateway = compose(config, LOGGED, Surroundings(clock=clock, members=directory.sources))
    scenario = Scenario(directory, truth, places, random, pace)
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        load = Load(run.url, truth)
        await run.metrics()
        before = Before(run, directory)
        await scenario.begin()
        await scenario.agree(run, "the beginning")
        assert before.left(run), "what is looked for is found while it is there"
        await scenario.run(run, load, seconds)
        await scenario.end()
        await _gone(run, clock)
        await before.is_all_there_is(run, clock)
    late, latest = truth.late(itertools.chain(*places.values()))
    heals = {name: f"{max(each):.2f} s at most of {len(each)}" for name, each in scenario.heals_s.items()}
    log.info("%d changes, %s, latest %.3f s, heals %s", truth.changes, load.fates, latest, heals)
    assert not late, (len(late), late[:5])
    assert not load.fates.failed, (len(load.fates.failed), load.fates.failed[:5])
    assert load.fates.answered > 10 * (load.fates.unserved + load.fates.cut)


async def _gone(run: Running, clock: Clock) -> None:
    """The fleet is empty: what a source doubts at first, it believes after a while."""
    for _ in range(20):
        if left := [*run.gateway.fleet.replicas, *run.gateway.fleet.leaving]:
            await asyncio.sleep(1)
            clock.added += SHOWN_S / 10
    assert not left, [f"{state.name}: {state_of(state)}" for state in left]


class Before:
    """What there is before the first pod: at the end there is nothing more."""

    def __init__(self, run: Running, directory: Directory) -> None:
        # The output has the lines of other tests, too.
        self._ignored = [run.gateway.around, directory, asyncio.get_running_loop(), OUTPUT]
        self._tasks = len(asyncio.all_tasks())
        self._files = open_files()
        self._objects = self._held(run)
        self._texts = texts_in(run.gateway, NAMES, self._ignored)

    async def is_all_there_is(self, run: Running, clock: Clock) -> None:
        clock.added += 2 * SHOWN_S + 1
        await eventually(lambda: len(asyncio.all_tasks()) <= self._tasks + SPARE_TASKS)
        await eventually(lambda: open_files() <= self._files + SPARE_FILES)
        assert not run.gateway.router.ledger.loads
        for _ in range(SWEEPS):
            if left := self.left(run):
                await asyncio.sleep(1)  # it is swept each second
        assert not left, left
        assert b'replica="' not in (await run.get("/metrics"))[2]
        objects = self._held(run)
        log.info("objects: %d at first, %d at the end", self._objects, objects)
        assert objects < self._objects + SPARE_OBJECTS

    def left(self, run: Running) -> dict[str, str]:
        """Names that were not there."""
        found = texts_in(run.gateway, NAMES, self._ignored)
        return {text: holder for text, holder in found.items() if text not in self._texts}

    def _held(self, run: Running) -> int:
        return sum(1 for _ in held(run.gateway, self._ignored))
