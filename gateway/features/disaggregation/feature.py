"""Disaggregated prefill and decode: the forms of decoders."""

from __future__ import annotations

import random

from gateway.core import Core
from gateway.features.disaggregation.forms import DecoderForms, LegEnds
from gateway.features.disaggregation.metrics import DisaggregationMetrics
from gateway.features.disaggregation.prefilling import PrefillLegs
from gateway.features.disaggregation.section import DISAGGREGATION


def install(core: Core) -> None:
    prefilling = PrefillLegs(
        fleet=core.fleet,
        router=core.router,
        upstream=core.upstream,
        metrics=core.metrics.of(DisaggregationMetrics),
        clock=core.clock,
        local_tokens=lambda: DISAGGREGATION.of(core.config).local_tokens,
    )
    ends = LegEnds(prefilling)
    core.work.finishes.append(ends.close)
    core.extensions.delivered.append(prefilling.delivered)
    core.extensions.decoding.append(DecoderForms(prefilling, core.extensions, ends, random.SystemRandom()).of)
