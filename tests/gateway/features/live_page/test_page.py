"""The live page in headless Chromium: it opens, follows requests, explains them, opens the index; by mouse and keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from bench.measure.ports import free_port
from gateway.features.live_page.broadcast import MAX_WATCHERS
from tests.chaos.stage import Child
from tests.gateway.conftest import BODY, eventually, running
from tests.gateway.features.live_page.conftest import converse, fleet, opened
from tests.support.browser import PHONE, Scheme
from tests.support.browser import tab as blank
from tests.support.fakes import FakeReplica, FakeRequest, answers, http, models, status, streams
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tiers import gate

pytestmark = [pytest.mark.tools, pytest.mark.asyncio(loop_scope="module")]
expect.set_options(timeout=40_000)

BARS_IN_THEIR_CELLS = """() => [...document.querySelectorAll("td.timeline")].every(
    (cell) => cell.firstElementChild.getBoundingClientRect().right <= cell.getBoundingClientRect().right + 1)"""
TABS = ["Overview", "Replicas", "Requests", "Runs", "Prefix index", "Keys", "Doctor"]


async def focused(page: Page) -> str:
    """What it says; "": nothing has the focus."""
    of = "(each) => each === document.body ? '' : each.ariaLabel || each.textContent.trim() || each.name"
    return str(await page.evaluate(f"({of})(document.activeElement)"))


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="all other tests have one worker")
async def test_it_opens_and_follows_requests_of_all_workers(browser: Browser, workers: int) -> None:
    async with fleet(workers) as (runs, _), opened(browser, runs[0]) as tab:
        page = tab.page
        await expect(page.get_by_role("status").first).to_have_text("live")
        await expect(page.get_by_text(f"{workers} worker")).to_be_visible()
        await expect(page.locator(".tile", has_text="Replicas")).to_contain_text("2 of 2")
        await page.get_by_role("link", name="Requests").click()
        await expect(page.get_by_text("No requests since this page was opened")).to_be_visible()
        for number, run in enumerate(runs * 2):
            await converse(run, tail=str(number), **{"X-Tenant-Id": f"tenant-{number}"})
        for number in range(len(runs) * 2):
            row = page.get_by_role("row").filter(has_text=f"tenant-{number}")
            await expect(row).to_contain_text("200")
            await expect(row).to_contain_text("33 %")
        await page.get_by_role("link", name="Overview").click()
        await expect(page.get_by_role("img", name="Cached share of prompt tokens")).to_have_attribute(
            "aria-label", re.compile("33 %")
        )
        await expect(page.locator(".tile", has_text="Saved")).to_contain_text("$0.00")
        await page.get_by_text("As a table").first.click()
        await expect(page.get_by_role("table", name="Requests per second")).to_be_visible()


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="all other tests have one worker")
async def test_a_request_is_explained(browser: Browser, workers: int) -> None:
    async with fleet(workers) as (runs, replicas), opened(browser, runs[0], "#requests") as tab:
        page = tab.page
        await expect(page.get_by_text("No requests since")).to_be_visible()
        await converse(runs[-1])
        await page.get_by_role("button", name="explain request").first.click()
        dialog = page.get_by_role("dialog", name="Why this replica")
        for replica in replicas:
            await expect(dialog.get_by_role("rowheader", name=replica.name)).to_be_visible()
        await expect(dialog.get_by_text("chosen", exact=True)).to_have_count(1)
        await expect(dialog).to_contain_text("cold")
        assert await tab.violations() == []
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        assert "explain request" in await focused(page), "the focus is back"


async def test_a_click_anywhere_in_a_row_opens_its_reasons(browser: Browser) -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run, opened(browser, run, "#requests") as tab:
        page, dialog = tab.page, tab.page.get_by_role("dialog")
        await expect(page.get_by_text("No requests since")).to_be_visible()
        await run.post({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
        cell = page.get_by_role("cell", name=replica.name)
        await expect(cell).to_be_visible()
        await page.get_by_role("button", name="Pause").click()  # so that the row stays where it is
        box = await cell.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        await page.mouse.move(box["x"] + 4, middle)
        await page.mouse.down()
        await page.mouse.move(box["x"] + box["width"] - 4, middle)
        await page.mouse.up()
        assert await page.evaluate("String(getSelection())"), "a selection of text"
        assert await dialog.count() == 0
        await page.get_by_role("cell", name="cold").or_(page.get_by_role("cell", name="blind")).click()
        await expect(dialog.get_by_role("rowheader", name=replica.name)).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        assert "explain request" in await focused(page), "the focus is on the row's button"


async def test_a_request_that_failed_over_says_so(browser: Browser) -> None:
    async with FakeReplica([status(500)]) as one, FakeReplica([answers()]) as other, running(one, other) as run:  # noqa: SIM117
        async with opened(browser, run, "#requests") as tab:
            await expect(tab.page.get_by_text("No requests since")).to_be_visible()
            for number in itertools.count():  # each is a new prompt, which may go to either
                messages = [{"role": "user", "content": f"{number} hello " * 200}]
                assert (await run.post({"model": "m", "messages": messages}))[0] == 200
                if one.requests:
                    break
            await tab.page.get_by_role("row").filter(has_text="after 1 failed").first.get_by_role("button").click()
            dialog = tab.page.get_by_role("dialog")
            await expect(dialog.get_by_text("Attempts that failed first")).to_be_visible()
            await expect(dialog.get_by_role("listitem").filter(has_text=one.name)).to_be_visible()


async def test_a_run_of_a_workflow_is_a_waterfall_of_its_steps(browser: Browser) -> None:
    hello = {"role": "user", "content": "hello"}
    steps = {
        "slow": {"chat": {"append": [hello, hello]}, "yield": "slow"},
        "fast": {"chat": {"append": [hello]}, "kill": ["slow", "early"]},
        "early": {"let": 1, "yield": "early"},
    }
    body = {"workflow": {"workflow": 1, "name": "race", "defaults": {"model": "m"}, "steps": steps}}
    scripted = ScriptedEngine(lambda body: ScriptedAnswer("x", None if len(body["messages"]) == 2 else 0.0), holds=True)
    async with scripted.replica, running(scripted.replica) as run, opened(browser, run, "#runs") as tab:
        page = tab.page
        await expect(page.get_by_text("No runs since this page was opened")).to_be_visible()
        asked = asyncio.create_task(run.post(body, "/v1/workflows/runs"))
        await expect(page.get_by_role("row", name="race")).to_contain_text("running")
        await expect(page.get_by_text("early (provisional)")).to_be_visible()
        scripted.release()
        assert (await asked)[0] == 200
        await expect(page.get_by_role("row", name="race")).to_contain_text("completed")
        await expect(page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="slow"))).to_contain_text(
            "killed by fast"
        )
        await expect(page.get_by_text("early (retracted)")).to_be_visible()
        await page.get_by_role("button", name="fast").click()
        dialog = page.get_by_role("dialog", name="Why this replica")
        await expect(dialog.get_by_role("rowheader", name=scripted.replica.name)).to_be_visible()
        assert await tab.violations() == []


@pytest.mark.parametrize("size", [None, PHONE], ids=["desk", "phone"])
async def test_a_run_with_the_longest_names_and_hostile_replicas_fits(browser: Browser, size: Any) -> None:
    """Names of workflows and steps are letters, digits, _ and -; names of replicas and error codes of engines are any text."""
    code, name = "<img src=x onerror=document.title='owned'>\u202e", "<i>replica</i>"
    long, failing = "s" * 63, "f" * 63
    hello = {"role": "user", "content": "hello"}
    item = {"each": {"in": [1], "as": "n", "steps": {long: {"chat": {"append": [hello]}}}, "value": f"${{{long}.text}}"}}
    steps = {
        "e" * 63: {**item, "kill": [failing]},
        "o" * 63: {"chat": {"append": [hello, hello]}, "on_error": "skip", "retry": {"max": 0}},
        failing: {"chat": {"append": [hello, hello]}, "needs": ["o" * 63]},
    }
    body = {"workflow": {"workflow": 1, "name": "w" * 63, "defaults": {"model": "m"}, "steps": steps}}
    refusal = json.dumps({"error": {"message": code, "code": code, "type": code}}).encode()

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if len(request.json["messages"]) == 1:
            return await answers()(request, writer)
        writer.write(http(400, refusal))
        return None

    async with FakeReplica([behave]) as one:
        pool = {"replicas": [{"url": one.url, "name": name}]}
        async with running(pools=[pool]) as run, opened(browser, run, "#runs", size=size) as tab:
            page = tab.page
            await expect(page.get_by_text("No runs since this page was opened")).to_be_visible()
            status, _, found = await run.post(body, "/v1/workflows/runs")
            assert (status, found["status"]) == (200, "completed"), found
            await expect(page.get_by_role("row", name="w" * 63)).to_contain_text("completed")
            line = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=f"{long}[0]"))
            await expect(line).to_contain_text(name)
            assert await page.locator("main img, main script, main i").count() == 0
            assert "owned" not in await page.title()
            assert await tab.violations() == []
            assert await tab.overflow() <= 0
            assert await page.evaluate(BARS_IN_THEIR_CELLS)


@pytest.mark.parametrize("size", [None, PHONE], ids=["desk", "phone"])
async def test_waiting_requests_are_shown_with_their_owner_and_place(browser: Browser, size: Any) -> None:
    hold = asyncio.Event()
    async with FakeReplica([streams("a", hold=hold), answers()]) as one:
        pools = [{"replicas": [one.url], "max_inflight": 1, "queue_s": 3600}]
        async with (
            running(one, pools=pools, limits={"drain_timeout_s": 1}) as run,
            opened(browser, run, "#requests", size=size) as tab,
        ):
            url, owner = (
                f"{run.url}/v1/chat/completions",
                {"X-Tenant-Id": "acme", "Session-Id": "<b>s-1</b>", "User-Agent": "y" * 500},
            )
            first = asyncio.create_task(run.session.post(url, json={**BODY, "stream": True}).__aenter__())
            await eventually(lambda: one.requests)
            second = asyncio.create_task(run.post(headers=owner))
            panel = tab.page.get_by_role("region", name="Under way for more than a second")
            row = panel.get_by_role("row").filter(has_text="acme")
            await expect(row).to_contain_text("1st in the queue")
            await expect(row).to_contain_text("<b>s-1</b>")
            assert await tab.violations() == []
            assert await tab.overflow() <= 0
            await tab.page.get_by_label("Filter").fill("nobody")
            await expect(panel).to_have_count(0)
            hold.set()
            await (await first).read()
            await second


async def test_the_list_can_be_filtered_and_paused(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0], "#requests") as tab:
        page, rows = tab.page, tab.page.get_by_role("row")
        await expect(page.get_by_text("No requests since")).to_be_visible()
        for name in ("red", "blue"):
            await converse(runs[0], **{"X-Tenant-Id": name})
        await expect(rows).to_have_count(3)
        await page.get_by_label("Filter").fill("re")
        await expect(rows.filter(has_text="blue")).to_have_count(0)
        await page.get_by_label("Filter").fill("nobody")
        await expect(page.get_by_text("No request matches")).to_be_visible()
        await page.get_by_label("Filter").fill("")
        await page.get_by_role("button", name="Pause").click()
        await converse(runs[0], **{"X-Tenant-Id": "green"})
        await page.get_by_role("link", name="Overview").click()
        await expect(page.locator(".tile", has_text="Under way")).to_be_visible()
        await page.get_by_role("link", name="Requests").click()
        await expect(rows.filter(has_text="green")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [None, PHONE], ids=["desk", "phone"])
@gate("desk-light", "phone-dark", reason="each size and each scheme")
async def test_logs_have_a_column_once_a_request_has_one(browser: Browser, scheme: Scheme, size: Any, tmp_path: Path) -> None:
    state = {"url": f"sqlite:///{tmp_path}/state.db"}
    async with fleet(state=state) as (runs, _), opened(browser, runs[0], "#requests", scheme=scheme, size=size) as tab:
        page = tab.page
        await expect(page.get_by_text("No requests since this page was opened")).to_be_visible()
        await converse(runs[0], **{"X-Tenant-Id": "acme"})
        rows = page.get_by_role("row")
        await expect(rows.filter(has_text="acme")).to_contain_text("200")
        await expect(page.locator("[data-label=Log]")).to_have_count(0)
        await converse(runs[0], **{"X-Tenant-Id": "whole", "Prompt-Log": "keep"})
        _, headers, _ = await runs[0].post(
            {"model": "m", "messages": [{"role": "user", "content": "hello"}]}, headers={"Prompt-Log": "keep"}
        )
        head = re.findall(r'head="(pl1_[^"]+)"', headers["Prompt-Log"])[0]
        await converse(runs[0], **{"Prompt-Log": f'base="{head}"', "X-Request-Id": "from-a-base"})
        await expect(rows.filter(has=page.get_by_text("1, whole"))).to_have_count(2)
        await expect(rows.filter(has=page.get_by_text("3, base"))).to_have_count(1)
        await expect(rows.filter(has_text="acme").locator("[data-label=Log]")).to_have_text("–")
        await page.get_by_role("searchbox").fill("base")
        await expect(page.locator("[data-label=Log]")).to_have_text(["3, base"])
        await page.get_by_role("row").get_by_role("button").click()
        await expect(page.get_by_role("dialog")).to_contain_text("3 entries, sent from a base")
        assert "pl1_" not in await page.content()
        await page.keyboard.press("Escape")
        await page.get_by_role("searchbox").fill("")
        assert await tab.violations() == []
        assert await tab.overflow() <= 0


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="all other tests have one worker")
async def test_the_index_is_opened_by_mouse_and_keyboard(browser: Browser, workers: int) -> None:
    async with fleet(workers) as (runs, _):
        for head in (0, 1):
            for tail in ("a", "b"):
                await converse(runs[-1], head, tail)
        async with opened(browser, runs[0], "#index") as tab:
            page = tab.page
            items = page.get_by_role("treeitem")
            await expect(page.get_by_text("2 heads of prompts")).to_be_visible()
            await expect(items).to_have_count(2)
            await items.first.click()
            await expect(items).to_have_count(4)
            detail = page.get_by_role("region", name="Selected prefix")
            await expect(detail).to_contain_text("2 prefixes")
            await expect(detail.get_by_role("table")).to_contain_text("127.0.0.1")
            await items.first.focus()
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("[role=treeitem][aria-level='2']:focus")).to_have_count(1)
            await expect(detail).to_contain_text("0 prefixes")
            await page.keyboard.press("ArrowLeft")
            await page.keyboard.press("ArrowLeft")
            await expect(items).to_have_count(2)
            await page.keyboard.press("End")
            await page.keyboard.press("Enter")
            await expect(items).to_have_count(4)
            assert await tab.violations() == []


async def test_the_focus_stays_with_a_node_that_changes_its_place(browser: Browser) -> None:
    async with fleet() as (runs, _):
        for head in range(3):
            await converse(runs[0], head)
        async with opened(browser, runs[0], "#index") as tab:
            items = tab.page.get_by_role("treeitem")
            await expect(items).to_have_count(3)
            for head in (0, 1):  # each becomes the first one, for it was used last
                way = str(await items.last.get_attribute("data-way"))
                await items.last.focus()
                await converse(runs[0], head, "b")
                await expect(items.first).to_have_attribute("data-way", way)
                await expect(items.first).to_be_focused()


async def test_on_a_phone_the_view_and_ends_of_names_are_seen(browser: Browser) -> None:
    async with fleet() as (runs, replicas), opened(browser, runs[0], "#doctor", size=PHONE) as tab:
        links = tab.page.get_by_role("navigation").get_by_role("link")
        # The width of a text is a fraction, which the font decides; a list is scrolled by whole pixels.
        await expect(links.last).to_be_in_viewport(ratio=0.98)
        await links.first.click()
        await tab.page.goto(f"{runs[0].admin_url}/warmroute/ui/#requests")
        await converse(runs[0])
        name = tab.page.get_by_role("row").locator("[data-label=Replica] .name")
        await expect(name).to_have_text(re.compile("|".join(each.name for each in replicas)))
        assert await name.evaluate("(name) => name.scrollWidth <= name.clientWidth"), "it is not cut"


async def test_many_children_are_shown_by_and_by(browser: Browser) -> None:
    async with fleet() as (runs, _):
        for number in range(20):
            await converse(runs[0], tail=f"{number} " * 200)
        async with opened(browser, runs[0], "#index") as tab:
            items = tab.page.get_by_role("treeitem")
            await items.first.click()
            more = tab.page.get_by_role("treeitem", name="8 more", exact=True)
            await more.click()
            await expect(items).to_have_count(21)


async def test_names_are_text_whatever_is_in_them(browser: Browser) -> None:
    name = "<img src=x onerror=document.title='owned'>\u202e\u0007"
    tenant = "<script>document.title='owned'</script>"
    async with FakeReplica([answers()], listing=models(name)) as one:
        pool = {"name": "<b>pool</b>", "replicas": [{"url": one.url, "name": "<i>replica</i>"}]}
        async with running(pools=[pool]) as run, opened(browser, run, "#requests") as tab:
            page = tab.page
            await expect(page.get_by_text("No requests since")).to_be_visible()
            body = {"model": name, "messages": [{"role": "user", "content": "hello " * 200}]}
            assert (await run.post(body, headers={"X-Tenant-Id": tenant, "X-Request-Id": "x-1"}))[0] == 200
            row = page.get_by_role("row").filter(has_text="200")
            await expect(row).to_contain_text(name[:-2] + "\ufffd\ufffd")
            await expect(row).to_contain_text("<script>")
            await expect(row).to_contain_text("<i>replica</i>")
            await row.get_by_role("button").click()
            await expect(page.get_by_role("dialog")).to_contain_text("<b>pool</b>")
            await page.keyboard.press("Escape")
            for fragment in ("#replicas", "#index", "#overview"):
                await page.goto(f"{run.admin_url}/warmroute/ui/{fragment}")
                await expect(page.locator("main")).not_to_contain_text("Waiting for the gateway")
            await page.goto(f"{run.admin_url}/warmroute/ui/#replicas")
            await expect(page.get_by_role("rowheader")).to_contain_text("<i>replica</i>")
            assert await page.locator("main img, main script, main i").count() == 0
            assert "owned" not in await page.title()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [None, PHONE], ids=["desk", "phone"])
@gate("desk-light", "phone-dark", reason="each size and each scheme")
async def test_every_view_is_accessible_and_fits(browser: Browser, scheme: Scheme, size: Any, tmp_path: Any) -> None:
    keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite", "required": False}
    async with fleet(keys=keys) as (runs, _):
        assert (await runs[0].post({"tenant": "acme", "budget_usd_day": 1}, "/warmroute/keys"))[0] == 201
        async with opened(browser, runs[0], scheme=scheme, size=size) as tab:
            page = tab.page
            await expect(page.locator(".tile").first).to_be_visible()
            for tail in ("a", "b"):
                await converse(runs[0], tail=tail, **{"X-Tenant-Id": "t" * 60})
            ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground))) < 200) is (scheme == "dark")
            for name in TABS:
                await page.get_by_role("navigation").get_by_role("link", name=name).click()
                await expect(page.locator("main")).not_to_contain_text("Asking the gateway")
                await expect(page.locator("main")).not_to_contain_text("Waiting for the gateway")
                if name == "Prefix index":
                    await page.get_by_role("treeitem").first.click()
                assert await tab.violations() == [], name
                assert await tab.overflow() <= 0, name


async def test_the_colours_can_be_chosen(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0]) as tab:
        page = tab.page
        theme = page.get_by_role("button", name="Colours")
        await expect(theme).to_have_attribute("aria-label", "Colours: as the system")
        await theme.click()
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        await page.reload()
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_everything_is_reached_by_keyboard(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0]) as tab:
        page = tab.page
        await expect(page.locator(".tile").first).to_be_visible()
        await page.keyboard.press("Tab")
        assert await focused(page) == "To the content"
        seen = []
        for _ in range(9):
            await page.keyboard.press("Tab")
            seen.append(await focused(page))
        assert [text for text in seen if text in TABS] == TABS
        await page.get_by_role("link", name="Replicas").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Drain").first).to_be_visible()
        assert page.url.endswith("#replicas")
        await page.go_back()
        await expect(page.locator(".tile").first).to_be_visible()


async def test_a_finding_of_the_audit_is_at_its_replica(browser: Browser) -> None:
    async with fleet() as (runs, replicas), opened(browser, runs[0], "#replicas") as tab:
        row = tab.page.get_by_role("row").filter(has_text=replicas[0].name)
        await expect(row).to_contain_text("up")
        state = runs[0].gateway.fleet.named(replicas[0].name)
        assert state
        state.findings = frozenset(["prompt_cut", "answer_short"])
        await expect(row).to_contain_text("answer short, prompt cut")


async def test_the_focus_is_back_when_a_dialog_closes(browser: Browser) -> None:
    async with fleet() as (runs, replicas), opened(browser, runs[0], "#replicas") as tab:
        page, name = tab.page, replicas[0].name
        button = page.get_by_role("button", name=f"Drain {name}")
        dialog = page.get_by_role("dialog")
        for end in ("Escape", "Cancel", "Close"):
            await button.focus()
            await page.keyboard.press("Enter")
            await expect(dialog).to_be_visible()
            if end == "Escape":
                await page.keyboard.press("Escape")
            else:
                await dialog.get_by_role("button", name=end).press("Enter")
            await expect(dialog).to_be_hidden()
            await expect(button).to_be_focused()
        await button.press("Enter")
        await dialog.get_by_role("button", name="Drain").press("Enter")
        await expect(page.get_by_role("button", name=f"Undrain {name}")).to_be_focused()


async def test_the_rate_of_the_last_seconds_is_said(browser: Browser) -> None:
    async def send() -> None:
        while True:
            await converse(runs[0])
            await asyncio.sleep(0.2)  # fewer than have a row each

    async with fleet() as (runs, _), opened(browser, runs[0], "#requests") as tab:
        said = tab.page.locator(".toolbar .hint")
        await expect(said).to_have_text("0/s, all are shown")
        sending = asyncio.create_task(send())
        try:
            await expect(said).to_have_text(re.compile(r"^(?!0/s)[\d.]+/s, all are shown$"))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def test_a_drain_of_the_last_replica_that_takes_requests_has_a_warning(browser: Browser) -> None:
    async with fleet() as (runs, replicas), opened(browser, runs[0], "#replicas") as tab:
        page, (one, other) = tab.page, replicas
        dialog = page.get_by_role("dialog")
        warning = dialog.get_by_text("No other replica of this pool takes requests")
        await page.get_by_role("button", name=f"Drain {one.name}").click()
        await expect(dialog).to_be_visible()
        await expect(warning).to_have_count(0)
        await dialog.get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("button", name=f"Undrain {one.name}")).to_be_visible()
        await page.get_by_role("button", name=f"Drain {other.name}").click()
        await expect(warning).to_be_visible()


async def test_where_no_watcher_is_taken_the_gateways_reason_is_shown(browser: Browser) -> None:
    async with fleet() as (runs, _), contextlib.AsyncExitStack() as watchers:
        for _ in range(MAX_WATCHERS):
            await watchers.enter_async_context(runs[0].session.get(f"{runs[0].admin_url}/warmroute/live/events"))
        async with opened(browser, runs[0]) as tab:
            tab.expected.add(503)
            state = tab.page.get_by_role("status").first
            await expect(state).to_contain_text("32 watchers are connected to this worker")
            await expect(state).to_contain_text("Trying again.")
            await watchers.aclose()
            await expect(state).to_have_text("live")


async def test_it_comes_back_when_the_gateway_does(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0]) as tab:
        page = tab.page
        await expect(page.get_by_role("status").first).to_have_text("live")
        tab.complaints.clear()
        await page.context.set_offline(True)
        runs[0].gateway.served.running.drain()  # its streams end
        await expect(page.get_by_role("status").first).to_contain_text("no connection")
        await page.context.set_offline(False)
        await expect(page.get_by_role("status").first).to_have_text("live")
        tab.complaints.clear()  # what a browser says of lost connections


async def test_a_gateway_that_is_frozen_is_not_live(browser: Browser, tmp_path: Path) -> None:
    """Its connections stay open, and nothing comes."""
    admin = f"http://127.0.0.1:{free_port()}"
    listeners = {"listen": "127.0.0.1:0", "admin_listen": admin.removeprefix("http://")}
    async with FakeReplica() as one:
        config = {**listeners, "pools": [{"replicas": [one.url]}], "state": {"url": "off"}, "snapshot": {"file": "off"}}
        config["limits"] = {"drain_accept_s": 0}
        (tmp_path / "c.yaml").write_text(json.dumps(config))
        with contextlib.ExitStack() as ends:
            child = Child(tmp_path / "log", ends, "-m", "gateway", "serve", "--config", str(tmp_path / "c.yaml"))
            await child.wait_for_line(lambda line: "listening" in line)
            async with blank(browser, admin) as tab:
                await tab.page.goto(f"{admin}/warmroute/ui/")
                state = tab.page.get_by_role("status").first
                await expect(state).to_have_text("live")
                child.signal(signal.SIGSTOP)
                ends.callback(child.signal, signal.SIGCONT)
                await expect(state).to_contain_text("no connection")
                child.signal(signal.SIGCONT)
                await expect(state).to_have_text("live")


async def test_the_doctor_watches_when_it_is_asked(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0], "#doctor") as tab:
        page = tab.page
        await page.get_by_role("button", name="Watch now").click()
        await expect(page.get_by_text("Nothing breaks")).to_be_visible()
        await expect(page.get_by_text("No request has come")).to_be_visible()
        await page.get_by_role("link", name="Replicas").click()
        await page.get_by_role("link", name="Doctor").click()
        await expect(page.get_by_text("No request has come")).to_be_visible()  # it watches on
