"""Sleeping engines are woken when all others of their pool are full."""

from __future__ import annotations

from typing import Final

from gateway.config.schema import Config
from gateway.features.declaring import Feature
from gateway.features.waking.section import WAKE


def _is_wanted(config: Config) -> bool:
    return WAKE.of(config)


FEATURE: Final = Feature(wanted=_is_wanted, section=WAKE)
