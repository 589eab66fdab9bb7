"""What the hub keeps for those who come later."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gateway.config import Config, load
from gateway.everywhere import Drain, Join, Refuse, Take
from gateway.workers import hub
from gateway.workers.channel import ANSWER, ASKED, COMMAND, CURRENT, EVENTS, GONE, HUB, SERVING, TOLD, WELCOME, Receive
from gateway.workers.commands import PENDING_MOST
from gateway.workers.hub import Hub
from gateway.workers.peers import _key
from tests.compiled import uncompiled


class End:
    """A channel's end that remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int, bytes]] = []

    def send(self, kind: int, who: int = 0, number: int = 0, payload: bytes = b"") -> None:
        self.sent.append((kind, who, number, payload))

    def receive(self, receive: Receive, _lost: Any) -> None:
        self.receives = receive

    def close(self) -> None:
        self.sent.append((-1, 0, 0, b""))

    def of(self, kind: int) -> list[tuple[int, bytes]]:
        return [(who, payload) for sent, who, _, payload in self.sent if sent == kind]


def config_of(ttl_s: float = 60.0) -> Config:
    return load(None, {"pools": [{"replicas": ["http://a:1"]}], "routing": {"ttl_s": ttl_s}, "workers": 2}, env={})


REPLICA_B, OTHER_B = (
    load(None, {"pools": [{"replicas": [{"url": url, "name": "b:1"}]}]}, env={}).pools[0].replicas[0]
    for url in ("http://b:1", "http://c:1")
)


class Now:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def joined(made: Hub) -> tuple[int, End]:
    end = End()
    return made.join(end), end  # type: ignore[arg-type]


pytestmark = uncompiled


def test_a_newcomer_hears_the_past_in_its_order_between_its_welcome_and_now() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    first, end = joined(made)
    end.receives(EVENTS, 0, 0, b"one")
    end.receives(EVENTS, 0, 0, b"two")
    made.leave(first)
    made.command("drain a", Drain("a", on=True))
    _, late = joined(made)
    kinds = [(kind, who) for kind, who, _, _ in late.sent]
    assert kinds == [(WELCOME, 2), (COMMAND, 0), (EVENTS, first), (EVENTS, first), (GONE, first), (CURRENT, 0)]
    assert [payload for _, payload in late.of(EVENTS)] == [b"one", b"two"]
    end.receives(EVENTS, 0, 0, b"its last words")
    assert len(late.of(EVENTS)) == 2, "it was given up"


def test_the_past_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HISTORY_BYTES", 100)
    now = Now()
    made = Hub(config_of(ttl_s=60), now, lambda _: None)
    _, end = joined(made)
    for number in range(50):
        end.receives(EVENTS, 0, 0, b"%020d" % number)
        assert made._history_bytes == sum(len(kept[3]) for kept in made._history) <= 100
    assert [int(payload) for _, payload in joined(made)[1].of(EVENTS)] == [45, 46, 47, 48, 49]
    now.time = 60.5
    end.receives(EVENTS, 0, 0, b"new")
    assert joined(made)[1].of(EVENTS) == [(1, b"new")]


def test_only_the_last_command_on_each_matter_is_in_force() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    other = config_of(ttl_s=5)
    commands = [Drain("a:1", on=True), Join(0, REPLICA_B), Drain("a:1", on=False), Refuse("no"), Drain("b:1", on=True)]
    (who, end) = joined(made)
    for number, command in enumerate(commands, start=1):
        made.command(_key(command), command)
        answers(end, HUB, number)
    assert who == 1
    in_force = [pickle.loads(payload)[1] for _, payload in joined(made)[1].of(COMMAND)]
    assert in_force == [Join(0, REPLICA_B), Drain("a:1", on=False), Drain("b:1", on=True)]
    made.command(_key(Take(other)), Take(other))
    _, late = joined(made)
    assert [pickle.loads(payload)[1] for _, payload in late.of(COMMAND)] == [Drain("a:1", on=False)], "b:1 is gone"
    assert pickle.loads(late.of(WELCOME)[0][1]) == other


# -- commands that are not executed everywhere yet


def asks(end: End, number: int, command: Drain | Join, until: float = 99.0) -> None:
    end.receives(COMMAND, 0, number, pickle.dumps((_key(command), command, until)))


def answers(end: End, asker: int, number: int, error: str | None = None) -> None:
    end.receives(ANSWER, asker, number, pickle.dumps(error))


def replayed(made: Hub) -> list[Drain | Join]:
    """What a new worker would begin with."""
    who, end = joined(made)
    made.leave(who)
    return [pickle.loads(payload)[1] for _, payload in end.of(COMMAND)]


def test_a_command_that_a_worker_refused_is_not_for_its_successor() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    (first, one), (second, two) = joined(made), joined(made)
    asks(one, 1, Join(0, REPLICA_B))
    asks(two, 1, Join(0, OTHER_B))
    assert replayed(made) == [Join(0, REPLICA_B), Join(0, OTHER_B)], "a worker that starts now executes what the others do"
    for end in (one, two):
        answers(end, first, 1)
        answers(end, second, 1, "listed twice")
    made.leave(first)
    assert replayed(made) == [Join(0, REPLICA_B)]
    assert [number for sent, _, number, _ in two.sent if sent == ANSWER] == [1, 1], "the answers reach who asked"


def test_a_worker_that_ends_without_an_answer_is_not_waited_for() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    (first, one), (second, two) = joined(made), joined(made)
    asks(one, 1, Drain("a:1", on=True))
    asks(one, 2, Join(0, REPLICA_B))
    answers(two, first, 1)
    answers(two, first, 2)
    assert repr(made._commands) == "<Commands: 0 in force, 2 pending>"
    made.leave(first)
    assert repr(made._commands) == "<Commands: 2 in force, 0 pending>"
    asks(two, 1, Join(0, OTHER_B))
    made.leave(second)
    assert replayed(made) == [Drain("a:1", on=True), Join(0, REPLICA_B)], "the first of that name stays"


def test_a_replica_that_is_pending_does_not_outlive_a_reload() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    first, one = joined(made)
    asks(one, 1, Join(0, REPLICA_B))
    made.command("", Take(config_of(ttl_s=5)))
    answers(one, first, 1)
    assert replayed(made) == []


def test_a_command_that_is_read_too_late_is_ignored() -> None:
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    _, one = joined(made)
    now.time = 5.0
    asks(one, 1, Drain("a:1", on=True), until=4.0)
    assert one.of(COMMAND) == one.of(ASKED) == replayed(made) == []


def test_commands_without_an_answer_are_bounded() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, one = joined(made)
    for number in range(PENDING_MOST + 500):
        asks(one, number, Drain(f"r{number}", on=True))
    assert len(replayed(made)) == len(one.of(ASKED)) == PENDING_MOST
    made.command("", Take(config_of(ttl_s=5)))
    assert made.config.routing.ttl_s == 5, "a new configuration is not one of them"
    assert pickle.loads(one.of(COMMAND)[-1][1])[1] == Take(config_of(ttl_s=5))


def test_who_says_nothing_for_long_is_silent() -> None:
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    first, end = joined(made)
    second, _ = joined(made)
    now.time = 20.0
    end.receives(TOLD, 0, 0, pickle.dumps({}))
    now.time = 40.0
    assert list(made.silent(30.0)) == [second]
    end.receives(SERVING, 0, 0, b"")
    end.receives(TOLD, 0, 0, pickle.dumps({}))
    assert (list(made.well(1.0)), list(made.unwell(2.0))) == ([first], [second])
    now.time = 45.0
    assert (list(made.well(1.0)), list(made.unwell(2.0))) == ([], [first, second])
    made.excuse(5.0)  # the supervisor was stopped
    assert (list(made.well(1.0)), list(made.unwell(2.0)), list(made.silent(30.0))) == ([first], [second], [second])
    assert repr(made) == f"<Hub of {first}, {second}, 0 bytes of history>"
    end.receives(TOLD, 0, 0, pickle.dumps({}))  # what has waited is read before the supervisor sees how long it was stopped
    made.excuse(3600.0)
    now.time += 31.0
    assert first in made.silent(30.0), "nobody is heard in the future"
