"""Each error code of the gateway is in the table of docs/api.md."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

MADE = re.compile(r"""GatewayError\(\s*\d{3},\s*"(\w+)"|\bcode="(\w+)"|bad_request\([^()]*(?:\([^()]*\)[^()]*)*, "(\w+)"\)""")


def codes() -> set[str]:
    found = set[str]()
    for path in (ROOT / "gateway").rglob("*.py"):
        for match in MADE.finditer(path.read_text("utf-8")):
            found.add(match[1] or match[2] or "")
    return found - {""}


def test_each_code_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert len(codes()) > 30
    assert sorted(code for code in codes() if f"`{code}`" not in page) == []
