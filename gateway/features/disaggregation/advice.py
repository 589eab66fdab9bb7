"""Advice on pools that divide the work."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.parse import Problem
from gateway.config.schema import Config
from gateway.features.declaring import Advice


class DisaggregationAdvice(Advice):
    """See the module."""

    def warnings(self, config: Config) -> Iterator[Problem]:
        """Decoders without a prefiller."""
        for number, pool in enumerate(config.pools):
            if pool.decode and not pool.prefill:
                text = "without `prefill`, or prefillers that `discovery` finds, they compute all prompts; SGLang's cannot"
                yield Problem(("pools", number, "decode"), text)
