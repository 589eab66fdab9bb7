"""Prompts that one replica may compute for another one: when that is worth it.

    here  = queue_d + lacking_d / rate_p * (1 + max(1, decoding_d))
    there = queue_p + lacking_p / rate_p

d: the decoder, p: the best prefiller. A prefill at the decoder delays its answers by its own duration, each of them: that is
what the split is for, and one answer is the least, so that an idle decoder computes no prompt that an idle prefiller could.
Both sides are in seconds: a prefiller with a long queue, or without the prefix that the decoder holds, is too dear. The decoder
is expected to compute as fast as a prefiller, since its own learned rate is that of transfers; those are short beside prefills,
and not counted.
"""

from __future__ import annotations

from typing import Final

from router.types import Candidate

LOCAL_TOKENS: Final = 512  # of a prompt that a decoder lacks: so few are computed there (llm-d's example; Dynamo: 2048)
SHORT, CHEAPER = "short", "cheaper"


def local_reason(decoder: Candidate, prefiller: Candidate, local_tokens: int) -> str:
    """The reason why a decoder computes a prompt itself; "": the prefiller does. local_tokens: as few lacking tokens are always
    computed by the decoder.
    """
    lacking = decoder.uncached_tokens
    if lacking <= local_tokens:
        return SHORT
    here = decoder.cost.queue_s + lacking / prefiller.prefill_rate * (1 + max(1, decoder.decoding))
    return CHEAPER if here < prefiller.cost.queue_s + prefiller.cost.prefill_s else ""
