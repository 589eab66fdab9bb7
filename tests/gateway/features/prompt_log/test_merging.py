"""Logs that are merged by `copy`, found by ids, compared with the expected one, and deleted with their frames."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.naming.chain import EMPTY, head_name
from gateway.features.prompt_log.naming.forms import names_in
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import (
    CHAT,
    FORMS,
    LISTS,
    NOW,
    RESPONSES,
    SAID,
    SYSTEM,
    TOOLS,
    USER,
    asked,
    body_of,
    called,
    engine,
    kept_in,
    seen,
)
from tests.support.fakes import FakeReplica

OTHER = {"role": "user", "content": "something else"}


@pytest.mark.parametrize("path", FORMS)
async def test_a_fork_is_merged_by_copying_its_entries(path: str, tmp_path: Path) -> None:
    form = FORMS[path]
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, base, _ = await asked(run, path, "keep", [USER])
        _, one, _ = await asked(run, path, f'keep, base="{base["head"]}"', [NOW])
        _, other, _ = await asked(run, path, f'keep, base="{base["head"]}"', [OTHER])
        merge = {"form": form, "base": one["head"], "copy": {"from": other["head"], "since": base["head"]}}
        code, merged = await called(run, "POST", "", body=merge)
        assert (code, merged["appended"], merged["length"]) == (200, 2, 6)
        whole = names_in(json.dumps(body_of(path, [USER, SAID, NOW, SAID, OTHER, SAID])).encode(), form)
        assert merged["head"] == head_name(whole.chain)
        assert await called(run, "POST", "", body=merge) == (200, merged), "the same again is the same turn"
        await asked(run, path, f'base="{merged["head"]}"', [USER])
        said = [turn["content"] for turn in (USER, SAID, NOW, SAID, OTHER, SAID, USER)]
        assert [text for _, text in seen(replica, path)] == said
        more = {**merge, "body": {LISTS[path]: [USER], "tools": TOOLS[path], **SYSTEM[path]}}
        code, longer = await called(run, "POST", "", body=more)
        assert (code, longer["appended"], longer["frame"] != merged["frame"]) == (200, 3, True)
        code, error = await called(run, "POST", "", body={**merge, "copy": {"from": other["head"], "since": one["head"]}})
        assert (code, error["code"]) == (409, "prompt_log_diverged")
        code, error = await called(run, "POST", "", body=merge, key="other")
        assert code == 404
        code, error = await called(run, "POST", "", body={**merge, "copy": {"from": head_name(b"x" * 32)}})
        assert (code, error["code"], error["param"]) == (404, "prompt_log_not_found", "from")
        code, error = await called(run, "POST", "", body={**merge, "copy": {"from": other["head"], "since": other["head"]}})
        assert (code, error["code"]) == (400, "prompt_log_invalid"), "nothing is left to be appended"
        all_of_it = {"form": form, "base": one["head"], "copy": {"from": other["head"]}}
        assert (await called(run, "POST", "", body=all_of_it))[1]["appended"] == 4


async def test_a_copy_does_not_begin_within_a_message_or_with_a_system_text(tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": id_, "name": "read", "input": {}} for id_ in "ab"]
    results = [{"type": "tool_result", "tool_use_id": id_, "content": id_} for id_ in "ab"]
    history: list[dict[str, Any]] = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    async with FakeReplica() as replica, running(replica, **kept_in(tmp_path)) as run:
        _, kept = await called(run, "POST", "", body={"form": "messages", "body": {"messages": history}})
        _, found = await called(run, "GET", f"{kept['head']}/entries")
        within = found["entries"][2]["head"]
        asked_for = {"form": "messages", "copy": {"from": kept["head"], "since": within}}
        code, error = await called(run, "POST", "", body=asked_for)
        assert (code, error["param"]) == (400, "since")
        late = [USER, {"role": "system", "content": "Be brief."}, NOW]
        _, kept = await called(run, "POST", "", body={"form": "chat", "body": {"messages": late}})
        _, found = await called(run, "GET", f"{kept['head']}/entries")
        since = found["entries"][0]["head"]
        asked_for = {"form": "chat", "base": kept["head"], "copy": {"from": kept["head"], "since": since}}
        code, error = await called(run, "POST", "", body=asked_for)
        assert (code, error["param"]) == (400, "since")


@pytest.mark.parametrize("path", FORMS)
async def test_the_first_difference_to_a_kept_log_is_told(path: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": f"turn {at}"} for at in range(300)]
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, expected = await called(run, "POST", "", body={"form": FORMS[path], "body": {LISTS[path]: turns}})
        for index in (0, 1, 137, 299):
            changed = [*turns[:index], OTHER, *turns[index + 1 :]]
            code, error, _ = await asked(run, path, f'expect="{expected["head"]}"', changed)
            assert (code, error["first_difference"]) == (409, {"index": index, "path": "content[0].text"})
            if path != RESPONSES:
                assert len(error["heads"]) == 256
        code, error, _ = await asked(run, path, f'expect="{expected["head"]}"', turns[:20])
        assert error["first_difference"] == {"index": 20, "path": ""}
        _, kept = await called(run, "POST", "", body={"form": FORMS[path], "body": {LISTS[path]: turns[:200]}})
        header = f'base="{kept["head"]}", expect="{expected["head"]}"'
        code, error, _ = await asked(run, path, header, [*turns[200:250], OTHER])
        assert error["first_difference"]["index"] == 250
        code, error, _ = await asked(run, path, f'expect="{head_name(b"x" * 32)}"', turns[:20])
        assert (code, "first_difference" in error) == (409, False), "the expected log is not kept"
        code, error, _ = await asked(run, path, f'expect="{expected["head"]}"', turns[:20], key="other")
        assert "first_difference" not in error, "the log of another owner"
        assert not replica.requests, "nothing was generated"


async def test_turns_are_found_and_deleted_by_their_ids(tmp_path: Path) -> None:
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        with sqlite3.connect(tmp_path / "state.db") as file:
            ((id_,),) = file.execute("select id from warmroute_responses").fetchall()
        by_id, by_head = await called(run, "GET", id_), await called(run, "GET", told["head"])
        assert by_id == by_head
        assert by_id[0] == 200
        assert (await called(run, "GET", id_, key="other"))[0] == 404
        assert (await called(run, "DELETE", id_, key="other"))[0] == 404
        _, second, _ = await asked(run, CHAT, f'keep, base="{told["head"]}"', [NOW])
        assert (await called(run, "GET", second["head"]))[1]["parent"] == id_
        assert await called(run, "DELETE", id_) == (200, {"deleted": 1})
        assert (await called(run, "GET", id_))[0] == 404


async def test_an_ordinary_response_gets_its_names_when_somebody_asks(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    async with FakeReplica([engine(RESPONSES, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        ids = list[str]()
        for turns in ([system, USER], [NOW], [OTHER]):
            more = {"previous_response_id": ids[-1]} if ids else {}
            code, _, raw = await asked(run, RESPONSES, None, turns, **more)
            assert code == 200
            ids.append(json.loads(raw)["id"])
        with sqlite3.connect(tmp_path / "state.db") as file:
            assert file.execute("select head from warmroute_responses").fetchall() == [("",)] * 3
        whole = names_in(json.dumps({"input": [system, USER, SAID, NOW, SAID, OTHER, SAID]}).encode(), "responses")
        code, second = await called(run, "GET", ids[1])
        assert (code, second["length"]) == (200, 4)
        code, third = await called(run, "GET", ids[2])
        assert (code, third["length"], third["head"]) == (200, 6, head_name(whole.chain))
        _, found = await called(run, "GET", f"{third['head']}/entries")
        assert [entry["entry"]["role"] for entry in found["entries"]] == ["user", "assistant"] * 3
        assert found["entries"][1]["head"] != found["entries"][3]["head"] == second["head"]
        code, told, _ = await asked(run, RESPONSES, f'name, base="{third["head"]}"', [USER])
        assert (code, told["length"]) == (200, 8)
        assert [role for role, _ in seen(replica, RESPONSES)] == ["system", *["user", "assistant"] * 3, "user"]
        assert (await called(run, "GET", ids[0], key="other"))[0] == 404
        code, _, raw = await asked(run, RESPONSES, None, [USER], conversation=None, store=False)
        assert (await called(run, "GET", json.loads(raw)["id"]))[0] == 404


@pytest.mark.parametrize("path", FORMS)
async def test_a_deleted_turn_takes_the_frame_that_only_it_has_named(path: str, tmp_path: Path) -> None:
    frame: dict[str, Any] = {**SYSTEM[path], "tools": TOOLS[path]}
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER], **frame)
        _, second, _ = await asked(run, path, "keep", [NOW], **frame)
        _, third, _ = await asked(run, path, f'keep, base="{second["head"]}", frame="{second["frame"]}"', [OTHER])
        named = f'name, frame="{first["frame"]}"'
        unstored = {"store": False} if path == RESPONSES else {}
        await called(run, "DELETE", first["head"])
        assert (await asked(run, path, named, [USER], **unstored))[0] == 200, "another turn has the frame"
        await called(run, "DELETE", f"{third['head']}?tree=true")
        code, error, _ = await asked(run, path, named, [USER])
        assert (code, error["code"]) == (404, "prompt_frame_not_found")
        assert (await called(run, "GET", head_name(EMPTY)))[0] == 404


async def test_a_long_log_is_read_in_the_parser_process(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": f"turn {at}"} for at in range(3_000)]
    async with FakeReplica([engine(CHAT, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, kept = await called(run, "POST", "", body={"form": "chat", "body": {"messages": turns}})
        _, first = await called(run, "GET", f"{kept['head']}/entries?limit=3")
        since = first["entries"][1]["head"]
        code, page = await called(run, "GET", f"{kept['head']}/entries?since={since}&limit=2")
        assert (code, page["more"], page["entries"][0]) == (200, True, first["entries"][2])
        code, error = await called(run, "GET", f"{kept['head']}/entries?since={head_name(b'x' * 32)}")
        assert (code, error["heads"][-1], len(error["heads"])) == (409, kept["head"], 256)
        code, error, _ = await asked(run, CHAT, f'base="{kept["head"]}", expect="{since}"', [NOW])
        assert (code, error["length"], len(error["heads"]), error["heads"][-2]) == (409, 3001, 256, kept["head"])
        merge = {"form": "chat", "base": kept["head"], "copy": {"from": kept["head"], "since": since}}
        code, made = await called(run, "POST", "", body=merge)
        assert (code, made["appended"], made["length"]) == (200, 2_998, 5_998)
        _, told, _ = await asked(run, CHAT, f'keep, base="{kept["head"]}"', [NOW])
        code, again, _ = await asked(run, CHAT, f'keep, base="{told["input"]}"', [OTHER])
        assert (code, again["length"]) == (200, 3_003), "the answer is left out"
        assert run.gateway.parsing.process.started >= 1
