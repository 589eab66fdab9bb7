"""Names of the causes, and a remedy for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TIMESTAMP: Final = "timestamp"
ID: Final = "id"
NONCE: Final = "nonce"
TOOLS_REORDERED: Final = "tools_reordered"
TOOLS_CHANGED: Final = "tools_changed"
SYSTEM_CHANGED: Final = "system_changed"
SETTINGS_CHANGED: Final = "settings_changed"
SALT: Final = "salt"
HISTORY_REWRITTEN: Final = "history_rewritten"
HISTORY_TRUNCATED: Final = "history_truncated"
COMPACTION: Final = "compaction"
MODEL_CHANGED: Final = "model_changed"
ADAPTER_CHANGED: Final = "adapter_changed"
REPLICA_LOST: Final = "replica_lost"
EVICTED: Final = "evicted"
SPILLED: Final = "spilled"
CONCURRENT: Final = "concurrent"

REMEDIES: Final[Mapping[str, str]] = {
    TIMESTAMP: "Move the time out of the head of the prompt: to the end of the latest user message, or round it to the day.",
    ID: "Move the id out of the head of the prompt: to the end of the latest user message, or to a header or `metadata`.",
    NONCE: (
        "Leave the random token out of the prompt, or move it behind the unchanged part. If it is Claude Code's billing line:"
        " CLAUDE_CODE_ATTRIBUTION_HEADER=0, or let the client speak Messages and keep `strip_billing_header` on."
    ),
    TOOLS_REORDERED: "Send the tools in one fixed order: sort them by name before each request.",
    TOOLS_CHANGED: (
        "Keep the list of tools the same for the whole conversation: offer all of them from the beginning, and limit the choice"
        " with `tool_choice`."
    ),
    SYSTEM_CHANGED: "Keep the system prompt the same for the whole conversation; put new information in a user message.",
    SETTINGS_CHANGED: "Keep the fields that shape the prompt (the first difference names one) the same for the conversation.",
    SALT: "Use one `cache_salt` for each tenant or user, not one for each request.",
    HISTORY_REWRITTEN: (
        "Only append to the history: do not edit, re-render, reorder or clear earlier messages, or do so seldom, in one step."
    ),
    HISTORY_TRUNCATED: (
        "Do not drop the oldest messages with each turn: drop many at once and seldom, or replace them by a summary that stays."
    ),
    COMPACTION: (
        "Nothing is wrong with a compaction; each one costs a new prefix. If they are frequent, raise the client's limit, and"
        " keep system prompt and tools unchanged in front of the summary."
    ),
    MODEL_CHANGED: "Keep a conversation on one model: each has its own cache. Check `fallback` pools and model aliases.",
    ADAPTER_CHANGED: "Keep a conversation on one adapter: adapters do not share prefixes.",
    REPLICA_LOST: "Find out why replicas restart, drain or leave; drain few at a time, when it is quiet; scale in slowly.",
    EVICTED: (
        "Give the replicas more KV cache (or more replicas), keep long conversations within `routing.ttl_s`, and compare"
        " predicted with reported cached tokens (metrics)."
    ),
    SPILLED: "The replica that had the prefix was too busy: add replicas, or look for one hot prefix that all requests share.",
    CONCURRENT: "Send the first request of a batch alone, and the others when its answer has begun.",
}
DELIVERY_CAUSES: Final = frozenset([REPLICA_LOST, EVICTED, SPILLED, CONCURRENT])
