"""The prefix doctor: where prefixes break, and why."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature

FEATURE: Final = Feature(
    commands=[
        Command(
            "doctor", "find where prefixes break, why, what that costs, and what to change", "gateway.features.doctor.command"
        )
    ]
)
