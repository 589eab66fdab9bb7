"""Streams of events against a model engine: after every fault the belief equals the truth, or is known to be a part of it."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.features.kv_events.holdings import Holdings
from gateway.features.kv_events.ordering import (
    LIVE,
    MAX_HELD_BYTES,
    MESSAGE_BYTES,
    QUIET_S,
    REPLAY_S,
    REST,
    RESTARTS,
    RESTARTS_S,
)
from gateway.features.kv_events.prompt_tokens import KnownTokens, PromptKeys
from gateway.features.kv_events.residency import EngineResidency
from gateway.features.kv_events.stream import FULL_S, EventStream, Source
from gateway.features.kv_events.wire import GPU, HOST, BlocksStored
from router import text_keys
from router.residency import HeldPrefix
from tests.support.model_engine import SIZE, Form, ModelEngine, ModelPublisher

SALTS = ("", "tenant")


def prompts(chance: random.Random) -> list[list[int]]:
    """Prompts that share prefixes."""
    roots = [[chance.randrange(9000) for _ in range(30)] for _ in range(2)]
    made = list[list[int]]()
    for _ in range(10):
        base = chance.choice(made or roots)
        end, more = chance.randrange(4, len(base) + 1), chance.randrange(1, 12)
        made.append(base[:end] + [chance.randrange(9000) for _ in range(more)])
    return made


def known(tokens: Sequence[int], salt: str = "", *, whole: bool = True) -> KnownTokens:
    return KnownTokens(array("I", tokens).tobytes(), "pool", "m", salt, whole=whole)


class Stage:
    """A model engine, its publisher, and a stream that follows it. What the publisher sends may be lost."""

    def __init__(self, engine: ModelEngine, *, kept: int, replays: bool = True) -> None:
        self.engine, self.kept, self.now = engine, kept, 0.0
        self.publisher = ModelPublisher(kept)
        self.asked = list[int]()
        self.lost = list[Source]()
        self.reborn = False  # another process has published nothing that was delivered
        source = Source("r", 0, "tcp://h:1", "tcp://h:2" if replays else "", "", salted=True)
        self.stream = EventStream(source, self.asked.append, self.lost.append)
        self.stream.ordering.start(self.now)

    def step(self, *, delivered: bool = True) -> None:
        """The engine ends a step: its events are published."""
        message = self.publisher.publish(self.engine.drain())
        if message is not None and delivered:
            if self.reborn and message[0] == self.stream.ordering.number + 1:
                self.stream.ordering.start(self.now)  # its numbers show nothing; the replica came up again (`following.py`)
            self.reborn = False
            self.stream.ordering.live(*message, self.now)

    def answer(self) -> None:
        """The publisher answers all questions; a new one ends the answer to the one before."""
        while self.asked:
            number = self.asked.pop()
            self.asked.clear()
            for message in self.publisher.replay(number):
                self.stream.ordering.replayed(*message, self.now)
                if self.asked:
                    break
            else:
                self.stream.ordering.replay_ended(self.now)

    def restart(self) -> None:
        """Another process takes the engine's place."""
        self.engine.clear()
        self.engine.events.clear()
        self.publisher = ModelPublisher(self.kept)
        self.reborn = True

    def settle(self) -> None:
        """Everything that is under way arrives, and silence is looked into."""
        self.answer()
        for _ in range(3):
            self.now += max(QUIET_S, REPLAY_S) + 1
            self.stream.tick(self.now)
            self.answer()
        self.stream.holdings.check()

    def held(self, tokens: Sequence[int], salt: str = "") -> HeldPrefix | None:
        return self.stream.holdings.held(known(tokens, salt))


def truth(engine: ModelEngine, tokens: Sequence[int], salt: str) -> int:
    """The tokens that the engine would report as cached: it always computes the last one."""
    return min(engine.held(tokens, salt)[1], (len(tokens) - 1) // SIZE) * SIZE


ACTION = st.sampled_from(["compute"] * 6 + ["again", "lose", "lose", "clear", "restart", "answer", "settle"])
# Of an engine: groups of layers, is there one with a window, blocks of host memory, form of its events.
ENGINES = st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from([0, 12, 60]), st.sampled_from(["map", "array"]))


@example(seed=0, actions=["answer", "lose", "compute", "compute"], kept=2, made=(1, False, 0, "map"), replays=True)
@example(seed=12815, actions=["compute"] * 5, kept=10_000, made=(2, False, 0, "map"), replays=True)  # in one group only
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    actions=st.lists(ACTION, max_size=40),
    kept=st.sampled_from([2, 10_000]),
    made=ENGINES,
    replays=st.booleans(),
)
def test_belief_equals_truth_after_every_fault(
    seed: int, actions: list[str], kept: int, made: tuple[int, bool, int, Form], replays: bool
) -> None:
    chance = random.Random(seed)
    groups, window, host, form = made
    engine = ModelEngine(chance, groups=groups, window=window, host=host, form=form)
    stage = Stage(engine, kept=kept, replays=replays)
    asked = prompts(chance)
    for action in (*actions, "settle"):
        if action in ("compute", "again", "lose"):
            engine.compute(chance.choice(asked), chance.choice(SALTS), again=action == "again")
            stage.step(delivered=action != "lose")
        elif action == "clear":
            engine.clear()
            stage.step()
        elif action == "restart":
            stage.restart()
            stage.now += RESTARTS_S  # else it counts as several publishers
        elif action == "answer":
            stage.answer()
        else:
            stage.settle()
            assert stage.stream.holdings.complete or kept == 2 or not replays
            for tokens in asked:
                for salt in SALTS:
                    found, right = stage.held(tokens, salt), truth(engine, tokens, salt)
                    if stage.stream.holdings.complete and replays:
                        assert found is not None
                        assert found.certain
                        assert found.cached == right
                    elif replays and found is not None:
                        assert found.cached <= right, "a part of the truth"
    assert engine.held(asked[0]) is not None


def engine(**options: int) -> ModelEngine:
    return ModelEngine(random.Random(1), **options)


PROMPT = list(range(100, 130))


def test_who_reads_it_meanwhile_sees_what_is_said_of_a_message_once_it_is_applied() -> None:
    """Other threads ask for its number, and choose by its blocks when they hear of a lost cache."""
    stage, told = Stage(engine(), kept=100), list[object]()
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.engine.clear()
    message = stage.publisher.publish(stage.engine.drain())
    assert message is not None

    class Sink(EventStream):
        def apply(self, payload: bytes, now: float) -> None:
            told.append(self.ordering.number)
            super().apply(payload, now)

    stream = Sink(stage.stream.source, lambda _number: None, lambda _source: told.append(stream.holdings.blocks))
    stream.ordering.start(0.0)
    stream.ordering.replay_ended(0.0)
    stream.ordering.live(*message, 0.0)
    assert (told, stream.ordering.number) == ([-1, 0], 0)


def test_events_that_do_not_name_an_adapter_say_nothing_of_its_prompts() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    tokens = array("I", PROMPT).tobytes()
    assert stage.held(PROMPT) is not None
    assert stage.stream.holdings.held(KnownTokens(tokens, "pool", "m", "", whole=True, adapter="a")) is None


def test_a_copy_that_is_removed_leaves_the_other_one() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.engine.compute(PROMPT, again=True)
    stage.step()
    last = list(stage.engine.gpu[0])[-1]
    stage.engine.events.append({"type": "BlockRemoved", "block_hashes": [last], "medium": "GPU", "group_idx": 0})
    stage.step()
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 28
    stage.engine.events.append({"type": "BlockRemoved", "block_hashes": [last], "medium": "GPU", "group_idx": 0})
    stage.step()
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 24


def test_the_engines_count_of_remaining_copies_counts() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.engine.compute(PROMPT, again=True)
    last = list(stage.engine.gpu[0])[-1]
    removed = {"type": "BlockRemoved", "block_hashes": [last], "medium": "GPU", "group_idx": 0, "remaining_copy_counts": [0]}
    stage.engine.events.append(removed)
    stage.step()
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 24


def test_a_prompt_in_slower_memory_saves_less() -> None:
    stage = Stage(engine(host=50), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    for number in list(stage.engine.gpu[0])[3:]:
        stage.engine.events.append({"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0})
    stage.step()
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 28, "the engine reports what it loads as cached"
    assert found.saved == 12 + int(0.8 * 16)


def test_host_blocks_without_removals_are_forgotten_after_a_time() -> None:
    stage = Stage(engine(host=50), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    for number in list(stage.engine.gpu[0]):
        stage.engine.events.append({"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0})
    stage.step()
    stage.stream.holdings.expire(stage.now + 1)
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 0


def test_blocks_that_are_stored_again_and_again_take_room_once() -> None:
    holdings = Holdings()
    numbers = list(range(1 << 40, (1 << 40) + 500))

    def store(now: float, parent: int | None) -> None:
        holdings.apply(BlocksStored(list(numbers), parent, bytes(4 * len(numbers)), 1, HOST, 0, "", "", None), now)

    store(0.0, None)
    tracemalloc.start()
    try:
        for now in range(200):
            store(now, None)
            store(now, 5)  # orphans
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    holdings.expire(199.0)
    assert holdings.blocks == 500, "they were stored again"
    holdings.expire(200.0)
    assert holdings.blocks == 0
    holdings.check()


def test_the_memory_of_forgotten_blocks_is_freed_in_slices() -> None:
    holdings = Holdings()
    holdings.apply(BlocksStored(list(range(10)), None, bytes(40), 1, GPU, 0, "", "", None), 0.0)
    holdings.clear(complete=True)
    assert holdings.blocks == 0
    assert [holdings.free(8) for _ in range(4)] == [True, True, False, False]  # two entries a block


def test_of_a_long_prompt_only_the_keys_that_are_looked_at_are_computed() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    tokens = known([*PROMPT[:8], *range(400_000)])
    assert stage.stream.holdings.held(tokens) == HeldPrefix(8, 8, certain=True)
    [keys] = tokens._keys.values()
    assert repr(keys) == f"<PromptKeys 256 of {400_008 // SIZE}>"


def test_keys_in_parts_are_those_of_the_whole() -> None:
    data = random.Random(1).randbytes(4 * 1000)
    joined = text_keys(data, 4, 9)
    keys = PromptKeys(data, 4, 9)
    assert b"".join(keys.part(300)) == joined[300 * 8 : 556 * 8]
    assert b"".join(keys.part(900)) == joined[900 * 8 :]
    assert keys.part(keys.count) == []


def test_a_gap_that_is_no_longer_kept_ends_the_belief() -> None:
    stage = Stage(engine(room=100), kept=1)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    stage.engine.compute([*PROMPT[:10], 1, 2, 3, 4])
    stage.step(delivered=False)
    stage.engine.compute([7, 8, 9, 10, 11])
    stage.step()
    stage.settle()
    assert not stage.stream.holdings.complete
    found = stage.held(PROMPT)
    assert found is not None
    assert (found.cached, found.certain) == (0, False)
    found = stage.held([7, 8, 9, 10, 11])
    assert found is not None
    assert found.cached == 4, "what follows the gap is known"
    stage.engine.clear()
    stage.step()
    assert stage.stream.holdings.complete, "from a cleared cache on everything is known"


def test_a_quick_restart_without_a_lower_number_is_found_by_its_content() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    stage.restart()
    stage.engine.compute([1, 2, 3, 4, 5])
    stage.step(delivered=False)  # 0
    stage.engine.compute([5, 6, 7, 8, 9])
    stage.step(delivered=False)  # 1
    stage.engine.compute([8, 6, 7, 8, 9])
    stage.step()  # 2: for the follower a gap
    stage.settle()
    assert stage.stream.ordering.restarts == 1
    assert len(stage.lost) == 1
    found = stage.held(PROMPT)
    assert found is not None
    assert (found.cached, found.certain) == (0, True)


def test_two_publishers_on_one_port_are_not_believed() -> None:
    stage, other = Stage(engine(), kept=100), Stage(engine(), kept=100)
    stage.answer()
    for number in range(3 * RESTARTS):
        stage.engine.compute([number, *PROMPT])
        stage.step()
        stage.answer()
        other.engine.compute([900 + number, *PROMPT])
        message = other.publisher.publish(other.engine.drain())
        assert message is not None
        stage.stream.ordering.live(message[0] % 2, message[1], stage.now)
        stage.answer()
    assert stage.stream.ordering.state == REST
    assert stage.held(PROMPT) is None
    stage.settle()
    stage.now += RESTARTS_S
    stage.stream.tick(stage.now)
    stage.answer()
    assert stage.stream.ordering.state == LIVE, "it is tried again"


def test_messages_that_are_no_batches_end_the_certainty() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    for number, payload in enumerate([b"", b"\xc1", b"\x93", msgspec.msgpack.encode("x"), b"\x91" * 5000], 1):
        stage.stream.ordering.live(number, payload, stage.now)
    assert stage.stream.refused == 5
    found = stage.held(PROMPT)
    assert found is not None
    assert (found.cached, found.certain) == (28, False)


def test_a_hash_for_two_blocks_and_two_hashes_for_a_block_change_nothing() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    first = next(iter(stage.engine.gpu[0]))
    for hashes, tokens in (([first], [1, 2, 3, 4]), ([77], PROMPT[:4])):
        stage.engine.events.append(stage.engine._stored(hashes, None, tokens, "GPU", 0, ""))
    stage.step()
    assert stage.stream.holdings.conflicts == 2
    stage.engine.events.append({"type": "BlockRemoved", "block_hashes": [77], "medium": "GPU", "group_idx": 0})
    stage.step()
    found = stage.held(PROMPT)
    assert found is not None
    assert found.cached == 28
    stage.stream.holdings.check()


def test_a_part_of_a_prompt_is_certain_only_where_it_ends() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    begin = stage.stream.holdings.held(known(PROMPT[:12], whole=False))
    assert begin == HeldPrefix(12, 12, certain=False), "it may hold more of the rest"
    other = stage.stream.holdings.held(known([*PROMPT[:8], 1, 2, 3, 4], whole=False))
    assert other == HeldPrefix(8, 8, certain=True)


def test_blocks_of_an_adapter_are_of_its_prompts_only() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.events.append({**stage.engine._stored([1], None, PROMPT[:SIZE], "GPU", 0, ""), "lora_name": "a"})
    stage.step()
    found = [stage.stream.holdings.held(KnownTokens(known(PROMPT).data, "pool", model, "", whole=True)) for model in ("a", "m")]
    assert found == [HeldPrefix(SIZE, SIZE, certain=True), HeldPrefix(0, 0, certain=True)]


def test_an_engine_with_too_many_blocks_is_followed_again_after_a_while() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.stream.overflow(stage.now)
    stage.engine.compute(PROMPT)
    stage.step()
    assert stage.held(PROMPT) is None
    stage.now += FULL_S + 1
    stage.settle()
    assert stage.held(PROMPT) == HeldPrefix(28, 28, certain=True)


def test_nothing_is_certain_while_a_message_is_missing() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    residency = EngineResidency(lambda _name: "pool", lambda: 0.0)
    residency.renew({stage.stream.source: stage.stream})
    assert residency.held(known(PROMPT), "r") == HeldPrefix(28, 28, certain=True)
    stage.engine.clear()
    stage.step(delivered=False)
    stage.engine.compute([1, 2, 3, 4, 5])
    stage.step()
    assert residency.held(known(PROMPT), "r") == HeldPrefix(28, 28, certain=False)


def test_an_unanswered_replay_ends_the_belief() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    stage.engine.compute(PROMPT)
    stage.step()
    stage.engine.compute([1, 2, 3, 4, 5])
    stage.step(delivered=False)
    stage.engine.compute([2, 2, 3, 4, 5])
    stage.step()
    stage.asked.clear()
    stage.now += REPLAY_S + 1
    stage.stream.tick(stage.now)
    assert stage.stream.ordering.state == LIVE
    assert not stage.stream.holdings.complete
    found = stage.held([2, 2, 3, 4, 5])
    assert found is not None
    assert found.cached == 4


def test_one_unanswered_replay_is_enough_for_all_gaps_meanwhile() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    for number in range(9):
        stage.engine.compute([number, *PROMPT])
        stage.step(delivered=number % 2 == 0)
    stage.asked.clear()
    stage.now += REPLAY_S + 1
    stage.stream.tick(stage.now)
    assert (stage.stream.ordering.state, stage.stream.ordering.number) == (LIVE, 8)
    assert not stage.asked


def test_messages_held_back_are_bounded_also_if_they_are_empty() -> None:
    stage = Stage(engine(), kept=100)
    ordering = stage.stream.ordering
    for number in range(2 * (most := MAX_HELD_BYTES // MESSAGE_BYTES)):
        ordering.live(number, b"", stage.now)
    assert len(ordering._held) == most
    ordering.replay_ended(stage.now)
    assert not ordering._held_bytes


def test_a_replay_that_repeats_itself_for_ever_is_given_up() -> None:
    stage = Stage(engine(), kept=100)
    stage.answer()
    sent = list[tuple[int, bytes]]()
    for number in range(3):
        stage.engine.compute([number, *PROMPT])
        message = stage.publisher.publish(stage.engine.drain())
        assert message is not None
        sent.append(message)
        if number != 1:
            stage.stream.ordering.live(*message, stage.now)
    for _ in range(20):
        stage.now += 1.0
        stage.stream.ordering.replayed(*sent[0], stage.now)
        stage.stream.tick(stage.now)
    assert stage.stream.ordering.state == LIVE
    assert not stage.stream.holdings.complete


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_was_stored_before_is_replayed_at_the_start(form: Form) -> None:
    model = ModelEngine(random.Random(1), form=form)
    stage = Stage(model, kept=100)
    model.compute(PROMPT, "tenant")
    stage.step(delivered=False)
    stage.answer()
    found, other = stage.held(PROMPT, "tenant"), stage.held(PROMPT)
    assert found is not None
    assert other is not None
    assert (found.cached, other.cached) == (28, 0)
