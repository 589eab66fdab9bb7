"""JSON as nobody should send it."""

from __future__ import annotations

from hypothesis import strategies as st

NAMES = st.sampled_from(
    [
        *("name", "pool", "url", "up", "draining", "leaving", "error", "circuit", "engine", "models", "inflight"),
        *("held_tokens", "capacity_tokens", "prompt_tokens", "cached_tokens", "key", "state", "time", "status", "tenant"),
        *("model", "replica", "reason", "failed_attempts", "cost", "total_s", "queue_s", "candidates", "way", "shown"),
        *("holders", "idle_s", "children", "blocks", "tokens", "id", "used", "usd_day", "budget_usd_day", "expires_at"),
        *("revoked_at", "rotated_until", "cost_usd", "saved_usd"),
    ]
)
PARTS = st.sampled_from(
    ["requests", "replicas", "points", "pools", "index", "ended", "hidden", "step_s", "version", "policy", "workers", "now"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["ended", "\x1b]0;x\x07", "[red]x[/]", "\u202e", "x" * 5000]),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)), max_leaves=6
)
ROWS = st.dictionaries(NAMES, ANYTHING, max_size=6)
FRAMES = st.dictionaries(PARTS, st.one_of(SCALARS, st.lists(ROWS, max_size=3)), max_size=6)
