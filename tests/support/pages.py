"""Pages of metrics, as tests read them."""

from __future__ import annotations

from gateway.fleet.engines import Page, PageReader, slices


def parse_page(text: bytes) -> Page:
    """All of a page at once."""
    reader = PageReader()
    for lines in slices(text):
        reader.feed(lines)
    return reader.page
