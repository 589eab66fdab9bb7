"""Where the checkout is, and the only files outside of it that tests read: `../shared`, recorded traces and engines' answers.

They are no part of the project. A test that needs one is skipped where it is missing, or makes up what it needs.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHARED = ROOT.parent / "shared"
TRACES = _SHARED / "traces"
CAPTURES = _SHARED / "captures"
