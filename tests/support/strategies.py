"""Hypothesis strategies that several test files share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from router import Candidate, Cost, Prompt, text_keys
from router.types import BlockKeys

# Prompts of one-letter blocks over a tiny alphabet, so that random prompts share prefixes, extend and split each other.
letters = st.binary(max_size=9).map(lambda data: bytes(byte % 3 for byte in data))
replicas = st.sampled_from(["r1", "r2", "r3"])


def keys_of(prompt: bytes) -> BlockKeys:
    """Real chained keys of a prompt of one-letter blocks."""
    return text_keys(prompt, 1, seed=7)


def prompt_of(text: bytes, scale: str = "") -> Prompt:
    return Prompt(keys_of(text), len(text), 1, scale)


def candidate_of(name: str, *, seconds: float = 0.0, **known: Any) -> Candidate:
    """A candidate with these values, all others 0. seconds: its cost."""
    nothing: dict[str, Any] = dict.fromkeys(Candidate._fields, 0)
    cost = Cost(*[0.0] * len(Cost._fields))._replace(prefill_s=seconds)
    return Candidate(**nothing | {"replica": name, "prefill_rate": 1000.0, "cost": cost} | known)  # type: ignore[arg-type]
