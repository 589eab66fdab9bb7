"""What a request has consumed: what its engine reported, and estimates in the place of what it did not.

    reported                               counted
    all of it                              as reported                                                     estimated: ""
    no cached tokens                       those that the router predicted, as their share of the prompt   CACHED
    the answer not to its end, or early    the tokens of it that passed                                    OUTPUT
    both of these, or nothing at all       the prompt as reported, else as the router estimated it         TOKENS

An engine that is known to have no prefix cache has cached nothing, which is no estimate. A prompt is never cached whole: its
last token has to be computed. Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.usage import Usage

BYTES_PER_TOKEN: Final = 4  # of a plain answer that says nothing of its tokens

CACHED: Final = "cached"
OUTPUT: Final = "output"
TOKENS: Final = "tokens"


class Consumption:
    """usage: its `cached` is a number. images: in the prompt. estimated: see the top; "": nothing is."""

    __slots__ = ("cached", "estimated", "images", "usage")

    def __init__(self, usage: Usage, images: int = 0, estimated: str = "") -> None:
        self.usage = usage
        self.cached: int = usage.cached or 0
        self.images = images
        self.estimated = estimated

    def __repr__(self) -> str:
        return f"<Consumed {self.usage!r}{', estimated: ' if self.estimated else ''}{self.estimated}>"


class Prediction:
    """What the router believed of a prompt, in tokens. caches: whether the replica has a prefix cache, as far as is known."""

    __slots__ = ("cached", "caches", "prompt")

    def __init__(self, prompt: int, cached: int, *, caches: bool = True) -> None:
        self.prompt = prompt
        self.cached = cached
        self.caches = caches

    def cached_of(self, prompt: int) -> int:
        """The cached tokens of a prompt that has this many."""
        if not self.caches or self.cached <= 0 or prompt <= 1:
            return 0
        share = self.cached if self.prompt <= 0 else self.cached * prompt // self.prompt
        return min(share, prompt - 1)


NOTHING_PREDICTED: Final = Prediction(0, 0)


def consumed(reported: Usage | None, predicted: Prediction, passed: int, *, whole: bool, images: int = 0) -> Consumption:
    """reported: by the engine, None: nothing. passed: tokens of the answer that went by. whole: the answer came to its end."""
    if reported is None:
        prompt = max(predicted.prompt, 0)
        return Consumption(Usage(prompt, passed, predicted.cached_of(prompt)), images, TOKENS)
    completion, cached, estimated = reported.completion, reported.cached, ""
    if not whole and passed > completion:  # the last count has not come
        completion, estimated = passed, OUTPUT
    if cached is None and predicted.caches:
        cached = min(predicted.cached_of(reported.prompt), reported.prompt - reported.written)
        estimated = TOKENS if estimated else CACHED
    elif cached is not None and not estimated:
        return Consumption(reported, images)
    cached = cached or 0
    return Consumption(Usage(reported.prompt, completion, cached, reported.written, reported.hours), images, estimated)
