"""WebSockets of clients."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature

FEATURE: Final = Feature()
