"""Promises beside an oracle that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.learning import promises as module
from router.learning.promises import LONGEST_S, MAX_PROMISES, Promises
from router.types import KEY_BYTES, Prompt
from tests.support.strategies import keys_of, letters, replicas

LEAST = 2  # blocks


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    text = draw(letters)
    prompt = Prompt(
        keys_of(text), len(text), 1, "", client=draw(st.integers(1, 2)), session_key=draw(st.sampled_from([0, 0, 5]))
    )
    if text:
        places = st.tuples(st.integers(1, len(text)), st.sampled_from([0, 300, 1800, 3600]))
        prompt.breakpoints = tuple(draw(st.lists(places, max_size=4, unique_by=lambda place: place[0])))
    return prompt


@dataclass
class Known:
    """Of one place: who has computed it, when, and until when it is to be kept."""

    replica: str
    at: float
    until: float


@dataclass
class Oracle:
    places: dict[tuple[int, bytes], Known] = field(default_factory=dict)
    losses: list[tuple[str, float]] = field(default_factory=list)

    @staticmethod
    def place(prompt: Prompt, blocks: int) -> tuple[int, bytes]:
        return prompt.session_key or prompt.client, prompt.keys[: blocks * KEY_BYTES]


class PromiseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.promises, self.oracle, self.now = Promises(), Oracle(), 0.0

    @rule(seconds=st.sampled_from([1.0, 200.0, 2000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(prompt=prompts(), replica=replicas)
    def make(self, prompt: Prompt, replica: str) -> None:
        self.promises.make(prompt, LEAST, replica, self.now)
        for blocks, seconds in prompt.breakpoints:
            if seconds and blocks >= LEAST:
                known = Known(replica, self.now, self.now + min(seconds, LONGEST_S))
                self.oracle.places[self.oracle.place(prompt, blocks)] = known

    @rule(replica=replicas)
    def lose(self, replica: str) -> None:
        self.promises.lost(replica, self.now)
        self.oracle.losses.append((replica, self.now))

    @rule(prompt=prompts())
    def find(self, prompt: Prompt) -> None:
        wanted, longest = None, 0
        for blocks, _ in prompt.breakpoints:
            known = self.oracle.places.get(self.oracle.place(prompt, blocks))
            if known and known.until >= self.now and blocks >= LEAST and blocks > longest:
                wanted, longest = known, blocks
        found = self.promises.find(prompt, LEAST, self.now)
        if wanted is None:
            assert found is None
            return
        assert found is not None
        assert (found.replica, found.blocks, found.made) == (wanted.replica, longest, wanted.at)
        lost = any(name == wanted.replica and at >= wanted.at for name, at in self.oracle.losses)
        assert self.promises.is_lost(found) == lost

    @invariant()
    def sound(self) -> None:
        self.promises.check()
        assert len(self.promises) == len(self.oracle.places)


TestPromises = PromiseMachine.TestCase


def test_a_flood_of_promises_leaves_the_last_ones() -> None:
    promises, more = Promises(), 100
    assert MAX_PROMISES == module.MAX_PROMISES
    for number in range(MAX_PROMISES + more):
        promises.make(one(number), 1, "r1", float(number) / 1000)
    promises.check()
    now = float(MAX_PROMISES + more) / 1000
    assert len(promises) == MAX_PROMISES
    assert promises.find(one(more - 1), 1, now) is None
    assert promises.find(one(more), 1, now) is not None


def one(number: int) -> Prompt:
    prompt = Prompt(number.to_bytes(KEY_BYTES, "big"), 1, 1, "", client=7)
    prompt.breakpoints = ((1, 3600),)
    return prompt


def test_no_more_places_are_looked_up_than_the_bound() -> None:
    text = bytes(200)
    prompt = Prompt(keys_of(text), len(text), 1, "", client=1)
    prompt.breakpoints = tuple((blocks + 1, 300) for blocks in range(200))
    promises = Promises()
    promises.make(prompt, 1, "r1", 0.0)
    assert len(promises) == module.MAX_PLACES


@pytest.mark.parametrize("client", [0, 2**64 - 1, 2**70, -1])
def test_any_number_is_an_owner(client: int) -> None:
    prompt = Prompt(keys_of(b"ab"), 2, 1, "", client=client)
    prompt.breakpoints = ((2, 300),)
    promises = Promises()
    promises.make(prompt, 1, "r1", 0.0)
    assert promises.find(prompt, 1, 300.0)
    assert not promises.find(prompt, 1, 300.1)
