"""The translations by the name of their dialect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.features.translation.messages.translation import MessagesTranslation
from gateway.features.translation.responses.translation import ResponsesTranslation
from gateway.features.translation.translation import Translation

TRANSLATIONS: Final[Mapping[str, Translation]] = MappingProxyType(
    {one.name: one for one in (MessagesTranslation(), ResponsesTranslation())}
)
