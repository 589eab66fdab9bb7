"""Recordings of traffic, while a recorder asks."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature

FEATURE: Final = Feature(
    commands=[
        Command(
            "record",
            "record a running gateway's traffic for `simulate`, without texts and names",
            "gateway.features.recording.command.record",
        )
    ]
)
