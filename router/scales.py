"""How many units of a prompt (bytes of canonical text) an engine counts as a token: learned, for each model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learned import Ratio

DEFAULT_UNITS_PER_TOKEN: Final = 4.0  # bytes of canonical text, believed until an engine has counted
SCALE_PRIOR_TOKENS: Final = 200.0
SCALE_HALF_LIFE_TOKENS: Final = 20_000.0
MOST_SCALES: Final = 1024


class Scales:
    """The scales of the MOST_SCALES names that were learned for last. All operations O(1)."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Ratio] = OrderedDict()

    def units_per_token(self, name: str) -> float:
        """1 without a name: a unit is a token."""
        if not name:
            return 1.0
        known = self._known.get(name)
        return known.value if known else DEFAULT_UNITS_PER_TOKEN

    def learn(self, name: str, units: int, tokens: int | None) -> None:
        """A prompt of so many units was counted as so many tokens.

        One observation counts as at most twice or half of what is believed: an image is many tokens in few bytes, and an engine
        that cuts a prompt counts few tokens of many bytes.
        """
        if not name or not tokens or not 0.01 < units / tokens < 1000:
            return  # nothing to learn, or nonsense, or a prompt that is mostly an image
        scale = self._known.get(name)
        if scale is None:
            scale = self._known[name] = Ratio(DEFAULT_UNITS_PER_TOKEN, SCALE_PRIOR_TOKENS, SCALE_HALF_LIFE_TOKENS)
            if len(self._known) > MOST_SCALES:
                self._known.popitem(last=False)
        elif len(self._known) > MOST_SCALES // 2:
            self._known.move_to_end(name)
        weight = min(float(tokens), SCALE_HALF_LIFE_TOKENS)
        scale.learn(scale.near(units / tokens) * weight, weight, weight)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Scales of {len(self._known)} names>"
