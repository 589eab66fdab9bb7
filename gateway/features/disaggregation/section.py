"""The section `disaggregation`."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import EXPECTED, MAX_NUMBER
from gateway.config.kinds import ConfigSection, about
from gateway.config.sections import Section
from router.pricing.legs import LOCAL_TOKENS


class DisaggregationConfig(ConfigSection, frozen=True):
    """Pools with `prefill` and `decode` replicas."""

    local_tokens: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (none) or more"}),
        about("A decoder computes a prompt itself of which it lacks at most so many tokens."),
    ] = LOCAL_TOKENS


DISAGGREGATION: Final = Section(
    "disaggregation",
    Annotated[DisaggregationConfig, about("Pools in which some replicas compute prompts, and others answer.")],
    DisaggregationConfig(),
)
