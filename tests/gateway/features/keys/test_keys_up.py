"""What the metrics say of keys: whether their database answers, and zeros before the first refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.database.failures import StoreFailed
from gateway.features.keys.keys import CODES, REASONS, Keys, open_store
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.store import KeyStore
from gateway.features.keys.tokens.verdict import CLAIMS, EXPIRED, ISSUER, UNKNOWN
from gateway.features.table import new_metrics
from tests.gateway.conftest import eventually
from tests.gateway.servers import live_of


async def test_a_gauge_is_down_while_the_database_does_not_answer(tmp_path: Path) -> None:
    away, metrics, seen = True, new_metrics().of(KeyMetrics), list[float]()

    async def opens(url: str, now: Callable[[], float]) -> KeyStore:
        if away:
            raise StoreFailed("gone")
        return await open_store(url, now)

    config = live_of(keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"}).config
    keys = Keys(config, metrics, lambda: 1e9, lambda: 0.0, opens)
    await keys.begin()
    seen.append(metrics.up.values[()])
    away = False
    await keys.poll()
    seen.append(metrics.up.values[()])
    await keys.close()
    assert seen == [0, 1]


async def test_what_is_said_of_a_file_is_said_once_and_true(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.yaml"
    metrics = new_metrics().of(KeyMetrics)
    keys = Keys(live_of(keys={"url": str(file)}).config, metrics, lambda: 1e9, lambda: 0.0)
    with caplog.at_level("INFO", "warmroute.keys"):
        await keys.begin()
        watching = asyncio.create_task(keys.run())
        try:
            await eventually(lambda: metrics.failures.values[()] == 2)
            for text in ("keys: nonsense", f"keys: [{{id: abcdefgh, sha256: {'a' * 64}, tenant: t}}]", "keys: nonsense"):
                before = len(caplog.records)
                (tmp_path / "new").write_text(text)
                (tmp_path / "new").rename(file)
                await eventually(lambda before=before: len(caplog.records) > before)  # type: ignore[misc]
        finally:
            watching.cancel()
    assert [record.message for record in caplog.records] == [
        "keys are not read: requests are refused until they are",
        "keys not read: requests are refused until a valid file is read",
        "keys read",
        "keys not read: the former keys stay valid",
    ]


def test_refusals_are_counted_from_zero_on() -> None:
    metrics = new_metrics().of(KeyMetrics)
    Keys(live_of(keys={"url": "/keys.yaml"}).config, metrics, lambda: 0.0, lambda: 0.0)
    assert metrics.refused.values == {(reason,): 0 for reason in REASONS}
    assert metrics.limited.values == {(code,): 0 for code in CODES}
    assert {UNKNOWN, EXPIRED, CLAIMS, ISSUER} <= set(REASONS), "tokens too"
    silent = new_metrics().of(KeyMetrics)
    Keys(live_of().config, silent, lambda: 0.0, lambda: 0.0)
    assert not silent.refused.values
    assert () not in silent.up.values
