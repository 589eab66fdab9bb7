"""Learned units of a prompt (bytes of canonical text) per token of an engine, for each model.

A token is between a part of a character and a long word: text has MIN_UNITS to MAX_UNITS bytes per token. Other reported values
are clamped. Values far outside are not about text (an image is a thousand tokens in a few bytes), or wrong, and are ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learning.learned import Ratio

DEFAULT_UNITS_PER_TOKEN: Final = 4.0  # bytes of canonical text, until an engine reports its count
SCALE_PRIOR_TOKENS: Final = 200.0
SCALE_FULL_TOKENS: Final = 1_000.0  # a shorter prompt counts less than its tokens
SCALE_HALF_LIFE_TOKENS: Final = 20_000.0
MIN_UNITS: Final = 1.0
MAX_UNITS: Final = 16.0
MAX_SCALES: Final = 1024


class Scales:
    """The scales of at most MAX_SCALES names. All operations O(1).

    A further name replaces the least recently learned one. While there are MAX_SCALES // 2 names or fewer, only the first
    learning of a name counts for this order.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Ratio] = OrderedDict()

    def units_per_token(self, name: str) -> float:
        """The scale of a name; 1 without a name: a unit is a token."""
        if not name:
            return 1.0
        known = self._known.get(name)
        return known.value if known else DEFAULT_UNITS_PER_TOKEN

    def learn(self, name: str, units: int, tokens: int | None) -> None:
        """An engine has counted `tokens` tokens in a prompt of `units` units.

        It counts by its tokens, a short prompt by their square, because the template adds most of its tokens. (Without that, 60
        prompts "hi" turned an estimate of 1,700 tokens into 6,300.) An observation is clamped to a factor of two around the
        current value: a prompt may contain an image, and an engine that truncates a prompt counts few tokens of many bytes.
        """
        if not name or not tokens or not MIN_UNITS / 2 <= units / tokens <= MAX_UNITS * 2:
            return
        scale = self._known.get(name)
        if scale is None:
            scale = self._known[name] = Ratio(DEFAULT_UNITS_PER_TOKEN, SCALE_PRIOR_TOKENS, SCALE_HALF_LIFE_TOKENS)
            if len(self._known) > MAX_SCALES:
                self._known.popitem(last=False)
        elif len(self._known) > MAX_SCALES // 2:
            self._known.move_to_end(name)
        weight = min(tokens * min(1.0, tokens / SCALE_FULL_TOKENS), SCALE_HALF_LIFE_TOKENS)
        plausible = min(max(units / tokens, MIN_UNITS), MAX_UNITS)
        scale.learn(scale.near(plausible) * weight, weight, weight)

    def entries(self) -> list[tuple[str, tuple[float, float]]]:
        """(name, sums of units and tokens), for another router's `restore`. O(scales)."""
        return [(name, scale.sums) for name, scale in self._known.items()]

    def restore(self, name: str, sums: tuple[float, float]) -> None:
        """Take over the sums of another router, unless the name was learned here."""
        if name and name not in self._known and len(self._known) < MAX_SCALES:
            scale = self._known[name] = Ratio(DEFAULT_UNITS_PER_TOKEN, SCALE_PRIOR_TOKENS, SCALE_HALF_LIFE_TOKENS)
            scale.restore(sums)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Scales of {len(self._known)} names>"
