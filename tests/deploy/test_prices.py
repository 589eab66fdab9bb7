"""deploy/prices.yaml: the gateway takes it, and some rows, looked up by hand, cost what the list says."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gateway.accounting.prices import PriceBook
from gateway.commands.advice import warnings_of
from gateway.config.schema import Config
from gateway.features.table import read
from tests.support.paths import ROOT

FILE = ROOT / "deploy" / "prices.yaml"


def config(tmp_path: Path) -> tuple[Config, list[str]]:
    values = yaml.safe_load(FILE.read_text("utf-8"))
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"replicas": ["http://127.0.0.1:9"]}], **values}), "utf-8")
    loaded = read(path, {})
    return loaded.config, [str(problem) for problem in warnings_of(loaded)]


@pytest.mark.parametrize(
    ("model", "when", "prompt", "expected"),
    [
        ("claude-opus-4-8-20260501", "2026-11-25T12:00", 1000, (5, 0.5, 6.25, 10, 25)),
        ("claude-opus-5-5", "2026-11-25T12:00", 1000, (4, 0.2, 5, 8, 20)),
        ("claude-sonnet-5-5", "2026-10-06T23:59", 1000, (2, 0.2, 2.5, 4, 10)),
        ("claude-sonnet-5-5", "2026-10-07T00:00", 1000, (2, 0.1, 2.5, 4, 10)),
        ("claude-haiku-5-5", "2026-11-25T12:00", 100_001, (0.5, 0.05, 0.625, 1, 2.5)),
        ("gpt-6-sol", "2026-11-25T12:00", 272_000, (2, 0.2, 2.5, 2.5, 10)),
        ("gpt-6-sol", "2026-11-25T12:00", 272_001, (4, 0.4, 5, 5, 15)),
        ("claude-mythos-5", "2026-11-25T12:00", 10, (10, 1, 12.5, 20, 50)),
        ("claude-mythos-5-1-20260901", "2026-11-25T12:00", 10, (10, 0.25, 12.5, 20, 50)),
        ("gpt-5.1-2025-11-13", "2026-11-25T12:00", 10, (1.25, 0.125, 1.25, 1.25, 10)),
        ("deepseek-flash-v4.1", "2026-11-25T12:00", 10, (0.15, 0.003, 0.15, 0.15, 0.6)),
        ("deepseek-flash-v4.1", "2026-11-25T09:59", 10, (0.3, 0.006, 0.3, 0.3, 1.2)),
        ("deepseek-flash-v4.1", "2026-11-28T09:59", 10, (0.15, 0.003, 0.15, 0.15, 0.6)),  # a Saturday
        ("gemini-2.5-pro", "2026-11-25T12:00", 200_001, (2.5, 0.25, 2.5, 2.5, 15)),
    ],
)
def test_a_row_costs_what_the_list_says(
    tmp_path: Path, model: str, when: str, prompt: int, expected: tuple[float, ...]
) -> None:
    book = PriceBook(config(tmp_path)[0].prices)
    now = datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()
    rates = book.at(model, now).of(prompt)
    assert rates
    found = (rates.input, rates.cached_input, rates.cache_write, rates.cache_write_1h, rates.output)
    assert [each / 1e6 for each in found] == list(expected)


@pytest.mark.parametrize("model", ["gpt-5.6-sol", "gpt-5-mini", "gpt-5-nano-2025-08-07", "gpt-5.1-codex-mini", "o3"])
def test_what_is_not_listed_is_without_a_price(tmp_path: Path, model: str) -> None:
    """And so counted and named in the log; not billed as a sibling."""
    assert PriceBook(config(tmp_path)[0].prices).at(model, 1.8e9).of(10) is None


def test_nothing_in_it_is_doubted(tmp_path: Path) -> None:
    assert config(tmp_path)[1] == []
