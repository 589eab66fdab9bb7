"""The twin's traces, and its clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.replica.twin_client import Served
from bench.replica.twin_document import AT_ONCE, DOCUMENT, ask_about_document, document_report, most_at_once
from bench.replica.twin_traces import Arrival, at_load, busy_share, first_tokens, mooncake
from replica.api.server import ServerConfig
from replica.sim.cost import SimConfig
from tests.replica.conftest import serve
from tests.replica.fakes import WatchedEngine


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


async def test_a_shared_document_raises_what_runs_at_once() -> None:
    """There is room for two documents, and for 16 requests that share one."""
    engine = WatchedEngine(SimConfig(kv_tokens=2 * DOCUMENT, max_batch=16, prefill_rate=1e6, decode_rate=40.0))
    async for replica in serve(engine, None, ServerConfig()):
        about = await ask_about_document(replica.url)
    assert [most_at_once(served) for served in about] == list(AT_ONCE)
    assert all(one.cached == DOCUMENT for served in about for one in served)
    *_, last = document_report([about, about], about)
    assert last.startswith("| 16 | 99.4%, 99.4% | 16, 16 |")


def test_those_that_wait_do_not_run() -> None:
    one, two = Served(0.0, 0.1, 1.0, 8, 8), Served(0.0, 1.1, 2.0, 8, 8)
    assert most_at_once([one, two]) == 1
