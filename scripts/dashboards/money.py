"""The dashboard of money: who costs what, what the cache and the routing save, and can the numbers be trusted?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.board import Board, Panel, Query, Row, Selectors

VARIABLES: Final = ("gateway", "model", "tenant")
_of: Final = Selectors(VARIABLES)
_COST: Final = _of.rate("cost_usd_total", "model", "tenant")
_SAVED: Final = _of.rate("savings_usd_total", "model", "tenant")
_COST_IN_RANGE: Final = _of.increase("cost_usd_total", "model", "tenant")
_ESTIMATED_IN_RANGE: Final = _of.increase("estimated_cost_usd_total", "model", "tenant")
_SAVED_IN_RANGE: Final = _of.increase("savings_usd_total", "model", "tenant")
_HOUR: Final = "* 3600"


def _today(metric: str) -> str:
    """The sum of a metric today over all gateways, by policy."""
    return f"sum by (policy) ({_of(metric)})"


_STATE: Final = Row(
    "",
    (
        Panel(
            "Cost in the range",
            "Cost over the chosen time range, by the configured prices. For invoices use the ledger: Prometheus extrapolates.",
            "currencyUSD",
            (Query(f"sum({_COST_IN_RANGE})", "cost"),),
            "stat",
            4,
        ),
        Panel(
            "Saved in the range",
            "What the cached tokens would have cost more, had they not been cached.",
            "currencyUSD",
            (Query(f"sum({_SAVED_IN_RANGE})", "saved"),),
            "stat",
            4,
        ),
        Panel(
            "Saved share",
            "That, as a share of what everything would have cost without a cache.",
            "percentunit",
            (Query(f"sum({_SAVED_IN_RANGE}) / (sum({_COST_IN_RANGE}) + sum({_SAVED_IN_RANGE}))", "saved"),),
            "stat",
            4,
        ),
        Panel("Spending", "Cost per hour, now.", "currencyUSD", (Query(f"sum({_COST}) {_HOUR}", "per hour"),), "stat", 4),
        Panel(
            "Estimated share",
            "Share of the cost that is an estimate, because engines did not report what they used.",
            "percentunit",
            (
                Query(
                    f"(sum({_ESTIMATED_IN_RANGE}) or vector(0)) / sum({_COST_IN_RANGE})",
                    "estimated",
                ),
            ),
            "stat",
            4,
            steps=((0.05, "orange"), (0.2, "red")),
        ),
        Panel(
            "Lost to the ledger",
            "Requests whose usage is not in the ledger, over the chosen time range. Zero is the goal.",
            "short",
            (Query(f"sum({_of.increase('ledger_dropped_total')})", "lost"),),
            "stat",
            4,
            steps=((1, "red"),),
        ),
    ),
)

_COSTS: Final = Row(
    "Who costs what",
    (
        Panel(
            "Cost per hour",
            "By kind. Much input beside little cached input: prompts share no prefix, or the cache is too small.",
            "currencyUSD",
            (Query(f"sum by (kind) ({_COST}) {_HOUR}", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Cost per hour by model",
            "Which model the money goes to.",
            "currencyUSD",
            (Query(f"sum by (model) ({_COST}) {_HOUR}", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Cost per hour by tenant",
            "The ten tenants that cost most. One that rises alone may have a client in a loop.",
            "currencyUSD",
            (Query(f"topk(10, sum by (tenant) ({_COST}) {_HOUR})", "{{tenant}}"),),
        ),
        Panel(
            "Cost by tenant",
            "The ten tenants that cost most over the chosen time range.",
            "currencyUSD",
            (Query(f"topk(10, sum by (tenant) ({_COST_IN_RANGE}))", "{{tenant}}"),),
            "bargauge",
        ),
        Panel(
            "Cost of a million tokens",
            "What a million tokens of a model, prompts and answers, really cost, cached ones included. All tenants.",
            "currencyUSD",
            (
                Query(
                    f"1e6 * sum by (model) ({_of.rate('cost_usd_total', 'model')}) / (sum by (model)"
                    f" ({_of.rate('prompt_tokens_total', 'model')}) + sum by (model)"
                    f" ({_of.rate('completion_tokens_total', 'model')}))",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Tokens",
            "Prompt tokens by hit and miss, generated tokens, as the engines report them. All tenants.",
            "short",
            (
                Query(f"sum by (cache) ({_of.rate('prompt_tokens_total', 'model')})", "prompt {{cache}}"),
                Query(f"sum({_of.rate('completion_tokens_total', 'model')})", "generated"),
            ),
        ),
    ),
)

_CACHE: Final = Row(
    "What cached tokens are worth",
    (
        Panel(
            "Savings per hour",
            "By model: what its cached tokens would have cost more.",
            "currencyUSD",
            (Query(f"sum by (model) ({_SAVED}) {_HOUR}", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Saved by tenant",
            "The ten tenants whose prompts save most over the chosen time range.",
            "currencyUSD",
            (Query(f"topk(10, sum by (tenant) ({_SAVED_IN_RANGE}))", "{{tenant}}"),),
            "bargauge",
        ),
        Panel(
            "Saved share by tenant",
            "Low beside others of the same model: prompts that change at their beginning; `warmroute doctor` says where.",
            "percentunit",
            (
                Query(
                    f"bottomk(10, sum by (tenant) ({_SAVED}) / (sum by (tenant) ({_COST}) + sum by (tenant) ({_SAVED})))",
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)

_ROUTING: Final = Row(
    "What routing saves (needs routing.compare)",
    (
        Panel(
            "Hit ratio of other policies",
            "Delivered: what the engines reported; the others by shadows of their caches. actual above round_robin: what "
            "routing "
            "is worth; actual beside delivered: how good the shadows are.",
            "percentunit",
            (
                Query(
                    f"sum by (policy) ({_of.rate('policy_cached_tokens_total')}) / on () group_left ()"
                    f" sum({_of.rate('compared_prompt_tokens_total')})",
                    "{{policy}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Saved today by routing",
            "Since midnight, UTC, or a worker's start, against each policy, by the configured prices.",
            "currencyUSD",
            (Query(_today("routing_saved_usd_today"), "against {{policy}}"),),
            width=12,
        ),
        Panel(
            "GPU time saved today",
            "The prefill of these tokens, by the learned rates of the replicas.",
            "s",
            (Query(_today("routing_saved_gpu_seconds_today"), "against {{policy}}"),),
            width=8,
        ),
        Panel(
            "Tokens saved today",
            "Cached tokens since midnight, UTC, or a worker's start, more than under each policy. Below zero: that"
            " policy would have been better.",
            "none",
            (Query(_today("routing_saved_tokens_today"), "against {{policy}}"),),
            width=8,
        ),
        Panel(
            "Error of the comparison",
            "Delivered less actual, as a share of the compared prompt tokens: add and subtract it from the hit ratios above.",
            "none",
            (
                Query(
                    f"sum({_of('routing_saved_error_tokens_today')}) / sum({_of('compared_prompt_tokens_today')})",
                    "of the prompt tokens",
                ),
            ),
            width=8,
        ),
    ),
)

_TRUST: Final = Row(
    "Can these numbers be trusted?",
    (
        Panel(
            "Estimated cost per hour",
            "Part of the cost per hour. By tenant: who uses the engine that does not report.",
            "currencyUSD",
            (Query(f"sum by (tenant) ({_of.rate('estimated_cost_usd_total', 'model', 'tenant')}) {_HOUR}", "{{tenant}}"),),
            width=6,
        ),
        Panel(
            "Estimated answers",
            "By what the engine did not report: cached (only the cached tokens), output, or all tokens.",
            "reqps",
            (Query(f"sum by (model, what) ({_of.rate('estimated_answers_total', 'model')})", "{{model}} {{what}}"),),
            width=6,
        ),
        Panel(
            "Answers without a price",
            "They cost nothing here, because no price is configured for their model.",
            "reqps",
            (Query(f"sum by (model) ({_of.rate('unpriced_answers_total', 'model')})", "{{model}}"),),
            width=6,
        ),
        Panel(
            "Unmetered answers",
            "Answers without usage: generations are estimated, other APIs are not counted at all.",
            "reqps",
            (Query(f"sum by (model, endpoint) ({_of.rate('unmetered_requests_total', 'model')})", "{{model}} {{endpoint}}"),),
            width=6,
        ),
    ),
)

_LEDGER: Final = Row(
    "Ledger (needs ledger.url)",
    (
        Panel(
            "Ledger written",
            "Requests whose usage went into the database.",
            "reqps",
            (Query(f"sum by (instance) ({_of.rate('ledger_written_total')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Waits for the ledger",
            "Requests whose usage waits in memory. Rising: the database is away or slow; at 64 MiB usage is lost.",
            "short",
            (Query(f"sum by (instance) ({_of('ledger_buffered')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Ledger is up",
            "0: the database does not take it. The log has the reason.",
            "short",
            (Query(f"min by (instance) ({_of('ledger_up')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Ledger losses",
            "Failures: attempts to write that failed, and are repeated. Dropped: usage that is lost.",
            "cps",
            (
                Query(f"sum({_of.rate('ledger_failures_total')})", "failures"),
                Query(f"sum({_of.rate('ledger_dropped_total')})", "dropped"),
            ),
            width=6,
        ),
    ),
)

_KEYS: Final = Row(
    "Keys, limits and budgets (needs keys.url)",
    (
        Panel(
            "Over a limit",
            "Requests answered 429. insufficient_quota: a budget is spent; rate_limit_exceeded: too many requests or "
            "tokens in a "
            "minute.",
            "reqps",
            (Query(f"sum by (code) ({_of.rate('keys_limited_total')})", "{{code}}"),),
            width=6,
        ),
        Panel(
            "Without a valid key",
            "Requests answered 401. revoked, expired: somebody's key ended; many unknown ones: somebody guesses.",
            "reqps",
            (Query(f"sum by (reason) ({_of.rate('keys_refused_total')})", "{{reason}}"),),
            width=6,
        ),
        Panel(
            "Keys are up",
            "0: their database does not answer. Keys that are known stay valid, and budgets are each gateway's own.",
            "short",
            (Query(f"min by (instance) ({_of('keys_up')})", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Keys",
            "Keys that are known, revoked and expired ones included.",
            "short",
            (Query(f"max by (instance) ({_of('keys')})", "{{instance}}"),),
            width=6,
        ),
    ),
)

MONEY: Final = Board(
    "warmroute-money",
    "warmroute-money",
    "Warmroute: money",
    "Who costs what, what do the cache and the routing save, and can the numbers be trusted?",
    VARIABLES,
    (_STATE, _COSTS, _CACHE, _ROUTING, _TRUST, _LEDGER, _KEYS),
)
