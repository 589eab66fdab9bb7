"""Marks tests that need plain Python: compiled modules accept no stand-ins and no subclasses, and beside them there are only
the packages, the tests and the benchmarks.
"""

from __future__ import annotations

import pytest

from router.pricing import quotes as pricing
from tests.support.paths import ROOT

COMPILED = not (pricing.__file__ or "").endswith(".py")
documented = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the documents are not beside these tests")
uncompiled = pytest.mark.skipif(COMPILED, reason="compiled code takes no stand-ins and no subclasses")
