"""A headless browser for tests of the live page: Chromium, driven by playwright, with a record of errors in a page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from tests.support.paths import ROOT
from tests.support.tools import missing, tool

DEADLINE_MS = 40_000
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 800}
Scheme = Literal["light", "dark"]


@dataclass(slots=True)
class Tab:
    """A page with its errors: console errors, uncaught errors, external requests."""

    page: Page
    base: str
    complaints: list[str] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)  # statuses of answers that are refused on purpose

    def check(self) -> None:
        refused = [f"status of {status}" for status in self.expected]
        assert [text for text in self.complaints if not any(each in text for each in refused)] == []

    def said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def asked(self, request: Request) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.complaints.append(f"asked for {request.url}")

    async def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    async def violations(self) -> list[str]:
        """Serious and critical findings of axe."""
        path = ROOT / ".tools" / "bin" / "axe.min.js"
        if not path.exists():
            missing("axe.min.js is missing: run scripts/tools.sh")
        if not await self.page.evaluate("typeof axe !== 'undefined'"):
            await self.page.evaluate(path.read_text("utf-8"))  # by the debugger, past the page's policy
        found: dict[str, Any] = json.loads(await self.page.evaluate("axe.run().then((found) => JSON.stringify(found))"))
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=str(tool("chromium")), args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def tab(browser: Browser, base: str, scheme: Scheme = "light", size: dict[str, int] | None = None) -> AsyncIterator[Tab]:
    """An empty tab in a separate window with separate storage."""
    context = await browser.new_context(color_scheme=scheme, viewport=size or DESK, reduced_motion="reduce")  # type: ignore[arg-type]
    context.set_default_timeout(DEADLINE_MS)
    page = await context.new_page()
    made = Tab(page, base)
    page.on("console", lambda message: made.said(message))  # noqa: PLW0108  (playwright writes on the owner of a method)
    page.on("pageerror", lambda error: made.complaints.append(str(error)))
    page.on("request", lambda request: made.asked(request))  # noqa: PLW0108
    try:
        yield made
    finally:
        await context.close()
