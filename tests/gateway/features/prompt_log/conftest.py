"""Databases of their own, as stores of histories have them."""

from __future__ import annotations

from tests.gateway.features.histories.conftest import server, url

__all__ = ["server", "url"]
