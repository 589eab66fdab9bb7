"""Translation for replicas that do not support a request's dialect."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature

FEATURE: Final = Feature()
