"""Databases of the store that stored workflows share with responses."""

from tests.gateway.features.histories.conftest import server, url

__all__ = ["server", "url"]
