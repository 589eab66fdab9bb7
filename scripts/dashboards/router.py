"""The dashboard of the router's internals: does it know what the engines have, and do all workers and gateways know it?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.board import Board, Panel, Query, Row, Selectors

VARIABLES: Final = ("gateway", "model", "replica")
_of: Final = Selectors(VARIABLES)
_PROMPT: Final = _of.rate("prompt_tokens_total", "model", "replica")
_HIT: Final = _of.rate("prompt_tokens_total", "model", "replica", where='cache="hit"')
_NOT_WRITTEN: Final = _of.rate("snapshots_total", where='result="failed"')
_PREDICTED: Final = _of.rate("predicted_cached_tokens_total", "model", "replica")

_DECISIONS: Final = Row(
    "Decisions",
    (
        Panel(
            "Decisions by reason",
            "Mostly warm is the goal; much spill: the warm replicas are full; much cold: new prompts, or a short `ttl_s`; "
            "blind: "
            "prompts shorter than a block.",
            "reqps",
            (Query(f"sum by (reason) ({_of.rate('routing_decisions_total')})", "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Hit ratio, predicted and reported",
            "Together: the index is right. Predicted far above reported: engines evict sooner (set `capacity_tokens`, lower "
            "`ttl_s`), restarted, or do not report. Available far above predicted: the holders are too busy to be chosen. "
            "All low: "
            "prompts share no prefix.",
            "percentunit",
            (
                Query(f"sum({_HIT}) / sum({_PROMPT})", "reported"),
                Query(f"sum({_PREDICTED}) / sum({_PROMPT})", "predicted"),
                Query(
                    f"sum({_of.rate('available_cached_tokens_total', 'model')})"
                    f" / sum({_of.rate('prompt_tokens_total', 'model')})",
                    "available",
                ),
            ),
        ),
        Panel(
            "Prediction error",
            "Predicted less reported, as a share of the prompt tokens of a replica. Above zero: it has forgotten what we "
            "believe "
            "it holds; below: it holds more than we know, as another sender fills it.",
            "none",
            (
                Query(
                    f"(sum by (replica) ({_PREDICTED}) - sum by (replica) ({_HIT})) / sum by (replica) ({_PROMPT})",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Routing time",
            "What the decision itself costs; well under a millisecond.",
            "s",
            _of.quantiles("routing", high=0.99),
        ),
        Panel(
            "Decisions by policy",
            "Which policy is in force; two at once: a change, or gateways with different configurations.",
            "reqps",
            (Query(f"sum by (policy) ({_of.rate('routing_decisions_total')})", "{{policy}}"),),
        ),
        Panel(
            "Promised prefixes",
            "Requests with breakpoints (`cache_control`). kept: the promise held; missed: the engine had it no more; busy, "
            "gone, "
            "lost: another replica had to do.",
            "reqps",
            (Query(f"sum by (result) ({_of.rate('breakpoints_total', 'model')})", "{{result}}"),),
        ),
    ),
)

_INDEX: Final = Row(
    "Prefix index",
    (
        Panel(
            "Index blocks",
            "Blocks that replicas are believed to hold, once for each replica.",
            "short",
            (Query(f"max by (instance) ({_of('trie_blocks')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Index memory",
            "Of all workers of a gateway: each keeps to `routing.memory_mb`.",
            "bytes",
            (Query(f"sum by (instance) ({_of('trie_bytes')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Evicted blocks",
            "Why entries go, at the gateway that evicts most. ttl and capacity are normal; memory all the time: raise "
            "`routing.memory_mb`; correction: requests fail, or engines count less than expected.",
            "cps",
            (Query(f"max by (reason) ({_of.rate('trie_evicted_blocks_total')})", "{{reason}}"),),
            width=6,
        ),
        Panel(
            "Restored blocks",
            "Taken in from snapshots, over the chosen time range: a start that was warm.",
            "short",
            (Query(f"max by (instance) ({_of.increase('snapshot_restored_blocks_total')})", "{{instance}}"),),
            "bargauge",
            6,
        ),
    ),
)

_LEARNED: Final = Row(
    "What is known of each replica",
    (
        Panel(
            "Prefill rate",
            "Learned tokens per second. One far below the others: its machine is shared, or throttled.",
            "short",
            (Query(f"avg by (replica) ({_of('replica_prefill_tokens_per_second', 'replica')})", "{{replica}}"),),
        ),
        Panel(
            "Tokens in prefill",
            "Uncached prompt tokens that are booked and not computed yet: what the cost of the next choice is made of.",
            "short",
            (Query(f"sum by (replica) ({_of('replica_booked_tokens', 'replica')})", "{{replica}}"),),
        ),
        Panel(
            "Cache capacity",
            "What bounds the index: `capacity_tokens`, else what the engine advertises. No line: neither is known.",
            "short",
            (Query(f"max by (replica) ({_of('replica_capacity_tokens', 'replica')})", "{{replica}}"),),
        ),
    ),
)

_WORKERS: Final = Row(
    "Workers",
    (
        Panel(
            "Event loop late",
            "How late a worker's loop runs what is due. Above some 50 ms: too little CPU, or something blocks it.",
            "s",
            (
                Query(_of.quantile(0.5, "event_loop_lag", by="instance"), "{{instance}} p50"),
                Query(_of.quantile(0.99, "event_loop_lag", by="instance"), "{{instance}} p99"),
            ),
            width=6,
        ),
        Panel(
            "Workers",
            "Processes that serve, and those that exited and were replaced in the last minutes.",
            "short",
            (
                Query(f"sum by (instance) ({_of('workers')})", "{{instance}}"),
                Query(f"sum by (instance) ({_of.rate('worker_restarts_total')}) * 300", "{{instance}} replaced in 5 minutes"),
            ),
            width=6,
        ),
        Panel(
            "Replication lag",
            "Until a request of one worker or gateway is known to another; some tens of milliseconds.",
            "s",
            _of.quantiles("worker_replication_lag", high=0.99),
            width=6,
        ),
        Panel(
            "Lines and spans lost",
            "Log lines whose reader did not keep up, and spans of traces that the collector did not take.",
            "cps",
            (
                Query(f"sum({_of.rate('log_lines_dropped_total')})", "log lines"),
                Query(f"sum({_of.rate('spans_dropped_total')}) or vector(0)", "spans"),
            ),
            width=6,
        ),
    ),
)

_SHARING: Final = Row(
    "Several gateways (needs sharing.url) and restarts (needs snapshot.file)",
    (
        Panel(
            "Sharing",
            "1: a gateway exchanges what it knows through the store. 0, or gaps: see Gateways do not share in "
            "docs/troubleshooting.md.",
            "short",
            (Query(f"min by (instance) ({_of('sharing_up')})", "{{instance}}"),),
        ),
        Panel(
            "Other gateways",
            "How many each one sees: all lines at the number of gateways less one.",
            "short",
            (Query(f"max by (instance) ({_of('sharing_gateways')})", "{{instance}}"),),
        ),
        Panel(
            "Sharing losses",
            "Refused: what another gateway wrote was not taken in; dropped: not written; missed: asked for again; unknown "
            "replicas: they have another name elsewhere; failures of the store by reason. All zero is the goal.",
            "cps",
            (
                Query(f"sum by (reason) ({_of.rate('sharing_refused_total')})", "refused: {{reason}}"),
                Query(f"sum({_of.rate('sharing_dropped_total')})", "dropped"),
                Query(f"sum({_of.rate('sharing_resyncs_total')})", "missed"),
                Query(f"max({_of.rate('sharing_unknown_replicas_total')})", "unknown replicas"),
                Query(f"sum by (reason) ({_of.rate('sharing_errors_total')})", "store: {{reason}}"),
            ),
        ),
        Panel(
            "Snapshot age",
            "How old is what a restart begins with; it saws between 0 and 60 s.",
            "s",
            (Query(f"time() - max by (instance) ({_of('snapshot_timestamp_seconds')})", "{{instance}}"),),
        ),
        Panel(
            "Snapshot size",
            "Bytes of the last snapshot.",
            "bytes",
            (Query(f"max by (instance) ({_of('snapshot_bytes')})", "{{instance}}"),),
        ),
        Panel(
            "Snapshots failed",
            "Not written: the folder is full or read-only, and a restart begins cold.",
            "cps",
            (Query(f"sum by (instance) ({_NOT_WRITTEN})", "{{instance}}"),),
        ),
    ),
)

_KEPT: Final = Row(
    "Replicas found, responses kept",
    (
        Panel(
            "Sources up",
            "1: what a source of replicas (`discovery`) has found is up to date. No data without `discovery`.",
            "short",
            (Query(f"min by (source) ({_of('discovery_up')})", "{{source}}"),),
        ),
        Panel(
            "Replicas by source",
            "How many each source has brought. A fall to zero: its name, selector or rights have changed.",
            "short",
            (Query(f"max by (source) ({_of('discovery_replicas')})", "{{source}}"),),
        ),
        Panel(
            "Responses kept",
            "With `state.url`: responses by whether the store took them. failed: their clients cannot go on with them.",
            "reqps",
            (Query(f"sum by (result) ({_of.rate('responses_kept_total')})", "{{result}}"),),
        ),
    ),
)

ROUTER: Final = Board(
    "warmroute-router",
    "warmroute-router",
    "Warmroute: router internals",
    "Does the router know what the engines have cached, and do all workers and gateways know the same?",
    VARIABLES,
    (_DECISIONS, _INDEX, _LEARNED, _WORKERS, _SHARING, _KEPT),
)
