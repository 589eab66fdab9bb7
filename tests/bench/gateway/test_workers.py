"""The benchmark of workers: the counts of its crowd, and its report of them."""

from __future__ import annotations

from collections import Counter

from bench.gateway.crowd import CrowdResult, crowd
from bench.gateway.workers import Apart, Cost, Plan, report, routed
from tests.support.fakes import FakeReplica, answers, status
from tests.support.tiers import nightly


async def test_a_crowd_counts_what_the_replicas_report() -> None:
    async with FakeReplica([answers(prompt=100, cached=40), status(503), answers(prompt=100, cached=100)]) as replica:
        result = await crowd(replica.url, users=2, requests=3, seed=1)
        assert (result.requests, len(result.errors)) == (5, 1)
        assert (result.prompt_tokens, result.cached_tokens) == (500, 440)
        assert result.hit_ratio == 0.88
        texts = [request.json["messages"] for request in replica.requests]
        assert max(map(len, texts)) == 6, "a conversation grows by question and answer"
        assert all(text[0]["role"] == "system" for text in texts)
    async with FakeReplica([answers(prompt=100, cached=40)]) as replica:
        await crowd(replica.url, users=2, requests=3, seed=1)
        again = [request.json["messages"][:2] for request in replica.requests]
        assert sorted(map(str, again)) == sorted(str(text[:2]) for text in texts), "the texts are the seed's"


@nightly("tests/gateway/cluster/workers: what one worker learns, the other knows")
def test_two_workers_route_a_small_crowd_to_where_its_prompts_are() -> None:
    result = routed(Plan(users=4, asked=3, seeds=1), ["--workers", "2"], seed=1)
    assert result.errors == []
    assert result.requests == 12
    assert result.hit_ratio > 0.5


def test_a_report_compares_with_one_worker_round_by_round() -> None:
    one = Cost(1, [100.0, 200.0, 90.0], [10.0, 20.0, 9.0], 9000.0, 60.0, {})
    two = Cost(2, [120.0, 240.0, 90.0], [11.0, 22.0, 9.9], 8000.0, 130.0, {"cut off": 2})
    separate = [
        Apart("two gateways", [50.0, 80.0, 40.0], [10.0, 10.0, 10.0]),
        Apart("two workers", [60.0, 88.0, 48.0], [11.0, 10.0, 10.0], Counter({"cut off": 1})),
    ]
    text = "\n".join(report("Made here.", [one, two], separate, {"1 workers": [CrowdResult(10, 1000, 250, [0.5])]}))
    assert "| two workers | 60.0 | 1.20 (1.10 to 1.20) | 1.67 | 10.0 | 1.00 (1.00 to 1.10) | 2.00 |" in text
    assert text.count("workers made errors, so") == 2
    assert "| 2 | 90.0 | 1.20 | 1.67 | 9.9 | 1.10 | 130 |" in text
    assert "**2 workers made errors" in text
    assert "| 1 workers | 10 | 25.0% | 25.0% | 500 | 0 |" in text
