"""Rotary positions whose frequencies depend on a text's length, as transformers (5.23) computes them.

Within `max_position_embeddings` (dynamic NTK) or the original context (longrope) the frequencies are constant. Beyond it a
longer text has other frequencies for all of its keys: keys that are cached, or were computed earlier in the same answer, would
be wrong. So would short texts in the same step, because the longest text of a step determines the frequencies for all.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def constant_until(config: Any) -> tuple[int, str] | None:
    """The most tokens for which the frequencies are constant, and the kind of positions; None if they are always constant."""
    return min(_bounds(config.get_text_config()), default=None)


def _bounds(config: Any) -> Iterator[tuple[int, str]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # one for all layers, or one for each type of layer
        kind = str(each.get("rope_type", "")) if isinstance(each, Mapping) else ""
        if "dynamic" in kind:
            yield config.max_position_embeddings, kind
        elif kind == "longrope":
            yield each.get("original_max_position_embeddings") or config.max_position_embeddings, kind
