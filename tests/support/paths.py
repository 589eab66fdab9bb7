"""The path of the checkout, and of the only external files that tests read: `../shared`: traces, engines' answers, example
workflows.

They are not part of the project. Without them a test is skipped, or generates its data.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHARED = ROOT.parent / "shared"
TRACES = _SHARED / "traces"
CAPTURES = _SHARED / "captures"
WORKFLOWS = _SHARED / "workflows"
