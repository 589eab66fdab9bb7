"""Refs through a whole gateway: their endpoints, and requests that move them, in each API."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.features.histories.refs import MAX_REFS
from gateway.features.prompt_log.naming.chain import head_name
from tests.gateway.conftest import Running, running
from tests.gateway.features.prompt_log.kept import ALL, CHAT, FORMS, LISTS, NOW, SAID, USER, asked, called, engine, kept_in
from tests.support.fakes import FakeReplica


async def ref(
    run: Running, method: str, name: str, head: str | None = None, key: str = "k", **headers: str
) -> tuple[int, dict[str, Any], str | None]:
    """(status, object or error, ETag)."""
    body = None if head is None else {"head": head}
    sent = {"Authorization": f"Bearer {key}"} | {at.replace("_", "-"): value for at, value in headers.items()}
    async with run.session.request(method, f"{run.url}/v1/logs/refs/{name}", headers=sent, json=body) as answer:
        found = await answer.json(content_type=None)
        return answer.status, found.get("error", found), answer.headers.get("ETag")


async def test_a_ref_is_read_made_moved_and_deleted(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        first, second = told["input"], told["head"]
        assert (await ref(run, "GET", "main"))[:2][0] == 404
        code, error, _ = await ref(run, "PUT", "main", first)
        assert (code, error["code"]) == (428, "precondition_required")
        code, error, _ = await ref(run, "PUT", "main", first, If_Match=f'"{second}"')
        assert (code, error["code"], error["head"]) == (412, "ref_moved", None)
        code, made, tag = await ref(run, "PUT", "main", first, If_None_Match="*")
        assert (code, made["ref"], made["head"], tag) == (200, "main", first, f'"{first}"')
        assert await ref(run, "GET", "main") == (200, made, tag)
        code, error, _ = await ref(run, "PUT", "main", second, If_None_Match="*")
        assert (code, error["head"]) == (412, first)
        code, moved, _ = await ref(run, "PUT", "main", second, If_Match=f'"{first}"')
        assert (code, moved["head"]) == (200, second)
        code, error, _ = await ref(run, "PUT", "main", head_name(b"x" * 32), If_Match=f'"{second}"')
        assert (code, error["code"]) == (404, "prompt_log_not_found")
        assert (await ref(run, "GET", "main", key="other"))[1] == (await ref(run, "GET", "none"))[1]
        code, error, _ = await ref(run, "DELETE", "main", If_Match=f'"{first}"')
        assert (code, error["head"]) == (412, second)
        assert (await ref(run, "DELETE", "main"))[0] == 200
        assert (await ref(run, "DELETE", "main"))[0] == 404
        assert len(replica.requests) == 1


async def test_malformed_requests_for_a_ref_are_refused(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        head = told["head"]
        bad: list[dict[str, str]] = [
            {"If_Match": head},
            {"If_Match": '"x"'},
            {"If_Match": "*"},
            {"If_None_Match": f'"{head}"'},
            {"If_Match": f'"{head}"', "If_None_Match": "*"},
            {"If_Match": f'W/"{head}"'},
        ]
        for headers in bad:
            code, error, _ = await ref(run, "PUT", "main", head, **headers)
            assert (code, error["code"]) == (400, "prompt_log_invalid"), headers
        for wrong in ("x", "pl1_x", "", "x" * 2000):
            code, error, _ = await ref(run, "PUT", "main", wrong, If_None_Match="*")
            assert (code, error["code"]) == (400, "prompt_log_invalid"), wrong
        for name in ("", "a" * 65, "a/b", "%20", "a~"):
            assert (await ref(run, "GET", name))[0] == 404, name
        assert (await ref(run, "POST", "main", head))[0] == 405
        assert (await ref(run, "GET", "main"))[0] == 404, "nothing was made"
        assert len(replica.requests) == 1


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_request_moves_a_ref_from_its_base(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, 'keep, ref="main"', [USER], stream=stream)
        assert (first["kept"], first["ref"]) == (True, True)
        header = f'keep, base="{first["head"]}", ref="main"'
        _, second, _ = await asked(run, path, header, [NOW], stream=stream)
        assert second["ref"] is True
        _, third, _ = await asked(run, path, header, [USER], stream=stream)
        assert (third["kept"], third["ref"]) == (True, False), "the ref is at another head"
        code, found, _ = await ref(run, "GET", "main")
        assert (code, found["head"]) == (200, second["head"])
        appended = {"form": FORMS[path], "base": second["head"], "ref": "main", "body": {LISTS[path]: [USER]}}
        code, made = await called(run, "POST", "", body=appended)
        assert (code, made["ref"]) == (200, True)
        code, made = await called(run, "POST", "", body={**appended, "body": {LISTS[path]: [NOW]}})
        assert (code, made["ref"]) == (200, False)
        assert len(replica.requests) == 3


@pytest.mark.parametrize("path", FORMS)
async def test_a_whole_history_moves_a_ref_that_is_at_a_beginning_of_it(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, 'keep, ref="main"', [USER])
        _, second, _ = await asked(run, path, 'keep, ref="main"', [USER, SAID, NOW])
        assert second["ref"] is True
        _, third, _ = await asked(run, path, 'keep, ref="main"', [NOW, SAID, NOW])
        assert third["ref"] is False
        assert (await ref(run, "GET", "main"))[1]["head"] == second["head"] != first["head"]
        assert len(replica.requests) == 3


async def test_of_two_devices_one_moves_a_ref_and_both_turns_are_kept(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, base, _ = await asked(run, CHAT, 'keep, ref="main"', [USER])
        header = f'keep, base="{base["head"]}", ref="main"'
        both = await asyncio.gather(*(asked(run, CHAT, header, [turn]) for turn in (USER, NOW)))
        told = [each[1] for each in both]
        assert sorted(each["ref"] for each in told) == [False, True]
        winner = next(each for each in told if each["ref"])
        assert (await ref(run, "GET", "main"))[1]["head"] == winner["head"]
        for each in told:
            assert (await called(run, "GET", each["head"]))[0] == 200


async def test_a_ref_beyond_the_last_one_is_refused_and_costs_no_turn(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, 'keep, ref="main"', [USER])
        row = "select owner, id || ?, created_at, expires_at, emptied, metadata, head from warmroute_conversations limit 1"
        with sqlite3.connect(tmp_path / "state.db") as file:
            columns = "owner, id, created_at, expires_at, emptied, metadata, head"
            numbers = [(number,) for number in range(1, MAX_REFS)]
            file.executemany(f"insert into warmroute_conversations ({columns}) {row}", numbers)
        code, error, _ = await ref(run, "PUT", "new", told["head"], If_None_Match="*")
        assert (code, error["code"]) == (413, "too_many_refs")
        code, kept, _ = await asked(run, CHAT, 'keep, ref="new"', [NOW])
        assert (code, kept["kept"], kept["ref"]) == (200, True, False)
        code, kept, _ = await asked(run, CHAT, f'keep, ref="main", base="{told["head"]}"', [NOW])
        assert (code, kept["ref"]) == (200, True)
        assert (await ref(run, "DELETE", "main1"))[0] == 200
        assert (await ref(run, "PUT", "new", told["head"], If_None_Match="*"))[0] == 200
