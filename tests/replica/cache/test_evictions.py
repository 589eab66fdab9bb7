"""The benchmark of evictions, cut short: an exact LRU, and ours within a point of it inside the real engine."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.replica.evictions import Found, exact_lru, main
from tests.support.tiers import nightly

pytestmark = pytest.mark.model


def test_the_exact_lru() -> None:
    one, two, three = ([at] * 40 for at in (1, 2, 3))
    assert exact_lru([one, one, two, one], 4) == Found(160, 64, 0)
    assert exact_lru([one, two, three, one], 4) == Found(160, 0, 4)
    assert exact_lru([one, two, one, three, one], 4).ratio == 64 / 200
    assert exact_lru([[1] * 32, [1] * 32], 4).hits == 16, "the last token is always computed"
    assert exact_lru([one, one, two, one], 4, at_once=2) == Found(160, 32, 0), "the first two find nothing"
    assert exact_lru([one, one, one], 4, at_once=2).hits == 32


@nightly("the order of evictions: test_blocks.py")
def test_ours_is_within_a_point_of_the_exact_lru_and_transformers_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--blocks", "256", "--requests", "250", "--at-once", "1"])
    columns = r"^\| \w+ \| 1 \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \| [+-][\d.]+ \| ([\d.]+)% \|$"
    rows = re.findall(columns, capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 3
    for exact, together, ours, transformers in (map(float, row) for row in rows):
        assert exact == together, "of one at a time"
        assert ours > exact - 1
        assert transformers < exact - 5
