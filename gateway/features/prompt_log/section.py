"""The key `prompt_log`: the header Prompt-Log is read."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.sections import Section

PROMPT_LOG: Final = Section(
    "prompt_log",
    Annotated[bool, Meta(description="The header Prompt-Log is read: names of conversations.", extra={FIXED: True})],
    True,
)
