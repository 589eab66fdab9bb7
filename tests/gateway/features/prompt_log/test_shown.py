"""Logs on the live page (their length, how they were sent) and in findings of the doctor (the entry), and never a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.prompt.outline import MAX_SEGMENTS
from gateway.features.prompt_log.naming.chain import DIGEST
from gateway.request import named_log
from tests.gateway.conftest import eventually, running
from tests.gateway.features.doctor.test_doctor import asked as examined
from tests.gateway.features.live_page.test_live import asked as page_of
from tests.gateway.features.prompt_log.kept import CHAT, FORMS, NOW, SAID, USER, asked, called, engine, kept_in
from tests.gateway.features.tracing.test_traces import texts
from tests.support.collector import Collector
from tests.support.fakes import FakeReplica, status


@pytest.mark.parametrize("path", FORMS)
async def test_the_page_shows_length_and_kind_of_a_log_and_no_name(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await page_of(run)  # the watch begins
        _, first, _ = await asked(run, path, "keep", [USER])
        await asked(run, path, f'base="{first["head"]}"', [NOW])
        _, named, _ = await asked(run, path, "name", [USER, SAID, NOW])
        await asked(run, path, None, [USER])
        for name in (first["head"], "pl1_" + "A" * 43, "refs/main"):
            await called(run, "GET", name)
        page = await page_of(run)
        rows = [(row["log_entries"], row["log_sent"]) for row in page["requests"]]
        assert rows == [(1, "whole"), (3, "base"), (3, "whole"), (None, ""), *[(None, "")] * 3]
        shown = json.dumps([page, *[await page_of(run, f"/warmroute/live/requests/{row['key']}") for row in page["requests"]]])
        assert "pl1_" not in shown
        assert "pf1_" not in shown
        assert "main" not in shown
        for head in (first["input"], first["head"], named["head"]):
            assert head.removeprefix("pl1_") not in shown


async def test_the_page_shows_a_repeated_answer(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await page_of(run)
        for _ in range(2):
            code, _, _ = await asked(run, CHAT, 'once="token-001"', [USER])
            assert code == 200
        rows = [(row["log_entries"], row["log_sent"]) for row in (await page_of(run))["requests"] if row["log_sent"]]
        assert sorted(rows) == [(1, "whole"), (2, "repeated")]
        assert len(replica.requests) == 1


async def test_names_at_wrong_places_are_in_no_log_line(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """The engine repeats the path in its error, as engines do."""
    head, frame = f"pl1_{'A' * 43}", f"pf1_{'B' * 43}"
    places = [f"responses/{head}", f"/logs/{head}", f"log/{head}/entries", f"logs%2F{head}", f"logs/{frame}"]
    replica = FakeReplica([status(404, message=f"Unknown path /v1/{head}")])
    async with replica, running(replica, **kept_in(tmp_path)) as run:
        for place in places:
            async with run.session.get(f"{run.url}/v1/{place}") as answer:
                assert answer.status == 404
        await eventually(lambda: len(request_lines()) == len(places))
        lines = request_lines()
        assert not any(name in json.dumps(lines) for name in ("pl1_", "pf1_"))
        assert lines[0]["path"] == "/v1/responses/(a head)"
        assert len(replica.requests) >= 2


async def test_names_are_in_no_span(tmp_path: Path) -> None:
    async with Collector() as collector, FakeReplica([engine(CHAT, stream=False)]) as replica:
        async with running(replica, tracing=collector.tracing(), **kept_in(tmp_path)) as run:
            _, told, _ = await asked(run, CHAT, 'keep, ref="main-talk"', [USER])
            await asked(run, CHAT, f'base="{told["head"]}", expect="{told["head"]}"', [NOW])  # diverged
            for name in (told["head"], "refs/main-talk", "pl1_" + "A" * 43):
                await called(run, "GET", name)
        shown = texts(collector.spans)
        assert "/v1/logs" in shown
        assert not any(name in shown for name in ("pl1_", "pf1_", "main-talk"))


def test_digests_have_one_length() -> None:
    assert named_log.DIGEST == DIGEST


def talk(count: int) -> list[dict[str, Any]]:
    """Turns of a user and a model, of 100 bytes."""
    return [{"role": ("user", "assistant")[at % 2], "content": f"{at:5} " * 16} for at in range(count)]


@pytest.mark.parametrize("header", ["name", None])
@pytest.mark.parametrize("rewritten", [9, MAX_SEGMENTS + 77])
async def test_the_doctor_finds_the_entry_that_was_rewritten(header: str | None, rewritten: int) -> None:
    """The outline of a prompt ends with one large segment, in which only the logs show the difference."""
    turns = talk(MAX_SEGMENTS + 277)
    later = [*turns, *talk(2)]
    later[rewritten] = {"role": later[rewritten]["role"], "content": "something else " * 7}
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica) as run:
        await examined(run)
        for said in (turns, later):
            assert (await asked(run, CHAT, header, said))[0] == 200
        found = [each for each in (await examined(run))["findings"] if each["cause"] == "history_rewritten"]
        if header is None:
            assert [each["entry"] for each in found] == ([None] if rewritten < MAX_SEGMENTS else [])
            return
        (finding,) = found
        assert finding["entry"] == rewritten
        assert f"entry {rewritten + 1} of its prompt log" in finding["where"]
        assert 256 < finding["lost_tokens"] < 32_000, "of some 32,500"
        assert "pl1_" not in json.dumps(found)


async def test_the_doctor_compares_requests_from_bases_and_whole_ones(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await examined(run)
        turns = talk(41)
        _, first, _ = await asked(run, CHAT, "keep", turns)
        await asked(run, CHAT, f'base="{first["head"]}"', [NOW])
        changed = [*turns, SAID, NOW, SAID, NOW]
        changed[20] = {"role": "user", "content": "something else " * 7}
        await asked(run, CHAT, "name", changed)
        found = await examined(run)
        assert found["requests"] == 3
        (finding,) = [each for each in found["findings"] if each["cause"] == "history_rewritten"]
        assert (finding["request"], finding["after_request"], finding["entry"]) == (3, 2, 20)
