"""Any order of appends, forks, moves of a ref by two writers, deletions, purges and crashes leaves the store as a simple model
says: turns, histories, refs and counted bytes.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.database.database import Database
from gateway.features.histories.purging import TOMBSTONE_S
from gateway.features.histories.records import (
    ExpiredObjectError,
    RefMove,
    RefMovedError,
    StoredResponse,
    TurnNames,
    UnknownObjectError,
)
from gateway.features.histories.store import MAX_RENEWED
from gateway.features.histories.tables import TABLES
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, file_url
from tests.gateway.features.histories.test_sizes import agrees

CONTENTS = "abc"
REFS = ("main", "side")


@dataclass(frozen=True)
class Kept:
    """A turn of the model."""

    id: str
    parent: str
    root: str
    head: str
    input_head: str
    after_input: bool
    content: str


def name_of(*parts: str) -> str:
    return sha256("/".join(parts).encode()).hexdigest()[:12]


class TurnMachine(RuleBasedStateMachine):
    """Both writers have a store of their own on one database."""

    @initialize(most=st.sampled_from([2, MAX_RENEWED]))
    def begin(self, most: int) -> None:
        self.most = most  # turns of a tree that is renewed as a whole
        self.folder = tempfile.TemporaryDirectory()
        self.runner, self.clock = asyncio.Runner(), Clock()
        self.stores = [self.runner.run(self.opened()) for _ in range(2)]
        self.turns = dict[str, Kept]()  # not deleted
        self.expiry = dict[str, float]()  # of turns, by id
        self.emptied = set[str]()  # ids of turns without content
        self.refs = dict[str, tuple[str, float]]()
        self.heads = {"none"}

    async def opened(self) -> RunStore:
        database = Database(file_url(Path(self.folder.name) / "a.sqlite"), TABLES)
        await database.open()
        store = RunStore(database, TTL_S, self.clock, ResponseRuns())
        store.max_renewed = self.most
        return store

    def alive(self) -> list[Kept]:
        return [turn for turn in self.turns.values() if self.is_alive(turn)]

    def turn(self, pick: int, content: str, after_input: bool) -> tuple[StoredResponse, Kept]:
        bases = [turn for turn in self.alive() if self.is_whole(turn)]
        base = bases[pick % (len(bases) + 1)] if pick % (len(bases) + 1) < len(bases) else None
        before = "" if base is None else base.input_head if after_input else base.head
        after_input = after_input and base is not None
        input_head = name_of(before, "in", content)
        head = name_of(input_head, "out", content)
        parent = base.id if base else ""
        id_ = f"turn_{name_of(parent, str(after_input), content)}"
        kept = Kept(id_, parent, base.root if base else id_, head, input_head, after_input, content)
        names = TurnNames(
            head=head, input_head=input_head, form="chat", frame="pf1_a", after_input=after_input, digests=b"d" * 64
        )
        text = content.encode() * 10
        row = StoredResponse(
            owner="o",
            id=id_,
            parent=parent,
            created_at=self.clock.now,
            status="completed",
            input=b'"i%b"' % text,
            output=b'"o%b"' % text,
            response=b"",
            log=names,
        )
        return row, kept

    def note(self, kept: Kept, expires_at: float) -> None:
        """A turn was put. It renews its whole tree, if a tenth of the lifetime has passed; also one that has expired. In a
        large tree it renews those before it. Emptied turns stay empty.
        """
        now, known = self.clock.now, self.turns.get(kept.id)
        if known is not None and known.id not in self.emptied:
            kept = known  # the same turn again
            anchor = kept.id
        else:
            anchor = kept.parent
        if anchor and self.expiry[anchor] < now + TTL_S - TTL_S * 0.1:
            assert expires_at == now + TTL_S
            root = self.turns[anchor].root
            tree = {turn.id for turn in self.turns.values() if turn.root == root} - self.emptied
            renewed = tree if len(tree) <= self.most else tree & self.line(anchor)
            self.expiry |= {id_: expires_at for id_ in renewed if self.expiry[id_] < expires_at}
        elif anchor:
            assert expires_at == self.expiry[anchor]
        self.turns[kept.id] = kept
        self.emptied.discard(kept.id)
        self.expiry[kept.id] = expires_at
        self.heads |= {kept.head, kept.input_head}

    def line(self, id_: str) -> set[str]:
        """A turn and those before it."""
        found = set[str]()
        while id_ in self.turns:
            found.add(id_)
            id_ = self.turns[id_].parent
        return found

    def is_alive(self, turn: Kept) -> bool:
        return turn.id not in self.emptied and self.expiry[turn.id] > self.clock.now

    def may_move(self, move: RefMove, head: str) -> bool:
        present, until = self.refs.get(move.name, ("", 0.0))
        return until <= self.clock.now or present in ("", *move.bases, head)

    @rule(
        pick=st.integers(0, 50),
        content=st.sampled_from(CONTENTS),
        fork=st.booleans(),
        writer=st.integers(0, 1),
        ref=st.sampled_from((None, *REFS)),
        lies=st.booleans(),
    )
    def append(self, pick: int, content: str, fork: bool, writer: int, ref: str | None, lies: bool) -> None:
        row, kept = self.turn(pick, content, fork)
        base = self.turns[kept.parent].head if kept.parent else ""
        move = RefMove(ref, ["another" if lies else base]) if ref else None
        expires_at = self.runner.run(self.stores[writer].put_turn(row, b'{"tools": []}', move=move))
        assert expires_at > self.clock.now
        if move is not None:
            assert move.moved == self.may_move(move, kept.head)
            if move.moved:
                self.refs[move.name] = kept.head, self.clock.now + TTL_S
        self.note(kept, expires_at)

    @rule(pick=st.integers(0, 50), content=st.sampled_from(CONTENTS), steps=st.integers(0, 4))
    def crash(self, pick: int, content: str, steps: int) -> None:
        """A writer is gone in the middle of a write: all of it is there, or nothing."""
        row, kept = self.turn(pick, content, False)
        move = RefMove("main", ["another"])

        async def broken() -> None:
            task = asyncio.create_task(self.stores[0].put_turn(row, move=move))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.stores[0].close()

        before = kept.id in {each.id for each in self.alive()}
        self.runner.run(broken())
        self.stores[0] = self.runner.run(self.opened())
        try:
            found = self.runner.run(self.stores[0].turns_at("o", kept.head))
        except (UnknownObjectError, ExpiredObjectError):
            found = []
        written = [turn for turn in found if turn.id == kept.id]
        if not written:
            return
        present = self.refs.get("main")
        if before:  # it was there, so only the ref or the lifetime shows a write
            if written[0].expires_at != self.expiry[kept.id]:
                self.note(kept, written[0].expires_at)
            now_at = self.ref_now("main")
            if now_at is not None and now_at != present:
                assert self.may_move(move, kept.head)
                self.refs["main"] = now_at
            return
        if self.may_move(move, kept.head):
            self.refs["main"] = kept.head, self.clock.now + TTL_S
        self.note(kept, written[0].expires_at)

    def ref_now(self, name: str) -> tuple[str, float] | None:
        try:
            found = self.runner.run(self.stores[0].ref("o", name))
        except UnknownObjectError:
            return None
        return found.head, found.expires_at

    @rule(pick=st.integers(0, 50), name=st.sampled_from(REFS), knows=st.booleans())
    def move(self, pick: int, name: str, knows: bool) -> None:
        heads = sorted(self.heads)
        head, (present, until) = heads[pick % len(heads)], self.refs.get(name, ("", 0.0))
        present = present if until > self.clock.now else ""
        expected = present if knows else "another"
        kept = any(head in (turn.head, turn.input_head) for turn in self.alive())
        try:
            self.runner.run(self.stores[1].set_ref("o", name, head, expected))
        except UnknownObjectError:
            assert not kept
        except RefMovedError:
            assert kept
            assert present not in (head, expected)
        else:
            assert kept
            assert present in (head, expected)
            self.refs[name] = head, self.clock.now + TTL_S

    @rule(pick=st.integers(0, 50), tree=st.booleans(), writer=st.integers(0, 1))
    def delete(self, pick: int, tree: bool, writer: int) -> None:
        heads = sorted(self.heads)
        head = heads[pick % len(heads)]
        roots = {turn.root for turn in self.turns.values() if turn.head == head}
        wanted = [turn for turn in self.alive() if (turn.root in roots if tree else turn.head == head)]
        assert self.runner.run(self.stores[writer].delete_turns("o", head, tree=tree)) == len(wanted)
        for turn in wanted:
            del self.turns[turn.id]

    @rule(share=st.sampled_from((0.05, 0.5, 1.0)), purges=st.booleans(), late=st.booleans())
    def wait(self, share: float, purges: bool, late: bool) -> None:
        self.clock.now += TTL_S * share + (TOMBSTONE_S if late else 0.0)
        if not purges:
            return
        while self.runner.run(self.stores[0].purge()):
            pass
        for id_ in list(self.turns):
            if self.expiry[id_] <= self.clock.now:
                self.emptied.add(id_)
            if self.expiry[id_] <= self.clock.now - TOMBSTONE_S:
                del self.turns[id_]

    def is_whole(self, turn: Kept) -> bool:
        alive = {each.id: each for each in self.alive()}
        while turn.parent:
            if turn.parent not in alive:
                return False
            turn = alive[turn.parent]
        return True

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "stores"):
            return
        self.runner.run(self._agrees())

    async def _agrees(self) -> None:
        for store in self.stores:
            alive = self.alive()
            for head in sorted(self.heads):
                wanted = {turn.id for turn in alive if head in (turn.head, turn.input_head)}
                try:
                    assert {turn.id for turn in await store.turns_at("o", head)} == wanted
                except ExpiredObjectError:
                    assert not wanted
                except UnknownObjectError:
                    assert not any(head in (turn.head, turn.input_head) for turn in self.turns.values())
            for turn in alive:
                try:
                    chain = await store.chain("o", turn.id, 1 << 20)
                    assert self.is_whole(turn)
                    assert chain[-1].log.head == turn.head
                except (UnknownObjectError, ExpiredObjectError):
                    assert not self.is_whole(turn)
            for name in REFS:
                head, until = self.refs.get(name, ("", 0.0))
                try:
                    assert (await store.ref("o", name)).head == head
                    assert until > self.clock.now
                except UnknownObjectError:
                    assert until <= self.clock.now
        await agrees(self.stores[0])

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                self.runner.run(store.close())
            self.runner.close()
            self.folder.cleanup()


TurnMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTurnMachine = TurnMachine.TestCase
