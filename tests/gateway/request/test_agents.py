"""The agents of a session: who they are, by the headers of each client, and what the router expects of them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.api_request import MAX_SESSION_CHARS, ApiRequest
from gateway.request.client import Caller, caller_of
from gateway.request.phases.scopes import prompt_of
from router import Prompt
from router.learning.sessions import MAX_NEW
from tests.gateway.conftest import running
from tests.gateway.servers import live_of
from tests.support.fakes import FakeReplica, answers

CLAUDE, AGENT, PARENT = "X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id"
CODEX = "Session-Id", "Thread-Id", "X-Codex-Parent-Thread-Id"


def text(name: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"{name} " * 2000}]}


def prompt(headers: dict[str, str]) -> Prompt:
    api = ApiRequest("m", b"text", "", stream=True, metered=True, body=b"")
    return prompt_of(live_of(), api, caller_of(headers), "m")


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        ({CLAUDE: "s"}, ("s", "", "")),
        ({CLAUDE: "s", AGENT: "a1"}, ("s", "a1", "")),
        ({CLAUDE: "s", AGENT: "a2", PARENT: "a1"}, ("s", "a2", "a1")),
        ({CLAUDE: "s", AGENT: "a1", PARENT: "a1"}, ("s", "a1", "")),
        (dict(zip(CODEX, ("s", "s"), strict=False)), ("s", "", "")),
        (dict(zip(CODEX, ("s", "t", "s"), strict=True)), ("s", "t", "")),
        (dict(zip(CODEX, ("s", "t", "u"), strict=True)), ("s", "t", "u")),
        (dict(zip(CODEX, ("t", "t", "s"), strict=True)), ("t", "", "s")),
        ({"X-OpenCode-Session": "c", "X-Parent-Session-Id": "p"}, ("c", "", "p")),
        ({"X-Session-Affinity": "c", "X-Parent-Session-Id": "p"}, ("c", "", "p")),
        ({"X-Dynamo-Session-Id": "c", "X-Dynamo-Parent-Session-Id": "p"}, ("c", "", "p")),
        ({"X-Dynamo-Session-Id": "c", "X-Dynamo-Parent-Session-Id": "c"}, ("c", "", "")),
        ({"X-Amp-Thread-Id": "s", AGENT: "a"}, ("s", "", "")),
        ({AGENT: "a", PARENT: "b"}, ("", "", "")),
    ],
)
def test_each_client_names_session_agent_and_parent(headers: dict[str, str], names: tuple[str, str, str]) -> None:
    caller = caller_of(headers)
    assert (caller.session, caller.agent, caller.parent) == names


def test_ids_are_cut() -> None:
    caller = caller_of({CLAUDE: "s" * 9000, AGENT: "a" * 9000, PARENT: "b" * 9000})
    assert {len(each) for each in (caller.session, caller.agent, caller.parent)} == {MAX_SESSION_CHARS}


def test_other_rights_leave_the_agent_as_it_is() -> None:
    caller = caller_of({CLAUDE: "s", AGENT: "a2", PARENT: "a1"}).holding("t", 5, None)
    assert (caller.tenant, caller.key, caller.session, caller.agent, caller.parent) == ("t", 5, "s", "a2", "a1")


def test_each_agent_has_a_number_and_knows_that_of_its_parent() -> None:
    main, one, two = prompt({CLAUDE: "s"}), prompt({CLAUDE: "s", AGENT: "a1"}), prompt({CLAUDE: "s", AGENT: "a2", PARENT: "a1"})
    assert len({main.session_key, one.session_key, two.session_key}) == 3
    assert (main.parent_key, one.parent_key, two.parent_key) == (0, main.session_key, one.session_key)
    assert {main.session, one.session, two.session} == {"s"}, "sticky policies keep them together"
    assert main.family_key == one.family_key == main.session_key
    child, parent = prompt({"X-Session-Id": "c", "X-Parent-Session-Id": "p"}), prompt({"X-Session-Id": "p"})
    assert child.parent_key == parent.session_key != child.session_key


def test_an_agent_of_another_tenant_is_another_one() -> None:
    one, two = (prompt({CLAUDE: "s", AGENT: "a", "X-Tenant-Id": tenant}) for tenant in ("t1", "t2"))
    assert one.session_key != two.session_key
    assert one.parent_key != two.parent_key


async def test_a_session_is_expected_agent_by_agent() -> None:
    """Prompts without a common block: each agent where it was answered, a new one where its parent was."""
    async with FakeReplica([answers(prompt=1300)]) as one, FakeReplica([answers(prompt=1300)]) as two, running(one, two) as run:
        home = (await run.post(text("main"), headers={CLAUDE: "s"}))[1]["X-Warmroute-Replica"]
        dry = await run.post(text("first"), path="/warmroute/route", headers={CLAUDE: "s", AGENT: "a1"})
        assert (dry[2]["replica"], dry[2]["reason"]) == (home, "session"), "its parent was answered there"
        dry = await run.post(text("first"), path="/warmroute/route", headers={CLAUDE: "s", AGENT: "a2", PARENT: "a9"})
        assert dry[2]["reason"] == "cold", "nothing is known of its parent"
        await run.post(text("first"), headers={CLAUDE: "s", AGENT: "a1"})
        dry = await run.post(text("second"), path="/warmroute/route", headers={CLAUDE: "s", AGENT: "a2", PARENT: "a1"})
        assert dry[2]["reason"] == "session"


async def test_agents_by_the_thousand_are_bounded_and_leave_their_session() -> None:
    async with FakeReplica([answers(prompt=1300)]) as one, running(one) as run:
        sessions = run.gateway.router.sessions
        for number in range(3):
            await run.post(text(f"main {number}"), headers={CLAUDE: "s"})
        for number in range(2 * MAX_NEW):
            sessions.answered(prompt({CLAUDE: "s", AGENT: f"a{number}"}).session_key, one.name, 10, 0.0)
        sessions.check()
        assert sessions.find(prompt({CLAUDE: "s"}).session_key) is not None


def test_a_caller_without_headers_has_no_agent() -> None:
    assert (Caller("", 0, "").agent, Caller("", 0, "").parent) == ("", "")
