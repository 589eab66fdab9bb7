"""The keys of every object in a document, and the bounds of its numbers, for the reader and the JSON schema of documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.features.workflows.language.results import KINDS


class NumberBounds(NamedTuple):
    """Both bounds are possible. whole: no fractions."""

    low: float
    high: float
    whole: bool = False


VERSION: Final = 1
SAMPLING: Final = ("temperature", "top_p", "stop", "seed")
DOCUMENT_KEYS: Final = ("workflow", "name", "description", "inputs", "defaults", "steps", "outputs", "primary", "limits")
DEFAULT_KEYS: Final = ("model", "max_tokens", *SAMPLING)
INPUT_KEYS: Final = ("type", "required", "default", "enum", "max_length")
STEP_KEYS: Final = (*KINDS, "needs", "needs_any", "if", "yield", "kill", "timeout_s", "retry", "on_error")
CHAT_KEYS: Final = ("from", "append", "model", "max_tokens", *SAMPLING, "choices", "output", "tools", "tool_choice", "extra")
TEXT_KEYS: Final = ("prompt", "from", "append", "model", "max_tokens", *SAMPLING, "choices", "output", "extra")
CALL_KEYS: Final = ("use", "with")
ARM_KEYS: Final = ("when", "else", "emit", "kill", "steps", "value")
EACH_KEYS: Final = ("in", "as", "steps", "value")
YIELD_KEYS: Final = ("as", "value", "stream")

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
STREAMS: Final = ("delta", "snapshot")
ERRORS: Final = ("fail", "skip")

MAX_MODEL_CHARS: Final = 256
TOKENS: Final = NumberBounds(1, 1 << 20, whole=True)
LENGTH: Final = NumberBounds(1, 1 << 20, whole=True)
TIMEOUT_S: Final = NumberBounds(0.001, 86_400)
RETRIES: Final = NumberBounds(0, 3, whole=True)
SAMPLING_NUMBERS: Final[Mapping[str, NumberBounds]] = {
    "temperature": NumberBounds(0, 2),
    "top_p": NumberBounds(0, 1),
    "seed": NumberBounds(-(1 << 63), (1 << 63) - 1, whole=True),
}
LIMITS: Final[Mapping[str, NumberBounds]] = {
    "calls": NumberBounds(1, 1 << 31, whole=True),
    "output_tokens": NumberBounds(1, 1 << 31, whole=True),
    "seconds": NumberBounds(0, 1e9),
    "cost_usd": NumberBounds(0, 1e9),
}
# Members of a request that the language or the gateway sets: `extra` would evade the bounds of the plan.
NOT_EXTRA: Final = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        *("n", "n_cmpl", "best_of"),
        *("max_tokens", "max_completion_tokens", "n_predict"),  # llama.cpp prefers its own name
        "min_tokens",
        "tools",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "use_beam_search",
        "echo",
        "suffix",
    ]
)
