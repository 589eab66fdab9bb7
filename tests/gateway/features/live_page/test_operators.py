"""What operators do on the live page: with the key, and not without."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from gateway.features.live_page.broadcast import Broadcast
from gateway.features.live_page.view import LiveView
from tests.gateway.conftest import eventually
from tests.gateway.features.live_page.conftest import fleet, opened
from tests.support.browser import tab as blank
from tests.support.tiers import gate

pytestmark = [pytest.mark.tools, pytest.mark.asyncio(loop_scope="module")]
expect.set_options(timeout=40_000)

KEY = "an admin key <b>&"


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="all other tests have one worker")
async def test_a_replica_is_drained_and_undrained(browser: Browser, workers: int) -> None:
    async with fleet(workers) as (runs, replicas), opened(browser, runs[0], "#replicas") as tab:
        page, name = tab.page, replicas[0].name
        await page.get_by_role("button", name=f"Drain {name}").click()
        dialog = page.get_by_role("dialog", name=f"Drain {name}?")
        await dialog.get_by_role("button", name="Cancel").click()
        await expect(dialog).to_be_hidden()
        assert not any(run.gateway.fleet.named(name).draining for run in runs)  # type: ignore[union-attr]
        await page.get_by_role("button", name=f"Drain {name}").click()
        await dialog.get_by_role("button", name="Drain").click()
        await expect(page.get_by_text(f"{name} drains: it gets no new requests.")).to_be_visible()
        assert all(run.gateway.fleet.named(name).draining for run in runs)  # type: ignore[union-attr]
        await expect(page.get_by_role("row").filter(has_text=name)).to_contain_text("draining")
        await page.get_by_role("button", name=f"Drain {replicas[1].name}").click()
        await expect(page.get_by_role("dialog")).to_contain_text("No other replica of this pool takes requests")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name=f"Undrain {name}").click()
        await expect(page.get_by_text(f"{name} takes requests again.")).to_be_visible()
        assert not any(run.gateway.fleet.named(name).draining for run in runs)  # type: ignore[union-attr]


async def test_nothing_is_shown_without_the_key(browser: Browser) -> None:
    async with fleet(admin_key=KEY) as (runs, replicas), opened(browser, runs[0], "#replicas") as tab:
        tab.expected.add(401)
        page = tab.page
        field = page.get_by_label("Admin key")
        await expect(field).to_be_focused()
        assert replicas[0].name not in await page.content()
        assert await tab.violations() == []
        await field.fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("The gateway does not take this key.")).to_be_visible()
        await field.fill(KEY)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Drain").first).to_be_visible()
        assert KEY not in page.url
        assert KEY not in await page.content()
        assert await page.evaluate("JSON.stringify(localStorage)") == "{}"
        await page.reload()
        await expect(page.get_by_role("button", name="Drain").first).to_be_visible()
        async with blank(browser, runs[0].admin_url) as other:
            await other.page.goto(f"{runs[0].admin_url}/warmroute/ui/")
            await expect(other.page.get_by_label("Admin key")).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await expect(field).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0


async def test_actions_are_refused_without_the_key(browser: Browser) -> None:
    """As a page would send them that lost its key, or never had one."""
    async with fleet(admin_key=KEY) as (runs, replicas), opened(browser, runs[0]) as tab:
        tab.expected.add(401)
        await expect(tab.page.get_by_label("Admin key")).to_be_visible()
        asks = """([path, method, body]) => fetch("../" + path, {method, body}).then((answer) => answer.status)"""
        body = f'{{"name": "{replicas[0].name}"}}'
        actions = [
            ["drain", "POST", body],
            ["undrain", "POST", body],
            ["keys", "POST", "{}"],
            ["keys/abcdefgh", "DELETE", None],
        ]
        reads = [
            [path, "GET", None] for path in ("live", "live/events", "live/requests/a:1", "trie", "replicas", "keys", "doctor")
        ]
        for each in actions + reads:
            assert await tab.page.evaluate(asks, each) == 401, each
        assert not runs[0].gateway.fleet.named(replicas[0].name).draining  # type: ignore[union-attr]


async def test_without_a_key_there_is_nothing_to_sign_out_of(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0]) as tab:
        await expect(tab.page.get_by_role("button", name="Colours")).to_be_visible()
        await expect(tab.page.get_by_role("button", name="Sign out")).to_have_count(0)


async def test_without_a_key_another_site_gets_nothing(browser: Browser) -> None:
    """A page of another origin in an operator's own browser, on the gateway's machine."""
    async with fleet() as (runs, replicas), blank(browser, "http://") as foreign:
        await foreign.page.goto(f"{runs[0].url}/health")  # another port is another origin
        asks = (
            """([url, method, body]) => fetch(url, {method, body, mode: "no-cors"}).then(() => "", (error) => String(error))"""
        )
        for path in ("drain", "live"):
            body = f'{{"name": "{replicas[0].name}"}}' if path == "drain" else None
            await foreign.page.evaluate(asks, [f"{runs[0].admin_url}/warmroute/{path}", "POST" if body else "GET", body])
        assert not runs[0].gateway.fleet.named(replicas[0].name).draining  # type: ignore[union-attr]
        assert not runs[0].gateway[LiveView].feed.on


async def test_keys_are_made_rotated_and_revoked(browser: Browser, tmp_path: Path) -> None:
    keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite"}
    async with fleet(keys=keys) as (runs, _), opened(browser, runs[0], "#keys") as tab:
        page, run = tab.page, runs[0]
        await expect(page.get_by_text("No keys yet")).to_be_visible()
        await page.get_by_role("button", name="New key").click()
        form = page.get_by_role("dialog", name="New key")
        await form.get_by_label("Tenant").fill('a"b')
        await form.get_by_role("button", name="Make the key").click()
        await expect(form.get_by_role("alert")).to_contain_text("tenant")
        assert await tab.violations() == []
        await form.get_by_label("Tenant").fill("acme")
        await form.get_by_label("Name").fill("<u>ci</u>")
        await form.get_by_label("USD a day").fill("0.5")
        await form.get_by_label("Requests a minute").fill("60")
        tab.expected.add(400)
        await form.get_by_role("button", name="Make the key").click()
        secret = page.get_by_role("dialog", name="The key")
        key = await secret.locator("code").inner_text()
        assert key.startswith("wr-")
        for _ in range(2):
            await page.keyboard.press("Escape")
            await page.mouse.click(5, 300)
        await expect(secret).to_be_visible()  # it is shown once
        await secret.get_by_role("button", name="I have it").click()
        assert key not in await page.content()
        headers = {"Authorization": f"Bearer {key}"}
        assert (await run.post(headers=headers))[0] == 200
        row = page.get_by_role("row").filter(has_text="acme")
        await expect(row).to_contain_text("<u>ci</u>")
        await expect(row).to_contain_text("of $0.50")
        await expect(row).to_contain_text("60 requests")
        await page.get_by_role("button", name="Rotate <u>ci</u>").click()
        rotations = list[str]()
        page.on("request", lambda request: rotations.append(request.url) if "rotate" in request.url else None)
        await page.get_by_role("dialog").get_by_role("button", name="Rotate").dblclick()
        newer = await secret.locator("code").inner_text()
        await secret.get_by_role("button", name="I have it").click()
        assert len(rotations) == 1, "a second one would end the former key at once"
        assert (await run.post(headers=headers))[0] == (await run.post(headers={"Authorization": f"Bearer {newer}"}))[0] == 200
        await page.get_by_role("button", name="Revoke <u>ci</u>").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        await expect(row).to_contain_text("revoked")
        await expect(page.locator("#main")).to_be_focused()  # the button that had the focus is gone
        assert (await run.post(headers={"Authorization": f"Bearer {newer}"}))[0] == 401


async def test_without_keys_it_says_how_to_have_them(browser: Browser) -> None:
    async with fleet() as (runs, _), opened(browser, runs[0], "#keys") as tab:
        tab.expected.add(409)
        await expect(tab.page.get_by_text("This gateway keeps no keys")).to_be_visible()


async def test_a_watcher_that_goes_is_forgotten(browser: Browser) -> None:
    async with fleet() as (runs, _):
        async with opened(browser, runs[0]) as tab:
            await expect(tab.page.get_by_role("status").first).to_have_text("live")
            assert repr(runs[0].gateway[Broadcast]).endswith("to 1>")
        await eventually(lambda: repr(runs[0].gateway[Broadcast]).endswith("to 0>"))
