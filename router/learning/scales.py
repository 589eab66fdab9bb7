"""How many units of a prompt (bytes of canonical text) an engine counts as a token: learned, for each model.

A tokenizer makes a token of a part of a character up to a long word: text has LEAST_UNITS to MOST_UNITS bytes a token, and
nothing outside of that is believed, whatever a replica reports. What is far outside is not about text (an image is a thousand
tokens in a few bytes), or wrong, and teaches nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learning.learned import Ratio

DEFAULT_UNITS_PER_TOKEN: Final = 4.0  # bytes of canonical text, believed until an engine has counted
SCALE_PRIOR_TOKENS: Final = 200.0
SCALE_HALF_LIFE_TOKENS: Final = 20_000.0
LEAST_UNITS: Final = 1.0
MOST_UNITS: Final = 16.0
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
        """An engine has counted `tokens` tokens in a prompt of `units` units.

        One observation counts as at most twice or half of what is believed: a prompt may have an image in it, and an engine
        that cuts a prompt counts few tokens of many bytes.
        """
        if not name or not tokens or not LEAST_UNITS / 2 <= units / tokens <= MOST_UNITS * 2:
            return
        scale = self._known.get(name)
        if scale is None:
            scale = self._known[name] = Ratio(DEFAULT_UNITS_PER_TOKEN, SCALE_PRIOR_TOKENS, SCALE_HALF_LIFE_TOKENS)
            if len(self._known) > MOST_SCALES:
                self._known.popitem(last=False)
        elif len(self._known) > MOST_SCALES // 2:
            self._known.move_to_end(name)
        weight = min(float(tokens), SCALE_HALF_LIFE_TOKENS)
        plausible = min(max(units / tokens, LEAST_UNITS), MOST_UNITS)
        scale.learn(scale.near(plausible) * weight, weight, weight)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Scales of {len(self._known)} names>"
