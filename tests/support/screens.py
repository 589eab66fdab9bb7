"""What stands on the screen of a textual application, as text."""

from __future__ import annotations

import html
import re
from typing import Any

_TEXT = re.compile(r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', re.DOTALL)
_CHARACTER = 12.2  # width in a picture


def shown(app: Any) -> str:
    """Line by line, from its own picture of itself."""
    lines = dict[float, str]()
    for x, y, raw in _TEXT.findall(app.export_screenshot(simplify=False)):
        at, text = round(float(x) / _CHARACTER), html.unescape(raw).replace("\xa0", " ")
        lines[float(y)] = lines.get(float(y), "").ljust(at) + text
    return "\n".join([lines[y].rstrip() for y in sorted(lines)])
