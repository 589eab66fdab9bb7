"""The tokens consumed by a request: as its engine reported them, with estimates for missing counts.

    the engine reported                    counted                                                         estimated
    everything                             as reported                                                     ""
    no cached tokens                       the router's prediction, as a share of the prompt, as far as    CACHED
                                           answers charged to this client have put it there
    usage before the end of the answer,    the tokens of the answer that passed                            OUTPUT
    or an impossible count of the answer
    no cached tokens, and early; nothing   the prompt as reported, else as the router estimated it         TOKENS

For an engine without a prefix cache, zero cached tokens are certain and no estimate. A prompt is never cached completely: its
last token has to be computed. Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.usage import Usage

BYTES_PER_TOKEN: Final = 4  # of a plain answer without a count of its tokens

CACHED: Final = "cached"
OUTPUT: Final = "output"
TOKENS: Final = "tokens"


class Consumption:
    """usage: with a number in `cached`. images: in the prompt. estimated: see the module; "": nothing."""

    __slots__ = ("cached", "estimated", "images", "usage")

    def __init__(self, usage: Usage, images: int = 0, estimated: str = "") -> None:
        self.usage = usage
        self.cached: int = usage.cached or 0
        self.images = images
        self.estimated = estimated

    def __repr__(self) -> str:
        return f"<Consumed {self.usage!r}{', estimated: ' if self.estimated else ''}{self.estimated}>"


class Prediction:
    """The router's prediction for a prompt, in tokens. caches: the replica has a prefix cache, as far as known."""

    __slots__ = ("cached", "caches", "prompt")

    def __init__(self, prompt: int, cached: int, *, caches: bool = True) -> None:
        self.prompt = prompt
        self.cached = cached
        self.caches = caches

    def cached_of(self, prompt: int) -> int:
        """The predicted cached tokens of a prompt with this many tokens."""
        if not self.caches or self.cached <= 0 or prompt <= 1:
            return 0
        share = self.cached if self.prompt <= 0 else self.cached * prompt // self.prompt
        return min(share, prompt - 1)


NOTHING_PREDICTED: Final = Prediction(0, 0)


def consumed(reported: Usage | None, predicted: Prediction, passed: int, *, whole: bool, images: int = 0) -> Consumption:
    """The consumption of a request. reported: by the engine, or None. passed: tokens of the answer that passed. whole: the
    answer reached its end.
    """
    if reported is None:
        prompt = max(predicted.prompt, 0)
        return Consumption(Usage(prompt, passed, predicted.cached_of(prompt)), images, TOKENS)
    completion, cached, estimated = reported.completion, reported.cached, ""
    if not whole and passed > completion:  # the last count is missing
        completion, estimated = passed, OUTPUT
    if cached is None and predicted.caches:
        cached = min(predicted.cached_of(reported.prompt), reported.prompt - reported.written)
        estimated = TOKENS if estimated else CACHED
    elif cached is not None and not estimated:
        return Consumption(reported, images)
    cached = cached or 0
    return Consumption(Usage(reported.prompt, completion, cached, reported.written, reported.hours), images, estimated)
