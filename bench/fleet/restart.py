"""A gateway is restarted during warm conversations: cached tokens of their next turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fleet.loads import growing
from bench.fleet.stage import REPLICAS, Gateways, ready, send, staged

CONVERSATIONS = 24
WARM_TURNS = 8
CONCURRENT = 8
THINK_S = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """file: there is a snapshot file. sibling: another gateway shares with it. restarted: False: for comparison."""

    name: str
    workers: int = 1
    file: bool = False
    sibling: bool = False
    restarted: bool = True


CASES = (
    Case("no restart", restarted=False),
    Case("empty"),
    Case("`snapshot.file`", file=True),
    Case("empty", workers=2),
    Case("`snapshot.file`", workers=2, file=True),
    Case("what another gateway knows", sibling=True),
    Case("what another gateway knows", workers=2, sibling=True),
)


@dataclass(frozen=True, slots=True)
class Restarted:
    """Cached shares of the last turn before the restart and of the next one after it; requests that failed, by their problem;
    down_s: from SIGTERM until ready.
    """

    before: float
    after: float
    failed: Mapping[str, int]
    down_s: float


async def restart(
    case: Case, folder: Path, clock: Callable[[], float], conversations: int = CONVERSATIONS, fleet: int = REPLICAS
) -> Restarted:
    """With a fleet of its own."""
    file = str(folder / f"index-{case.workers}.snapshot") if case.file else "off"
    sessions = [growing(number, WARM_TURNS + 1) for number in range(conversations)]
    settings: dict[str, Any] = {"concurrent": CONCURRENT, "think_s": THINK_S}
    count = 2 if case.sibling else 1
    changes: dict[str, Any] = {"workers": case.workers, "snapshot": {"file": file}}
    async with staged(count, folder, shared=case.sibling, fleet=fleet, **changes) as (made, _):
        warm = await send(made.urls, [each[:-2] for each in sessions], seed=1, **settings)
        before = await send(made.urls, [each[-2:-1] for each in sessions], seed=2, **settings)
        begun = clock()
        if case.restarted:
            await _restart_first(made)
        down_s = clock() - begun
        after = await send(made.urls[:1], [each[-1:] for each in sessions], seed=3, **settings)
        return Restarted(before.share(), after.share(), warm.failed + before.failed + after.failed, down_s)


async def _restart_first(made: Gateways) -> None:
    gateway = made.each[0]
    gateway.terminate()
    await gateway.ended(60)
    gateway.start()
    await ready([gateway.url], "/ready")
