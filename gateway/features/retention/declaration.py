"""Engines that take retention hints are asked to keep the prompts of sessions longer than others."""

from __future__ import annotations

from typing import Final

from gateway.config.schema import Config
from gateway.features.declaring import Feature
from gateway.features.retention.section import RETAIN


def _is_wanted(config: Config) -> bool:
    return RETAIN.of(config)


FEATURE: Final = Feature(wanted=_is_wanted, section=RETAIN)
