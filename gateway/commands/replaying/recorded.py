"""A recording as a workload: the replayed requests, the fleet, and the recorded result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from router.learning.rates import DEFAULT_RATE
from router.simulation.calibration import Speed, measured, speed_of
from router.simulation.fleet import FleetSpec, Held, Result, ServedRequest
from router.simulation.policies import SIMULATED
from router.simulation.recorded import (
    JITTER_S,
    ClosedReplay,
    OpenReplay,
    RecordedRequest,
    RecordedTraffic,
    Replay,
    held,
    read,
)
from router.simulation.workloads import Row, TraceError, WorkloadSource
from router.types import Random

WARM_SHARE: Final = 0.1
WARM_S: Final = 60.0, 600.0  # least and most; of a recording under 180 s, a third at most


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """open: all requests come at their recorded times. engine_block: tokens of an engine's block."""

    open: bool
    engine_block: int


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """The replayable requests of one pool, and the fleet as they show it. left_out: number of requests of other pools, and of
    failed ones. replicas, kv_tokens: None if the recording does not have them. warm_s: earlier requests do not count, because
    the simulated caches are empty then. learned_rate: as in `FleetSpec`.
    """

    recording: RecordedTraffic
    requests: list[RecordedRequest]
    pool: int
    left_out: int
    replicas: int | None
    kv_tokens: int | None
    speed: Speed
    warm_s: float
    learned_rate: float

    @property
    def policy(self) -> str:
        """The gateway's policy, if it can be simulated."""
        return self.recording.policy if self.recording.policy in SIMULATED else "cost"

    def spec(self, base: FleetSpec) -> FleetSpec:
        """The recorded fleet; values missing in the recording are taken from `base`."""
        speed = self.speed
        return dataclasses.replace(
            base,
            replicas=self.replicas or base.replicas,
            kv_tokens=self.kv_tokens or base.kv_tokens,
            prefill_rate=speed.prefill_rate or base.prefill_rate,
            decode_rate=speed.decode_rate or base.decode_rate,
            latency_s=speed.latency_s,
            learned_rate=self.learned_rate,
        )

    def source(self, chance: Random, spec: FleetSpec, how: ReplayOptions, speed: float) -> WorkloadSource:
        replay = Replay(self.recording, self.requests, spec.decode_rate, how.engine_block)
        return (OpenReplay if how.open else ClosedReplay)(replay, chance, speed, JITTER_S)

    def held(self, chance: Random, how: ReplayOptions) -> list[Held]:
        """The caches of the replicas at the beginning of the recording."""
        replay = Replay(self.recording, self.requests, 1.0, how.engine_block)
        names = {number: place for place, number in enumerate(sorted({one.replica for one in self.requests}))}
        return list(held(replay, names, chance))

    def measured(self, spec: FleetSpec) -> Result | None:
        return measured(self.requests, spec.replicas, spec.kv_tokens, self.warm_s)

    def compared(self, served: Sequence[ServedRequest]) -> tuple[list[ServedRequest], list[ServedRequest]]:
        """The requests of a replay whose waits were measured, and the requests whose cached tokens were reported; all if there
        are none.

        Chosen by recorded times, so that each replay compares the same requests. Requests of the warm-up count only if there
        are no others.
        """
        waited, reported, later = list[ServedRequest](), list[ServedRequest](), list[ServedRequest]()
        for one in served:
            assert one.request.measured is not None
            recorded = self.requests[one.request.measured.number]
            if recorded.at < self.warm_s:
                continue
            later.append(one)
            if recorded.ttft is not None:
                waited.append(one)
            if recorded.cached is not None:
                reported.append(one)
        counted = later or list(served)
        return waited or counted, reported or counted

    def unmeasured(self) -> str:
        """The reason why there is no recorded result for comparison; "": there is one."""
        later = [one for one in self.requests if one.at >= self.warm_s]
        if not later:
            what = f"all requests begin in the first {self.warm_s:.0f} s, the warm-up"
            return f"{what}, so nothing measured is left, and the rows count them all: set --warm-up 0"
        if all(one.ttft is None for one in later):
            return "nothing measured: no request was streamed, so there is no time to a first token"
        if all(one.cached is None for one in later):
            return "nothing measured: no answer reports cached tokens (docs/engines.md has the engine's flag)"
        return ""


def recorded_fleet(rows: Iterable[Row], pool: int | None, warm_s: float | None = None) -> RecordedFleet:
    """The fleet of a recording. pool: its number; None: the one with the most requests. warm_s: None: a share of the recording.
    Raises TraceError.
    """
    recording = read(rows)
    counts: dict[int, int] = {}
    for one in recording.requests:
        counts[one.pool] = counts.get(one.pool, 0) + 1
    if not counts:
        raise TraceError("it has no request")
    if pool is None:
        pool = max(counts, key=counts.__getitem__)
    elif pool not in counts:
        raise TraceError(f"no request of pool {pool} (--pool); there are: {', '.join(map(str, sorted(counts)[:20]))}")
    chosen = [one for one in recording.requests if one.pool == pool and one.replayable]
    if not chosen:
        raise TraceError(f"no request of pool {pool} was answered")
    fleet = recording.pools.get(pool, [])
    sizes = [each["kv_tokens"] for each in fleet if each["kv_tokens"]]
    learned = [each["prefill_rate"] for each in fleet if each["prefill_rate"] not in (0.0, DEFAULT_RATE)]
    seen = len({one.replica for one in chosen})
    return RecordedFleet(
        recording,
        chosen,
        pool,
        len(recording.requests) - len(chosen),
        max(len(fleet), seen) or None,
        round(sum(sizes) / len(sizes)) if sizes else None,
        speed_of(chosen, whole=recording.share == 1),
        _warm_s(recording.seconds) if warm_s is None else warm_s,
        sum(learned) / len(learned) if learned else 0.0,
    )


def _warm_s(seconds: float) -> float:
    least, most = WARM_S
    return min(most, max(WARM_SHARE * seconds, min(least, seconds / 3)))


def about(fleet: RecordedFleet, spec: FleetSpec, given: dict[str, Any]) -> list[str]:
    """Lines that describe the replay. given: the flags that the user has set."""
    recording, speed = fleet.recording, fleet.speed
    guess = "" if fleet.kv_tokens or given.get("kv_tokens") else " (a guess, for the recording does not say: --kv-tokens)"
    lines = [
        f"{len(fleet.requests)} requests in {recording.seconds / 3600:.2f} h; {spec.replicas} replicas,"
        f" {spec.kv_tokens:,} KV tokens each{guess}",
        f"prefill {spec.prefill_rate:,.0f} tokens/s, decode {spec.decode_rate:.1f} tokens/s,"
        f" {spec.latency_s * 1000:.0f} ms for each first token beside that",
    ]
    if speed.prefill_rate is None and not given.get("prefill_rate"):
        lines.append("the recording does not show the prefill rate: --prefill-rate")
    if why := fleet.unmeasured():
        lines.append(why)
    elif fleet.warm_s:
        lines.append(f"the first {fleet.warm_s:.0f} s are not in the numbers (--warm-up)")
    if recording.share < 1:
        lines.append(
            f"a sample of {recording.share:.4g} of the conversations: each is replayed {1 / recording.share:.4g} times"
        )
    if fleet.left_out:
        lines.append(f"left out: {fleet.left_out} requests that failed, or of other pools than {fleet.pool} (--pool)")
    if recording.lost:
        lines.append(f"the recording lacks {recording.lost} requests: the real load was higher")
    return lines


def middle_of(results: Sequence[Result]) -> Result:
    """The median of each value over several replays of the same requests. In some of them the queues of a nearly
    saturated fleet grow without bound.
    """
    first = dataclasses.asdict(results[0])
    changes = {
        name: median([getattr(each, name) for each in results]) for name, value in first.items() if isinstance(value, float)
    }
    return dataclasses.replace(results[0], **changes)
