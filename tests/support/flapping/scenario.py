"""Pods come, become unready, are deleted, crash, flap, and come back at the addresses or with the names of others, while what
tells the gateway about them is cut, silent or down, and clients send requests all the time.

No request fails that a pod could have answered, none reaches a marked pod late, the gateway's fleet is the cluster's within
HEALS_S of each repair, and when all pods are gone nothing of them is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

from gateway.cluster.member_source import MemberSource
from gateway.config.schema import Config
from gateway.fleet.state import ReplicaState
from tests.gateway.conftest import Running
from tests.support.flapping.load import Load
from tests.support.flapping.pods import Place, Pod, Truth

log = logging.getLogger("tests.flapping")

HEALS_S: Final = 5.0  # after an outage is repaired
WELL: Final = 2  # pods of each pool that are known, at least, while anything is done to another


class Directory(Protocol):
    """Where the gateway finds pods. outages: while the block runs, it learns nothing. disturbances: it learns all the same.

    most_s: how long an outage of that name may take. expected: the fleet's replicas, and the state of each.
    """

    most_s: Mapping[str, float]

    @property
    def pools(self) -> tuple[str, ...]: ...

    @property
    def discovery(self) -> Sequence[dict[str, Any]]: ...

    @property
    def outages(self) -> Mapping[str, Callable[[], contextlib.AbstractAsyncContextManager[None]]]: ...

    @property
    def disturbances(self) -> Mapping[str, Callable[[], Awaitable[None]]]: ...

    def places(self, number: int, clock: Callable[[], float]) -> Mapping[str, Sequence[Place]]: ...

    def expected(self, pods: Sequence[Pod]) -> Mapping[str, str]: ...

    def sources(self, config: Config) -> Sequence[MemberSource]: ...

    async def show(self, pod: Pod) -> None: ...

    async def remove(self, pod: Pod) -> None: ...


@dataclass(frozen=True)
class Pace:
    """In seconds. step: between two changes, on average. grace: least and most of a deletion's. outage: likewise; long: one of
    them, in the middle. calm: between two outages. down: how long a crashed process is. patience: by which bounds are
    multiplied, on a machine that does other things at the same time.
    """

    step: float
    grace: tuple[float, float]
    outage: tuple[float, float]
    calm: float
    down: tuple[float, float]
    long: float = 0.0
    patience: float = 1.0

    @property
    def heals_s(self) -> float:
        return HEALS_S * self.patience


QUICK: Final = Pace(0.03, (0.3, 0.8), (0.3, 1.0), 1.3, (0.1, 0.5), patience=3.0)
LASTING: Final = Pace(0.1, (0.5, 4.0), (1.0, 15.0), 6.0, (0.2, 3.0), long=150.0)


class Scenario:
    """See the top of this file. places: of each pool."""

    def __init__(
        self, directory: Directory, truth: Truth, places: Mapping[str, Sequence[Place]], chance: Random, pace: Pace
    ) -> None:
        self._directory = directory
        self._truth = truth
        self._places = places
        self._chance = chance
        self._pace = pace
        self._numbers = itertools.count(1)
        self._going = set[asyncio.Task[None]]()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self.heals_s: dict[str, list[float]] = {}  # by outage: until the fleet was right again

    async def begin(self) -> None:
        """A few pods of each pool, before the gateway begins."""
        for pool in self._directory.pools:
            for place in self._places[pool][: WELL + 2]:
                await self._come(self._new(pool, place))

    async def run(self, run: Running, load: Load, seconds: float) -> None:
        async with load.on(*self._directory.pools), asyncio.timeout(seconds * 2 + 120):
            outages = asyncio.create_task(self._disturb(run, seconds))
            try:
                ends = self._truth.clock() + seconds
                while self._truth.clock() < ends or not outages.done():
                    await self._may_step.wait()
                    self._step(self._chance.choice(self._directory.pools))
                    await asyncio.sleep(self._chance.expovariate(1 / self._pace.step))
                await outages
                await self._finish()
                await self.agree(run, "the end")
            finally:
                outages.cancel()

    async def end(self) -> None:
        """All pods go."""
        for pod in list(self._truth.pods):
            self._do(pod, self._delete(pod))
        await self._finish()

    async def _finish(self) -> None:
        while self._going:
            await asyncio.gather(*self._going)

    # -- what happens to pods

    def _step(self, pool: str) -> None:
        free = self._free(pool)
        known = self._truth.known(pool)
        calm = [pod for pod in self._truth.pods if pod.pool == pool and not pod.busy]
        spare = [pod for pod in calm if len([each for each in known if each is not pod and not each.busy]) >= WELL]
        if free and (not spare or self._chance.random() < 0.3):
            self._come_to(pool, self._chance.choice(free))
        elif spare:
            pod = self._chance.choice(spare)
            change = self._chance.choice([self._toggle, self._toggle, self._flap, self._delete, self._replace, self._crash])
            self._do(pod, change(pod))

    def _free(self, pool: str) -> list[Place]:
        taken = [pod.place for pod in self._truth.pods]
        return [place for place in self._places[pool] if place not in taken]

    def _new(self, pool: str, place: Place, name: str = "") -> Pod:
        """A pod that the cluster does not know yet."""
        number = next(self._numbers)
        pod = Pod(name or f"pod-{number}", f"uid-{number}", pool, place, busy=True)
        self._truth.pods.append(pod)
        return pod

    def _come_to(self, pool: str, place: Place) -> None:
        pod = self._new(pool, place)
        self._do(pod, self._come(pod))

    def _do(self, pod: Pod, change: Coroutine[Any, Any, None]) -> None:
        """One after the other."""
        pod.busy = True
        task = asyncio.create_task(change)
        self._going.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._going.discard(task)
            pod.busy = False

        task.add_done_callback(done)

    async def _set(self, pod: Pod, *, ready: bool, deleting: bool = False) -> None:
        """It counts as well, or as marked, once this has been sent; no more as either before: the gateway may know it first."""
        pod.ready, pod.deleting = ready, deleting
        if pod.serving:
            pod.marked_at = None
        else:
            pod.well_since = None
        await self._directory.show(pod)
        self._truth.note(pod)

    async def _come(self, pod: Pod) -> None:
        await self._set(pod, ready=False)
        await pod.place.start(pod)
        await self._set(pod, ready=True)
        pod.busy = False

    async def _toggle(self, pod: Pod) -> None:
        await self._set(pod, ready=not pod.ready)

    async def _flap(self, pod: Pod) -> None:
        for _ in range(self._chance.randint(3, 8)):
            await self._toggle(pod)
            await asyncio.sleep(self._chance.random() * 0.03)
        await self._set(pod, ready=True)

    async def _delete(self, pod: Pod) -> None:
        await self._set(pod, ready=pod.ready, deleting=True)
        await asyncio.sleep(self._chance.uniform(*self._pace.grace))
        await self._end(pod)
        await self._remove(pod)

    async def _end(self, pod: Pod) -> None:
        self._truth.ends(pod)
        await pod.place.stop()

    async def _remove(self, pod: Pod) -> None:
        await self._directory.remove(pod)
        self._truth.pods.remove(pod)
        self._truth.changes += 1

    async def _replace(self, pod: Pod) -> None:
        """By one of another name at its address, which may come before it is gone; or one of its name."""
        await self._set(pod, ready=pod.ready, deleting=True)
        await asyncio.sleep(self._chance.uniform(*self._pace.grace))
        await self._end(pod)
        if self._chance.random() < 0.5:
            successor = self._new(pod.pool, pod.place)
            await self._come(successor)
            await self._remove(pod)
        else:
            await self._remove(pod)
            others = self._free(pod.pool)
            place = self._chance.choice(others) if others and self._chance.random() < 0.5 else pod.place
            await self._come(self._new(pod.pool, place, pod.name))

    async def _crash(self, pod: Pod) -> None:
        """And its kubelet notices, or not."""
        await self._end(pod)
        if self._chance.random() < 0.5:
            await self._set(pod, ready=False)
        await asyncio.sleep(self._chance.uniform(*self._pace.down))
        await pod.place.start(pod)
        self._truth.note(pod)
        await self._set(pod, ready=True)

    # -- what happens to what the gateway knows

    async def _disturb(self, run: Running, seconds: float) -> None:
        """Each disturbance and an outage, in any order, again and again."""
        begun, long = self._truth.clock(), self._pace.long
        while (gone_s := self._truth.clock() - begun) < seconds:
            names = [*self._directory.disturbances, ""]
            self._chance.shuffle(names)
            for name in names:
                await asyncio.sleep(self._pace.calm * self._chance.uniform(0.8, 1.2))
                self._truth.changes += 1
                if name:
                    await self._directory.disturbances[name]()
                elif long and gone_s > seconds / 3:
                    await self._outage(run, min(long, seconds / 4))
                    long = 0.0
                else:
                    await self._outage(run, self._chance.uniform(*self._pace.outage))

    async def _outage(self, run: Running, seconds: float) -> None:
        name = self._chance.choice(sorted(self._directory.outages))
        seconds = min(seconds, self._directory.most_s.get(name, seconds))
        log.info("%s for %.1f s", name, seconds)
        self._truth.outages.begin(self._truth.clock())
        async with self._directory.outages[name]():
            await asyncio.sleep(seconds)
        self._may_step.clear()
        try:
            await self.agree(run, name)
        finally:
            self._truth.outages.over(self._truth.clock())
            self._may_step.set()

    async def agree(self, run: Running, after: str) -> None:
        """The fleet has to be as the cluster is soon, while nothing new begins."""
        begun = self._truth.clock()
        while (differs := self._differences(run)) and self._truth.clock() - begun <= self._pace.heals_s:  # noqa: ASYNC110  (see `eventually`)
            await asyncio.sleep(0.01)
        assert not differs, f"{self._pace.heals_s} s after {after}: {differs}"
        self.heals_s.setdefault(after, []).append(self._truth.clock() - begun)

    def _differences(self, run: Running) -> Mapping[str, tuple[str, str]]:
        """By replica: what it is, and what it should be."""
        expected = self._directory.expected(self._truth.pods)
        found = {state.name: state_of(state) for state in run.gateway.fleet.replicas}
        problems = {watch.name: watch.problem for watch in run.gateway.local.membership.watches.all if watch.problem}
        expected, found = {**expected, **dict.fromkeys(problems, "well")}, {**found, **problems}
        names = sorted({*expected, *found})
        both = {name: (found.get(name, "none"), expected.get(name, "none")) for name in names}
        return {name: each for name, each in both.items() if each[0] != each[1]}


def state_of(state: ReplicaState) -> str:
    return "draining" if state.draining else "up" if state.up else "down"
