"""The dashboard of the fleet: is it well, and if not, is it the gateway or the engines?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.board import Board, Panel, Query, Row, Selectors

VARIABLES: Final = ("gateway", "pool", "model", "replica")
_of: Final = Selectors(VARIABLES)
_OWN: Final = "and on (instance) warmroute_workers"  # other programs have process_*, too


def _share(part: str, whole: str) -> str:
    """0 where there is nothing of the part."""
    return f"(sum({part}) or vector(0)) / sum({whole})"


_ERRORS: Final = _of.rate("requests_total", "model", where='code=~"[45].."')
_LOSSES: Final = _of.rate("replica_restarts_total", "replica")
_FILES: Final = 'process_open_fds{instance=~"$gateway"} / process_max_fds{instance=~"$gateway"}'
_HIT: Final = _of.rate("prompt_tokens_total", "model", "replica", where='cache="hit"')
_PROMPT: Final = _of.rate("prompt_tokens_total", "model", "replica")
_ALL: Final = _of.rate("requests_total", "model")

_STATE: Final = Row(
    "",
    (
        Panel(
            "Requests", "Answers per second, of every HTTP status.", "reqps", (Query(f"sum({_ALL})", "requests"),), "stat", 4
        ),
        Panel(
            "Server errors",
            "Share of the answers with a 5xx: the fleet's fault, not the client's.",
            "percentunit",
            (Query(_share(_of.rate("requests_total", "model", where='code=~"5.."'), _ALL), "5xx"),),
            "stat",
            4,
            steps=((0.001, "orange"), (0.01, "red")),
        ),
        Panel(
            "TTFT p95",
            "Time to the first byte of streams: 95 of 100 are faster.",
            "s",
            (Query(_of.quantile(0.95, "ttft", "model"), "p95"),),
            "stat",
            4,
        ),
        Panel(
            "Hit ratio",
            "Share of the prompt tokens that the engines had cached, as they report it.",
            "percentunit",
            (
                Query(
                    _share(_HIT, _PROMPT),
                    "hit ratio",
                ),
            ),
            "stat",
            4,
        ),
        Panel(
            "Waiting",
            "Requests in the gateways' queues now. More than a moment above zero: the fleet is full.",
            "short",
            (Query(f"sum({_of('pool_waiting', 'pool')})", "waiting"),),
            "stat",
            4,
            steps=((1, "orange"),),
        ),
        Panel(
            "Replicas up",
            "Replicas that answer the probes of every gateway.",
            "short",
            (Query(f"sum(min by (replica) ({_of('replica_up', 'replica')}))", "up"),),
            "stat",
            4,
        ),
    ),
)

_TRAFFIC: Final = Row(
    "Traffic",
    (
        Panel(
            "Requests by status",
            "4xx: caused by clients (429: over a limit or the queue is full, 499: they have left); 5xx: by the fleet.",
            "reqps",
            (Query(f"sum by (code) ({_ALL})", "{{code}}"),),
            stacked=True,
        ),
        Panel(
            "Requests by endpoint",
            "Which APIs are used; `other`: paths that the gateway does not know.",
            "reqps",
            (Query(f"sum by (endpoint) ({_ALL})", "{{endpoint}}"),),
            stacked=True,
        ),
        Panel(
            "Errors by endpoint",
            "Answers of 400 and above. One endpoint alone: a client that sends what its engine does not take.",
            "reqps",
            (
                Query(
                    f"sum by (endpoint, code) ({_ERRORS})",
                    "{{endpoint}} {{code}}",
                ),
            ),
        ),
    ),
)

_LATENCY: Final = Row(
    "Is it us, or the engines?",
    (
        Panel(
            "Time to first token",
            "Hits (the router predicted cached tokens) should lie well below misses; if not, the cache saves no time. "
            "Slow while the next three are quick: it is the engines.",
            "s",
            _of.quantiles("ttft", "model", by="cache"),
        ),
        Panel(
            "Time in the queue",
            "How long those waited that had to wait for a slot. Long: the pool has too few replicas, or a small "
            "`max_inflight`.",
            "s",
            _of.quantiles("queue", "pool", by="pool"),
        ),
        Panel(
            "The gateway's own time",
            "What the decision takes, and how late the event loop is. Above some 50 ms the gateway is the slow part: give "
            "it CPU, "
            "or workers.",
            "s",
            (
                Query(_of.quantile(0.99, "routing"), "decision p99"),
                Query(_of.quantile(0.99, "event_loop_lag"), "event loop late p99"),
            ),
        ),
        Panel(
            "Prefill that waits",
            "Seconds of prefill before a new prompt, for each live replica of the pool: what it costs to be next.",
            "s",
            (
                Query(
                    f"sum by (pool) ({_of('pool_prefill_backlog_seconds', 'pool')})"
                    f" / max by (pool) ({_of('pool_replicas_live', 'pool')} > 0)",
                    "{{pool}}",
                ),
            ),
        ),
        Panel(
            "Time between tokens",
            "Decoding speed of the engines. Rising while requests are few: they share their machine.",
            "s",
            _of.quantiles("inter_token", "model"),
        ),
        Panel(
            "Whole request", "From the request to the last byte, long answers included.", "s", _of.quantiles("request", "model")
        ),
    ),
)

_QUEUE: Final = Row(
    "Queue and refusals",
    (
        Panel(
            "Slots taken",
            "The share of `pools[].max_inflight` that is in use; at 100 % requests wait in the queue.",
            "percentunit",
            (Query(f"max by (pool) ({_of('pool_slots_taken', 'pool')} / {_of('pool_inflight_limit', 'pool')})", "{{pool}}"),),
            width=6,
        ),
        Panel(
            "In the queue",
            "Requests that wait for a slot, by pool.",
            "short",
            (Query(f"sum by (pool) ({_of('pool_waiting', 'pool')})", "{{pool}}"),),
            width=6,
        ),
        Panel(
            "Refused by the queue",
            "Requests answered 429. queue_full: add replicas; queue_timeout: they waited too long.",
            "reqps",
            (Query(f"sum by (pool, reason) ({_of.rate('admission_rejected_total', 'pool')})", "{{pool}} {{reason}}"),),
            width=6,
        ),
        Panel(
            "Refused for want of memory or connections",
            "Zero is the goal. Memory: `limits.inflight_mb` is full of clients' bodies; connections: `limits.connections`.",
            "reqps",
            (
                Query(f"sum({_of.rate('memory_rejected_total')})", "memory"),
                Query(f"sum({_of.rate('client_connections_rejected_total')})", "connections"),
            ),
            width=6,
        ),
    ),
)

_FAILURES: Final = Row(
    "Failures that clients did or did not see",
    (
        Panel(
            "Broken answers",
            "Answers that a replica broke off after their first byte: it died, or was restarted.",
            "reqps",
            (Query(f"sum by (replica) ({_of.rate('broken_responses_total', 'model', 'replica')})", "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Resumed streams",
            "Broken streams where `resume_streams` is on. good: the client has the whole answer and noticed nothing.",
            "reqps",
            (Query(f"sum by (result) ({_of.rate('resumed_streams_total', 'model')})", "{{result}}"),),
            width=6,
        ),
        Panel(
            "Retries by reason",
            "Attempts that failed before their first byte and went on elsewhere. Budget spent: retries that were not made.",
            "reqps",
            (
                Query(f"sum by (reason) ({_of.rate('retries_total')})", "{{reason}}"),
                Query(f"sum({_of.rate('retry_budget_exhausted_total')})", "budget spent"),
            ),
            width=6,
        ),
        Panel(
            "Handed to a fallback",
            "Requests that their own pool could not serve, and that another one got.",
            "reqps",
            (Query(f"sum by (pool, to, reason) ({_of.rate('fallbacks_total', 'pool')})", "{{pool}} to {{to}}: {{reason}}"),),
            width=6,
        ),
    ),
)

_REPLICAS: Final = Row(
    "Replicas",
    (
        Panel(
            "Up",
            "1: it answers its probes.",
            "short",
            (Query(f"min by (replica) ({_of('replica_up', 'replica')})", "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Circuits open",
            "1: it answers its probes perhaps, but its requests fail, or it asked for a pause.",
            "short",
            (Query(f"max by (replica) ({_of('replica_circuit_open', 'replica')})", "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Requests in flight",
            "Of all gateways together. A line that stays above the others is a slow replica, or one that holds a popular "
            "prefix.",
            "short",
            (Query(f"sum by (replica) ({_of('replica_inflight', 'replica')})", "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Running and waiting in the engines",
            "By the engines' own metrics. Above the requests in flight: others use them, too.",
            "short",
            (
                Query(f"max by (replica) ({_of('replica_engine_running', 'replica')})", "{{replica}} running"),
                Query(f"max by (replica) ({_of('replica_engine_waiting', 'replica')})", "{{replica}} waiting"),
            ),
            width=6,
        ),
        Panel(
            "Hit ratio by replica",
            "One far below the others: it restarted, or its cache is too small.",
            "percentunit",
            (
                Query(
                    f"sum by (replica) ({_HIT}) / sum by (replica) ({_PROMPT})",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Cache hits missing",
            "1: its engine reports no hit at all although many were predicted. The gateway's log has a hint.",
            "short",
            (Query(f"max by (replica) ({_of('replica_cache_hits_missing', 'replica')})", "{{replica}}"),),
        ),
        Panel(
            "Cache losses",
            "Restarts, by evidence; continuous zero_hits: as in the panel before, or a cache that is much too small.",
            "cps",
            (
                Query(
                    f"sum by (reason) (max by (replica, reason) ({_LOSSES}))",
                    "{{reason}}",
                ),
            ),
        ),
    ),
)

_GATEWAY: Final = Row(
    "The gateways",
    (
        Panel(
            "CPU per worker",
            "1: a core. Near 1 for long: more `workers`, or more gateways.",
            "short",
            (
                Query(
                    'sum by (instance) (rate(process_cpu_seconds_total{instance=~"$gateway"}[$__rate_interval]))'
                    f" / on (instance) {_of('workers')}",
                    "{{instance}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Memory",
            "Resident memory of all workers of a gateway.",
            "bytes",
            (
                Query(
                    f'sum by (instance) (process_resident_memory_bytes{{instance=~"$gateway"}}) {_OWN}',
                    "{{instance}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Memory held by requests",
            "The share of `limits.inflight_mb` that clients' bodies and answers hold; at 100 % requests are refused.",
            "percentunit",
            (Query(f"max by (instance) ({_of('inflight_bytes')} / {_of('inflight_limit_bytes')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Connections of clients",
            "The share of `limits.connections` that is open; at 100 % connections are answered 503.",
            "percentunit",
            (Query(f"max by (instance) ({_of('client_connections')} / {_of('client_connections_limit')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Open files",
            "The share of the open files limit that is in use.",
            "percentunit",
            (
                Query(
                    f"max by (instance) ({_FILES}) {_OWN}",
                    "{{instance}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Reloads",
            "Changes of the configuration. invalid: it changed nothing, and the log has the errors.",
            "cps",
            (Query(f"sum by (result) ({_of.rate('config_reloads_total')})", "{{result}}"),),
            width=6,
        ),
        Panel(
            "Running since",
            "Seconds since the oldest worker started. A saw: it restarts.",
            "s",
            (
                Query(
                    f'time() - min by (instance) (process_start_time_seconds{{instance=~"$gateway"}}) {_OWN}',
                    "{{instance}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Versions",
            "Gateways by version, and by whether their hot modules are compiled: not compiled costs twice the CPU.",
            "short",
            (
                Query(
                    f"count by (version, python, compiled) ({_of('build_info')})",
                    "{{version}} Python {{python}} compiled: {{compiled}}",
                ),
            ),
            width=6,
        ),
    ),
)

FLEET: Final = Board(
    "warmroute-fleet",
    "warmroute-fleet",
    "Warmroute: fleet",
    "Is the fleet well; and if not, is it the gateway or the engines?",
    VARIABLES,
    (_STATE, _TRAFFIC, _LATENCY, _QUEUE, _FAILURES, _REPLICAS, _GATEWAY),
)
