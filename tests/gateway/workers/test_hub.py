"""What the hub keeps for those who come later."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gateway.config import Config, load
from gateway.everywhere import Drain, Join, Refuse, Take
from gateway.workers import hub
from gateway.workers.channel import COMMAND, CURRENT, EVENTS, GONE, TOLD, WELCOME, Receive
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
    replica = load(None, {"pools": [{"replicas": ["http://b:1"]}]}, env={}).pools[0].replicas[0]
    other = config_of(ttl_s=5)
    commands = [Drain("a", on=True), Join(0, replica), Drain("a", on=False), Refuse("no"), Drain("b:1", on=True)]
    for command in commands:
        made.command(_key(command), command)
    in_force = [pickle.loads(payload)[1] for _, payload in joined(made)[1].of(COMMAND)]
    assert in_force == [Join(0, replica), Drain("a", on=False), Drain("b:1", on=True)]
    made.command(_key(Take(other)), Take(other))
    _, late = joined(made)
    assert [pickle.loads(payload)[1] for _, payload in late.of(COMMAND)] == [Drain("a", on=False), Drain("b:1", on=True)]
    assert pickle.loads(late.of(WELCOME)[0][1]) == other


def test_who_says_nothing_for_long_is_silent() -> None:
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    first, end = joined(made)
    second, _ = joined(made)
    now.time = 20.0
    end.receives(TOLD, 0, 0, pickle.dumps({}))
    now.time = 40.0
    assert list(made.silent(30.0)) == [second]
    assert repr(made) == f"<Hub of {first}, {second}, 0 bytes of history>"
