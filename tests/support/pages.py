"""Parses pages of metrics."""

from __future__ import annotations

from gateway.fleet.engines import Page, PageReader, slices


def parse_page(text: bytes) -> Page:
    """Parses a whole page."""
    reader = PageReader()
    for lines in slices(text):
        reader.feed(lines)
    return reader.page
