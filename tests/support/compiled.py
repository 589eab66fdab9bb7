"""Some tests run on plain Python only: what mypyc has compiled takes no stand-ins and no subclasses."""

from __future__ import annotations

import pytest

from router.pricing import quotes as pricing

COMPILED = not (pricing.__file__ or "").endswith(".py")
uncompiled = pytest.mark.skipif(COMPILED, reason="compiled code takes no stand-ins and no subclasses")
