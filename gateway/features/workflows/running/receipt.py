"""The receipt of a run: tokens that the engines computed, beside the least that any order of the calls computes.

A prompt is a path of pieces: messages, or parts of a text. The least is the size of the union of all paths, in the engines'
own counts: a call adds its prompt without the longest beginning that an earlier call has, too. Counts are known where a prompt
or an answer ends; between two such places tokens are spread evenly over the bytes. O(bytes of a prompt), and for a piece that
differs O(siblings) comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from xxhash import xxh3_64_intdigest

from gateway.dialects.prompt.batch import common_length
from gateway.features.workflows.running.messages import CallUsage

PIECE: Final = 16 << 10  # bytes: longer messages are several pieces
ROUNDING: Final = 128  # tokens: predictions end at a whole block of the index
MAX_KEPT: Final = 8 << 20  # bytes of pieces that are compared with others; further ones are only equal or not


def message_bytes(message: Mapping[str, Any]) -> bytes:
    """A message as one piece, equal for equal prompts."""
    content = message.get("content")
    if isinstance(content, str) and message.keys() == {"role", "content"}:
        return f"{message['role']}\n{content}".encode("utf-8", "surrogatepass")
    return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)


@dataclass(slots=True, eq=False)
class _Node:
    """text: b"": not kept. total: tokens up to its end."""

    text: bytes
    size: int
    total: float
    inner: dict[int, _Node] = field(default_factory=dict)


class PromptUnion:
    """All prompts of a run. least: tokens of the union."""

    def __init__(self) -> None:
        self.least = 0
        self._roots: dict[str, _Node] = {}
        self._kept = 0

    def add(
        self,
        model: str,
        prompt: Sequence[bytes],
        tokens: int,
        continued: Sequence[bytes] = (),
        answer_tokens: int = 0,
        *,
        estimated: bool = False,
    ) -> int:
        """Add a call with its counts. Returns the tokens that it computes at least.

        continued: the beginning of a prompt that continues this call. A cache holds all its tokens but the answer's last.
        estimated: the engine has not counted the prompt: then its known beginning has the engines' counts of it.
        """
        root = self._roots.setdefault(model, _Node(b"", 0, 0.0))
        pieces = _parts(prompt)
        node, rest = _known(root, pieces)
        shared = _shared_within(node, rest[0]) if rest else node.total
        if estimated and node is not root:
            tokens = round(node.total + tokens * sum(map(len, rest)) / max(1, sum(map(len, pieces))))
        new = max(1, tokens - round(min(shared, tokens)))  # an engine computes the last token of a prompt again
        self.least += new
        self._extend(node, rest, tokens)
        if continued:
            self._extend(*_known(root, _parts(continued)), tokens + max(0, answer_tokens - 1))
        return new

    def _extend(self, node: _Node, pieces: Sequence[bytes], total: float) -> None:
        size, begin, done = sum(map(len, pieces)) or 1, node.total, 0
        for piece in pieces:
            done += len(piece)
            kept = piece if self._kept + len(piece) <= MAX_KEPT else b""
            self._kept += len(kept)
            made = _Node(kept, len(piece), begin + (total - begin) * done / size)
            node.inner[xxh3_64_intdigest(piece)] = made
            node = made


def _known(node: _Node, pieces: Sequence[bytes]) -> tuple[_Node, Sequence[bytes]]:
    """The end of the longest known beginning, and the pieces after it."""
    for at, piece in enumerate(pieces):
        found = node.inner.get(xxh3_64_intdigest(piece))
        if found is None:
            return node, pieces[at:]
        node = found
    return node, ()


def _parts(pieces: Sequence[bytes]) -> list[bytes]:
    return [piece[at : at + PIECE] for piece in pieces for at in range(0, len(piece), PIECE)]


def _shared_within(node: _Node, piece: bytes) -> float:
    """Tokens up to the place where a piece differs from the pieces of earlier calls."""
    best = node.total
    for other in node.inner.values():
        share = common_length(other.text, piece) / other.size if other.size else 0.0
        best = max(best, node.total + (other.total - node.total) * share)
    return best


class Receipt:
    """The usage of a run, over all attempts of all its steps. calls: that replicas were asked for. wasted: tokens of answers
    that are in no result.

    The cached tokens of a killed call are predicted. If it and another call with its prefix were sent at once, the engine may
    have computed the prefix for either. The other one then reports more cached tokens than were predicted for it: so many were
    computed for the killed one.
    """

    def __init__(self) -> None:
        self.union = PromptUnion()
        self._surplus = self._predicted = 0  # cached tokens: beyond the predicted ones; of calls without a report
        self.calls = self.prompt = self.cached = self.completion = self.wasted = 0
        self.cost_usd = 0.0

    def count(self, usage: CallUsage) -> None:
        """An attempt has ended. It is no call if no replica was asked: its key is over its rate, say."""
        self.calls += bool(usage.replica)
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.completion += usage.completion_tokens
        self.cost_usd += usage.cost_usd
        if usage.reported:
            surplus = usage.cached_tokens - usage.predicted_cached
            self._surplus += surplus if surplus > ROUNDING else 0
        else:
            self._predicted += usage.cached_tokens

    def restore(self, found: Mapping[str, Any]) -> None:
        """Sets the counts from `as_json`, but for the least tokens."""
        self.calls, self.prompt, self.cached = found["calls"], found["prompt_tokens"], found["cached_tokens"]
        self.completion, self.wasted = found["completion_tokens"], found["wasted_tokens"]
        self.cost_usd = found["cost_usd"]

    def as_json(self) -> dict[str, Any]:
        cached = self.cached - min(self._surplus, self._predicted)
        return {
            "calls": self.calls,
            "prompt_tokens": self.prompt,
            "cached_tokens": cached,
            "computed_tokens": self.prompt - cached,
            "least_tokens": self.union.least,
            "completion_tokens": self.completion,
            "wasted_tokens": self.wasted,
            "cost_usd": round(self.cost_usd, 9),
        }
