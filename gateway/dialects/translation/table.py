"""The table: from a dialect's name to its translation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.dialects.translation.translation import Translation

TRANSLATIONS: Final[Mapping[str, Translation]] = MappingProxyType({})
