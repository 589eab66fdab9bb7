"""Errors of engines about a full context, and their numbers, for the words of the client's API.

    an engine's error ── full_context ──► FullContext ── completed ──► the dialect's words (`Dialect.full_context_error`)

Agents compact a conversation, or ask for a shorter answer, when an error has the words of the API that they speak. In the words
of an engine it ends the conversation: every later turn is as long. The text of an error counts, not the engine's name: a proxy
in between may hide that name. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.excerpt import message_of

CODE: Final = "context_length_exceeded"
STATUSES: Final = frozenset([400, 413, 422])  # of errors that the client can cure
MAX_READ: Final = 16 << 10  # bytes of an error

_COMMON: Final = r"maximum context length is (?P<most>\d+) tokens"
# Engine, pattern. Groups: prompt, output (the tokens that the answer may have), most: tokens; least: `prompt` is a lower bound;
# excess: tokens of the prompt beyond the context. The first match counts.
PATTERNS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (engine, re.compile(pattern))
    for engine, pattern in (
        (
            "vllm",
            _COMMON + r"\. However, (?:you requested (?P<output>\d+) output tokens and )?your prompt contains"
            r" (?P<least>at least )?(?P<prompt>\d+) input tokens",
        ),
        ("vllm", _COMMON + r"\. However, you requested (?P<output>\d+) output tokens"),  # the prompt is counted in characters
        ("vllm", _COMMON + r"\. However, your request has (?P<prompt>\d+) input tokens(?: plus (?P<output>\d+))?"),
        ("vllm", _COMMON + r"[.,] [Hh]owever,? you requested \d+ tokens \((?P<prompt>\d+) [^,;]*[,;] (?P<output>\d+) "),
        (
            "vllm",
            r"too large: (?P<output>\d+)\. This model's " + _COMMON + r" and your request has (?P<prompt>\d+) input tokens",
        ),
        ("vllm", r"prompt \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<most>\d+)"),
        ("sglang", r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<most>\d+) tokens\)"),
        (
            "sglang",
            r"exceeds the model's maximum context length of (?P<most>\d+) tokens\. You requested a total of \d+ tokens:"
            r" (?P<prompt>\d+) tokens from the input messages and (?P<output>\d+) tokens",
        ),
        ("sglang", r"Input length \((?P<prompt>\d+)(?: tokens)?\) exceeds [a-z ']*maximum [a-z ]*length \((?P<most>\d+)"),
        ("llamacpp", r"request \((?P<prompt>\d+) tokens\) exceeds the available context size \((?P<most>\d+) tokens\)"),
        ("llamacpp", r"the request exceeds the available context size"),
        ("tgi", r"must be <= (?P<most>\d+)\. Given: (?P<prompt>\d+) `inputs` tokens and (?P<output>\d+) `max_new_tokens`"),
        ("tgi", r"`inputs` must have less than (?P<most>\d+) tokens\. Given: (?P<prompt>\d+)"),
        ("ollama", r"prompt too long; exceeded (?:max )?context length(?: by (?P<excess>\d+) tokens)?"),
        ("warmroute", r"The prompt has (?P<prompt>\d+) tokens; at most (?P<most>\d+) leave room for an answer"),
        (
            "warmroute",
            r"(?P<prompt>\d+) prompt tokens and (?P<output>\d+) for the answer are more than the (?P<most>\d+) tokens",
        ),
        ("openai", _COMMON + r"\. However, your messages resulted in (?P<prompt>\d+) tokens"),
        ("unknown", _COMMON),
    )
)
_NUMBERS: Final = ("prompt", "output", "most", "excess")
_RIGHT: Final = ("prompt is too long: ", "exceed context limit: ")  # Anthropic's words already


class FullContext:
    """The prompt, or the prompt and the wanted answer, exceed the context. Tokens; 0: not reported.

    least: `prompt` is a lower bound. excess: tokens of the prompt beyond `most`. message: the engine's.
    """

    __slots__ = ("excess", "least", "message", "most", "output", "prompt")

    def __init__(self, message: str, prompt: int = 0, output: int = 0, most: int = 0, excess: int = 0) -> None:
        self.message = message
        self.prompt = prompt
        self.output = output
        self.most = most
        self.excess = excess
        self.least = not prompt

    def complete(self, estimate: int, context: int | None) -> None:
        """Fill in missing numbers. estimate: of the prompt's tokens. context: of the replica's models, if it is known."""
        if self.least:
            self.prompt = max(self.prompt, estimate)
        if not self.most:
            self.most = max(0, self.prompt - self.excess) if self.excess else context or 0

    def __repr__(self) -> str:
        return f"<FullContext {self.prompt}{'+' * self.least} and {self.output} of {self.most}>"


def full_context(body: bytes) -> FullContext | None:
    """Reads an engine's error. None: another error, or one in Anthropic's words already. O(MAX_READ)."""
    if len(body) > MAX_READ:
        return None
    try:
        return full_context_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None


def full_context_of(error: Any) -> FullContext | None:
    """`full_context` of an error that was read already."""
    message = message_of(error)
    if any(words in message for words in _RIGHT):
        return None
    for _, pattern in PATTERNS:
        if match := pattern.search(message):
            numbers = match.groupdict()
            found = FullContext(message, *(int(numbers.get(name) or 0) for name in _NUMBERS))
            found.least = found.least or bool(numbers.get("least"))
            return found
    return FullContext(message) if _code_of(error) == CODE else None


def _code_of(error: Any) -> Any:
    holder = error.get("error") if isinstance(error, dict) else None
    return holder.get("code") if isinstance(holder, dict) else None
