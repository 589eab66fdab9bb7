"""Some tests run on plain Python only: what mypyc has compiled takes no stand-ins and no subclasses."""

from __future__ import annotations

import pytest

from router import pricing

uncompiled = pytest.mark.skipif(
    not (pricing.__file__ or "").endswith(".py"), reason="compiled code takes no stand-ins and no subclasses"
)
