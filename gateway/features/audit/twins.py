"""The engines' counts of the last prompts, for comparison with other replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

PROMPTS: Final = 4096
_REPLICAS: Final = 4  # of one prompt

PromptId = tuple[str, bytes, int]
"""Tokenizer, key of the last full block, length: the same for the same prompt, up to a part of a block at its end."""


class PromptTwins:
    """The counts of the last PROMPTS prompts."""

    def __init__(self, prompts: int = PROMPTS) -> None:
        self._most = prompts
        self._known = OrderedDict[PromptId, list[tuple[str, int]]]()

    def count(self, prompt: PromptId, replica: str, tokens: int) -> Sequence[int]:
        """Store a count. Returns the last counts of other replicas for this prompt. O(1)."""
        known = self._known.get(prompt)
        if known is None:
            self._known[prompt] = [(replica, tokens)]
            if len(self._known) > self._most:
                self._known.popitem(last=False)
            return ()
        others = [(name, count) for name, count in known if name != replica]
        self._known[prompt] = [(replica, tokens), *others[: _REPLICAS - 1]]
        self._known.move_to_end(prompt)
        return [count for _, count in others]

    def forget(self, replica: str) -> None:
        """Drop the counts of a replica. O(prompts)."""
        for prompt, known in list(self._known.items()):
            if left := [each for each in known if each[0] != replica]:
                self._known[prompt] = left
            else:
                del self._known[prompt]

    def __len__(self) -> int:
        return len(self._known)
