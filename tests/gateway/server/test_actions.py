"""Actions of operators: each is a line of the log. The read-only key may read, and change nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gateway.config.parse import ConfigError
from tests.gateway.conftest import BODY, running
from tests.support.fakes import FakeReplica

READS = ["/warmroute/replicas", "/warmroute/live", "/warmroute/trie", "/warmroute/keys", "/metrics"]
CHANGES: list[tuple[str, str, Any]] = [
    ("POST", "/warmroute/drain", {"name": "a"}),
    ("POST", "/warmroute/undrain", {"name": "a"}),
    ("POST", "/warmroute/replicas", {"url": "http://127.0.0.1:1"}),
    ("DELETE", "/warmroute/replicas/a", None),
    ("POST", "/warmroute/keys", {"tenant": "acme"}),
    ("PATCH", "/warmroute/keys/abcdefgh", {"name": "x"}),
    ("POST", "/warmroute/keys/abcdefgh/rotate", {}),
    ("POST", "/warmroute/keys/abcdefgh/credit", {"usd": 1}),
    ("DELETE", "/warmroute/keys/abcdefgh", None),
]
Actions = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def actions(caplog: pytest.LogCaptureFixture) -> Actions:
    """What the lines of the log say of actions."""
    caplog.set_level(logging.INFO, "warmroute.operators")
    names = ("action", "status", "by", "client", "agent", "details")

    def found() -> list[dict[str, Any]]:
        lines = [each for each in caplog.records if each.message == "operator action"]
        return [{name: getattr(line, name) for name in names if hasattr(line, name)} for line in lines]

    return found


async def asked(run: Any, base: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    async with run.session.request(method, base + path, json=body, headers=headers) as answer:
        parsed = await answer.json(content_type=None) if path != "/metrics" else {}
        return answer.status, (parsed.get("error") or {}).get("code", "")


async def test_an_action_is_a_line_with_who_from_where_and_what(actions: Actions) -> None:
    async with FakeReplica() as one, running(one) as run:
        name = next(iter(run.gateway.fleet.replicas)).name
        await asked(run, run.admin_url, "POST", "/warmroute/drain", {"name": name}, **{"User-Agent": "curl/8"})
        await asked(run, run.admin_url, "GET", "/warmroute/replicas")
        await asked(run, run.admin_url, "POST", "/warmroute/route", BODY)
    (line,) = actions()
    details = json.loads(line.pop("details"))
    where = {"by": "this machine", "client": "127.0.0.1", "agent": "curl/8"}
    assert line == {"action": "POST /warmroute/drain", "status": 200, **where}
    assert details == {"body": {"name": name}}


async def test_what_is_refused_is_said_without_its_body(actions: Actions) -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        key = {"X-Warmroute-Admin-Key": "k-1"}
        assert (await asked(run, run.url, "POST", "/warmroute/replicas", {"url": one.url, "key": "sk-secret"}, **key))[0] == 400
        assert (await asked(run, run.url, "POST", "/warmroute/drain", {"name": "none"}, **key))[0] == 404
    assert [(line["status"], line["by"], "details" in line) for line in actions()] == [
        (400, "admin key", False),
        (404, "admin key", False),
    ]
    assert "sk-secret" not in json.dumps(actions())


async def test_nobody_else_makes_a_line(actions: Actions) -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        for base in (run.url, run.admin_url):
            assert (await asked(run, base, "POST", "/warmroute/drain", {"name": "a"}))[0] == 401
        assert (await run.post(BODY))[0] == 200
    assert actions() == []


async def test_a_line_is_bounded(actions: Actions) -> None:
    async with FakeReplica() as one, running(one) as run:
        await asked(run, run.admin_url, "DELETE", "/warmroute/replicas/" + "x" * 5000, **{"User-Agent": "y" * 5000})
        name = next(iter(run.gateway.fleet.replicas)).name
        await asked(run, run.admin_url, "POST", "/warmroute/drain", {"name": name, "note": "z" * 5000})
    one_, two = actions()
    assert len(one_["action"]) < 220
    assert (len(one_["agent"]), len(two["details"])) == (200, 1000)


async def test_the_read_only_key_reads_and_changes_nothing(actions: Actions) -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1", read_key="k-2") as run:
        for base in (run.url, run.admin_url):
            for path in READS:
                headers = {"Authorization": "Bearer k-2"}
                status, code = await asked(run, base, "GET", path, **headers)
                assert status == 200 or code == "keys_not_kept", path
            for method, path, body in CHANGES:
                found = await asked(run, base, method, path, body, **{"X-Warmroute-Admin-Key": "k-2"})
                assert found == (403, "read_only_key"), path
            assert (await asked(run, base, "POST", "/warmroute/route", BODY, Authorization="Bearer k-2"))[0] == 200
            assert (await asked(run, base, "GET", "/warmroute/replicas", Authorization="Bearer k-3"))[0] == 401
        assert not any(state.draining for state in run.gateway.fleet.replicas)
        assert len(list(run.gateway.fleet.replicas)) == 1
        _, headers, _ = await run.post(BODY, headers={"X-Warmroute-Admin-Key": "k-2"})
        assert "X-Warmroute-Replica" not in headers, "its holder is no operator for answers to clients"
    assert actions() == []


@pytest.mark.parametrize(
    ("keys", "text"), [({"read_key": "r"}, "needs WARMROUTE_ADMIN_KEY"), ({"read_key": "k", "admin_key": "k"}, "is that of")]
)
async def test_a_read_only_key_needs_an_admin_key_of_its_own(keys: dict[str, str], text: str) -> None:
    from gateway.config.checks import clashes
    from gateway.config.schema import Config

    problems = list(clashes(Config, {(name,): value for name, value in keys.items()}))
    assert text in str(ConfigError(*problems))
