"""The endpoints of logs: what is kept at a head, its entries, its deletion."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.features.histories.lazy import LazyStore
from gateway.features.prompt_log.bases import base_of, outline_of
from gateway.features.prompt_log.naming.chain import chains_of, head_name
from gateway.features.prompt_log.naming.forms import log_in, names_in
from gateway.request.owner import owner_of
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import (
    CHAT,
    FORMS,
    LISTS,
    MESSAGES,
    NOW,
    RESPONSES,
    USER,
    asked,
    body_of,
    called,
    engine,
    in_turn,
    kept_in,
    told_in,
)
from tests.support.fakes import FakeReplica, answers, status


@pytest.mark.parametrize("path", FORMS)
async def test_a_log_is_shown_with_what_goes_on_from_it(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        _, second, _ = await asked(run, path, f'keep, base="{first["head"]}"', [NOW])
        _, fork, _ = await asked(run, path, f'keep, base="{first["input"]}"', [NOW])
        code, log = await called(run, "GET", first["head"])
        assert (code, log["head"], log["length"], log["form"]) == (200, first["head"], 2, FORMS[path])
        assert (log["frame"], log["expires_at"]) == (first["frame"], first["expires"])
        (child,) = log["children"]
        assert (child["head"], child["status"]) == (second["head"], "completed")
        assert re.fullmatch("wr-[0-9a-f]{32}", child["request_id"])
        code, log = await called(run, "GET", first["input"])
        assert (code, log["length"]) == (200, 1)
        assert {each["head"] for each in log["children"]} == {first["head"], fork["head"]}
        code, log = await called(run, "GET", second["input"])
        assert (log["length"], [each["head"] for each in log["children"]]) == (3, [second["head"]])
        assert len(replica.requests) == 3


@pytest.mark.parametrize("path", FORMS)
async def test_a_lost_answer_is_known_by_the_id_of_its_request(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        headers = {"Authorization": "Bearer k", "Prompt-Log": "keep", "X-Request-Id": "mine-1"}
        async with run.session.post(run.url + path, json=body_of(path, [USER]), headers=headers) as answer:
            told = told_in(answer.headers)
        appended = {"form": FORMS[path], "base": told["head"], "body": {LISTS[path]: [NOW]}}
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine-2"}
        async with run.session.post(f"{run.url}/v1/logs", json=appended, headers=headers) as answer:
            assert answer.status == 200
        for name, wanted in ((told["input"], "mine-1"), (told["head"], "mine-2")):
            _, log = await called(run, "GET", name)
            assert [each["request_id"] for each in log["children"]] == [wanted]


async def test_a_request_that_only_appends_waits_longer_for_the_store_than_an_answer(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, running(replica, late_s=1e-6, **kept_in(tmp_path)) as run:
        body = {"form": "chat", "body": {"messages": [USER]}}
        code, appended = await called(run, "POST", "", body=body)
        assert (code, appended.get("appended")) == (200, 1)
        _, told, _ = await asked(run, CHAT, f'keep, base="{appended["head"]}"', [NOW])
        assert told["kept"] is False


@pytest.mark.parametrize("path", FORMS)
async def test_entries_are_those_of_the_whole_conversation(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        _, second, _ = await asked(run, path, f'keep, base="{first["head"]}"', [NOW])
        code, found = await called(run, "GET", f"{second['head']}/entries")
        said = [element for entry in found["entries"] for element in entry["body"]]
        whole = log_in(json.dumps(body_of(path, said)).encode(), FORMS[path])
        assert (code, found["more"]) == (200, False)
        assert [entry["entry"] for entry in found["entries"]] == whole.entries
        assert [entry["index"] for entry in found["entries"]] == [0, 1, 2, 3]
        heads = [first["input"], first["head"], second["input"], second["head"]]
        assert [entry["head"] for entry in found["entries"]] == heads
        assert said[0].get("content") == USER["content"]
        code, page = await called(run, "GET", f"{second['head']}/entries?since={first['head']}&limit=1")
        assert (code, page) == (200, {"entries": [found["entries"][2]], "more": True})
        code, page = await called(run, "GET", f"{second['head']}/entries?since={second['head']}")
        assert (code, page) == (200, {"entries": [], "more": False})
        code, error = await called(run, "GET", f"{first['head']}/entries?since={second['head']}")
        assert (code, error["code"], error["heads"]) == (409, "prompt_log_diverged", heads[:2])
        for query in ("limit=0", "limit=x", "since=x"):
            code, error = await called(run, "GET", f"{first['head']}/entries?{query}")
            assert (code, error["code"]) == (400, "prompt_log_invalid")


@pytest.mark.parametrize("path", FORMS)
async def test_an_outline_is_the_base_without_its_elements(path: str, tmp_path: Path) -> None:
    """At heads and input heads, also of turns that go on from an input."""
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        _, second, _ = await asked(run, path, f'keep, base="{first["input"]}"', [NOW])
        _, third, _ = await asked(run, path, f'keep, base="{second["head"]}"', [USER, NOW])
        store, owner = await run.gateway[LazyStore].get(), owner_of("", "Bearer k", None)
        for told in (first, second, third):
            for head in (told["input"], told["head"]):
                for turn in await store.turns_at(owner, head):
                    base = await base_of(store, owner, turn, 10_000)
                    assert base.size == sum(map(len, base.before))
                    assert await outline_of(store, owner, turn, 10_000) == base._replace(before=[], issuers=frozenset())
                    assert head_name(deque(chains_of(base.digests), 1)[0]) == head
                    _, log = await called(run, "GET", turn.id if not turn.at_input else head)
                    assert (log["bytes"], log["length"]) == (base.size, base.length)


@pytest.mark.parametrize(("path", "turns"), [(MESSAGES, "messages"), (RESPONSES, "responses")])
async def test_elements_that_are_several_entries_or_parts_of_one_are_given_once(path: str, turns: str, tmp_path: Path) -> None:
    if path == MESSAGES:
        calls: list[dict[str, Any]] = [{"type": "tool_use", "id": id_, "name": "read", "input": {}} for id_ in "ab"]
        results = [{"type": "tool_result", "tool_use_id": id_, "content": id_} for id_ in "ba"]
        history: list[dict[str, Any]] = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    else:
        calls = [{"type": "function_call", "call_id": id_, "name": "read", "arguments": "{}"} for id_ in "ab"]
        results = [{"type": "function_call_output", "call_id": id_, "output": id_} for id_ in "ba"]
        history = [USER, {"type": "reasoning", "summary": []}, *calls, *results]
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, path, "keep", history)
        _, found = await called(run, "GET", f"{told['input']}/entries")
        assert [element for entry in found["entries"] for element in entry["body"]] == history
        whole = log_in(json.dumps(body_of(path, history)).encode(), turns)
        assert [entry["entry"] for entry in found["entries"]] == whole.entries


@pytest.mark.parametrize("path", FORMS)
async def test_a_deleted_log_is_unknown_and_so_is_what_goes_on_from_it(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, first, _ = await asked(run, path, "keep", [USER])
        _, second, _ = await asked(run, path, f'keep, base="{first["head"]}"', [NOW])
        assert (await called(run, "DELETE", first["head"], key="other"))[0] == 404
        assert await called(run, "DELETE", first["head"]) == (200, {"deleted": 1})
        assert (await called(run, "DELETE", first["head"]))[0] == 404
        for header in (f'base="{first["head"]}"', f'base="{second["head"]}"'):
            code, error, _ = await asked(run, path, header, [NOW])
            assert (code, error["code"]) == (404, "prompt_log_not_found")
        _, again, _ = await asked(run, path, "keep", [USER])
        _, third, _ = await asked(run, path, f'keep, base="{again["head"]}"', [NOW])
        assert again["head"] == first["head"]
        code, deleted = await called(run, "DELETE", f"{third['head']}?tree=true")
        assert (code, deleted["deleted"]) == (200, 3 if path == RESPONSES else 2), "a second response has the same content"
        assert (await called(run, "GET", again["head"]))[0] == 404
        assert LISTS[path] in replica.requests[-1].json


async def test_other_heads_and_other_paths_read_like_nothing(request_lines: Callable[[], Any], tmp_path: Path) -> None:
    async with FakeReplica([in_turn(answers(), status(418))]) as replica, running(replica, **kept_in(tmp_path)) as run:
        _, told, _ = await asked(run, CHAT, "keep", [USER])
        unknown = await called(run, "GET", head_name(b"x" * 32))
        assert unknown == await called(run, "GET", told["head"], key="other")
        assert (unknown[0], unknown[1]["code"]) == (404, "prompt_log_not_found")
        for path in ("pl1_x", "turn_1", "refs", "resp_1", f"{told['head']}/entries/x"):
            assert (await called(run, "GET", path))[0] == 404
        assert (await called(run, "PUT", told["head"]))[0] == 405
        assert (await called(run, "DELETE", f"{told['head']}/entries"))[0] == 405
        assert "pl1_" not in json.dumps(request_lines())
        assert len(replica.requests) == 1
    async with FakeReplica([status(418)]) as replica, running(replica) as run:
        assert (await called(run, "GET", told["head"]))[0] == 418, "without a store a replica is asked"


@pytest.mark.parametrize("path", FORMS)
async def test_turns_are_appended_without_an_answer(path: str, tmp_path: Path) -> None:
    form, turns = FORMS[path], LISTS[path]
    said = {"role": "assistant", "content": "hello"}
    whole = names_in(json.dumps(body_of(path, [USER, said, NOW])).encode(), form)
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, first = await called(run, "POST", "", body={"form": form, "body": {turns: [USER, said]}})
        assert (code, first["length"], first["appended"]) == (200, 2, 2)
        more = {"form": form, "base": first["head"], "expect": head_name(whole.chain), "body": {turns: [NOW]}, "ttl": 60}
        code, second = await called(run, "POST", "", body=more)
        assert (code, second["head"], second["length"]) == (200, head_name(whole.chain), 3)
        assert await called(run, "POST", "", body=more) == (200, second), "the same again is the same turn"
        code, told, _ = await asked(run, path, f'keep, base="{second["head"]}"', [USER])
        assert (code, told["kept"], told["length"], len(replica.requests[-1].json[turns])) == (200, True, 5, 4)
        code, error = await called(run, "POST", "", body={**more, "expect": first["head"]})
        assert (code, error["code"], error["length"]) == (409, "prompt_log_diverged", 3)
        code, error = await called(run, "POST", "", body=more, key="other")
        assert (code, error["code"]) == (404, "prompt_log_not_found")
        bad: list[dict[str, Any]] = [
            {"form": "x"},
            {"ttl": 0},
            {"ttl": "5"},
            {"base": "pl1_x"},
            {"base": 5},
            {"body": 5},
            {"ref": "a b"},
        ]
        bad += [{"copy": {}}, {"copy": 5}, {"copy": {"from": "x"}}, {"copy": {"from": first["head"], "since": "x"}}]
        for wrong in [*bad, {"body": {}}]:
            code, error = await called(run, "POST", "", body={**more, **wrong})
            assert (code, error["code"]) == (400, "prompt_log_invalid"), wrong
        assert len(replica.requests) == 1


@pytest.mark.parametrize("value", [0, False, [], {}, 1, "x"])
async def test_a_head_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    """null and "" are none; other values that are false are not."""
    turns = {"form": "chat", "body": {"messages": [USER]}}
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:
        code, made = await called(run, "POST", "", body={**turns, "base": None, "expect": "", "ref": None, "copy": None})
        assert (code, made["length"]) == (200, 1)
        for name in ("base", "expect", "ref"):
            code, error = await called(run, "POST", "", body={**turns, name: value})
            if (name, value) == ("ref", "x"):
                assert code == 200
            else:
                assert (code, error["code"], error["param"]) == (400, "prompt_log_invalid", name)
        for name, copied in (("since", {"from": made["head"], "since": value}), ("copy", value)):
            code, error = await called(run, "POST", "", body={**turns, "copy": copied})
            assert (code, error["code"], error["param"]) == (400, "prompt_log_invalid", name)


async def test_nothing_is_appended_to_a_log_that_is_too_long(tmp_path: Path) -> None:
    """Its bytes are not read: a log may have all that an owner keeps."""
    text = {"role": "user", "content": "x" * 500_000}
    async with FakeReplica([]) as replica, running(replica, limits={"body_mb": 1}, **kept_in(tmp_path)) as run:
        found, base = list[int](), dict[str, str]()
        for turn in (text, text, USER):
            code, told = await called(run, "POST", "", body={"form": "chat", "body": {"messages": [turn]}, **base})
            found.append(code)
            base = {"base": told.get("head", "")}
        assert (found, told["code"]) == ([200, 200, 413], "history_too_large")
