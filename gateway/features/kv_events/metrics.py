"""Metrics of the feature `kv_events`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class KvEventMetrics:
    """Cache events of engines, and predictions by them."""

    def __init__(self, make: MetricFamily) -> None:
        self.followed = make.gauge(
            "kv_events_followed",
            "What the events of the replica tell: 2 all that its cache holds, 1 a part (the rest was stored before the gateway"
            " followed it), 0 nothing: there were none yet, or they are not used for a while.",
            "replica",
        )
        self.blocks = make.gauge("kv_events_blocks", "Blocks that the replica holds by its events, by tier.", "replica", "tier")
        self.seen = make.counter("kv_events_blocks_total", "Blocks stored and removed by events of the replica.", "replica")
        self.faults = make.counter(
            "kv_events_faults_total",
            "Faults of event streams: gap (missed messages), restart (the numbers began again), refused (a message that is no"
            " batch of events), orphan (a block with an unknown parent), conflict (a hash that stands for two blocks).",
            "replica",
            "fault",
        )
        self.prompts = make.counter(
            "kv_events_prompts_total",
            "Prompts for replicas with events, by the source of their token ids: sent (by the client), engine, cache, prefix"
            " (an earlier turn), late (not in time), failed.",
            "source",
        )
        self.tokenize = make.seconds("kv_events_tokenize", "Time that an engine took to tokenize a prompt.")
        self.predictions = make.counter(
            "kv_events_predictions_total",
            "Answers with reported cached tokens that were predicted by events: exact, above, below (by a block or more).",
            "replica",
            "result",
        )
