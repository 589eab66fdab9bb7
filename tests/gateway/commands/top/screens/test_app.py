"""Each screen shows what the gateway says; what an operator does on it is done."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.commands.top.answers import PARTS, Decision
from gateway.commands.top.screens.requests import REASONS, costs
from gateway.commands.top.screens.tree import Index
from gateway.commands.top.state import KEPT_REQUESTS
from router import Cost
from tests.gateway.commands.top.screens.conftest import converse, fleet, opened
from tests.gateway.conftest import BODY, running
from tests.gateway.features.keys.conftest import made
from tests.support.fakes import FakeReplica, answers, models, streams

BAD = "[red]x[/][@click=app.quit]\x1b[31m\x1b]0;t\x07\u202eabc"


async def test_replicas_are_shown_sorted_and_opened() -> None:
    async with fleet() as (run, [one, other]), opened(run.admin_url) as screen:
        await screen.shows("● live", one.name, other.name, "2/2 replicas", "d Drain")
        for number in range(3):
            await converse(run, str(number))
        held = {name: run.gateway.router.held_tokens(name) for name in (one.name, other.name)}
        await screen.until(lambda: any("33%" in row for row in screen.rows("replica-rows")))
        names = [row[0] for row in screen.rows("replica-rows")]
        assert names == sorted(held)
        for _ in range(8):  # by what they hold
            await screen.press("s")
        assert "held/capacity▼" in screen.text
        await screen.until(
            lambda: [row[0] for row in screen.rows("replica-rows")] == sorted(held, key=lambda name: -held[name])
        )
        await screen.press("R")
        assert "held/capacity▲" in screen.text
        await screen.press("enter")
        await screen.shows("URL", "Circuit  closed", "prompt tokens")
        await screen.press("escape")
        assert "Circuit" not in screen.text


async def test_a_drain_is_asked_about_and_done() -> None:
    async with fleet() as (run, replicas), opened(run.admin_url) as screen:
        name, second = sorted(replica.name for replica in replicas)
        await screen.until(lambda: len(screen.rows("replica-rows")) == 2)
        state = run.gateway.fleet.named(name)
        assert state is not None
        await screen.press("d")
        await screen.shows(f"Drain {name}?")
        await screen.press("n")
        assert not state.draining
        await screen.press("d", "y")
        await screen.until(lambda: state.draining)
        await screen.shows("gets no new requests", "draining")
        await screen.press("down", "d")
        await screen.shows(f"Drain {second}?", "its clients will")
        await screen.press("escape", "up", "u", "y")
        await screen.until(lambda: not state.draining)
        await screen.shows(f"{name} gets requests.")


async def test_requests_are_shown_as_they_happen_and_explained() -> None:
    hold = asyncio.Event()
    async with (
        FakeReplica([streams("a", "b", hold=hold, prompt=100, cached=40)]) as one,
        running(one) as run,
        opened(run.admin_url) as screen,
    ):
        await screen.shows("● live")
        await screen.press("2")
        await screen.shows("No request yet")
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"X-Request-Id": "r1", "X-Tenant-Id": "acme"}
        async with run.session.post(run.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            await screen.until(lambda: screen.rows("request-rows"))
            [row] = screen.rows("request-rows")
            assert row[1:6] == ["running", "m", "acme", one.name, "cold"]
            hold.set()
            await answer.read()
        await screen.until(lambda: screen.rows("request-rows")[0][1] == "200")
        assert screen.rows("request-rows")[0][6:8] == ["100", "40%"]
        await screen.press("enter")
        await screen.shows("Why it went there", "r1", "100 prompt, 40 cached", REASONS["cold"], "prefill")
        [candidate] = screen.rows("candidates")
        assert candidate[0] == f"► {one.name}"
        await screen.press("escape")


async def test_a_list_that_is_paused_stands_still() -> None:
    async with fleet() as (run, _), opened(run.admin_url) as screen:
        await screen.shows("● live")
        await screen.press("2")
        await converse(run)
        await screen.until(lambda: len(screen.rows("request-rows")) == 1)
        await screen.press("space")
        await converse(run, "b", **{"X-Tenant-Id": "acme"})
        await screen.until(lambda: len(screen.app.live.requests) == 2)
        await screen.shows("PAUSED")
        assert len(screen.rows("request-rows")) == 1
        await screen.press("space")
        await screen.until(lambda: len(screen.rows("request-rows")) == 2)
        await screen.press("slash")
        await screen.type("acme")
        await screen.until(lambda: [row[3] for row in screen.rows("request-rows")] == ["acme"])
        await screen.press("escape")
        await screen.until(lambda: len(screen.rows("request-rows")) == 2)


async def test_the_cursor_stays_on_its_request() -> None:
    async with fleet() as (run, _), opened(run.admin_url) as screen:
        await screen.shows("● live")
        await screen.press("2")
        for tail in ("a", "b"):
            await converse(run, tail, **{"X-Request-Id": f"r-{tail}"})
        await screen.until(lambda: len(screen.rows("request-rows")) == 2)
        await screen.press("down")
        await converse(run, "c", **{"X-Request-Id": "r-c"})
        await screen.until(lambda: len(screen.rows("request-rows")) == 3)
        await screen.press("enter")
        await screen.shows("r-a")


async def test_the_index_is_opened_level_by_level() -> None:
    async with fleet() as (run, replicas), opened(run.admin_url) as screen:
        for tail in ("a", "b"):
            await converse(run, tail)
        await screen.press("3")
        index = screen.app.query_one("#index", Index)
        await screen.until(lambda: len(index.root.children) == 1)
        [head] = index.root.children
        await screen.shows("2 below", "blocks held, over all replicas")
        await screen.press("down", "enter")
        await screen.until(lambda: len(head.children) == 2)
        await screen.press("down")
        holder = next(replica for replica in replicas if replica.requests)
        await screen.shows("behind", f"{holder.name}", "all of it")
        await converse(run, "c")
        await screen.press("r")
        await screen.shows("3 below")


async def test_hits_and_money() -> None:
    async with fleet() as (run, _), opened(run.admin_url) as screen:
        await screen.shows("● live")
        for number in range(3):
            await converse(run, str(number), **{"X-Tenant-Id": "acme"})
        await screen.press("4")
        await screen.until(lambda: [row[:2] for row in screen.rows("tenants")] == [["acme", "3"]])
        [model] = screen.rows("models")
        cost = 3 * (600 * 1.0 + 300 * 0.1 + 4 * 2.0) / 1e6
        assert model == ["m", "3", "2.7k", "33%", f"${cost:.4f}", f"${3 * 300 * 0.9 / 1e6:.5f}"]
        await screen.until(lambda: screen.app.live.totals(900).requests > 2.9)
        await screen.shows("Cached tokens  33% of 2.7k", "USD saved", "█")


async def test_keys_are_made_rotated_and_revoked(tmp_path: Path) -> None:
    keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite"}
    async with fleet(keys=keys) as (run, _), opened(run.admin_url) as screen:
        await screen.press("5")
        await screen.shows("There are no keys yet")
        await screen.press("n", "enter")
        await screen.shows("New key", "Tenant is needed")
        await screen.type("acme")
        for _ in range(4):
            await screen.press("tab")
        await screen.type("x")
        await screen.press("enter")
        await screen.shows("USD a day: a number is expected, got 'x'")
        await screen.press("backspace")
        await screen.type("0.5")
        await screen.press("enter")
        await screen.shows("not shown again", "wr-")
        secret = next(word for word in screen.text.split() if word.startswith("wr-"))
        await screen.press("c")
        assert screen.app.clipboard == secret
        await screen.press("escape")
        assert secret not in screen.text
        assert (await run.post(headers={"Authorization": f"Bearer {secret}"}))[0] == 200
        await screen.until(lambda: len(screen.rows("key-rows")) == 1)
        assert screen.rows("key-rows")[0][1] == "acme"
        await screen.press("r", "y")
        await screen.shows("This new secret is of acme")
        other = next(word for word in screen.text.split() if word.startswith("wr-"))
        assert other != secret
        await screen.press("escape", "x", "n")
        assert (await run.post(headers={"Authorization": f"Bearer {other}"}))[0] == 200
        await screen.press("x")
        await screen.shows("Requests with this key are refused")
        await screen.press("y")
        await screen.until(lambda: screen.rows("key-rows")[0][3] == "revoked")
        for revoked in (secret, other):
            assert (await run.post(headers={"Authorization": f"Bearer {revoked}"}))[0] == 401


async def test_what_a_key_has_used_is_shown(tmp_path: Path) -> None:
    keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite"}
    async with fleet(keys=keys) as (run, _), opened(run.admin_url) as screen:
        id_, secret = await made(run, budget_usd_day=0.01, requests_per_minute=60)
        await run.post(headers={"Authorization": f"Bearer {secret}"})
        await screen.press("5")
        await screen.until(lambda: screen.rows("key-rows"))
        row = screen.rows("key-rows")[0]
        assert (row[0], row[5]) == (id_, "60")
        assert row[7].endswith("/$0.010")


async def test_a_gateway_without_keys_says_what_to_do() -> None:
    async with fleet() as (run, _), opened(run.admin_url) as screen:
        await screen.press("5")
        await screen.shows("There are no keys at this gateway", "keys: {url: sqlite}")
        await screen.press("r", "x", "enter")  # there is nothing to rotate


async def test_the_key_is_asked_for() -> None:
    async with fleet(admin_key="k-1") as (run, [one, _]), opened(run.admin_url) as screen:
        await screen.shows("Admin key", "it has an admin key")
        assert one.name not in screen.text
        await screen.type("wrong")
        assert "wrong" not in screen.text
        await screen.press("enter")
        await screen.shows("is not its admin key")
        await screen.type("k-1")
        await screen.press("enter")
        await screen.shows("● live", one.name)
        assert "k-1" not in screen.text
        await screen.press("d", "y")
        await screen.shows("gets no new requests")


async def test_a_key_of_the_environment_is_used_and_escape_leaves_the_question() -> None:
    async with fleet(admin_key="k-1") as (run, [one, _]):
        async with opened(run.admin_url, WARMROUTE_ADMIN_KEY="k-1\n") as screen:
            await screen.shows("● live", one.name)
        async with opened(run.admin_url) as screen:
            await screen.shows("Admin key")
            await screen.press("escape")
            await screen.shows("● not connected", "it has an admin key")
            await screen.press("k")
            await screen.type("k-1")
            await screen.press("enter")
            await screen.shows("● live", one.name)


@pytest.mark.parametrize("tab", ["1", "2", "4"])
async def test_names_are_shown_as_they_are_and_obeyed_by_nothing(tab: str) -> None:
    async with (
        FakeReplica([answers()], listing=models(BAD)) as one,
        running({"url": one.url, "name": "a[b]"}) as run,
        opened(run.admin_url) as screen,
    ):
        await screen.shows("● live", "a[b]")
        await screen.press(tab)
        await run.post({**BODY, "model": BAD}, headers={"X-Tenant-Id": "[bold]t[/bold]"})
        await screen.until(lambda: screen.app.live.requests)
        await screen.press("enter")
        wanted = {"1": ["[red]x[/][@click=app.quit]"], "2": ["[red]x[/]", "[bold]t[/bold]"], "4": ["[red]x[/]", "[bold]t["]}
        await screen.shows(*wanted[tab])
        assert not set(screen.text) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (20, 8), (250, 60)])
async def test_any_size_is_drawn(width: int, height: int) -> None:
    async with fleet() as (run, [one, _]), opened(run.admin_url, width, height) as screen:
        await screen.until(lambda: screen.rows("replica-rows"))
        await converse(run)
        for tab in "12345":
            await screen.press(tab)
            assert max(len(line) for line in screen.text.splitlines()) <= width
        await screen.press("2", "enter")
        await screen.until(lambda: len(screen.app.screen_stack) == 2)
        await screen.press("escape", "question_mark")
        assert len(screen.app.screen_stack) == 2
        await screen.press("escape")
        await screen.pilot.resize_terminal(80, 24)
        await screen.press("1")
        await screen.shows(one.name)


async def test_a_wide_character_or_a_long_name_breaks_no_line() -> None:
    name = "模型" * 40
    async with (
        FakeReplica([answers()], listing=models(name)) as one,
        running(one) as run,
        opened(run.admin_url, 80, 24) as screen,
    ):
        await screen.shows("● live")
        await screen.press("2")
        await run.post({**BODY, "model": name})
        await screen.until(lambda: screen.rows("request-rows"))
        assert screen.rows("request-rows")[0][2].startswith("模型")
        assert screen.rows("request-rows")[0][2].endswith("…")


async def test_a_flood_is_drawn_a_few_times_a_second() -> None:
    async with fleet() as (run, _), opened(run.admin_url) as screen:
        await screen.shows("● live")
        await screen.press("2")
        await asyncio.gather(*(run.post(headers={"X-Request-Id": f"r{at}"}) for at in range(300)))
        await screen.until(lambda: "of them are shown, for there are many" in screen.text)
        assert len(screen.rows("request-rows")) <= KEPT_REQUESTS
        screen.app.live.check()


def test_parts_of_a_cost_have_the_routers_names() -> None:
    assert [name for name, _ in PARTS] == list(Cost._fields)
    cost = {"total_s": 1.0, "prefill_s": 1.0, "queue_s": 0.0}
    decision = Decision.of(
        {"replica": "a", "candidates": [{"replica": "a", "cost": cost}, {"replica": "b", "cost": {"total_s": 2}}]}
    )
    columns, lines = costs(decision)
    assert [column.name for column in columns] == ["replica", "cost", "prefill", "match", "running"]
    assert [cell[0] for cell in lines[0].cells[:3]] == ["► a", "1.00 s", "1.00 s"]
    assert [cell[0] for cell in lines[1].cells[:3]] == ["  b", "2.00 s", "·"]
