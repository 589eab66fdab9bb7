"""Re-sent requests get the answer that still runs."""

from __future__ import annotations

from typing import Final

from gateway.config.schema import Config
from gateway.features.adoption.metrics import AdoptionMetrics
from gateway.features.adoption.section import ADOPT_S
from gateway.features.declaring import Feature


def _is_wanted(config: Config) -> bool:
    return ADOPT_S.of(config) > 0


FEATURE: Final = Feature(wanted=_is_wanted, section=ADOPT_S, metrics=AdoptionMetrics)
