"""Sleeping engines are woken when all others of their pool are full."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.waking.section import WAKE

FEATURE: Final = Feature(wanted=WAKE.of, section=WAKE)
