"""Configurations as a gateway reads them, with the sections of all features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.features.table import read


def load(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Any:
    """`read`, without the file's lines. Any: the sections are no attributes of the core's type."""
    return read(path, overrides, env).config
