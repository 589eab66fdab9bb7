"""The benchmark of several gateways: its loads, and that what it measures is there."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.__main__ import Load, chart_variant, hits, outage, updated
from bench.fleet.exchange import Decision, following
from bench.fleet.loads import TOKENS, agent_sessions, conversation, growing
from bench.fleet.plan import CHAT, Fleet, measured
from bench.fleet.restart import Case, restart
from bench.fleet.rolling import Scale, Variant, rolling
from bench.measure.machine import trace_folder
from gateway.cluster.replication import BATCH_S, FEW, pause_s
from router.types import KEY_BYTES
from tests.support.tiers import gate, nightly
from tests.support.tools import tool


def turns(number: int) -> list[bytes]:
    """A conversation of four, each turn longer than the one before."""
    prompts = [[(number * 1009 + place) % 30_000 for place in range(320 * turn)] for turn in range(1, 5)]
    return [json.dumps({"model": "sim", "prompt": prompt, "max_tokens": 2}).encode() for prompt in prompts]


CONVERSATIONS = [turns(number) for number in range(8)]
LOAD = Load("conversations", CONVERSATIONS, 4, 0.1)


@pytest.mark.skipif(not trace_folder().exists(), reason="the traces are not here")
def test_prompts_share_what_they_share_in_the_trace() -> None:
    session = next(each for each in agent_sessions(20, 4) if len(each) == 4)
    first, second = (json.loads(body)["prompt"] for body in session[:2])
    shared = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert shared % TOKENS == 0
    assert shared > len(first) // 2
    assert len({body for (body,) in conversation(200)}) > 150


@pytest.mark.tools
@nightly("sharing: tests/gateway/cluster/store, and deploy/test_machines.py with whole gateways")
async def test_two_gateways_that_share_cache_as_one_does(tmp_path: Path) -> None:
    tool("redis-server")
    alone, shared, apart = [
        await hits(LOAD, gateways, shared=shared, folder=tmp_path) for gateways, shared in ((1, False), (2, True), (2, False))
    ]
    assert alone.failed == shared.failed == apart.failed == {}
    assert len(shared.hits) == 32
    assert shared.share() > apart.share()
    assert shared.share() >= alone.share() - 0.1


@pytest.mark.tools
@nightly("tests/gateway/features/sharing/test_link.py: a store that is killed and comes back")
async def test_no_request_fails_when_the_store_does(tmp_path: Path) -> None:
    tool("redis-server")
    long = Load("conversations", CONVERSATIONS, 2, 0.5)
    sent, killed, back = await outage(long, tmp_path, after_s=1.0, down_s=2.0)
    assert sent.failed == {}
    when = [at for at, _, _ in sent.hits]
    assert min(when) < killed < back < max(when)
    assert any(killed < at < back for at in when)
    assert sent.share(back) > 0


@pytest.mark.tools
def test_the_plan_of_a_small_fleet() -> None:
    tool("redis-server")
    lines: list[str] = []
    measured(Fleet(20, 4), Fleet(5, 2), replace(CHAT, hours=0.01), 2, lines.append)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    hits = {tuple(row[:3]): float(row[5].rstrip("%")) for row in rows if len(row) == 11 and row[5].endswith("%")}
    assert hits["20", "4", "no"] < hits["20", "4", "yes"] == pytest.approx(hits["20", "1", "–"], abs=5)
    assert len(hits) == 6
    sums = [row for row in rows if len(row) == 9 and row[3].endswith("%")]
    assert [row[:3] for row in sums] == [["5", "2", "60"], ["5", "2", "470"], ["20", "4", "60"], ["20", "4", "470"]]
    follows = [row for row in rows if len(row) == 5 and row[3].isdigit()]
    assert len(follows) == 4
    assert all(int(row[3]) > 0 for row in follows)


def test_with_many_gateways_each_reads_no_more_envelopes() -> None:
    few, many = Fleet(10, 2), Fleet(1000, 100)
    assert few.delay_s < many.delay_s < 0.5
    assert 99 / (many.delay_s - BATCH_S) == pytest.approx(FEW / BATCH_S)
    assert pause_s(1) == pause_s(FEW) == BATCH_S
    assert replace(many, shared=False).delay_s == float("inf")


def test_a_follower_knows_what_was_decided() -> None:
    """What is measured is the way that decisions take in a gateway."""
    assert following(3, Decision(20), 4, envelopes=5) > 0
    assert Decision(470).bytes - Decision(60).bytes == pytest.approx(410 * KEY_BYTES, rel=0.01)


def test_turns_of_a_conversation_find_the_same_share() -> None:
    prompts = [json.loads(body)["prompt"] for body in growing(1, 6)]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
        assert len(earlier) / len(later) == pytest.approx(1 / 1.18, abs=0.002)
    assert json.loads(growing(2, 1)[0])["prompt"][:TOKENS] != prompts[0][:TOKENS]


def test_a_part_of_the_report_replaces_the_one_before() -> None:
    report = "# A\n\nabout\n\n## B\n\nold\n\n## C\n\nstays\n"
    assert updated(report, "## B\n\nnew") == "# A\n\nabout\n\n## B\n\nnew\n\n## C\n\nstays\n"
    assert updated(report, "## D\n\nmore") == f"{report}\n## D\n\nmore\n"


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="one worker: tests/gateway/cluster/snapshots")
async def test_after_a_restart_the_next_turns_find_their_caches_by_the_file(workers: int, tmp_path: Path) -> None:
    seen = await restart(Case("", workers=workers, file=True), tmp_path, time.monotonic, conversations=8, fleet=3)
    assert seen.failed == {}
    assert seen.before > 0.8
    assert seen.after >= seen.before - 0.02


@pytest.mark.tools
@nightly("tests/gateway/features/sharing/test_snapshot_exchange.py")
async def test_after_a_restart_the_next_turns_find_their_caches_by_another_gateway(tmp_path: Path) -> None:
    tool("redis-server")
    seen = await restart(Case("", sibling=True), tmp_path, time.monotonic, conversations=8, fleet=3)
    assert seen.failed == {}
    assert seen.after >= seen.before - 0.02


@pytest.mark.tools
@nightly("tests/chaos/test_gateway.py: one gateway that is stopped under load")
async def test_a_rolling_restart_loses_no_request_and_cuts_no_stream(tmp_path: Path) -> None:
    tool("redis-server")
    variant = Variant("SIGTERM", accept_s=chart_variant().accept_s)
    seen = await rolling(variant, tmp_path, Scale(gateways=2, fleet=2, plain=6, streams=3, warm_s=1.0, calm_s=1.0))
    assert (seen.failed, seen.cut, seen.killed) == ({}, {}, 0)
    assert len(seen.ends) == 2
    before, during, _ = (seen.share(begin, end) for _, begin, end in seen.phases)
    assert during > before - 0.25  # a few hundred requests


def test_the_charts_grace_period_is_long_enough() -> None:
    chart = chart_variant()
    assert chart.pre_stop_s > 1
    assert chart.grace_s >= chart.pre_stop_s + chart.accept_s + chart.drain_s + 10
