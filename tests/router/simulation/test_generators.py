"""Made-up workloads: the same for a seed, with the sharing and the load that they state."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.blocks import shared_blocks
from router.simulation.fleet import FleetSpec, SharedQueue, Simulation
from router.simulation.generators import BLOCK, GENERATORS, Agents, ChatWorkload, Lengths, Text
from router.simulation.workloads import Arrival, SimulatedRequest, Turn, WorkloadSource

OPEN = ["shared_prompt", "no_reuse", "rag", "burst_head", "hot_prefix"]
CLOSED = ["chat", "agents"]


def arrivals(name: str, replicas: int = 2, seed: int = 1, **changes: Any) -> list[Arrival]:
    generator: Any = dataclasses.replace(GENERATORS[name], **changes)  # type: ignore[type-var]
    return list(generator.source(replicas, random.Random(seed)).begin())


def asks(name: str, **changes: Any) -> list[SimulatedRequest]:
    return [request for _, request in arrivals(name, **changes)]


def shared(one: SimulatedRequest, other: SimulatedRequest) -> int:
    return shared_blocks(one.prompt.keys, other.prompt.keys)


def session(generator: ChatWorkload | Agents, seed: int = 1, skip: int = 0) -> list[Turn]:
    """The turns of one session."""
    return list(next(itertools.islice(generator._sessions(random.Random(seed)), skip, None)))


# -- texts and lengths

texts = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 40, 64, 100, 192])), max_size=5)


def tokens_of(pieces: list[tuple[str, int]]) -> Iterator[tuple[object, ...]]:
    """Each token, identified by all that stands before it."""
    before: tuple[object, ...] = ()
    for name, length in pieces:
        begun = (*before, name)
        yield from ((*begun, place) for place in range(length))
        before = (*begun, length)


@given(texts, texts)
def test_two_texts_share_the_blocks_that_were_written_alike(left: list[tuple[str, int]], right: list[tuple[str, int]]) -> None:
    def written(pieces: list[tuple[str, int]]) -> Text:
        text = Text()
        for name, length in pieces:
            text = text.then(name, length)
        assert text.tokens == sum(length for _, length in pieces)
        assert len(text.keys) == text.tokens // BLOCK * 8
        return text

    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens_of(left), tokens_of(right), strict=False))
    assert shared_blocks(written(left).keys, written(right).keys) == sum(1 for _ in alike) // BLOCK


def test_lengths_have_their_mean_and_their_bounds() -> None:
    chance = random.Random(3)
    drawn = [Lengths(500, 0.7).draw(chance) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(500, rel=0.03)
    assert {Lengths(500, 0.7, most=3).draw(chance) for _ in range(20)} == {3}
    assert min(Lengths(1, 2.0).draw(chance) for _ in range(200)) == 1


# -- all of them


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_decides_everything(name: str) -> None:
    def beginning(seed: int) -> list[Arrival]:
        generator: Any = dataclasses.replace(GENERATORS[name], hours=0.01)  # type: ignore[type-var]
        return list(generator.source(3, random.Random(seed)).begin())

    assert beginning(5) == beginning(5) != beginning(6)


@pytest.mark.parametrize("name", CLOSED)
def test_a_session_is_the_same_whenever_it_is_taken(name: str) -> None:
    """The third session of two runs, although in one of them the first two are read to their end before."""
    generator: Any = GENERATORS[name]
    early = list(next(itertools.islice(generator._sessions(random.Random(2)), 2, None)))
    sessions = generator._sessions(random.Random(2))
    for _ in range(2):
        list(next(sessions))
    assert list(next(sessions)) == early


@pytest.mark.parametrize("name", GENERATORS)
def test_a_fleet_prefills_as_much_of_the_time_as_is_stated(name: str) -> None:
    """About two thirds with perfect placement; the burst all the time."""
    source: WorkloadSource = GENERATORS[name].source(2, random.Random(0))
    simulation = Simulation(FleetSpec(2), source, SharedQueue(), shared=True)
    arrived = max(one.arrived for one in simulation.run())
    busy = sum(simulation.busy_s) / 2 / arrived
    assert (0.9 if name == "burst_head" else 0.55) < busy < (1.2 if name == "burst_head" else 0.8)


@pytest.mark.parametrize("name", OPEN)
def test_requests_come_at_the_rate_for_each_replica(name: str) -> None:
    few, many = (arrivals(name, replicas=replicas) for replicas in (2, 6))
    rate = GENERATORS[name].rate  # type: ignore[attr-defined]
    for stream, replicas in ((few, 2), (many, 6)):
        gaps = sorted(at for at, _ in stream)
        assert len(gaps) / gaps[-1] == pytest.approx(rate * replicas, rel=0.25)
        assert gaps[-1] < GENERATORS[name].hours * 3600


# -- what is shared, one by one


def test_a_shared_prompt_is_all_that_users_share() -> None:
    prompts = asks("shared_prompt", hours=0.003)
    assert {shared(one, other) for one, other in itertools.pairwise(prompts)} == {8000 // BLOCK}
    assert len({request.prompt.session for request in prompts}) == len(prompts)


def test_without_reuse_nothing_is_shared() -> None:
    prompts = asks("no_reuse", hours=0.05)
    assert len({request.prompt.keys[:8] for request in prompts if request.prompt.blocks}) == sum(
        1 for request in prompts if request.prompt.blocks
    )
    assert sum(request.prompt.units for request in prompts) / len(prompts) == pytest.approx(6000, rel=0.2)


def test_documents_are_hot_and_only_the_first_are_shared() -> None:
    prompts = asks("rag", hours=0.1)
    depths = [max(shared(one, other) for other in prompts[:number]) for number, one in enumerate(prompts) if number > 400]
    instruction = 500 // BLOCK
    assert min(depths) >= instruction
    first = sum(depth > instruction + 3 for depth in depths) / len(depths)
    most = sum(depth > instruction + 3 * 2000 / BLOCK for depth in depths) / len(depths)
    assert first > 0.6, "the first document was there before"
    assert most < 0.1, "three of them hardly ever"


def test_a_document_is_not_repeated_in_a_prompt() -> None:
    prompts = asks("rag", hours=0.05, corpus=5, document=Lengths(2000, 0.0), question=Lengths(1, 0.0))
    assert {request.prompt.units for request in prompts} == {500 + 4 * 2000 + 1}


def test_a_burst_is_so_many_prompts_over_one_head() -> None:
    prompts = asks("burst_head", replicas=8)
    assert len(prompts) == 400
    assert {request.prompt.units for request in prompts} == {9800}
    assert {shared(one, other) for one, other in itertools.pairwise(prompts)} == {2500 // BLOCK}
    assert {request.prompt.session for request in prompts} == {""}


def test_a_hot_prefix_is_in_every_request() -> None:
    prompts = asks("hot_prefix", hours=0.005)
    assert {shared(one, other) for one, other in itertools.pairwise(prompts)} == {4000 // BLOCK}
    assert sum(request.prompt.units for request in prompts) / len(prompts) == pytest.approx(4300, rel=0.05)


def test_a_conversation_grows_by_answer_and_message() -> None:
    conversations = [session(ChatWorkload(), skip=number) for number in range(200)]
    assert sum(map(len, conversations)) / 200 == pytest.approx(ChatWorkload().turns, rel=0.2)
    pauses = [pause for turns in conversations for pause, _ in turns]
    assert sum(pauses) / len(pauses) == pytest.approx(ChatWorkload().pause_s, rel=0.15)
    for turns in conversations[:20]:
        for (_, one), (_, following) in itertools.pairwise(turns):
            assert shared(one, following) == one.prompt.blocks, "all of the last prompt"
            assert following.prompt.units > one.prompt.units + one.output_tokens
            assert one.session == following.session == following.prompt.session
    firsts = [turns[0][1] for turns in conversations[:40]]
    assert {shared(one, other) for one, other in itertools.combinations(firsts, 2)} == {0, 1500 // BLOCK}
    assert len({request.prompt.keys[:8] for request in firsts}) == ChatWorkload().systems


def test_a_conversation_may_have_one_turn() -> None:
    assert {len(session(ChatWorkload(turns=1.0), skip=number)) for number in range(20)} == {1}


def test_agents_grow_over_a_head_that_their_kind_shares() -> None:
    agents = [session(Agents(sub_share=0.0), skip=number) for number in range(30)]
    assert {20 <= len(turns) <= 60 for turns in agents} == {True}
    for turns in agents[:5]:
        for (_, one), (_, following) in itertools.pairwise(turns):
            assert shared(one, following) == one.prompt.blocks
    firsts = [turns[0][1] for turns in agents]
    assert {shared(one, other) for one, other in itertools.combinations(firsts, 2)} == {0, 12_000 // BLOCK}


def test_a_sub_agent_has_a_prompt_of_its_own_in_its_parents_session() -> None:
    turns = [request for _, request in session(Agents(sub_share=0.3))]
    parent = [request for request in turns if shared(request, turns[0]) >= 12_000 // BLOCK]
    subs = [request for request in turns if shared(request, turns[0]) == 0]
    assert len(parent) + len(subs) == len(turns)
    assert all(shared(one, following) == one.prompt.blocks for one, following in itertools.pairwise(parent))
    assert min(shared(one, other) for one, other in itertools.combinations(subs, 2)) >= 4000 // BLOCK
    assert {request.session for request in turns} == {turns[0].session}
    assert {request.prompt.session for request in turns} == {turns[0].session}
