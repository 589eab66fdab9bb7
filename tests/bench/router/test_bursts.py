"""The benchmark of cold bursts: its rows, on a few bursts."""

from __future__ import annotations

import pytest

from bench.router import bursts


def test_waiting_computes_a_head_once_where_engines_do_not_share() -> None:
    shared = bursts.run(6, "cost", 1, apart=False, waits=True, bursts=3)
    apart, nobody = (bursts.run(6, "cost", 1, apart=True, waits=waits, bursts=3) for waits in (True, False))
    assert apart.computed == pytest.approx(shared.computed, rel=0.3)
    assert nobody.computed > 2 * apart.computed
    assert nobody.ttft_mean_s > apart.ttft_mean_s
