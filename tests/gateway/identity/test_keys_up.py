"""What the metrics say of keys: whether their database answers, and zeros before the first refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.database.failures import StoreFailed
from gateway.identity.keys import CODES, REASONS, Keys, open_store
from gateway.identity.store import KeyStore
from gateway.identity.tokens.verdict import EXPIRED, UNDECIDED, UNFIT, UNKNOWN
from gateway.telemetry.metrics import Metrics
from tests.gateway.servers import live_of


async def test_a_gauge_is_down_while_the_database_does_not_answer(tmp_path: Path) -> None:
    away, metrics, seen = True, Metrics(), list[float]()

    async def opens(url: str, now: Callable[[], float], lost: Callable[[], None]) -> KeyStore:
        if away:
            raise StoreFailed("gone")
        return await open_store(url, now, lost)

    config = live_of(keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"}).config
    keys = Keys(config, metrics, lambda: 1e9, lambda: 0.0, opens)
    await keys.begin()
    seen.append(metrics.keys_up.values[()])
    away = False
    await keys.poll()
    seen.append(metrics.keys_up.values[()])
    await keys.close()
    assert seen == [0, 1]


def test_refusals_are_counted_from_zero_on() -> None:
    metrics = Metrics()
    Keys(live_of(keys={"url": "/keys.yaml"}).config, metrics, lambda: 0.0, lambda: 0.0)
    assert metrics.keys_refused.values == {(reason,): 0 for reason in REASONS}
    assert metrics.keys_limited.values == {(code,): 0 for code in CODES}
    assert {UNKNOWN, EXPIRED, UNFIT, UNDECIDED} <= set(REASONS), "tokens too"
    silent = Metrics()
    Keys(live_of().config, silent, lambda: 0.0, lambda: 0.0)
    assert not silent.keys_refused.values
    assert () not in silent.keys_up.values
