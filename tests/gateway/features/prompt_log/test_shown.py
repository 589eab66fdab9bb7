"""Logs on the live page: their length and how they were sent, and never a name or a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.features.prompt_log.naming.chain import DIGEST
from gateway.request import named_log
from tests.gateway.conftest import running
from tests.gateway.features.live_page.test_live import asked as page_of
from tests.gateway.features.prompt_log.kept import CHAT, FORMS, NOW, SAID, USER, asked, engine, kept_in
from tests.support.fakes import FakeReplica


@pytest.mark.parametrize("path", FORMS)
async def test_the_page_shows_length_and_kind_of_a_log_and_no_name(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        await page_of(run)  # the watch begins
        _, first, _ = await asked(run, path, "keep", [USER])
        await asked(run, path, f'base="{first["head"]}"', [NOW])
        _, named, _ = await asked(run, path, "name", [USER, SAID, NOW])
        await asked(run, path, None, [USER])
        page = await page_of(run)
        rows = [(row["log_entries"], row["log_sent"]) for row in page["requests"]]
        assert rows == [(1, "whole"), (3, "base"), (3, "whole"), (None, "")]
        shown = json.dumps([page, *[await page_of(run, f"/warmroute/live/requests/{row['key']}") for row in page["requests"]]])
        assert "pl1_" not in shown
        assert "pf1_" not in shown
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


def test_digests_have_one_length() -> None:
    assert named_log.DIGEST == DIGEST
