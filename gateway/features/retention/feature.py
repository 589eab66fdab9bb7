"""Retention hints: the form of requests with a session, to engines that take the hint."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.retention.form import retaining


def install(core: Core) -> None:
    core.extensions.forms.append(retaining)
