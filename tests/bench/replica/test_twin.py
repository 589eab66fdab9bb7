"""The twin's traces, and its clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.replica.twin_traces import Arrival, at_load, busy_share, first_tokens, mooncake
from replica.sim.cost import SimConfig


def test_recorded_blocks_become_the_same_tokens_and_the_rest_a_request_s_own(tmp_path: Path) -> None:
    """Blocks of 512 tokens become 16; the conversation of block 25 is left out."""
    rows = [
        {"timestamp": 3000 * number, "input_length": length, "output_length": 64, "hash_ids": ids}
        for number, (length, ids) in enumerate(
            [(1600, [0, 32, 7, 8]), (1600, [0, 32, 7, 9]), (1600, [0, 25, 7, 8]), (500, [0])]
        )
    ]
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = mooncake(file, seed=0)
    assert first.at < second.at
    assert (len(first.prompt), first.output) == (50, 2)
    assert first.prompt[:48] == second.prompt[:48]
    assert first.prompt[48:] != second.prompt[48:]


def test_a_trace_is_stretched_until_the_engine_is_busy_enough() -> None:
    config = SimConfig(prefill_rate=1000, decode_rate=100)
    even = [Arrival(float(at), [at] * 100, 11) for at in range(50)]
    assert busy_share(config, even) == pytest.approx(0.2, abs=0.01)  # 0.1 s for the prompt, ten steps of 10 ms
    assert first_tokens(config, even) == pytest.approx([0.1] * 50)
    half = at_load(config, even, 0.5, 10)
    assert busy_share(config, half) == pytest.approx(0.5, abs=0.01)
    assert half[-1].at < 10
    assert half[1].at == pytest.approx(0.4, abs=0.01)
