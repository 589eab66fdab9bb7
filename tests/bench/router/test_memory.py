"""The memory benchmark, cut short: its report, its traffic, and the adversaries."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.router.adversary import ADVERSARIES
from bench.router.memory import Found, Job, bound_table, in_blocks, main, resident, run, traffic_table
from router.types import KEY_BYTES, Prompt

SMALL = Found(requests=10, credits=100, distinct=80, bytes=2_000, peak=3_000, estimate=1_500, evicted=7)


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "little") for number in numbers)


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same tests with and without recorded traces."""
    monkeypatch.setenv("WARMROUTE_TRACES", str(tmp_path))


def test_a_report_has_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [
        Job(limit=40),
        Job(limit=40, tool="rss"),
        Job("dictionaries", 512, limit=40),
        Job(adversary="single", limit=60, bound=1 << 20),
    ]
    main(["--workers", "0", "--out", str(tmp_path)], wanted)
    text = (tmp_path / "memory.md").read_text("utf-8")
    assert capsys.readouterr().out == text
    assert "the generator `chat`, for there is no trace here" in text
    assert "| 64 | **warmroute** | 40 |" in text
    assert "| 512 | dictionaries | 40 |" in text
    assert "## The bound of 1 MiB under adversarial prompts" in text
    assert "| distinct prompts of one block | 60 | 0 | 60 |" in text
    rows = json.loads((tmp_path / "memory.json").read_text("utf-8"))["rows"]
    assert [(row["contestant"], row["tool"]) for row in rows][:2] == [("warmroute", "tracemalloc"), ("warmroute", "rss")]
    assert rows[0]["credits"] >= rows[0]["distinct"] > 0
    assert rows[0]["bytes"] > 0


@pytest.mark.parametrize("name", sorted(ADVERSARIES))
def test_an_adversary_makes_the_same_prompts_again(name: str) -> None:
    one, other = (list(itertools.islice(ADVERSARIES[name].prompts(random.Random(3)), 6)) for _ in range(2))
    assert one == other
    assert all(prompt and len(prompt) % KEY_BYTES == 0 for prompt in one)


@pytest.mark.parametrize("name", sorted(ADVERSARIES))
def test_the_estimate_stays_under_a_small_bound(name: str) -> None:
    bound = 200_000
    _, found = run(Job(adversary=name, limit=8 if name == "long" else 400, bound=bound))
    assert found.estimate <= bound
    assert found.peak >= found.bytes > 0


def test_prompts_are_cut_in_other_blocks_and_still_share_prefixes() -> None:
    one, other = (Prompt(keys(*ids), 1600, 512, "") for ids in ((1, 2, 3), (1, 2, 9)))
    fine, fine_other = in_blocks(one, 64), in_blocks(other, 64)
    assert (fine.blocks, fine.block_units, fine.units) == (24, 64, 1600)
    assert fine.keys[: 16 * KEY_BYTES] == fine_other.keys[: 16 * KEY_BYTES]
    assert fine.keys[16 * KEY_BYTES :][:KEY_BYTES] != fine_other.keys[16 * KEY_BYTES :][:KEY_BYTES]
    assert len({fine.keys[at : at + KEY_BYTES] for at in range(0, len(fine.keys), KEY_BYTES)}) == 24
    coarse = in_blocks(Prompt(keys(*range(1, 20)), 19 * 64, 64, ""), 512)
    assert coarse.keys == keys(8, 16)
    same = in_blocks(one, 512)
    assert same.keys == one.keys
    assert same.keys is not one.keys, "what the router keeps of it is counted"


def test_rows_are_per_block_and_per_bound() -> None:
    job = Job()
    row = list(traffic_table({job: SMALL, replace(job, tool="rss"): replace(SMALL, bytes=4_000)}))[2]
    assert row == "| 64 | **warmroute** | 10 | 100 | 80 | 0.00 | 20.0 | 25.0 | 40.0 | 0.75 |"
    row = list(bound_table({Job(adversary="late", bound=4_000): SMALL}))[2]
    assert row.startswith("| one head of 200 blocks, then a block that differs | 10 | 7 | 100 |")
    assert "| 75% |" in row


def test_the_resident_set_is_known_or_zero() -> None:
    assert resident() >= 0
