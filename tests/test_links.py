"""Links between the pages of the repository: each file and each heading that a page, an alert or a message names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.rules import name_of, nobody

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md"), ROOT / "helm" / "README.md"]
SOURCES = [*(ROOT / "gateway").rglob("*.py"), *(ROOT / "rules").glob("*.yaml"), *(ROOT / "scripts" / "dashboards").glob("*.py")]


@cache
def headings(page: Path) -> frozenset[str]:
    """Their anchors, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).lower() for line in lines]
    return frozenset(re.sub(r"[^\w\- ]", "", line).strip().replace(" ", "-") for line in plain)


def missing(place: Path, links: Iterator[tuple[Path, str]]) -> Iterator[str]:
    for page, heading in links:
        if not page.exists():
            yield f"{name_of(place)}: {page} does not exist"
        elif heading and page.suffix == ".md" and heading not in headings(page):
            yield f"{name_of(place)}: {page.name} has no heading #{heading}"


def of_page(page: Path) -> Iterator[tuple[Path, str]]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in link:
            path, _, heading = link.partition("#")
            yield (page.parent / path).resolve() if path else page, heading


def of_source(source: Path) -> Iterator[tuple[Path, str]]:
    for path, heading in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", source.read_text("utf-8")):
        yield ROOT / path, heading


def test_links_of_pages_lead_somewhere() -> None:
    assert sum(len(list(of_page(page))) for page in PAGES) > 300
    nobody(fault for page in PAGES for fault in missing(page, of_page(page)))


def test_pages_that_the_code_and_the_alerts_name_exist() -> None:
    nobody(fault for source in SOURCES for fault in missing(source, of_source(source)))
